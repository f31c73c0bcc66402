"""A run's checkpoints: which are complete, which are kept, and where a run resumes."""

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import xxhash
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerState, TrainingArguments

from training.monitor.monitor import trained_seconds
from training.recipe.fields import TrainingRecipe
from training.run.distributed import RunError, check_weights
from vaswani_transformer.body import ProjectedModel
from vaswani_transformer.support.errors import UserError, one_line
from vaswani_transformer.support.files import (
    PARTIAL,
    digest_of_file,
    free_megabytes,
    lock,
    open_lock,
    read_json,
    write_atomically,
    write_errors,
)

logger = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"
NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
WEIGHTS = "model.safetensors"
STATE = "trainer_state.json"
STREAM_FILE = "stream.json"  # the position in a stream
RECIPE = "recipe.yaml"
MANIFEST = "manifest.json"
UNFINISHED = f"{MANIFEST}{PARTIAL}"  # instead of the manifest while a checkpoint is written
EXTRA = "interrupted"  # in a checkpoint that only a signal asked for: the next one replaces it, and no mean has it
AFTER_DELETED = "after-deleted"  # in a checkpoint between which and any older one others were deleted
DAMAGED = ".damaged"  # added to the name of a checkpoint that is set aside
LOCK = ".lock"  # never replaced or removed while a run uses its folder
SHARDED_WEIGHTS = "pytorch_model_fsdp.bin"  # Accelerate's name for weights that it loads into shards


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def run_folder(args: TrainingArguments) -> Path:
    """Return the folder of a run, in which its Trainer has the one of the checkpoints as `output_dir`."""
    return Path(args.output_dir or CHECKPOINTS).parent


def checkpoint_at(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"checkpoint-{step}"


def all_checkpoints(run: Path) -> list[Path]:
    """Return a run's checkpoints, complete or not, the oldest first; a copy of another name does not count."""
    folders = (path for path in (run / CHECKPOINTS).glob("checkpoint-*") if NAME.fullmatch(path.name))
    return sorted((path for path in folders if path.is_dir()), key=step_of)


def is_complete(checkpoint: Path) -> bool:
    """Return whether all of a checkpoint has been written, which its last file shows, the manifest.

    The Trainer's own files do not show this. The first rank writes `trainer_state.json` last, but another rank may
    still have to write its random state.
    """
    return (checkpoint / MANIFEST).exists() and not (checkpoint / UNFINISHED).exists()


def is_unfinished(checkpoint: Path) -> bool:
    """Return whether training was interrupted while it wrote a checkpoint, so that its files may be deleted."""
    return (checkpoint / UNFINISHED).exists() or not any(checkpoint.iterdir())


def complete_checkpoints(run: Path) -> list[Path]:
    return [checkpoint for checkpoint in all_checkpoints(run) if is_complete(checkpoint)]


def last_checkpoint(run: Path) -> Path | None:
    return next(reversed(complete_checkpoints(run)), None)


def has_trained(run: Path) -> bool:
    return last_checkpoint(run) is not None or (run / STATE).exists()


def size_and_digest(path: Path) -> list[int | str]:
    """Return the bytes of a file and their XXH3, which shows damage and costs little more than reading them."""
    return digest_of_file(path, lambda: xxhash.xxh3_128())


def changed_file(checkpoint: Path) -> str | None:
    """Return the name of a checkpoint's first file that is missing, or not as training wrote it; None without one."""
    try:
        manifest = read_json(checkpoint / MANIFEST, "restore it.")
    except UserError:
        return MANIFEST
    for name, written in manifest.items():
        try:
            if size_and_digest(checkpoint / name) != written:
                return name
        except (OSError, ValueError):  # a damaged manifest may have names that no file can have
            return name
    return None


def intact_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint of a run whose files are all as training wrote them; None before the first one."""
    written = [checkpoint for checkpoint in all_checkpoints(run) if not is_unfinished(checkpoint)]
    if (intact := next((path for path in reversed(written) if changed_file(path) is None), None)) or not written:
        return intact
    raise UserError(
        f"{run / CHECKPOINTS}: no checkpoint is as training wrote it; in {written[-1].name} the first such file is "
        f"{changed_file(written[-1])}. Restore one, or move all elsewhere, and the same command trains from the start."
    )


def fix_of(checkpoint: Path) -> str:
    """Return the way out for a checkpoint that a run cannot resume from."""
    return f"restore it, or move {checkpoint.name} elsewhere, and the run resumes from the one before or starts over."


def read_state(folder: Path, fix: str) -> TrainerState:
    """Return the Trainer's state in a checkpoint or in the folder of a run; `fix` ends the message."""
    content = read_json(folder / STATE, fix, global_step=int, log_history=list, stateful_callbacks=dict)
    try:
        return TrainerState(**content)
    except TypeError as error:
        raise UserError(f"{folder / STATE}: is damaged ({one_line(error)}); {fix}") from error


def checked_weights(model: ProjectedModel, folder: Path, fix: str) -> dict[str, Tensor]:
    """Return the weights in a folder of a run: exactly those of its model, all finite; `fix` ends the message."""
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS}: cannot be read ({one_line(error, with_file=False)}); {fix}") from error
    check_weights(model, weights, str(folder), fix)
    return weights


