"""A run writes its folder, and one that was killed, interrupted or extended takes the steps of an uninterrupted one."""

import contextlib
import itertools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForSeq2SeqLM, set_seed

from tests import ROOT
from tests.commands import no_space, run_main, user_error
from tests.models import load_tokenizer, save
from tests.training import runs
from tests.training.invented_results import results_of
from training import train
from training import trainer as trainer_module
from training.checkpoints import CHECKPOINTS, COMPLETE, complete_checkpoints, step_of
from training.prepare import PREPARED
from training.recipe import recipe_of
from training.trainer import PaperTrainer
from training.vocabulary import starting_entries
from vaswani_transformer import VaswaniTransformerForConditionalGeneration


@pytest.mark.slow
def test_run_writes_model_recipe_results_and_checkpoints(finished_run: runs.FinishedRun) -> None:
    folder, results = finished_run.folder, finished_run.results
    assert [step_of(path) for path in complete_checkpoints(folder)] == [3, 6, 9]
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(results))
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(folder), VaswaniTransformerForConditionalGeneration)
    assert load_tokenizer(str(folder))("one tree").input_ids
    assert results["data"]["train"]["pairs"] == 16
    assert results["source"] == "gum"
    assert results["steps"] == 9
    assert results["seconds"] > results["test"]["seconds"] > 0
    assert {"loss", "perplexity", "bleu", "signature"} <= results["validation"].keys()
    assert {"bleu", "chrf", "signature", "sentences", "examples", "distinct_1"} <= results["test"].keys()
    assert [entry["step"] for entry in runs.entries(results)] == list(range(1, 10))
    assert all(entry["target_tokens_per_second"] > 0 for entry in runs.entries(results))
    assert [entry["step"] for entry in runs.entries(results, "eval_bleu")] == [3, 6, 9]
    assert str(folder) not in (folder / "results.json").read_text()
    lines = [json.loads(line) for line in (folder / "translations.jsonl").read_text().splitlines()]
    assert [(line["source"], line["reference"]) for line in lines] == [(text, text[::-1]) for text in runs.LANGUAGE]
    assert all(line.pop("log_probability") < 0 for line in lines)
    assert all(example in lines for example in results["test"]["examples"])
    assert str(folder.parent) not in (folder / "recipe.yaml").read_text()


def terminal_output(command: list[str]) -> str:
    """Run a command with a terminal of 100 columns as its standard error, and return its output."""
    terminal, program_side = pty.openpty()
    termios.tcsetwinsize(program_side, (24, 100))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=program_side, cwd=ROOT)
    os.close(program_side)
    written = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while chunk := os.read(terminal, 4096):
            written += chunk
    os.close(terminal)
    process.wait()
    return re.sub(r"\x1b\[\w+", "", written.decode())


