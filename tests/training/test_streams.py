"""A run on a stream learns from the same steps in any processes, and resumes in the middle of the stream."""

import json
from pathlib import Path

import pytest

from tests.training.runs import (
    LANGUAGE,
    TWO_PROCESSES,
    assert_same_checkpoints,
    finish,
    kill_after,
    last_step,
    start,
)
from training.checkpoints import step_of
from training.data import pairs as data_pairs
from training.recipe import load_recipe
from training.run_folder import prepare_folder
from training.train import prepare, run
from vaswani_transformer.batching import stream
from vaswani_transformer.errors import UserError


@pytest.fixture
def streamed(arguments: list[str], tmp_path: Path) -> list[str]:
    """Return a streamed run on eighty pairs and one that is too long: buffers of twenty, twelve steps an epoch.

    No step has less than four pairs.
    """
    lines = [json.dumps({"translation": {"en": text, "de": text[::-1]}}) for text in 5 * LANGUAGE]
    lines.insert(50, json.dumps({"translation": {"en": "one tree", "de": 60 * "eert "}}))
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [*arguments, "--data.streaming=true", "--data.buffer=20", "--data.max_length=40"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TWO_PROCESSES], ids=["one process", "two processes"])
def test_killed_streamed_run_resumes_by_the_same_command_to_the_same_weights(
    streamed: list[str], tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    """Bit for bit on a CPU, dropout, buffers and batches included, in a later epoch."""
    arguments = [*streamed, "--training.steps=50"]
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    finish(start(arguments, uninterrupted, launcher=launcher))
    checkpoint = kill_after(21, start(arguments, killed, launcher=launcher), killed)
    assert step_of(checkpoint) < 50
    assert json.loads((checkpoint / "stream.json").read_text())["epoch"] > 0
    finish(start(arguments, killed, launcher=launcher))
    assert_same_checkpoints(uninterrupted, killed)
    curves = [json.loads((folder / "results.json").read_text())["curve"] for folder in (uninterrupted, killed)]
    for single, resumed in zip(*curves, strict=True):
        for name in ("step", "epoch", "loss", "eval_loss"):
            assert single.get(name) == resumed.get(name)
    assert curves[0][-1]["epoch"] == 4


@pytest.mark.slow
def test_streamed_run_on_two_processes_or_in_micro_batches_learns_from_the_same_steps(
    streamed: list[str], tmp_path: Path
) -> None:
    """The losses of two epochs' steps agree to 0.005; the loss of a step of other pairs differs by 0.02.

    Dropout is off. Adam enlarges rounding of 1e-7 if a gradient is nearly 0.
    """
    arguments = [*streamed, "--training.steps=24", "--model.dropout=0.0", "--training.learning_rate_scale=0.1"]
    finish(start(arguments, tmp_path / "one"))
    finish(start([*arguments, "--training.device_tokens=30"], tmp_path / "parts"))
    finish(start(arguments, tmp_path / "two", launcher=TWO_PROCESSES))
    one, parts, two = (
        [
            entry["loss"]
            for entry in json.loads((tmp_path / name / "results.json").read_text())["curve"]
            if "loss" in entry
        ]
        for name in ("one", "parts", "two")
    )
    assert len(one) == 24
    assert parts == pytest.approx(one, rel=5e-3)
    assert two == pytest.approx(one, rel=5e-3)


@pytest.mark.slow
def test_bad_line_of_a_stream_ends_the_run_on_reaching_it_and_a_corrected_one_resumes(
    streamed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_pairs, "PREVIEW_PAIRS", 16)
    monkeypatch.setattr(stream, "ENCODE_BATCH", 1)
    path, folder = tmp_path / "data" / "train.jsonl", tmp_path / "run"
    good = path.read_text()
    lines = good.split("\n")
    path.write_text("\n".join([*lines[:60], "{", *lines[60:]]))
    more = ["--training.steps=20", "--tokenizer.sample=16", f"--output_dir={folder}"]
    with pytest.raises(UserError, match=r"train\.jsonl, line 61: not JSON"):
        run(load_recipe(streamed[0], [*streamed[1:], *more]))
    assert last_step(folder) >= 3
    path.write_text(good)
    results = run(load_recipe(streamed[0], [*streamed[1:], *more]))
    assert results["steps"] == 20
    assert [split for split, entry in results["data"].items() if "first_of_stream" in entry] == ["train"]


def test_streamed_run_with_budgets_too_small_for_its_pairs_is_an_error_before_it_begins(
    streamed: list[str], tmp_path: Path
) -> None:
    for more, message in (
        ("--training.source_tokens=39", r"training\.source_tokens: a pair may have 40 tokens on that side"),
        ("--training.device_tokens=20", r"data\.buffer: 20 pairs are too few for 3 micro-batches of a step; give at"),
    ):
        with pytest.raises(UserError, match=message):
            run(load_recipe(streamed[0], [*streamed[1:], more, f"--output_dir={tmp_path / 'run'}"]))
        assert not (tmp_path / "run").exists()


def test_first_pairs_of_a_stream_that_changed_are_an_error(streamed: list[str], tmp_path: Path) -> None:
    recipe = load_recipe(streamed[0], [*streamed[1:], f"--output_dir={tmp_path / 'run'}"])
    prepare(recipe, prepare_folder(recipe))
    path = tmp_path / "data" / "train.jsonl"
    path.write_text(path.read_text().replace("one tree", "one crow"))
    with pytest.raises(UserError, match=r"^data\.train: these are not the pairs"):
        prepare(recipe, prepare_folder(recipe))