def mark_complete(checkpoint: Path) -> None:
    """Write the manifest, the last file of a checkpoint: the name, the size and the digest of each file before it."""
    names = [path.relative_to(checkpoint).as_posix() for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    digests = {name: size_and_digest(checkpoint / name) for name in names if name not in (MANIFEST, UNFINISHED)}
    write_atomically(checkpoint / MANIFEST, json.dumps(digests, indent=2))


@contextmanager
def writing(checkpoint: Path) -> Generator[None]:
    """Let all ranks write their files of a checkpoint, which is complete afterwards and unfinished until then.

    All ranks must call it together.
    """
    is_main = PartialState().is_main_process
    if is_main:
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / UNFINISHED).touch()
    PartialState().wait_for_everyone()
    yield
    PartialState().wait_for_everyone()
    if is_main:
        mark_complete(checkpoint)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, under another name first, so that an interrupted deletion leaves none; of a link only that.

    What the link names stays as it is.
    """
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    partial = checkpoint.with_name(f"{checkpoint.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(checkpoint.rename(partial))


def rotate(run: Path, keep: int, best_step: int | None) -> None:
    """Delete the oldest complete checkpoints beyond `keep`, but never the best or the newest, and older extra ones."""
    checkpoints = complete_checkpoints(run)
    extra = [checkpoint for checkpoint in checkpoints if (checkpoint / EXTRA).exists()]
    regular = [checkpoint for checkpoint in checkpoints if checkpoint not in extra]
    spare = [checkpoint for checkpoint in regular[:-1] if step_of(checkpoint) != best_step]
    deleted = spare[: max(0, len(regular) - keep)]
    if deleted:
        (regular[regular.index(deleted[-1]) + 1] / AFTER_DELETED).touch()
    for checkpoint in [*deleted, *(each for each in extra if each != checkpoints[-1])]:
        remove(checkpoint)


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that is not as training wrote it, and return its new path."""
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    paths = (checkpoint.with_name(f"{checkpoint.name}{DAMAGED}{number}") for number in numbers)
    return checkpoint.rename(next(path for path in paths if not path.exists()))


def settle(run: Path, needs_best: bool = True) -> None:
    """Leave a run's newest checkpoint intact: set later ones aside, and delete those that were never finished.

    The best one must be intact too if the run needs it.
    """
    for partial in (run / CHECKPOINTS).glob(f"checkpoint-*{PARTIAL}"):
        if NAME.fullmatch(partial.stem):  # a deletion was interrupted
            shutil.rmtree(partial)
    for checkpoint in filter(is_unfinished, all_checkpoints(run)):
        logger.warning("%s is unfinished; the run resumes from an earlier checkpoint.", checkpoint)
        remove(checkpoint)
    if (intact := intact_checkpoint(run)) is None:
        return
    if needs_best:
        check_best(run, read_state(intact, fix_of(intact)).best_global_step)
    for checkpoint in [path for path in all_checkpoints(run) if step_of(path) > step_of(intact)]:
        name, aside = changed_file(checkpoint), set_aside(checkpoint)
        logger.warning("%s: %s is not as training wrote it; kept as %s.", checkpoint, name, aside.name)


def check_best(run: Path, step: int | None) -> None:
    if step is not None and (name := changed_file(checkpoint_at(run, step))) is not None:
        raise RunError(f"{checkpoint_at(run, step) / name}: is not as training wrote it; {best_fix(run, step)}")


def best_fix(run: Path, step: int) -> str:
    """Return the way out for a run whose best checkpoint, that of a step, cannot be used."""
    earlier = [path for path in complete_checkpoints(run) if step_of(path) < step]
    return (
        f"it is the best checkpoint: restore it, or move checkpoint-{step} and all later ones elsewhere, and the same "
        f"command trains from {earlier[-1].name if earlier else 'the start'}."
    )


def check_same_sharding(checkpoint: Path, is_sharded: bool) -> None:
    """Check that this launch can load a checkpoint's optimizer state."""
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
    callbacks = read_json(checkpoint / STATE, fix_of(checkpoint), stateful_callbacks=dict)["stateful_callbacks"]
    if not callbacks["TrainerControl"]["args"]["should_training_stop"]:
        return False
    early_stopping = callbacks.get("EarlyStoppingCallback", {}).get("attributes", {})
    waited = early_stopping.get("early_stopping_patience_counter", 0)  # evaluations
    patience_exhausted = training.patience is not None and waited >= training.patience
    return patience_exhausted or is_beyond(checkpoint, training)


def run_write_errors(path: Path) -> AbstractContextManager[None]:
    """Turn a failed write of a run's file into an OutputError: a full disk, a used-up quota, a broken device."""

    def fix() -> str:
        room = f"make room, {free_megabytes(path):,d} MB are free there"
        return f"{room}, and repeat the command to resume from the last complete checkpoint"

    return write_errors(path, fix, SafetensorError)