@pytest.mark.slow
def test_terminal_shows_a_progress_bar_below_the_lines_of_the_log(arguments: list[str], tmp_path: Path) -> None:
    settings = ["--training.steps=5", f"--output_dir={tmp_path / 'run'}"]
    text = terminal_output([sys.executable, "-m", "training.train", *arguments, *settings])
    lines, bars = [], []
    for row in re.split(r"[\r\n]+", text):
        (bars if re.match(r" *\d+% ", row) else lines).append(row.rstrip())
    logged = [line for line in lines if line.startswith("Step ")]
    assert [line.split(":")[0] for line in logged if "loss" in line and "BLEU" not in line] == [
        f"Step {step} of 5" for step in range(1, 6)
    ]
    for line in logged:
        assert any(line.partition(": ")[2] in bar for bar in bars), line
    assert re.match(r"100% \S+ 5/5, ", bars[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("file", "launch"), [("optimizer.pt", ()), (COMPLETE, runs.TWO_PROCESSES)])
def test_run_killed_while_it_saves_resumes_to_the_same_bits(
    arguments: list[str], tmp_path: Path, file: str, launch: tuple[str, ...]
) -> None:
    """With one kept checkpoint, the one before must be there until the new one is complete; curves show a step once."""
    settings = [*arguments, "--training.steps=9", "--training.keep_checkpoints=1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    runs.run_to_end(settings, whole, launch=launch)
    process: Any = runs.start(settings, killed, launch=launch, change=f"{file}@6")
    while process.poll() is None and not any(member.exitcode for member in process.members):
        time.sleep(0.02)
    process.kill()
    assert runs.last_step(killed) == 3
    runs.run_to_end(settings, killed, launch=launch)
    runs.assert_same_checkpoints(whole, killed)
    curves = EventAccumulator(str(killed / "tensorboard")).Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == list(range(1, 10))


@pytest.mark.slow
def test_checkpoint_is_complete_only_when_every_process_has_written(arguments: list[str], tmp_path: Path) -> None:
    settings = [*arguments, "--training.steps=6", "--training.keep_checkpoints=1"]
    output = runs.run_to_end(settings, tmp_path / "run", launch=runs.TWO_PROCESSES, change="late")
    assert re.findall(r"complete: (\w+), others: (\d)", output) == [("False", "0"), ("False", "1")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [["--training.patience=2", "--training.learning_rate_scale=1e-30"], ["--training.steps=7"]],
    ids=["patience", "steps"],
)
def test_run_killed_after_its_last_step_trains_no_further_step(
    arguments: list[str], tmp_path: Path, end: list[str]
) -> None:
    """Patience is exhausted, because a model that learns nothing is never better than at its first evaluation."""
    settings, whole = [*arguments, "--training.steps=20", *end], tmp_path / "whole"
    first = runs.train_in(settings, whole)
    killed = runs.rewound(whole, first["steps"], tmp_path / "killed")
    again = runs.train_in(settings, killed)
    assert again["steps"] == first["steps"] <= 20
    for split, name in (("validation", "loss"), ("validation", "bleu"), ("test", "bleu"), ("test", "examples")):
        assert again[split][name] == first[split][name]
    runs.assert_same_checkpoints(whole, killed)


@pytest.mark.slow
def test_finished_run_with_more_steps_equals_one_that_began_with_them(arguments: list[str], tmp_path: Path) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    runs.train_in([*arguments, "--training.steps=7"], short)
    kept = (short / "results.json").read_text()
    with user_error(r"contains a finished run; choose a different --output_dir, or raise training\.steps"):
        runs.train_in([*arguments, "--training.steps=7"], short)
    assert (short / "results.json").read_text() == kept
    for folder in (short, long):
        assert runs.train_in([*arguments, "--training.steps=12"], folder)["steps"] == 12
    assert runs.equal(runs.weights(short, 12), runs.weights(long, 12))
    assert runs.equal(runs.weights(short), runs.weights(long))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "first"),
    [
        (["--training.average_last=3"], 7),
        (["--training.average_last=3", "--training.checkpoint_steps=2"], 8),
        (["--training.patience=3"], 5),
        (["--training.keep_checkpoints=1"], 4),
        (["--model.kind=flowseq", "--model.flow_steps=1", "--training.decoder_steps=5"], 7),
    ],
)
def test_end_of_a_run_that_is_extended_counts_for_no_mean_best_checkpoint_or_patience(
    arguments: list[str], tmp_path: Path, settings: list[str], first: int
) -> None:
    """The extra evaluation gets the best score, so the checkpoint with the best one before must be kept."""
    short, long = tmp_path / "short", tmp_path / "long"
    scores = {3: 5.0, 6: 4.0, 9: 3.0, 12: 2.0, 15: 1.0}

    def evaluate(trainer: PaperTrainer, *_: object, **__: object) -> dict[str, float]:
        metrics = {"eval_bleu": scores.get(trainer.state.global_step, 9.0), "eval_loss": 1.0}
        trainer.log(dict(metrics))
        trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
        return metrics

    with mock.patch.object(PaperTrainer, "evaluate", evaluate):
        runs.train_in([*arguments, *settings, f"--training.steps={first}"], short)
        results = [runs.train_in([*arguments, *settings, "--training.steps=15"], folder) for folder in (short, long)]
    assert runs.equal(runs.weights(short), runs.weights(long))
    for name in ("steps", "averaged_steps", "best_validation_bleu"):
        assert results[0].get(name) == results[1].get(name)
    curves = [[entry["step"] for entry in runs.entries(one, "eval_loss")] for one in results]
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_device_tokens_that_would_change_the_steps_of_an_epoch_are_an_error(
    arguments: list[str], tmp_path: Path
) -> None:
    settings = [*arguments, "--training.steps=5", "--training.source_tokens=30", "--training.target_tokens=30"]
    runs.train_in(settings, tmp_path / "run")
    more = ["--training.steps=7", "--training.device_tokens=5"]
    with user_error(
        r"^training\.device_tokens: changes which pairs share a step; got 5 \(processes: 1\), expected 25000 "
        r"\(processes: 1\)\. Set training\.device_tokens=25000, or"
    ):
        runs.train_in([*settings, *more], tmp_path / "run")
    runs.train_in([*settings, "--training.steps=7", "--training.device_tokens=20"], tmp_path / "run")


