"""Every command of `bench/` runs in its `--tiny` form and prints its table."""

import argparse
import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import decode_family, family, family_table, kills, layer_complexity, serving, table3
from bench.kills import write_recipe
from bench.measuring import report
from tests import ROOT
from tests.commands import error_line, run_main, write_pairs
from tests.forks import ForkedCommand, run_forked
from tests.models import PAIRS, family_of_pairs, model_of_pairs, save
from training.recipe import load_recipe
from vaswani_transformer import rerank
from vaswani_transformer.support.command import UserError
from vaswani_transformer.translation.targets import TargetScorer

# Each module's arguments and a column of its table
COMMANDS: dict[str, tuple[list[str], str]] = {
    "decode_against_marian": (["--beams=1", "--arms", "ours", "int8"], "ratio to Marian"),
    "decode_before_after": ([str(ROOT)], "same tokens"),
    "decode_family": (
        [
            "--model=AR=MADE/ar",
            "--model=CMLM=MADE/cmlm",
            "--model=CTC=MADE/ctc",
            "--model=DAG=MADE/dag",
            "--rerank=MADE/ar",
            "--length_bonuses=0.5",
            "--data=MADE/pairs.jsonl",
            "--history=2",
            "--refinement",
            "--significance",
            "--reference_lengths",
        ],
        "tokens changed",
    ),
    "dialects": (["iterative_vae"], "right words"),
    "dialects flowseq": (["flowseq"], "latent_temperature"),
    "gpu": (["--minutes=13", "--out=NEW/results"], "difference"),
    "layer_complexity": (["--output=NEW/table1"], "self-attention, fused"),
    "memory": ([], "peak MiB"),
    "serving": (["MADE/ar", "MADE/lines.txt", "--engines", "plain", "CTranslate2 int8"], "resident MiB"),
    "serving calls": (["MADE/ar", "MADE/lines.txt", "--calls"], "ratio to generate"),
    "serving clients": (["MADE/ar", "MADE/lines.txt", "--clients=2"], "ms at half load, 99%"),
    "step_times": (["MADE/splits", "--tokenizer=MADE/cmlm"], "steps in 60 minutes"),
    "train_against_marian": ([], "ours to it"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models, pairs, lines and a recipe."""
    folder = tmp_path_factory.mktemp("made")
    save(folder / "ar", *model_of_pairs())
    for kind in ("cmlm", "ctc", "dag"):
        save(folder / kind, *family_of_pairs(kind))
    write_pairs(folder / "pairs.jsonl", 2 * list(PAIRS.items()))
    (folder / "lines.txt").write_text("\n".join(PAIRS), encoding="utf-8")
    (folder / "splits").mkdir()
    write_splits(folder / "splits")
    write_recipe(folder)
    return folder


def assert_table(output: str, column: str) -> None:
    """Assert that a table with this column, and a row, was printed."""
    lines = output.splitlines()
    heading = next(number for number, line in enumerate(lines) if f" {column} |" in line)
    assert lines[heading].count("|") == lines[heading + 2].count("|") > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_bench_prints_its_table(name: str, made: Path, tmp_path: Path) -> None:
    if name.startswith(("serving", "decode_against_marian")):
        pytest.importorskip("ctranslate2", reason="the ctranslate2 extra is not installed")
    if name in ("serving calls", "serving clients"):
        pytest.importorskip("uvicorn", reason="the service's packages are not installed")
    given, column = COMMANDS[name]
    arguments = [argument.replace("MADE", str(made)).replace("NEW", str(tmp_path)) for argument in given]
    assert_table(run_forked(f"bench.{name.partition(' ')[0]}", "--tiny", *arguments, folder=ROOT), column)


def test_figures_of_the_service_appear_when_they_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([1.0, 5.0, 2.0])
    assert serving.medians({"torch": lambda: {"ms": next(seconds)}}, rounds=3) == {"torch": {"ms": 2.0}}
    lines = [f"torch: {text}" for ms in (1, 5, 2) for text in ("starts", f"ms {ms}")]
    assert capsys.readouterr().err.splitlines() == lines


def test_figures_may_go_into_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    report([{"ms": 1.0}], argparse.Namespace(output=path))
    assert json.loads(path.read_text(encoding="utf-8"))["rows"] == [{"ms": 1.0}]


def test_missing_lines_are_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.txt"
    expected = f"{path}: No such file or directory\n"
    assert error_line(run_main(serving.main, ["models/tatoeba-en-de", path], capsys)) == expected


class ForkedStep(ForkedCommand):
    """A command `python -m MODULE` in a fork, which begins sooner than a new interpreter."""

    modules: ClassVar[list[str]] = []

    def __init__(self, command: list[str], **_: Any) -> None:
        self.modules.append(command[2])
        super().__init__(command[2], command[3:])

    def wait(self, timeout: float = 300) -> int | None:
        self.communicate(timeout)
        return self.returncode


@pytest.mark.slow
def test_killed_run_ends_with_the_bits_of_an_uninterrupted_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.kills.Popen", ForkedStep)
    status = kills.main(["--tiny"])
    output, errors = capsys.readouterr()
    assert (errors, status) == ("", 0)
    assert_table(output, "cases")


@pytest.mark.slow
def test_rows_of_table_3_are_trained_once(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.table3.run", lambda command, **_: run_forked(*command[2:], folder=ROOT))
    arguments = ["--tiny", made / "kills.yaml", "--training.steps=2", "--training.evaluation_steps=2"]
    arguments.append(f"--output_dir={tmp_path}")
    output = run_main(table3.main, arguments, capsys).output
    assert_table(output, "paper's BLEU")
    assert all((tmp_path / row / "results.json").exists() for row in ("base", "C-n2"))
    monkeypatch.setattr("bench.table3.run", None)
    assert run_main(table3.main, arguments, capsys).output == output


def write_splits(folder: Path) -> None:
    """Write pairs of the shipped task as the files of a comparison."""
    with gzip.open(ROOT / "training" / "quickstart" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        for split, count in (("train", 80), ("validation", 4), ("test", 8)):
            rows = [json.loads(line) for line in itertools.islice(lines, count)]
            pairs = "".join(f"{json.dumps({'en': row['en'], 'de': row['es']})}\n" for row in rows)
            (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(pairs.encode()))


@pytest.mark.slow
def test_comparison_of_the_family_resumes_and_prints_commands_minutes_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    write_splits(tmp_path / "data")
    monkeypatch.setattr("bench.family.Popen", ForkedStep)
    monkeypatch.setattr(ForkedStep, "modules", [])
    arguments = ["--tiny", "--pairs=60", tmp_path / "data", f"--output_dir={tmp_path / 'runs'}"]
    arguments += ["--models", "nat", "ctc", "--seeds", "2017", "2018"]

    # A file in the way of the fourth step ends the first command.
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "ctc").touch()
    errors, status = run_main(family.main, arguments, capsys)[1:]
    assert (errors.partition(". ")[0], status) == ("ctc: the command above failed with status 2", 2)
    (tmp_path / "runs" / "ctc").unlink()
    output, errors, status = run_main(family.main, arguments, capsys)
    assert (errors, status) == ("", 0)
    trained = ["training.train", "training.distill", "training.train", "training.train"]
    assert ForkedStep.modules == [*trained, "training.train", "training.train", "bench.decode_family"]

    assert output.startswith("4 trainings, about ")
    assert output.count("python -m training.train") == 4
    assert output.count("# finished before, ") == 3
    assert output.count(f"--data.path={tmp_path / 'runs' / 'data'} ") == 5  # of the trainings and the distillation
    limited = gzip.decompress((tmp_path / "runs" / "data" / "train.jsonl.gz").read_bytes())
    assert limited.count(b"\n") == 60  # of 80 pairs
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| ") and " - " not in line][2:]
    seeds = {row[0]: row[1] for row in rows if not row[0].startswith("| comparison")}
    searches = ["best path", "beam 8", "beam 8; reranked"]
    expected = dict.fromkeys(["| the teacher, beam 1", "| the teacher, beam 4"], "1")
    expected.update(
        dict.fromkeys([f"| NAT*, {search}" for search in ("1 length", "5 lengths", "5 lengths; reranked")], "1")
    )
    assert {name: count for name, count in seeds.items() if count.isdecimal()} == expected | {
        f"| CTC, {search}": "2" for search in searches
    }
    assert "| CTC, beam 8 - the teacher, beam 4 | " in output

    # The table comes from the kept files alone, which have no text.
    kept = tmp_path / "runs" / "kept"
    table = run_main(family_table.main, [kept, "--samples=20"], capsys).output
    assert table.partition("| model")[2] == output.partition("| model")[2].rpartition("\n\n")[0] + "\n"
    names = {"teacher", "nat", "ctc", "ctc-2018"}
    files = {f"{name}{end}" for name in names for end in (".json", ".csv.gz")}
    assert {path.name for path in kept.iterdir()} == files | {"decoding.json"}
    assert not [path for path in kept.glob("*.json") if str(tmp_path) in path.read_text()]
    assert all("examples" not in json.loads((kept / f"{name}.json").read_text())["test"] for name in names)
    assert output.endswith(" minutes in all.\n")
    assert "was started with other settings" in run_main(family.main, [*arguments, "--steps=3"], capsys)[1]


def test_comparison_names_the_files_that_its_folder_lacks_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "validation.jsonl.gz").touch()
    errors, status = run_main(family.main, [tmp_path / "data", f"--output_dir={tmp_path / 'runs'}"], capsys)[1:]
    assert (errors, status) == (
        f"{tmp_path / 'data'}: files are missing; got no train.jsonl.gz, test.jsonl.gz. Choose a folder that python -m "
        "training.prepare multi30k-tokenized --output=FOLDER has written.\n",
        2,
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", ["--steps=0", "--minutes=nan", "--minutes=-1"])
def test_comparison_with_a_limit_that_no_training_has_is_not_begun(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [tmp_path, f"--output_dir={tmp_path / 'runs'}", option]
    errors, status = run_main(family.main, arguments, capsys)[1:]
    assert (status, option.partition("=")[0] in errors) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_comparison_that_times_no_model_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model=A=runs/a", "--model=B=runs/b", "--data=FOLDER", "--untimed", "A", "B"]
    assert "--untimed: names every model" in error_line(run_main(decode_family.main, arguments, capsys))


def test_comparison_resumes_with_a_different_spelling_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = []
    for folder in (tmp_path / "data", "data", "./data/"):
        options = family.parse_arguments([str(folder), "--output_dir=runs"])
        Path("runs").mkdir(exist_ok=True)
        family.Record(options).save()
        commands.append([step.command for step in family.steps_of(options)])
    assert commands[0] == commands[1] == commands[2]


def test_comparison_trains_some_models_with_every_seed_and_the_others_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [str(tmp_path), "--output_dir=.", "--seeds", "2018", "2020", "--models", "nat", "ctc"]
    options = family.parse_arguments(arguments)
    trained = [step for step in family.steps_of(options) if "training.train" in step.arguments]
    assert [step.name for step in trained if "--seed=2018" in step.arguments] == ["teacher", "nat", "ctc"]
    assert [step.name for step in trained if "--seed=2020" in step.arguments] == ["ctc-2020"]
    measurement = list(family.steps_of(options))[-1].arguments
    assert measurement[measurement.index("--untimed") + 1] == "ctc-2020"
    assert measurement[measurement.index("--distilled") + 1 :] == ["nat", "ctc", "ctc-2020"]
    assert family.expected_minutes(options) == family.TEACHER_MINUTES + 3 * family.MINUTES
    options.minutes = 10
    assert family.expected_minutes(options) == 40
    family.Record(options).save()
    with pytest.raises(UserError, match="was started with other settings"):
        family.Record(family.parse_arguments([str(tmp_path), "--output_dir=."]))


def test_models_of_raw_data_get_only_the_vocabulary_of_the_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = family.parse_arguments([str(tmp_path), "--output_dir=.", "--models", *family.RAW])
    steps = {step.name: step.arguments for step in family.steps_of(options)}
    for name in family.RAW:
        assert "--tokenizer.path=teacher" in steps[name]
        assert not any(argument.startswith(("--data.distilled", "--training.encoder_from")) for argument in steps[name])
    assert "--distilled" not in steps["decoding"]


def test_history_has_in_bold_the_words_whose_tokens_are_all_committed() -> None:
    model, tokenizer = family_of_pairs("iterative_vae")
    arm = decode_family.Arm("VAE", "VAE", model, tokenizer, "1", {}, is_distilled=False)
    tokens = torch.tensor(tokenizer("two longwords here")["input_ids"])
    assert len(tokens) > 4  # a word of several tokens, and </s>
    is_committed = torch.ones(len(tokens), dtype=torch.bool)
    assert decode_family.mark_committed(arm, tokens, is_committed) == "**two** **longwords** **here**"
    is_committed[-2:] = False  # the last token of a word, and </s>
    assert decode_family.mark_committed(arm, tokens, is_committed) == "**two** **longwords** here"

    # After the last layer every word is committed, and none is marked.
    source = decode_family.sources_of([tokens.tolist()])
    texts = [text for _, text in decode_family.passes_of(arm, source)]
    assert len(texts) == model.config.decoder_layers
    assert "**" not in texts[-1]


def test_every_search_of_a_cmlm_has_a_name_of_its_own() -> None:
    model, _ = family_of_pairs("cmlm")
    options = argparse.Namespace(lengths=[1, 5], iterations=[1, 10])
    names = [name for name, *_ in decode_family.searches(model, options)]
    assert names == [
        "1 length; 1 iteration",
        "1 length; 10 iterations",
        "5 lengths; 1 iteration",
        "5 lengths; 10 iterations",
    ]


def test_teacher_of_the_benchmark_chooses_what_the_command_chooses() -> None:
    teacher = model_of_pairs()
    model, tokenizer = family_of_pairs("nat")
    arm = decode_family.Arm("NAT", "NAT, l = 3", model, tokenizer, "1", {"length_beam_size": 3}, is_distilled=True)
    (reranked,) = decode_family.reranked(arm, TargetScorer(*teacher))
    assert (reranked.name, reranked.single is not arm.single) == ("NAT, l = 3; reranked", True)
    rows = decode_family.encode([arm], list(PAIRS))
    expected = [each.text for each in rerank(model, tokenizer, *teacher, PAIRS, length_beam_size=3)]
    assert decode_family.translations(reranked, rows) == expected
    arm.settings["length_beam_size"] = 1
    assert decode_family.reranked(arm, TargetScorer(*teacher)) == []


def test_length_bonus_of_ctc_is_the_best_on_validation_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has its own, and its seeds have the best one of their mean."""
    arms = [
        decode_family.Arm(name, f"{name}, beam 3", *family_of_pairs("ctc"), "1", {"num_beams": 3}, is_distilled=True)
        for name in ("ctc", "ctc-2018", "other")
    ]
    options = argparse.Namespace(
        data=tmp_path, source="en", target="de", tokenize="none", length_bonuses=[0.0, 0.5, 1.0]
    )
    references = list(PAIRS.values())
    monkeypatch.setattr(decode_family, "read_data", lambda *_: (list(PAIRS), references))
    wrong = references[::-1]
    half = [*references[:3], *wrong[3:]]
    best = {"ctc": {0.0: references, 0.5: half}, "ctc-2018": {0.5: references}, "other": {1.0: references}}
    monkeypatch.setattr(
        decode_family, "translations", lambda arm, _, length_bonus: best[arm.model_name].get(length_bonus, wrong)
    )
    decode_family.choose_length_bonus(arms, options)
    assert [arm.settings["length_bonus"] for arm in arms] == [0.5, 0.5, 1.0]
    options.data = tmp_path / "test.jsonl"
    with pytest.raises(UserError, match=r"chosen on validation data; got a file"):
        decode_family.choose_length_bonus(arms, options)


def test_significance_has_a_p_value_for_each_pair_of_searches_and_a_better_one_differs() -> None:
    references = [f"{word} is here and {word} stays there ." for word in PAIRS]
    texts = {"right": references, "same": references, "wrong": ["nothing of the kind was said by them ."] * len(PAIRS)}
    arms = [decode_family.Arm(name, name, None, None, "1", {}, is_distilled=False, texts=texts[name]) for name in texts]
    rows = decode_family.significance(arms, references, "13a")
    assert [row["model"] for row in rows] == list(texts)
    assert [rows[index][name] for index, name in enumerate(texts)] == [None, None, None]
    assert rows[0]["same"] == rows[1]["right"] == 1
    assert rows[0]["wrong"] < 0.05


@pytest.mark.parametrize(("kind", "has_row"), [("nat", True), ("iterative_vae", True), ("ctc", False)])
def test_models_that_predict_lengths_can_be_measured_at_those_of_the_references(
    kind: str, has_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any
    model, tokenizer = family_of_pairs(kind)
    lengths: list[int] = []
    generate = model.generate

    def record_lengths(*args: Any, **settings: Any) -> torch.Tensor:
        tokens = generate(*args, **settings)
        lengths.extend((tokens != model.config.pad_token_id).sum(1).tolist())
        return tokens

    monkeypatch.setattr(model, "generate", record_lengths)
    arm = decode_family.Arm("model", "model", model, tokenizer, "1", {}, is_distilled=False)
    references = ["one short text", "a text that is a good deal longer than the first"]
    rows = decode_family.at_reference_lengths([arm], ["a source", "a second source"], references, "13a")
    expected = [1 + len(tokenizer(reference)["input_ids"]) for reference in references]  # after the start token
    assert ([row["model"] for row in rows], lengths) == ((["model"], expected) if has_row else ([], []))


@pytest.mark.parametrize("name", family.MODELS)
def test_model_of_the_comparison_has_a_valid_recipe(name: str, tmp_path: Path) -> None:
    options = family.parse_arguments([str(tmp_path), f"--output_dir={tmp_path}", "--models", name])
    _, _, step, *_ = family.steps_of(options)
    _, module, recipe, *fields = step.arguments
    loaded: Any = load_recipe(recipe, fields)
    assert (module, loaded.training.precision, loaded.training.steps) == ("training.train", "fp32", family.STEPS[name])
    # Equal care for all: the peak of the learning rate, which is that of 0.7 with 1,000 steps of warm-up, and dropout.
    scale = loaded.training.learning_rate_scale * (1000 / loaded.training.warmup_steps) ** 0.5
    dropout = 0.2 if name == "autoregressive-raw" else 0.1  # the teacher's, which learns the references too
    assert (scale, loaded.model["dropout"]) == (pytest.approx(0.7, rel=1e-3), dropout)


@pytest.mark.slow
def test_gpu_command_needs_no_extra() -> None:
    absent = "".join(f"sys.modules[{name!r}] = None;" for name in ("datasets", "evaluate", "jsonargparse", "psutil"))
    subprocess.run([sys.executable, "-c", f"import sys; {absent} import bench.gpu_parts"], cwd=ROOT, check=True)


@pytest.mark.parametrize("layer", ["self-attention", "convolutional"])
def test_operations_of_a_layer_are_those_that_torch_counts(layer: str) -> None:
    """torch counts neither the products of a fused LSTM nor those of fused attention on a CPU."""
    options = layer_complexity.parse_arguments(["--kernel=5"])
    with FlopCounterMode(display=False) as counter:
        layer_complexity.make_layer(layer, 64, options)(torch.randn(1, 24, 64))
    assert counter.get_total_flops() == layer_complexity.operations(layer, 24, 64, options)
