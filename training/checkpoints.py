"""A run's checkpoints: which are complete, which are kept, and where a run resumes."""

import json
import logging
import os
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerState, TrainingArguments

from training.monitor.monitor import trained_seconds
from training.recipe import TrainingRecipe
from vaswani_transformer.errors import OutputError, UserError, one_line
from vaswani_transformer.files import free_megabytes, is_write_error, lock, open_lock, write_atomically

logger = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"
WEIGHTS = "model.safetensors"
STATE = "trainer_state.json"
RECIPE = "recipe.yaml"
MANIFEST = "manifest.json"
LOCK = ".lock"  # never replaced or removed while a run uses its folder
SHARDED_WEIGHTS = "pytorch_model_fsdp.bin"  # Accelerate's name for weights that it loads into shards


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step at which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints_folder(args: TrainingArguments) -> Path:
    """Return the folder of the checkpoints that a Trainer writes; the run's folder is its parent."""
    return Path(args.output_dir or CHECKPOINTS)


def checkpoint_at(run: Path, step: int) -> Path:
    """Return the folder in which the Trainer writes the checkpoint of a step."""
    return run / CHECKPOINTS / f"checkpoint-{step}"


def all_checkpoints(run: Path) -> list[Path]:
    """Return a run's checkpoints, complete or not, the oldest first."""
    return sorted((path for path in (run / CHECKPOINTS).glob("checkpoint-*") if path.is_dir()), key=step_of)


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file in the manifest exists and has its size.

    The Trainer's own files do not show this. The first rank writes `trainer_state.json` last, but another rank may
    still have to write its random state, and an existing file may be truncated.
    """
    try:
        sizes: dict[str, int] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def complete_checkpoints(run: Path) -> list[Path]:
    """Return a run's complete checkpoints, the oldest first."""
    return [checkpoint for checkpoint in all_checkpoints(run) if is_complete(checkpoint)]


def last_checkpoint(run: Path) -> Path | None:
    """Return the newest complete checkpoint of a run."""
    return next(reversed(complete_checkpoints(run)), None)


def read_weights(folder: Path, fix: str) -> dict[str, Tensor]:
    """Return the weights in a checkpoint or another folder of a run; `fix` ends the message.

    Raises:
        UserError: they cannot be read.
    """
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS}: cannot be read ({one_line(error, with_file=False)}); {fix}") from error


def mark_complete(checkpoint: Path) -> None:
    """Write the manifest, the last file of a checkpoint: the name and the bytes of each file before it."""
    sizes = {path.name: path.stat().st_size for path in sorted(checkpoint.iterdir()) if path.name != MANIFEST}
    write_atomically(checkpoint / MANIFEST, json.dumps(sizes, indent=2))


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, manifest first, so that after an interrupted deletion it is incomplete."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def rotate(run: Path, keep: int, best_step: int | None) -> None:
    """Delete the oldest complete checkpoints beyond `keep`, but never the best or the newest."""
    checkpoints = complete_checkpoints(run)
    spare = [checkpoint for checkpoint in checkpoints[:-1] if step_of(checkpoint) != best_step]
    for checkpoint in spare[: max(0, len(checkpoints) - keep)]:
        remove(checkpoint)


def resume_point(run: Path) -> Path | None:
    """Return the newest complete checkpoint and delete incomplete later ones; all ranks must call it together."""
    point = [None]
    if PartialState().is_main_process:
        point = [last_checkpoint(run)]
        for checkpoint in all_checkpoints(run):
            if point[0] is None or step_of(checkpoint) > step_of(point[0]):
                logger.warning("%s is incomplete; the run resumes from an earlier checkpoint.", checkpoint)
                remove(checkpoint)
    return broadcast_object_list(point)[0]


def check_same_sharding(checkpoint: Path, is_sharded: bool) -> None:
    """Check that this launch can load a checkpoint's optimizer state.

    Raises:
        UserError: FSDP2 wrote it and this launch does not use FSDP2, or the other way round.
    """
    was_sharded = (checkpoint / SHARDED_WEIGHTS).exists()
    if was_sharded != is_sharded:
        raise UserError(
            f"{checkpoint}: was written {'with' if was_sharded else 'without'} FSDP2, and the run is launched "
            f"{'with' if is_sharded else 'without'} it; launch it as before."
        )


@contextmanager
def run_lock(folder: Path) -> Generator[None]:
    """Lock a run's folder against other commands, in the main process, where the file system has locks.

    A missing folder is made. The lock's file is removed at the end, and if no run begins, so is the folder.

    Raises:
        UserError: another run holds the lock; its processes may have outlived a launcher that was killed.
        OutputError: the folder cannot be made.
    """
    if not PartialState().is_main_process:
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    in_use = (
        f"{folder}: another run is using it; end its processes, which outlive a launcher that is killed, or give "
        "another --output_dir."
    )
    with ExitStack() as stack:
        with run_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open_lock(folder / LOCK))
        lock(file, in_use)
        if not (folder / LOCK).exists() or not os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
            raise UserError(in_use)  # another command has just removed the file
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / LOCK).unlink()
                for path in () if (folder / RECIPE).exists() else made:
                    path.rmdir()


def is_beyond(checkpoint: Path, training: TrainingRecipe) -> bool:
    """Return whether a checkpoint was written after the steps or the minutes that a recipe allows."""
    is_late = training.minutes is not None and trained_seconds(checkpoint) > 60 * training.minutes
    return is_late or step_of(checkpoint) > training.steps


def has_ended(checkpoint: Path, training: TrainingRecipe) -> bool:
    """Return whether training had ended at a checkpoint, and has still ended by the recipe's present limits."""
    if step_of(checkpoint) >= training.steps:
        return True
    callbacks = TrainerState.load_from_json(str(checkpoint / STATE)).stateful_callbacks
    if not callbacks["TrainerControl"]["args"]["should_training_stop"]:
        return False
    early_stopping = callbacks.get("EarlyStoppingCallback", {}).get("attributes", {})
    waited = early_stopping.get("early_stopping_patience_counter", 0)  # evaluations
    patience_exhausted = training.patience is not None and waited >= training.patience
    return patience_exhausted or is_beyond(checkpoint, training)


@contextmanager
def run_write_errors(path: Path) -> Generator[None]:
    """Turn a failed write of a run's file into an OutputError: a full disk, a used-up quota, a broken device.

    Raises:
        OutputError: `path` cannot be written.
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, SafetensorError) or is_write_error(error)):
            raise
        raise OutputError(
            f"{path}: cannot be written: {one_line(error, with_file=False)}; make room, {free_megabytes(path):,d} MB "
            "are free there, and repeat the command to resume from the last complete checkpoint."
        ) from error