@pytest.mark.slow
def test_run_resumes_with_other_execution_settings(arguments: list[str], tmp_path: Path) -> None:
    """A step is the same for any split into micro-batches."""
    settings, other = [*arguments, "--training.steps=9", "--model.dropout=0.0"], tmp_path / "other"
    runs.train_in(settings, tmp_path / "whole")
    runs.rewound(tmp_path / "whole", 3, other)
    more = ["--training.device_tokens=20", "--training.log_steps=2", "--training.evaluation_batch_size=3"]
    results = runs.train_in(settings, other, *more, "--training.gradient_checkpointing=true", "--expected=better")
    assert results["recipe"]["training"]["device_tokens"] == 20
    torch.testing.assert_close(runs.weights(tmp_path / "whole", 9), runs.weights(other, 9), rtol=1e-3, atol=1e-4)


def test_run_with_another_recipe_is_an_error(arguments: list[str], tmp_path: Path) -> None:
    runs.begin_in(arguments, tmp_path / "run")
    before = (tmp_path / "run" / "recipe.yaml").read_text()
    with user_error(r"contains a run with a different training\.warmup_steps; got 9, expected 10\. Rerun the original"):
        runs.begin_in(arguments, tmp_path / "run", "--training.warmup_steps=9")
    assert (tmp_path / "run" / "recipe.yaml").read_text() == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.json", "{", r"data\.json: cannot be read \(.*\); restore it, or choose a different"),
        ("data.json", '{"train": 5}', r"data\.json: is damaged; got 5 for train; restore it"),
        ("data.json", '{"train": {"sha256": ""}}', r"data\.json: is damaged; got .* for train; restore it"),
        ("data.json", '{"tokenizer": 5}', r"data\.json: is damaged; got 5 for tokenizer; restore it"),
        ("results.json", "{", r"results\.json: cannot be read \(.*\); restore or remove it"),
        ("results.json", '{"recipe": 5}', r"results\.json: is damaged; .* restore or remove it"),
        ("recipe.yaml", "data: [", r"recipe\.yaml: does not fit this version, or is damaged \(.*\); restore it"),
        ("recipe.yaml", "5", r"recipe\.yaml: does not fit .*a recipe is a mapping"),
        ("recipe.yaml", "training: {steps: many}", r"recipe\.yaml: does not fit .*training\.steps"),
    ],
)
def test_damaged_file_of_a_run_is_an_error_of_one_line(
    arguments: list[str], tmp_path: Path, name: str, content: str, message: str
) -> None:
    runs.begin_in(arguments, tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    with user_error(message):
        runs.begin_in(arguments, tmp_path / "run")
    assert (tmp_path / "run" / name).read_text() == content


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_run_with_a_changed_tokenizer_is_an_error(arguments: list[str], tmp_path: Path, name: str) -> None:
    """Other token ids would train something else."""
    runs.begin_in(arguments, tmp_path / "run")
    path = tmp_path / "run" / name
    good = path.read_text()
    path.write_text(f"{good} ")
    with user_error(rf"run: {name} was altered; restore it, or choose a different --output_dir"):
        runs.begin_in(arguments, tmp_path / "run")
    path.unlink()
    with user_error(rf"run: {name} is missing; restore it"):
        runs.begin_in(arguments, tmp_path / "run")
    path.write_text(good)
    runs.begin_in(arguments, tmp_path / "run")


def test_damaged_record_of_prepared_data_is_an_error_before_the_first_step(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "data" / PREPARED).write_text("{")
    with user_error(r"prepared\.json: cannot be read \(.*\); repeat training\.prepare"):
        runs.train_in(arguments, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_run_with_checkpoints_and_no_recipe_is_an_error(arguments: list[str], tmp_path: Path) -> None:
    runs.begin_in(arguments, folder := tmp_path / "run")
    (folder / "recipe.yaml").unlink()
    runs.begin_in(arguments, folder)  # killed before it wrote its recipe
    (folder / "recipe.yaml").unlink()
    (folder / CHECKPOINTS).mkdir()
    with user_error(r"recipe\.yaml: does not fit this version, or is damaged \(.*no such recipe.*\); restore it"):
        runs.begin_in(arguments, folder)


def test_run_that_ended_by_time_names_both_limits_to_raise(arguments: list[str], tmp_path: Path) -> None:
    settings = [*arguments, "--training.steps=9", "--training.minutes=1"]
    runs.begin_in(settings, folder := tmp_path / "run")
    results = {"steps": 4, "recipe": {"training": {"steps": 9, "minutes": 1.0, "patience": None}}}
    (folder / "results.json").write_text(json.dumps(results))
    for more in ([], ["--training.steps=12"], ["--training.minutes=2"]):
        with user_error(r"finished run; choose .*, or raise training\.steps and training\.minutes to train it further"):
            runs.begin_in([*settings, *more], folder)
    runs.begin_in([*settings, "--training.steps=12", "--training.minutes=2"], folder)


def test_start_that_cannot_be_loaded_leaves_a_folder_for_the_corrected_command(
    arguments: list[str], tmp_path: Path
) -> None:
    with user_error(r"typo"):
        runs.train_in(arguments, tmp_path / "run", f"--training.start_from={tmp_path / 'typo'}")
    runs.begin_in(arguments, tmp_path / "run")


@pytest.mark.slow
def test_run_that_patience_did_not_end_needs_more_time_with_more_steps(arguments: list[str], tmp_path: Path) -> None:
    settings = [*arguments, "--training.patience=9"]
    runs.train_in([*settings, "--training.steps=300", "--training.minutes=0.0001"], tmp_path / "run")
    with user_error(r"training\.minutes: the run has trained for .* minutes; got 0\.0001, expected more"):
        runs.train_in([*settings, "--training.steps=301", "--training.minutes=0.0001"], tmp_path / "run")


def test_error_before_the_first_step_leaves_the_results_of_a_finished_run(arguments: list[str], tmp_path: Path) -> None:
    runs.begin_in([*arguments, "--training.steps=9"], folder := tmp_path / "run")
    results = json.dumps({"recipe": {"training": {"steps": 9}}})
    (folder / "results.json").write_text(results)
    (folder / "translations.jsonl").write_text("{}")
    longer = [*arguments, "--training.steps=12"]
    with user_error(r"^training\.report_to: sheets is not installed"):
        runs.train_in([*longer, "--training.report_to=sheets"], folder)
    assert (folder / "results.json").read_text() == results
    assert (folder / "translations.jsonl").exists()

    # the corrected command continues, and the results stay until there is a new model
    there = []

    def save(_: PaperTrainer) -> None:
        there.extend(name for name in ("results.json", "translations.jsonl") if (folder / name).exists())
        no_space()

    def train(_: PaperTrainer, checkpoint: Path | None) -> None:
        assert (folder / "results.json").read_text() == results

    with (
        mock.patch.object(PaperTrainer, "train_or_resume", train),
        mock.patch.object(PaperTrainer, "save_final_model", save),
        pytest.raises(OSError, match="No space"),
    ):
        runs.train_in(longer, folder)
    assert there == []


def test_run_whose_checkpoints_are_damaged_does_not_start_over(arguments: list[str], tmp_path: Path) -> None:
    trainer = runs.trainer_in(arguments, folder := tmp_path / "run")
    trainer.state.global_step = 3
    trainer._save_checkpoint(trainer.model, None)
    (folder / "results.json").write_text('{"recipe": {"training": {"steps": 3}}}')
    (runs.checkpoint_at(folder, 3) / "rng_state.pth").unlink()
    with user_error(r"checkpoint-3: rng_state\.pth is missing, and no other checkpoint is complete"):
        runs.train_in([*arguments, "--training.steps=100001"], folder)
    assert (folder / "results.json").exists()


def test_error_of_the_package_within_a_run_ends_the_command_with_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(PaperTrainer, "train", side_effect=ValueError("text 7:\nis longer than the table")):
        _, errors, status = run_main(train.main, [*arguments, f"--output_dir={tmp_path / 'run'}"], capsys)
    assert status == 2
    assert errors.endswith("text 7: is longer than the table\n")


@pytest.mark.parametrize(
    ("override", "prepared", "is_shown"), [(False, None, True), (True, None, False), (True, "gum", True)]
)
def test_expected_score_is_shown_only_for_the_data_that_it_is_about(
    arguments: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    override: bool,
    prepared: str | None,
    is_shown: bool,
) -> None:
    data = tmp_path / "data"
    if prepared is not None:
        (data / PREPARED).write_text(json.dumps({"name": prepared}))
    more = [f"--data.path={data}"] if override else []
    with (
        mock.patch.object(train, "run", side_effect=KeyboardInterrupt),
        caplog.at_level("INFO", logger="training.train"),
        pytest.raises(SystemExit),
    ):
        train.main([*arguments, "--expected=99 BLEU", f"--output_dir={tmp_path / 'run'}", *more])
    assert ("The recipe as shipped: 99 BLEU." in caplog.messages) is is_shown


def test_results_name_files_without_their_folders() -> None:
    data = {"path": "/home/somebody/pairs", "train": ["/home/somebody/a.jsonl", "b.jsonl"], "validation": 9}
    assert train.without_folders({"data": data}) == {
        "data": {"path": "pairs", "train": ["a.jsonl", "b.jsonl"], "validation": 9}
    }


def test_folder_with_other_files_is_an_error(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    for content in (None, '{"tokenizer": "mine"}'):
        if content is not None:
            (tmp_path / "run" / "data.json").write_text(content)
        with user_error(r"contains files that are not a run; choose a different --output_dir"):
            runs.begin_in(arguments, tmp_path / "run")
    with user_error(r"output_dir: a run needs a folder"):
        train.run(runs.load_recipe(arguments[0], arguments[1:]))


def test_folder_in_which_another_command_trains_is_an_error(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / train.LOCK), user_error(r"a training command is already running there"):
        runs.begin_in(arguments, tmp_path / "run")


@pytest.mark.parametrize(
    ("split", "change"),
    [("train", lambda text: text.replace("tree", "crow")), ("test", lambda text: text.partition("\n")[2])],
)
def test_data_that_changed_since_the_run_began_is_an_error(
    arguments: list[str], tmp_path: Path, split: str, change: Callable[[str], str]
) -> None:
    runs.begin_in(arguments, tmp_path / "run")
    path = tmp_path / "data" / f"{split}.jsonl"
    good = path.read_text()
    path.write_text(change(good))
    with user_error(rf"^data\.{split}: differs from the data that the run in .* \(16 pairs then, 1[56] n"):
        runs.begin_in(arguments, tmp_path / "run")
    path.write_text(good)
    runs.begin_in(arguments, tmp_path / "run")


@pytest.mark.slow
def test_interrupted_run_saves_its_step_and_resumes_to_the_same_bits(arguments: list[str], tmp_path: Path) -> None:
    settings = [*arguments, "--training.evaluation_steps=40", "--training.checkpoint_steps=15"]
    settings += ["--training.average_last=2"]
    process = runs.start([*settings, "--training.steps=100000"], folder := tmp_path / "run")
    runs.wait_for_checkpoint(process, folder)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    step = runs.last_step(folder)
    assert f"Interrupted: saving step {step}; the same command resumes the run." in errors
    assert (runs.checkpoint_at(folder, step) / "interrupted").exists() is bool(step % 15 and step % 40)
    settings.append(f"--training.steps={step + 15}")
    runs.run_to_end(settings, folder)
    runs.run_to_end(settings, whole := tmp_path / "whole")
    runs.assert_same_checkpoints(whole, folder)


@pytest.mark.slow
def test_interrupted_run_of_two_processes_resumes(arguments: list[str], tmp_path: Path) -> None:
    settings, folder = [*arguments, "--training.evaluation_steps=60", "--training.steps=3000"], tmp_path / "run"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *runs.TWO_PROCESSES]
    command = [*launch, "training.train", *settings, f"--output_dir={folder}"]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        runs.wait_for_checkpoint(process, folder)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=120)
    step = runs.last_step(folder)
    settings = runs.last_of_each(*settings, f"--training.steps={step + 3}")
    _, errors = runs.start(settings, folder, launch=runs.TWO_PROCESSES).communicate(timeout=300)
    assert f"Resuming from step {step} of {step + 3}." in errors


@pytest.mark.parametrize("phase", ["load_data", "write_results"])
def test_interruption_before_and_after_training_ends_with_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], phase: str
) -> None:
    given = [*arguments, "--training.steps=1", f"--output_dir={tmp_path / 'run'}"]
    with mock.patch.object(train, phase, side_effect=KeyboardInterrupt):
        _, errors, status = run_main(train.main, given, capsys)
    assert status == 130
    assert errors.endswith("Interrupted; the same command resumes the run from its last checkpoint.\n")


