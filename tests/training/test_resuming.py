"""A run that was killed, interrupted or extended goes through the steps of an uninterrupted one."""

import itertools
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from tests.helpers import load_tokenizer, run_main, user_error
from tests.training.runs import (
    TIRED,
    TWO_PROCESSES,
    FinishedRun,
    assert_same_checkpoints,
    equal,
    finish,
    kill_after,
    last_of_each,
    last_step,
    prepare_run,
    recipe_in,
    rewind,
    rewound,
    start,
    train_in,
    weights,
)
from training import train
from training.recipe.fields import load_recipe
from training.run.checkpoints import has_ended, last_checkpoint, step_of
from training.run.folder import prepare_folder
from training.train import run
from training.trainer import trainer as trainer_module
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.batching.prefetch import prefetch


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TWO_PROCESSES], ids=["one process", "two processes"])
def test_killed_run_resumes_by_the_same_command_to_the_same_weights(
    arguments: list[str], tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    """Bit for bit on a CPU, dropout and the order of batches included, in the middle of a later epoch."""
    arguments = [*arguments, "--training.steps=40"]
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    finish(start(arguments, uninterrupted, launcher=launcher))
    assert step_of(kill_after(9, start(arguments, killed, launcher=launcher, is_fork=not launcher), killed)) < 30
    finish(start(arguments, killed, launcher=launcher))
    assert_same_checkpoints(uninterrupted, killed)
    results = json.loads((killed / "results.json").read_text())
    assert (results["steps"], results["processes"]) == (40, 2 if launcher else 1)


@pytest.mark.slow
def test_rest_of_a_resumed_epoch_is_loaded_ahead(
    finished_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate's loader for the rest of an epoch is another one than the trainer's."""
    loaded: list[int] = []

    def counted(batches: Iterator[Any], ahead: int) -> Iterator[Any]:
        loaded.append(0)
        for batch in prefetch(batches, ahead):
            loaded[-1] += 1
            yield batch

    monkeypatch.setattr(trainer_module, "prefetch", counted)
    folder = rewound(finished_run.folder, 3, tmp_path / "run")
    train_in(finished_run.arguments, folder)
    assert loaded[:2] == [1, 2]
    assert sum(loaded) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [["--training.steps=7"], TIRED, ["--training.steps=7", "--training.average_last=2"]],
    ids=["steps", "patience", "mean"],
)
def test_run_killed_after_its_last_step_trains_no_further_step(
    arguments: list[str], tmp_path: Path, end: list[str]
) -> None:
    """It is killed right after its last checkpoint, or while it translates the test set.

    The number of steps is no multiple of an epoch's, so the Trainer by itself would take one more.
    """
    settings, whole = [*arguments, "--training.steps=20", *end], tmp_path / "whole"
    first = train_in(settings, whole)
    last = whole / "checkpoints" / f"checkpoint-{first['steps']}"
    assert has_ended(last, recipe_in(settings, whole).training)
    for phase, lost in (("saving", ["model.safetensors", "trainer_state.json"]), ("scoring", [])):
        killed = shutil.copytree(whole, tmp_path / phase)
        for name in ("results.json", *lost):
            (killed / name).unlink()
        again = train_in(settings, killed)
        assert again["steps"] == first["steps"] <= 20
        for split, name in (("validation", "loss"), ("validation", "bleu"), ("test", "bleu"), ("test", "examples")):
            assert again[split][name] == first[split][name]
        assert_same_checkpoints(whole, killed)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["--training.steps=7", "--training.minutes=0.001"])
def test_finished_run_with_larger_limits_equals_one_that_began_with_them(
    arguments: list[str], tmp_path: Path, limit: str
) -> None:
    settings = [*arguments[1:], "--training.steps=12", "--training.evaluation_steps=5"]
    short, long = tmp_path / "short", tmp_path / "whole"
    first = run(load_recipe(arguments[0], last_of_each(*settings, limit, f"--output_dir={short}")))
    assert first["steps"] < 12
    kept, model = (short / "results.json").read_text(), weights(short)
    for more in ([limit], [limit, "--training.warmup_steps=9"], ["--training.warmup_steps=9"]):
        with user_error(r"holds a finished run; give another --output_dir, remove the folder, or"):
            run(load_recipe(arguments[0], last_of_each(*settings, *more, f"--output_dir={short}")))
    assert (short / "results.json").read_text() == kept
    cut = rewound(short, first["steps"], tmp_path / "cut")
    less = load_recipe(arguments[0], [*settings, f"--output_dir={cut}", "--training.minutes=0.00001"])
    with user_error(rf"unfinished run of {first['steps']} steps in .* give training\.steps and"):
        prepare_folder(less)
    remarks = ["--expected=better", "--published=as good"]
    again = run(load_recipe(arguments[0], [*settings, *remarks, f"--output_dir={short}"]))
    true = run(load_recipe(arguments[0], [*settings, f"--output_dir={long}"]))
    assert again["recipe"]["published"] == "as good"
    assert again["steps"] == true["steps"] == 12
    before = short / f"finished-{first['steps']}"
    assert (before / "results.json").read_text() == kept
    assert equal(weights(before), model)
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(before), VaswaniTransformerForConditionalGeneration)
    assert load_tokenizer(before)("a").input_ids == load_tokenizer(short)("a").input_ids
    assert again["test"]["bleu"] == true["test"]["bleu"]
    assert equal(weights(short / "checkpoints" / "checkpoint-12"), weights(long / "checkpoints" / "checkpoint-12"))


@pytest.mark.parametrize(
    ("split", "more"),
    [("train", []), ("validation", []), ("test", []), ("train", ["--data.streaming=true", "--data.max_length=40"])],
)
@pytest.mark.parametrize("change", [lambda text: text.replace("tree", "crow"), lambda text: text.partition("\n")[2]])
def test_data_that_changed_since_the_run_began_is_an_error(
    arguments: list[str], tmp_path: Path, split: str, more: list[str], change: Callable[[str], str]
) -> None:
    recipe = recipe_in(arguments, tmp_path / "run", *more)
    prepare_run(recipe)
    path = tmp_path / "data" / f"{split}.jsonl"
    good = path.read_text()
    path.write_text(change(good))
    with user_error(rf"^data\.{split}: these are not the pairs that the run in .* \(16 then, 1[56] n"):
        prepare_run(recipe)
    path.write_text(good)
    prepare_run(recipe)


@pytest.mark.slow
def test_clock_that_jumps_and_files_of_the_future_change_no_bit(
    finished_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, folder = finished_run.arguments, tmp_path / "run"
    jumps, now = itertools.cycle((1e9, -1e9, 0.0)), time.time
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    train_in(arguments, folder)
    rewind(folder, 3)
    for path, year in zip(sorted(folder.rglob("*")), itertools.cycle((1970, 2100))):
        seconds = 31_556_952 * (year - 1970)
        os.utime(path, (seconds, seconds))
    results = train_in(arguments, folder)
    assert_same_checkpoints(finished_run.folder, folder)
    assert all(0 <= seconds < 1000 for seconds in (*results["time"].values(), results["seconds"]))


@pytest.mark.slow
def test_run_resumes_with_other_execution_settings_to_the_same_weights_without_a_warning(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step is the same for any split into micro-batches."""
    settings = [*arguments, "--training.steps=9", "--model.dropout=0.0"]
    uninterrupted, other = tmp_path / "uninterrupted", tmp_path / "other"
    train_in(settings, uninterrupted)
    rewound(uninterrupted, 3, other)
    more = ["--training.device_tokens=20", "--training.log_steps=2", "--training.evaluation_batch_size=3"]
    caplog.clear()
    with caplog.at_level("INFO"):
        more += ["--training.gradient_checkpointing=true", "--training.on_divergence=skip"]
        results = train_in(settings, other, *more)
    assert results["recipe"]["training"]["device_tokens"] == 20
    assert [entry["step"] for entry in results["curve"] if "loss" in entry] == [1, 2, 3, 4, 6, 8]
    first, second = (
        weights(uninterrupted / "checkpoints" / "checkpoint-9"),
        weights(other / "checkpoints" / "checkpoint-9"),
    )
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)
    assert "Resuming from step 3 of 9." in caplog.text
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    with user_error(r"holds a finished run"):
        train_in(settings, other, "--training.device_tokens=30")


def test_micro_batches_so_small_that_steps_would_change_are_an_error_on_resuming(
    arguments: list[str], tmp_path: Path
) -> None:
    recipe = recipe_in(arguments, tmp_path / "run")
    prepare_run(recipe)
    before = (tmp_path / "run" / "recipe.yaml").read_text()
    other = recipe_in(arguments, tmp_path / "run", "--training.device_tokens=6")
    with user_error(r"^training\.device_tokens: 6 splits the pairs into other steps than the 25"):
        prepare_run(other)
    assert (tmp_path / "run" / "recipe.yaml").read_text() == before


@pytest.mark.slow
def test_run_and_its_resumption_print_no_warning(arguments: list[str], tmp_path: Path) -> None:
    """The output includes that of the libraries."""
    settings = [*arguments, "--training.steps=6", "--training.average_last=2"]
    for _ in range(2):
        process = start(settings, tmp_path / "run", is_fork=False)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert not re.search(r"warn|missing|ignored|not valid|do not match", errors, re.IGNORECASE), errors
        rewind(tmp_path / "run", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status", "launcher"),
    [(signal.SIGINT, 130, ()), (signal.SIGTERM, 143, ()), (signal.SIGINT, 130, TWO_PROCESSES)],
    ids=["Ctrl-C", "SIGTERM", "Ctrl-C in two processes"],
)
def test_interrupted_run_saves_the_step_says_so_in_one_line_and_resumes(
    arguments: list[str], tmp_path: Path, sent: signal.Signals, status: int, launcher: tuple[str, ...]
) -> None:
    """Torch's launcher adds a traceback and another exit status."""
    settings, folder = [*arguments, "--training.evaluation_steps=60", "--training.steps=3000"], tmp_path / "run"
    process = start(settings, folder, launcher=launcher, is_fork=not launcher)
    while last_checkpoint(folder) is None and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, sent)
    _, errors = process.communicate(timeout=120)
    lines = [line for line in errors.splitlines() if "Interrupted" in line]
    assert lines == ["Interrupted; the same command resumes the run from its last checkpoint."]
    if not launcher:
        assert process.returncode == status
        assert "Traceback" not in errors
    step = last_step(folder)
    is_regular = step % 60 == 0
    assert (folder / "checkpoints" / f"checkpoint-{step}" / "interrupted").exists() is not is_regular
    settings = last_of_each(*settings, f"--training.steps={step + 3}")
    _, again = start(settings, folder, launcher=launcher).communicate(timeout=300)
    assert f"Resuming from step {step} of {step + 3}." in again


@pytest.mark.parametrize("phase", ["run.preparation.load_pairs", "run.preparation.tokenize", "train.write_results"])
def test_interruption_in_any_phase_ends_the_command_with_one_line(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    phase: str,
) -> None:
    def interrupt(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"training.{phase}", interrupt)
    given = [*arguments, "--training.steps=1", f"--output_dir={tmp_path / 'run'}"]
    _, errors, status = run_main(train.main, given, capsys)
    assert status == 130
    assert errors.endswith("Interrupted; the same command resumes the run from its last checkpoint.\n")
