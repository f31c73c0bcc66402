"""Every command that a page prints is run by a test in its smallest form, or one table says why not."""

import re
import shlex

import pytest

from docs.tools.repository import line_of
from tests.command_parsers import PAGES, PROGRAMS, blocks_of, commands_of
from tests.helpers import ROOT

BENCH = "data_pace decode_against_marian decode_before_after decode_family dialects gpu kills layer_complexity memory"
BENCH += " serving table3 train_against_marian"
SERVICE = "tests/test_docs.py::test_service_answers_a_request_with_the_translation_of_its_sentences"
PUBLISH = "tests/training/test_publish.py::test_run_is_published_in_one_commit_whose_example_runs_elsewhere"

# Each program or module, with the test that runs it, or the reason why none does.
COMMANDS = {
    **{f"bench.{name}": "tests/test_bench.py::test_bench_prints_its_table" for name in BENCH.split()},
    **dict.fromkeys(["joeynmt", "jupyter", "sacrebleu", "tensorboard"], "another project's program"),
    **dict.fromkeys(["git", "hf", "nox", "playwright", "pre-commit"], "needs the network"),
    **dict.fromkeys(["pytest", "ruff", "ty"], "checks this repository; .ci/run and the workflows run it"),
    "accelerate launch": "tests/training/test_train.py::test_interrupted_run_of_two_processes_resumes",
    "curl": SERVICE,
    "cut": "a system's program",
    "docker": "needs Docker and the network",
    "docs.tools.demo_picture": "needs Chromium, whose picture differs from machine to machine",
    "docs.tools.paper": "tests/test_paper_page.py::test_page_prints_what_it_shows_and_draws_its_pictures",
    "docs.tools.pictures": "tests/test_docs_figures.py::test_diagrams_show_a_models_weights_and_its_best_target",
    "docs.tools.reference": "tests/test_docs.py::test_reference_page_is_what_the_code_says",
    "examples/adapters.py": "tests/test_examples.py::test_adapter_learns_and_merges",
    "examples/own_data.py": "tests/test_examples.py::test_own_data_becomes_a_run_that_translates",
    "examples/trainer_script.py": "tests/test_examples.py::test_trainer_script_learns_its_task",
    "gh": "needs a release on GitHub",
    "mkdocs": "tests/test_docs.py::test_site_builds_without_a_warning",
    "pip": "tests/test_packaging.py::test_wheel_holds_the_package_and_works_where_it_is_installed",
    "tests.golden": "tests/golden/test_golden.py::test_command_writes_a_checkpoint_that_this_version_lacks",
    "tests/published_release.py": PUBLISH,
    "training.average": "tests/training/test_average.py::test_averaged_model_has_its_tokenizer_and_no_file_of_training",
    "training.card": "tests/training/test_card.py::test_card_is_what_the_code_makes_of_the_results",
    "training.distill": "tests/training/test_distill.py::test_distillation_replaces_training_targets_only",
    "training.prepare": "tests/training/test_prepare.py::test_multi30k_has_the_published_split_in_three_languages",
    "training.publish": PUBLISH,
    "training.score": "tests/training/test_score.py::test_scores_are_printed_and_written_each_with_its_signature",
    "training.train": "tests/training/test_train.py::test_interrupted_run_saves_its_step_and_resumes_to_the_same_bits",
    "uvicorn": SERVICE,
    "vaswani-convert ctranslate2": (
        "tests/convert/test_ctranslate2_exporter.py::test_command_converts_a_folder_and_never_overwrites_one_without_force"
    ),
    "vaswani-convert fairseq": "tests/convert/test_fairseq.py::test_command_imports_a_fairseq_checkpoint",
    "vaswani-convert fsmt": "tests/convert/test_foreign.py::test_tokenizer_of_a_fsmt_model_is_imported_too",
    "vaswani-convert marian": "tests/convert/test_foreign.py::test_command_imports_a_marian_model_with_its_tokenizer",
    "vaswani-demo": "tests/demo/test_command.py::test_page_is_served_without_a_network_until_ctrl_c",
    "vaswani-parse": "tests/parsing/test_command.py::test_every_line_has_its_tree_and_an_empty_line_stays_empty",
    "vaswani-translate": (
        "tests/translation/test_command.py::test_every_line_has_its_translation_and_an_empty_line_stays_empty"
    ),
    "vaswani_transformer.figures": "tests/figures/test_page.py::test_command_writes_a_page_and_prints_its_path",
    "venv": ".ci/run and nox make one",
}


def names_of(words: list[str]) -> list[str]:
    """Return the program, file or module that a command calls, with its subcommand; a launcher's module is another."""
    program, *rest = words
    if program == "accelerate":
        return ["accelerate launch", *(names_of(["python", *rest[rest.index("-m") :]]) if "-m" in rest else [])]
    if program in ("python", "python3"):
        program, *rest = rest[rest[0] == "-m" :]
    has_subcommands = program == "vaswani-convert"
    return [" ".join([program, *rest[:1]] if has_subcommands else [program])]


def printed_commands() -> set[str]:
    """Return the names of the commands in shell blocks, in spans of code, and in the scripts of `examples/`."""
    commands = []
    for page in [*PAGES, ROOT / "model_card.md", ROOT / "examples" / "README.md"]:
        commands += [words for block in blocks_of(page, "bash") for words in commands_of(block)]
        prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        spans = [span.split() for _, span in re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", prose, re.DOTALL)]
        commands += [span for span in spans if len(span) > 1 and span[0] in PROGRAMS]  # a single word is a name
    for script in (ROOT / "examples").glob("*.py"):
        commands += map(shlex.split, re.findall(r"^python .*$", script.read_text(encoding="utf-8"), re.MULTILINE))
    return {name for words in commands for name in names_of(words)}


def test_every_printed_command_is_run_by_a_test_or_has_a_reason_why_not() -> None:
    assert sorted(printed_commands()) == sorted(COMMANDS)


@pytest.mark.parametrize("command", [name for name, test in COMMANDS.items() if "::" in test])
def test_test_of_a_command_exists(command: str) -> None:
    assert line_of(*COMMANDS[command].split("::"))