@pytest.mark.slow
def test_full_disk_ends_the_run_with_one_line_and_loses_no_checkpoint(arguments: list[str], tmp_path: Path) -> None:
    save_state = PaperTrainer._save_rng_state

    def full(trainer: PaperTrainer, folder: str) -> None:
        if trainer.state.global_step == 6:
            no_space()
        save_state(trainer, folder)

    settings, folder = [*arguments, "--training.steps=9", "--training.keep_checkpoints=1"], tmp_path / "run"
    message = r"checkpoint-6: cannot be written: No space left on device; make room, and the same command"
    with mock.patch.object(PaperTrainer, "_save_rng_state", full), user_error(message):
        runs.train_in(settings, folder)
    assert runs.last_step(folder) == 3
    set_seed(99)
    runs.train_in(settings, folder)
    runs.train_in(settings, tmp_path / "whole")
    runs.assert_same_checkpoints(tmp_path / "whole", folder)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["optimizer.pt", "rng_state.pth"])
def test_full_disk_in_a_library_ends_the_run_with_one_line(arguments: list[str], tmp_path: Path, file: str) -> None:
    """The file of the checkpoint is a link to a device on which no byte fits."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    settings, folder = [*arguments, "--training.steps=6"], tmp_path / "run"
    begin = trainer_module.begin_checkpoint

    def begin_on_full_disk(checkpoint: Path) -> None:
        begin(checkpoint)
        if step_of(checkpoint) == 6:
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / file).symlink_to("/dev/full")

    with (
        mock.patch.object(trainer_module, "begin_checkpoint", begin_on_full_disk),
        user_error(r"checkpoint-6: cannot be written: .*; make room, and the same command resumes the run\.$"),
    ):
        runs.train_in(settings, folder)
    assert runs.last_step(folder) == 3
    (runs.checkpoint_at(folder, 6) / file).unlink(missing_ok=True)
    assert runs.train_in(settings, folder)["steps"] == 6


@pytest.mark.slow
def test_run_on_a_small_file_system_ends_with_one_line_and_resumes(arguments: list[str], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=250k", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        settings = [*arguments, "--training.steps=12", "--training.checkpoint_steps=1"]
        full = runs.start(settings, disk / "run")
        _, errors = full.communicate(timeout=300)
        assert full.returncode == 2, errors
        assert "Traceback" not in errors
        assert errors.endswith("; make room, and the same command resumes the run.\n")
        subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
        runs.run_to_end(settings, disk / "run")
        assert runs.results_in(disk / "run")["steps"] == 12
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_minutes_end_a_run_and_go_on_after_an_interruption(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reading of the clock takes a second, so the same steps are saved on every machine."""
    monkeypatch.setattr("training.callbacks.time", SimpleNamespace(monotonic=map(float, itertools.count()).__next__))
    settings = [*arguments, "--training.steps=100000", "--training.checkpoint_steps=null"]
    settings += ["--training.minutes=1", "--training.checkpoint_minutes=0.1"]
    results = runs.train_in(settings, tmp_path / "run")
    assert 0 < results["steps"] < 60
    steps = [step_of(path) for path in complete_checkpoints(tmp_path / "run")]
    assert len(steps) > 5
    seconds = [float((path / "seconds").read_text()) for path in complete_checkpoints(tmp_path / "run")]
    assert all(second - first > 6 for first, second in itertools.pairwise(seconds[:-1]))
    assert 60 < seconds[-1] < 66

    again = runs.rewound(tmp_path / "run", steps[-2], tmp_path / "again")
    resumed = runs.train_in(settings, again)["steps"]
    assert 0 < resumed - steps[-2] < results["steps"] / 2
    assert runs.train_in(settings, again, "--training.steps=100001", "--training.minutes=2")["steps"] > resumed


