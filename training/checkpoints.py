"""A run's checkpoints: which of them are whole, which are kept, and where a run goes on."""

import json
import logging
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from transformers import TrainerState

from training.monitor.monitor import trained_seconds
from training.recipe import RecipeError, TrainingRecipe

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None
logger = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"
WEIGHTS = "model.safetensors"
STATE = "trainer_state.json"
RECIPE = "recipe.yaml"
MANIFEST = "manifest.json"
SHARDED_WEIGHTS = "pytorch_model_fsdp.bin"  # as Accelerate names what it loads into shards
PARTIAL = ".part"


def step_of(checkpoint: Path) -> int:
    """The optimiser step at which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoint_at(run: Path, step: int) -> Path:
    """Where the Trainer writes the checkpoint of a step."""
    return run / CHECKPOINTS / f"checkpoint-{step}"


def all_checkpoints(run: Path) -> list[Path]:
    """A run's checkpoints, whole or not, the oldest first."""
    return sorted((path for path in (run / CHECKPOINTS).glob("checkpoint-*") if path.is_dir()), key=step_of)


def is_complete(checkpoint: Path) -> bool:
    """Whether every file that its manifest lists is there with all its bytes.

    No file of the Trainer's own tells: it writes `trainer_state.json` last on the first rank, perhaps before another
    rank has written its random numbers, and a file that is there may be cut short.
    """
    try:
        sizes: dict[str, int] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def complete_checkpoints(run: Path) -> list[Path]:
    """A run's checkpoints that were written to their end and have stayed so, the oldest first."""
    return [checkpoint for checkpoint in all_checkpoints(run) if is_complete(checkpoint)]


def last_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    return next(reversed(complete_checkpoints(run)), None)


def mark_complete(checkpoint: Path) -> None:
    """Write the manifest, the last file of a checkpoint: the name and the bytes of each file before it."""
    sizes = {path.name: path.stat().st_size for path in sorted(checkpoint.iterdir()) if path.name != MANIFEST}
    write(checkpoint / MANIFEST, json.dumps(sizes, indent=2))


def write(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_name(f"{path.name}{PARTIAL}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, of which nothing whole is left if that is cut short."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def rotate(run: Path, keep: int, best_step: int | None) -> None:
    """Delete the oldest whole checkpoints beyond `keep`, but never the best or the newest."""
    found = complete_checkpoints(run)
    spare = [checkpoint for checkpoint in found[:-1] if step_of(checkpoint) != best_step]
    for checkpoint in spare[: max(0, len(found) - keep)]:
        remove(checkpoint)


def resume_point(run: Path) -> Path | None:
    """The newest whole checkpoint; what lies behind it was cut short and is deleted. All ranks call it together."""
    point = [None]
    if PartialState().is_main_process:
        point = [last_checkpoint(run)]
        for checkpoint in all_checkpoints(run):
            if point[0] is None or step_of(checkpoint) > step_of(point[0]):
                logger.warning("%s was not written to its end; the run goes on from before it.", checkpoint)
                remove(checkpoint)
    return broadcast_object_list(point)[0]


def check_same_sharding(checkpoint: Path, is_sharded: bool) -> None:
    """Refuse to go on from a checkpoint whose optimiser state the engine at hand cannot load.

    Raises:
        RecipeError: it was written by FSDP2 and the launch has none, or the other way round.
    """
    was_sharded = (checkpoint / SHARDED_WEIGHTS).exists()
    if was_sharded != is_sharded:
        raise RecipeError(
            f"{checkpoint}: was written {'with' if was_sharded else 'without'} FSDP2, and the run is launched "
            f"{'with' if is_sharded else 'without'} it; launch it as before."
        )


@contextmanager
def run_lock(folder: Path) -> Generator[None]:
    """Keep other runs out of a run's folder, where its file system has locks.

    Raises:
        RecipeError: a run is going on there, perhaps of processes that have outlived the launcher that was killed.
    """
    if fcntl is None or not PartialState().is_main_process:
        yield
        return
    with (folder / RECIPE).open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecipeError(
                f"{folder}: a run is going on in it; end its processes, which outlive a launcher that is killed, or "
                "give another --output_dir."
            ) from error
        except OSError:
            logger.warning("%s: its file system has no locks; see that no other run writes there.", folder)
        yield


def is_beyond(checkpoint: Path, training: TrainingRecipe) -> bool:
    """Whether a checkpoint was written after the steps or the minutes that a recipe allows."""
    is_late = training.minutes is not None and trained_seconds(checkpoint) > 60 * training.minutes
    return is_late or step_of(checkpoint) > training.steps


def has_ended(checkpoint: Path, training: TrainingRecipe) -> bool:
    """Whether training was over when a checkpoint was written, and is by the limits that a recipe sets now."""
    if step_of(checkpoint) >= training.steps:
        return True
    callbacks = TrainerState.load_from_json(str(checkpoint / STATE)).stateful_callbacks
    if not callbacks["TrainerControl"]["args"]["should_training_stop"]:
        return False
    early_stopping = callbacks.get("EarlyStoppingCallback", {}).get("attributes", {})
    waited = early_stopping.get("early_stopping_patience_counter", 0)  # evaluations
    patience_exhausted = training.patience is not None and waited >= training.patience
    return patience_exhausted or is_beyond(checkpoint, training)


def free_megabytes(path: Path) -> int:
    """The room on the disk that holds a path, or its nearest folder."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free >> 20


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Say in one line that `path` cannot be written, where a disk is full, a quota is used up or a device fails.

    Raises:
        RecipeError: it cannot.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch's archives fail with a RuntimeError as a lost process does; theirs names the source file or the stream
        if isinstance(error, RuntimeError) and not re.search(
            "inline_container|PytorchStreamWriter|basic_ios", str(error)
        ):
            raise
        said = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        raise RecipeError(
            f"{path}: cannot be written ({said}; {free_megabytes(path):,d} MB are free there); "
            "make room, and give the same command to go on from the last whole checkpoint."
        ) from error
