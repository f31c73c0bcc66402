"""A run on a stream learns from the same steps in any processes, and resumes in the middle of the stream."""

import json
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import pytest

from tests.helpers import user_error, write_pairs
from tests.training import runs
from training.data import pairs as data_pairs
from training.data.stream import PairStream, described
from training.recipe.fields import DataRecipe
from training.report.results import fingerprint
from training.run.checkpoints import step_of
from vaswani_transformer.batching import stream
from vaswani_transformer.support.errors import UserError


@pytest.fixture
def streamed(arguments: list[str], tmp_path: Path) -> list[str]:
    """Return a streamed run on eighty pairs and one that is too long: buffers of twenty, twelve steps an epoch.

    No step has less than four pairs.
    """
    pairs = [(text, text[::-1]) for text in 5 * runs.LANGUAGE]
    pairs.insert(50, ("one tree", 60 * "eert "))
    write_pairs(tmp_path / "data" / "train.jsonl", pairs)
    return [*arguments, "--data.streaming=true", "--data.buffer=20", "--data.max_length=40"]


@pytest.mark.slow
def test_streamed_run_of_two_processes_that_was_killed_resumes_by_the_same_command_to_the_same_weights(
    streamed: list[str], tmp_path: Path
) -> None:
    """Bit for bit on a CPU, dropout, buffers and batches included, in a later epoch."""
    arguments = [*streamed, "--training.steps=50"]
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    runs.run_to_end(arguments, uninterrupted, launcher=runs.TWO_PROCESSES)
    checkpoint = runs.kill_after(21, runs.start(arguments, killed, launcher=runs.TWO_PROCESSES), killed)
    assert step_of(checkpoint) < 50
    assert json.loads((checkpoint / "stream.json").read_text())["position"]["epoch"] > 0
    runs.run_to_end(arguments, killed, launcher=runs.TWO_PROCESSES)
    runs.assert_same_checkpoints(uninterrupted, killed)
    curves = [runs.results_in(folder)["curve"] for folder in (uninterrupted, killed)]
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
    runs.train_in(arguments, tmp_path / "one")
    runs.train_in(arguments, tmp_path / "parts", "--training.device_tokens=30")
    runs.run_to_end(arguments, tmp_path / "two", launcher=runs.TWO_PROCESSES)
    results = (runs.results_in(tmp_path / name) for name in ("one", "parts", "two"))
    one, parts, two = ([entry["loss"] for entry in runs.entries(each)] for each in results)
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
    more = ["--training.steps=20", "--tokenizer.sample=16"]
    with user_error(r"train\.jsonl, line 61: not JSON"):
        runs.train_in(streamed, folder, *more)
    assert runs.last_step(folder) >= 3
    path.write_text(good)
    results = runs.train_in(streamed, folder, *more)
    assert results["steps"] == 20
    assert [split for split, entry in results["data"].items() if "first_of_stream" in entry] == ["train"]
    assert results["data"]["train"]["read"]["pairs"] == 81
    path.write_text("four ski".join(good.rsplit("four sea", 1)))
    with user_error(r"^data\.train: the pairs of .* have changed since the run read them"):
        runs.train_in(streamed, folder, *more, "--training.steps=40")


@pytest.mark.slow
def test_stream_that_vanishes_ends_the_run_with_one_line_and_resumes_once_it_is_back(
    streamed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is gone when the second epoch opens it."""
    path, whole, folder = tmp_path / "data" / "train.jsonl", tmp_path / "whole", tmp_path / "run"
    runs.train_in(streamed, whole, "--training.steps=20")

    def hide(*_: object) -> None:
        if path.exists():
            path.rename(tmp_path / "hidden")

    monkeypatch.setattr("training.trainer.trainer.rotate", hide)
    with user_error(r"train\.jsonl: there is no such file; set data"):
        runs.train_in(streamed, folder, "--training.steps=20")
    monkeypatch.undo()
    assert 3 <= runs.last_step(folder) < 20
    (tmp_path / "hidden").rename(path)
    runs.train_in(streamed, folder, "--training.steps=20")
    runs.assert_same_checkpoints(whole, folder)


PAIRS = [("one", "eno"), ("two", "owt"), ("three", "eerht"), ("four", "ruof"), ("five", "evif"), ("six", "xis")]


@pytest.mark.parametrize(
    ("changed", "is_noticed"),
    [
        (PAIRS, (False, False)),
        ([*PAIRS[:4], ("new", "wen"), *PAIRS[5:]], (False, True)),  # after the four that were read
        ([*PAIRS, ("new", "wen")], (False, True)),
        (PAIRS[:5], (False, True)),
        ([PAIRS[1], PAIRS[0], *PAIRS[2:]], (True, True)),
        ([*PAIRS[:3], ("new", "wen"), *PAIRS[4:]], (True, True)),  # read, and perhaps learned from
        ([("new", "wen"), *PAIRS[1:]], (True, True)),
        (PAIRS[:3], (True, True)),
        (PAIRS[:1], (True, True)),  # before the position
    ],
)
@pytest.mark.parametrize("is_first_epoch", [True, False])
def test_stream_notices_what_changed_of_the_pairs_that_it_had_read(
    tmp_path: Path, changed: list[tuple[str, str]], is_noticed: tuple[bool, bool], is_first_epoch: bool
) -> None:
    """Of six pairs four are read, and two of them are skipped; in the second epoch all six are known."""
    recipe = DataRecipe(kind="json", path=str(tmp_path), train="train.jsonl", streaming=True)
    write_pairs(tmp_path / "train.jsonl", PAIRS)
    before = PairStream(recipe, seed=0)
    if not is_first_epoch:
        assert list(before) == PAIRS
    assert list(islice(before, 4)) == PAIRS[:4]
    write_pairs(tmp_path / "train.jsonl", changed)
    after = PairStream(recipe, seed=0)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())), skipped=2)
    learned: list[tuple[str, str]] = []
    message = r"^data\.train: .* have changed since the run read them; got \d pairs, expected the same \d\."
    with pytest.raises(UserError, match=message) if is_noticed[not is_first_epoch] else nullcontext():
        learned.extend(islice(after, 2, None))
    assert not (is_noticed[0] and learned)
    if not any(is_noticed):
        assert list(after) == PAIRS


def test_whole_epoch_of_a_stream_has_the_fingerprint_of_the_set(tmp_path: Path) -> None:
    recipe = DataRecipe(kind="json", path=str(tmp_path), train="train.jsonl", streaming=True)
    write_pairs(tmp_path / "train.jsonl", PAIRS)
    stream = PairStream(recipe, seed=0)
    list(islice(stream, 4))
    assert described(stream.state_dict()) == {"complete": False, **fingerprint(runs.dataset_of(PAIRS[:4]))}
    list(stream)
    list(islice(stream, 1))
    assert described(stream.state_dict()) == {"complete": True, **fingerprint(runs.dataset_of(PAIRS))}