def shaped_as(model: Path, arguments: list[str]) -> list[str]:
    """Return the arguments of a run that has the shape and the tokenizer of a model."""
    config = json.loads((model / "config.json").read_text())
    names = ("d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers")
    shape = [f"--model.{name}={config[name]}" for name in names]
    return [*runs.last_of_each(*arguments, *shape), f"--tokenizer.path={model}"]


@pytest.mark.slow
@pytest.mark.parametrize("field", ["start_from", "encoder_from"])
def test_run_begins_with_the_weights_of_a_trained_model(
    arguments: list[str], tmp_path: Path, teacher: Path, field: str
) -> None:
    given = [*shaped_as(teacher, arguments), f"--training.{field}={teacher}"]
    trainer = runs.trainer_in(given, tmp_path / "run")
    taught = AutoModelForSeq2SeqLM.from_pretrained(teacher).state_dict()
    same = {name for name, weight in trainer.model.state_dict().items() if torch.equal(weight, taught[name])}
    expected = {name for name in taught if field == "start_from" or "encoder." in name or "shared" in name}
    assert expected - {name for name in taught if "norm" in name} <= same
    with user_error(rf"training\.{field}: .* has num_heads 4; .*set model\.num_heads"):
        runs.trainer_in([*given, "--model.num_heads=1"], tmp_path / "other")


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        ({"pairs": 0, "sources": 0}, "unseen"),
        ({"pairs": 0, "sources": 1}, "held-out"),
        ({"pairs": 0, "sources": 0, "not_known": True}, "held-out"),
        (None, "held-out"),
    ],
)
def test_last_line_says_unseen_only_if_no_training_data_can_have_the_sentences(
    seen: dict[str, int] | None, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results: dict[str, Any] = results_of() | {"seen_in_training": {"test": seen}}
    results["test"]["examples"] = []
    train.report(results, recipe_of(results["recipe"]))
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"BLEU 28.46 on 16 {word} sentences (nrefs:1|")


