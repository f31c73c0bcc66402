"""A run that was killed, interrupted or extended goes through the steps of an uninterrupted one."""

import itertools
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
from tests.training import runs
from training import train
from training.run.checkpoints import checkpoint_at, complete_checkpoints, has_ended, mark_complete, step_of
from training.run.folder import prepare_folder
from training.trainer import trainer as trainer_module
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.batching.prefetch import prefetch
from vaswani_transformer.support.errors import Terminated


@pytest.mark.slow
def test_rest_of_a_resumed_epoch_is_loaded_ahead(
    finished_run: runs.FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate's loader for the rest of an epoch is another one than the trainer's."""
    loaded: list[int] = []

    def counted(batches: Iterator[Any], ahead: int) -> Iterator[Any]:
        loaded.append(0)
        for batch in prefetch(batches, ahead):
            loaded[-1] += 1
            yield batch

    monkeypatch.setattr(trainer_module, "prefetch", counted)
    folder = runs.rewound(finished_run.folder, 3, tmp_path / "run")
    runs.train_in(finished_run.arguments, folder)
    assert loaded[:2] == [1, 2]
    assert sum(loaded) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [["--training.steps=7"], runs.TIRED, ["--training.steps=7", "--training.average_last=2"]],
    ids=["steps", "patience", "mean"],
)
def test_run_killed_after_its_last_step_trains_no_further_step(
    arguments: list[str], tmp_path: Path, end: list[str]
) -> None:
    """It is killed right after its last checkpoint, or while it translates the test set.

    The number of steps is no multiple of an epoch's, so the Trainer by itself would take one more.
    """
    settings, whole = [*arguments, "--training.steps=20", *end], tmp_path / "whole"
    first = runs.train_in(settings, whole)
    assert has_ended(checkpoint_at(whole, first["steps"]), runs.recipe_in(settings, whole).training)
    for phase, lost in (("saving", ["model.safetensors", "trainer_state.json"]), ("scoring", [])):
        killed = shutil.copytree(whole, tmp_path / phase)
        for name in ("results.json", *lost):
            (killed / name).unlink()
        again = runs.train_in(settings, killed)
        assert again["steps"] == first["steps"] <= 20
        assert again.get("averaged_steps") == first.get("averaged_steps")
        for split, name in (("validation", "loss"), ("validation", "bleu"), ("test", "bleu"), ("test", "examples")):
            assert again[split][name] == first[split][name]
        runs.assert_same_checkpoints(whole, killed)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["--training.steps=7", "--training.minutes=0.001"])
def test_finished_run_with_larger_limits_equals_one_that_began_with_them(
    arguments: list[str], tmp_path: Path, limit: str
) -> None:
    settings = [*arguments, "--training.steps=12", "--training.evaluation_steps=5"]
    short, long = tmp_path / "short", tmp_path / "whole"
    first = runs.train_in(settings, short, limit)
    assert first["steps"] < 12
    kept, model = (short / "results.json").read_text(), runs.weights(short)
    for more in ([limit], [limit, "--training.warmup_steps=9"], ["--training.warmup_steps=9"]):
        with user_error(r"holds a finished run; give another --output_dir, remove the folder, or"):
            runs.train_in(settings, short, *more)
    assert (short / "results.json").read_text() == kept
    cut = runs.rewound(short, first["steps"], tmp_path / "cut")
    with user_error(rf"unfinished run of {first['steps']} steps in .* give training\.steps and"):
        prepare_folder(runs.recipe_in(settings, cut, "--training.minutes=0.00001"))
    again, true = (
        runs.train_in(settings, short, "--expected=better", "--published=as good"),
        runs.train_in(settings, long),
    )
    assert again["recipe"]["published"] == "as good"
    assert again["steps"] == true["steps"] == 12
    before = short / f"finished-{first['steps']}"
    assert (before / "results.json").read_text() == kept
    assert runs.equal(runs.weights(before), model)
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(before), VaswaniTransformerForConditionalGeneration)
    assert load_tokenizer(before)("a").input_ids == load_tokenizer(short)("a").input_ids
    assert again["test"]["bleu"] == true["test"]["bleu"]
    assert runs.equal(runs.weights(short, 12), runs.weights(long, 12))


@pytest.mark.parametrize(
    ("split", "more"),
    [("train", []), ("validation", []), ("test", []), ("train", ["--data.streaming=true", "--data.max_length=40"])],
)
@pytest.mark.parametrize("change", [lambda text: text.replace("tree", "crow"), lambda text: text.partition("\n")[2]])
def test_data_that_changed_since_the_run_began_is_an_error(
    arguments: list[str], tmp_path: Path, split: str, more: list[str], change: Callable[[str], str]
) -> None:
    recipe = runs.recipe_in(arguments, tmp_path / "run", *more)
    runs.prepare_run(recipe)
    path = tmp_path / "data" / f"{split}.jsonl"
    good = path.read_text()
    path.write_text(change(good))
    with user_error(rf"^data\.{split}: these are not the pairs that the run in .* \(16 then, 1[56] n"):
        runs.prepare_run(recipe)
    path.write_text(good)
    runs.prepare_run(recipe)


@pytest.mark.slow
def test_clock_that_jumps_and_files_of_the_future_change_no_bit(
    finished_run: runs.FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, folder = finished_run.arguments, tmp_path / "run"
    jumps, now = itertools.cycle((1e9, -1e9, 0.0)), time.time
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    runs.train_in(arguments, folder)
    runs.rewind(folder, 3)
    for path, year in zip(sorted(folder.rglob("*")), itertools.cycle((1970, 2100))):
        seconds = 31_556_952 * (year - 1970)
        os.utime(path, (seconds, seconds))
    results = runs.train_in(arguments, folder)
    runs.assert_same_checkpoints(finished_run.folder, folder)
    assert all(0 <= seconds < 1000 for seconds in (*results["time"].values(), results["seconds"]))


@pytest.mark.slow
def test_run_resumes_with_other_execution_settings_to_the_same_weights_without_a_warning(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step is the same for any split into micro-batches."""
    settings = [*arguments, "--training.steps=9", "--model.dropout=0.0"]
    uninterrupted, other = tmp_path / "uninterrupted", tmp_path / "other"
    runs.train_in(settings, uninterrupted)
    runs.rewound(uninterrupted, 3, other)
    more = ["--training.device_tokens=20", "--training.log_steps=2", "--training.evaluation_batch_size=3"]
    caplog.clear()
    with caplog.at_level("INFO"):
        more += ["--training.gradient_checkpointing=true", "--training.on_divergence=skip"]
        results = runs.train_in(settings, other, *more)
    assert results["recipe"]["training"]["device_tokens"] == 20
    assert [entry["step"] for entry in runs.entries(results)] == [1, 2, 3, 4, 6, 8]
    torch.testing.assert_close(runs.weights(uninterrupted, 9), runs.weights(other, 9), rtol=1e-3, atol=1e-4)
    assert "Resuming from step 3 of 9." in caplog.text
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    with user_error(r"holds a finished run"):
        runs.train_in(settings, other, "--training.device_tokens=30")


def test_micro_batches_so_small_that_steps_would_change_are_an_error_on_resuming(
    arguments: list[str], tmp_path: Path
) -> None:
    runs.prepare_run(runs.recipe_in(arguments, tmp_path / "run"))
    before = (tmp_path / "run" / "recipe.yaml").read_text()
    with user_error(r"^training\.device_tokens: 6 splits the pairs into other steps than the 25"):
        runs.prepare_run(runs.recipe_in(arguments, tmp_path / "run", "--training.device_tokens=6"))
    assert (tmp_path / "run" / "recipe.yaml").read_text() == before


@pytest.mark.slow
def test_number_of_processes_that_changes_the_steps_of_a_resumed_run_is_announced(
    finished_run: runs.FinishedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of eight processes needs a pair of every step; a run that has ended takes no step."""
    folder = runs.rewound(finished_run.folder, 3, tmp_path / "run")
    checkpoint = checkpoint_at(folder, 3)
    for rank in range(8):
        shutil.copy(checkpoint / "rng_state.pth", checkpoint / f"rng_state_{rank}.pth")
    (checkpoint / "rng_state.pth").unlink()
    mark_complete(checkpoint)
    runs.prepare_run(runs.recipe_in(finished_run.arguments, folder))
    assert "processes: 1 split the pairs into other steps than the 8 before" in caplog.text
    caplog.clear()
    shutil.copytree(checkpoint, checkpoint_at(folder, 9))
    runs.prepare_run(runs.recipe_in(finished_run.arguments, folder))
    assert "processes" not in caplog.text


@pytest.mark.slow
def test_run_and_its_resumption_print_no_warning(arguments: list[str], tmp_path: Path) -> None:
    """The output includes that of the libraries."""
    settings = [*arguments, "--training.steps=6", "--training.average_last=2"]
    for _ in range(2):
        process = runs.start(settings, tmp_path / "run", is_fork=False)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert not re.search(r"warn|missing|ignored|not valid|do not match", errors, re.IGNORECASE), errors
        runs.rewind(tmp_path / "run", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status", "launcher"),
    [(signal.SIGINT, 130, ()), (signal.SIGTERM, 143, ()), (signal.SIGINT, 130, runs.TWO_PROCESSES)],
    ids=["Ctrl-C", "SIGTERM", "Ctrl-C in two processes"],
)
def test_interrupted_run_saves_the_step_says_so_in_one_line_and_resumes(
    arguments: list[str], tmp_path: Path, sent: signal.Signals, status: int, launcher: tuple[str, ...]
) -> None:
    """Torch's launcher adds a traceback and another exit status."""
    settings, folder = [*arguments, "--training.evaluation_steps=60", "--training.steps=3000"], tmp_path / "run"
    process = runs.start(settings, folder, launcher=launcher, is_fork=not launcher)
    runs.wait_for_checkpoint(process, folder)
    os.killpg(process.pid, sent)
    _, errors = process.communicate(timeout=120)
    lines = [line for line in errors.splitlines() if "Interrupted" in line]
    assert lines == ["Interrupted; the same command resumes the run from its last checkpoint."]
    if not launcher:
        assert process.returncode == status
        assert "Traceback" not in errors
    step = runs.last_step(folder)
    is_regular = step % 60 == 0
    assert (checkpoint_at(folder, step) / "interrupted").exists() is not is_regular
    settings = runs.last_of_each(*settings, f"--training.steps={step + 3}")
    _, again = runs.start(settings, folder, launcher=launcher).communicate(timeout=300)
    assert f"Resuming from step {step} of {step + 3}." in again


@pytest.mark.slow
@pytest.mark.parametrize(("method", "saved"), [("training_step", [3]), ("translate", [])])
def test_signal_before_an_evaluation_saves_its_step_and_one_in_it_ends_the_run_at_once(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, saved: list[int]
) -> None:
    """Step 3 is followed by an evaluation."""
    plain = getattr(trainer_module.RecipeTrainer, method)

    def interrupted(self: Any, *given: Any, **named: Any) -> Any:
        if method == "translate" or self.state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)
        return plain(self, *given, **named)

    monkeypatch.setattr(trainer_module.RecipeTrainer, method, interrupted)
    with pytest.raises(Terminated):
        runs.train_in([*arguments, "--training.steps=9"], tmp_path / "run")
    assert [step_of(checkpoint) for checkpoint in complete_checkpoints(tmp_path / "run")] == saved


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
