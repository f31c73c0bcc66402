"""A checkpoint is complete or ignored; the best and the newest are kept, and the mean is over the last ones."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerState

from tests.commands import user_error
from tests.models import tiny_model
from training.checkpoints import (
    CHECKPOINTS,
    COMPLETE,
    STARTED,
    STATE,
    WEIGHTS,
    begin_checkpoint,
    complete_checkpoints,
    finish_checkpoint,
    last_checkpoint,
    load_mean,
    mean_weights,
    step_of,
)
from training.machine import init_processes


@pytest.fixture(autouse=True, scope="module")
def processes() -> None:
    init_processes()


def write(run: Path, step: int, weights: dict[str, Tensor] | None = None) -> Path:
    """Write the files of a checkpoint, without its mark."""
    checkpoint = run / CHECKPOINTS / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    begin_checkpoint(checkpoint)
    save_file({"x": torch.tensor([float(step)])} if weights is None else weights, checkpoint / WEIGHTS)
    TrainerState(global_step=step).save_to_json(str(checkpoint / "trainer_state.json"))
    for name in ("optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"):  # of two processes
        torch.save({"step": step}, checkpoint / name)
    return checkpoint


def finish(
    run: Path,
    step: int,
    keep: int = 9,
    best: int | None = None,
    is_interrupted: bool = False,
    weights: dict[str, Tensor] | None = None,
) -> Path:
    checkpoint = write(run, step, weights)
    finish_checkpoint(checkpoint, keep, best, is_interrupted)
    return checkpoint


def steps(checkpoints: list[Path]) -> list[int]:
    return [step_of(checkpoint) for checkpoint in checkpoints]


def test_checkpoint_counts_from_its_mark_on_and_in_the_order_of_steps(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (100, 9, 3):
        finish(tmp_path, step)
    newest = write(tmp_path, 120)
    assert steps(complete_checkpoints(tmp_path)) == [3, 9, 100]
    assert last_checkpoint(tmp_path) == newest.with_name("checkpoint-100")
    finish_checkpoint(newest, 9, None, False)
    assert last_checkpoint(tmp_path) == newest
    assert TrainerState.load_from_json(str(newest / STATE)).global_step == 120


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12), st.integers(1, 4))
def test_best_and_newest_checkpoints_are_never_deleted(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[bool, bool]], keep: int
) -> None:
    """Each example is a sequence of saves, some of them a new best, some incomplete."""
    run, best, saved = tmp_path_factory.mktemp("run"), None, []
    for step, (is_best, is_partial) in enumerate(saves, start=1):
        if is_partial:
            write(run, step)
            continue
        best = step if is_best else best
        finish(run, step, keep, best)
        saved.append(step)
        kept = steps(complete_checkpoints(run))
        assert {step, best} - {None} <= set(kept)
        assert len(kept) == min(len(saved), max(keep, len({step, best} - {None})))
        others = [other for other in kept if other not in (step, best)]
        assert others == [other for other in saved if other not in (step, best)][-len(others) or len(saved) :]


def test_interrupted_checkpoint_is_replaced_by_the_next_and_counts_for_no_mean(tmp_path: Path) -> None:
    finish(tmp_path, 3)
    finish(tmp_path, 4, keep=1, is_interrupted=True)
    assert steps(complete_checkpoints(tmp_path)) == [3, 4]
    assert steps(complete_checkpoints(tmp_path, with_interrupted=False)) == [3]
    assert step_of(last_checkpoint(tmp_path) or tmp_path) == 4
    finish(tmp_path, 5, is_interrupted=True)
    assert steps(complete_checkpoints(tmp_path)) == [3, 5]
    finish(tmp_path, 6)
    assert steps(complete_checkpoints(tmp_path)) == [3, 6]


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "is missing"),
    "truncated": (lambda path: os.truncate(path, 5), "was altered"),
    "flipped": (flip_bit, "was altered"),
}


@pytest.mark.parametrize("name", [WEIGHTS, "optimizer.pt", "trainer_state.json", "rng_state_1.pth"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_skipped_with_one_line_that_names_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, kind: str
) -> None:
    change, problem = DAMAGE[kind]
    for step in (3, 6, 9):
        finish(tmp_path, step)
    for step in (6, 9):
        change(tmp_path / CHECKPOINTS / f"checkpoint-{step}" / name)
    assert step_of(last_checkpoint(tmp_path) or tmp_path) == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"Skipping {tmp_path / CHECKPOINTS / f'checkpoint-{step}'}: {name} {problem}." for step in (9, 6)
    ]


def test_run_whose_complete_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path) -> None:
    (finish(tmp_path, 3) / "optimizer.pt").unlink()
    write(tmp_path, 6)
    with user_error(r"checkpoint-3: optimizer\.pt is missing, and no other checkpoint is complete and undamaged; "):
        last_checkpoint(tmp_path)


@pytest.mark.parametrize("lost", ["folder", "checkpoint", "mark"])
@pytest.mark.parametrize("file", [STARTED, WEIGHTS])
def test_run_that_has_lost_its_checkpoints_does_not_start_over(tmp_path: Path, lost: str, file: str) -> None:
    """`started` tells it of an interrupted run, and the final weights of a run that was copied without it."""
    checkpoint = finish(tmp_path, 3)
    (tmp_path / STARTED).replace(tmp_path / file)
    paths = {"folder": checkpoint.parent, "checkpoint": checkpoint, "mark": checkpoint / COMPLETE}
    paths[lost].rename(tmp_path / "elsewhere")
    with user_error(r"checkpoints: has lost the checkpoints of the run; .* Restore them, or choose a different"):
        last_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", "5"])
def test_checkpoint_whose_mark_lists_no_files_is_an_error(tmp_path: Path, content: str) -> None:
    (finish(tmp_path, 3) / COMPLETE).write_text(content)
    with user_error(r"checkpoint-3: complete lists no files; it is damaged, or of an earlier version"):
        last_checkpoint(tmp_path)


def test_damaged_later_checkpoint_deletes_none_of_the_resumed_run(tmp_path: Path) -> None:
    finish(tmp_path, 6)
    (finish(tmp_path, 9) / "optimizer.pt").unlink()
    newest = finish(tmp_path, 8, keep=1)
    assert steps(complete_checkpoints(tmp_path)) == [8, 9]
    assert last_checkpoint(tmp_path) == newest
    assert steps(complete_checkpoints(tmp_path, last_step=8)) == [8]


def test_mean_over_an_altered_checkpoint_is_an_error(tmp_path: Path) -> None:
    folders = [finish(tmp_path, step) for step in (3, 6)]
    flip_bit(folders[0] / WEIGHTS)
    with user_error(r"checkpoint-3: model\.safetensors was altered; restore it, or average others with training\.ave"):
        mean_weights(folders)


def test_mean_that_ends_a_run_leaves_damaged_checkpoints_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    name = next(iter(model.state_dict()))
    weights = model.state_dict()[name].clone()
    folders = [finish(tmp_path, step, weights={name: step * weights}) for step in (1, 2, 3)]
    flip_bit(folders[1] / WEIGHTS)
    assert load_mean(model, folders) == [folders[0], folders[2]]
    assert torch.allclose(model.state_dict()[name], 2 * weights)
    assert f"Skipping {folders[1]}: model.safetensors was altered." in caplog.messages
    with user_error(r"checkpoint-2: model\.safetensors was altered; restore it, or average others with training"):
        load_mean(model, folders[1:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_is_that_in_float64_and_has_the_dtype_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """Values of very different sizes would lose digits in another precision."""
    several = [{"x": (torch.randn(50) * 10.0 ** (4 * number)).to(dtype)} for number in range(-1, 2)]
    folders = [finish(tmp_path, step, weights=weights) for step, weights in enumerate(several)]
    expected = torch.stack([weights["x"].double() for weights in several]).mean(0)
    mean = mean_weights(folders)["x"]
    assert mean.dtype == dtype
    assert torch.equal(mean, expected.to(dtype))
    assert torch.equal(mean_weights(folders[:1])["x"], several[0]["x"])