@pytest.mark.slow
def test_pairs_that_the_start_model_learned_from_are_counted_in_the_test_set(
    finished_run: runs.FinishedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = runs.make_arguments(tmp_path, train=["ten trees", "ten seas"], test=["ten dogs", runs.LANGUAGE[0]])
    start = [f"--training.start_from={finished_run.folder}", f"--tokenizer.path={finished_run.folder}"]
    results = runs.train_in([*arguments, "--training.steps=1", *start], tmp_path / "run")
    assert results["seen_in_training"]["test"] == {"pairs": 1, "sources": 1}
    assert "test set: the training data contain 1 of its 2 pairs, and 1 of its sources" in caplog.text


@pytest.mark.slow
def test_weights_of_a_padded_vocabulary_can_be_taken(arguments: list[str], tmp_path: Path, teacher: Path) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(teacher)
    entries = model.config.vocab_size
    model.resize_token_embeddings(pad_to_multiple_of=64)
    assert model.config.vocab_size > entries
    padded = save(tmp_path / "padded", model, load_tokenizer(teacher))
    given = [*shaped_as(padded, arguments), f"--training.encoder_from={padded}"]
    trainer = runs.trainer_in(given, tmp_path / "run")
    torch.testing.assert_close(trainer.model.model.shared.weight, model.model.shared.weight[:entries])


def test_deeper_encoder_starts_from_the_layers_of_a_trained_one(
    arguments: list[str], tmp_path: Path, teacher: Path
) -> None:
    layers = AutoConfig.from_pretrained(teacher).encoder_layers
    deeper = [*shaped_as(teacher, arguments), f"--model.encoder_layers={layers + 1}"]
    model = runs.trainer_in([*deeper, f"--training.encoder_from={teacher}"], tmp_path / "run").model.model
    taught = AutoModelForSeq2SeqLM.from_pretrained(teacher).model
    for layer, taught_layer in zip(model.encoder.layers, taught.encoder.layers, strict=False):
        torch.testing.assert_close(layer.state_dict(), taught_layer.state_dict(), rtol=0, atol=0)
    assert len(model.encoder.layers) == layers + 1
    torch.testing.assert_close(model.shared.weight, taught.shared.weight, rtol=0, atol=0)


def test_teacher_of_another_vocabulary_is_an_error(arguments: list[str], tmp_path: Path, teacher: Path) -> None:
    with user_error(r"training\.start_from: the vocabulary of .* differs from the run's; set --tokenizer\.path="):
        runs.trainer_in(
            [*arguments, "--tokenizer.vocab_size=270", f"--training.start_from={teacher}"], tmp_path / "run"
        )


def test_run_starts_from_a_teacher_with_another_vocabulary(
    arguments: list[str], tmp_path: Path, teacher: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A common token has its embedding, another the mean of the tokens that write its text."""
    given = [*shaped_as(teacher, arguments), "--tokenizer.path=null", "--tokenizer.vocab_size=270"]
    given += [f"--training.start_from={teacher}", "--training.new_vocabulary=true", "--data.variants.upper=1"]
    with caplog.at_level("INFO", "training"):
        trainer = runs.trainer_in(given, tmp_path / "run")
    taught = AutoModelForSeq2SeqLM.from_pretrained(teacher)
    own, known = trainer.processing_class.get_vocab(), load_tokenizer(teacher).get_vocab()
    entries, common = starting_entries(trainer.processing_class, load_tokenizer(teacher))
    assert common == len(own.keys() & known.keys()) < len(own)
    assert f"training.start_from: {common} of {len(own)} tokens are in the vocabulary of {teacher}" in caplog.text
    for index, ids in entries.items():
        mean = taught.model.shared.weight[ids].mean(0)
        torch.testing.assert_close(trainer.model.model.shared.weight[index], mean)
    copied = trainer.model.model.decoder.layers.state_dict()
    torch.testing.assert_close(copied, taught.model.decoder.layers.state_dict(), rtol=0, atol=0)
