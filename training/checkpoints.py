"""Completion, deletion, resumption and averaging (6.1) of a run's checkpoints.

A checkpoint is complete once it has the file `complete`, which the main process writes after all processes have written
their files. Older checkpoints are deleted after that. `complete` lists the SHA-256 of each file, so that no run resumes
from files that were lost or altered.
"""

import json
import logging
import math
import shutil
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import DictValueType, StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel

from vaswani_transformer.support.command import UserError
from vaswani_transformer.support.files import sha256_of, write_atomically

logger = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"
COMPLETE = "complete"
INTERRUPTED = "interrupted"  # in one that is due at no step of the run: the next one replaces it, no mean has it
WEIGHTS = "model.safetensors"
STATE = "trainer_state.json"
STARTED = "started"  # in a run that has had a complete checkpoint, so that one without any does not start over
SECONDS = "seconds"  # of training up to a checkpoint, interruptions left out
EPOCH_STEPS = "epoch_steps.json"  # how the steps of an epoch divide the pairs, which must stay


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def complete_checkpoints(run: Path, with_interrupted: bool = True, last_step: float = math.inf) -> list[Path]:
    """Return the complete checkpoints of a run up to a step, oldest first."""
    complete = [mark.parent for mark in (run / CHECKPOINTS).glob(f"checkpoint-*/{COMPLETE}")]
    regular = [path for path in complete if with_interrupted or not (path / INTERRUPTED).exists()]
    return sorted((path for path in regular if step_of(path) <= last_step), key=step_of)


def mark_complete(checkpoint: Path) -> None:
    """Write the file `complete` with the SHA-256 of each other file of a checkpoint."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.stem != COMPLETE]
    digests = {path.relative_to(checkpoint).as_posix(): sha256_of(path) for path in sorted(files)}
    write_atomically(checkpoint / COMPLETE, json.dumps(digests, indent=2))


def damage(checkpoint: Path) -> str:
    """Return the problem with the files of a complete checkpoint; "" if they are as the run wrote them."""
    if not (checkpoint / COMPLETE).is_file():
        return f"{COMPLETE} is missing"
    try:
        digests = dict(json.loads((checkpoint / COMPLETE).read_bytes()))
    except (ValueError, TypeError):
        digests = {}
    if not digests:
        return f"{COMPLETE} lists no files; it is damaged, or of an earlier version of this command"
    return changed_file(checkpoint, digests)


def is_skipped(checkpoint: Path) -> bool:
    """Return whether a complete checkpoint is damaged, after logging its problem."""
    problem = damage(checkpoint)
    if problem:
        logger.warning("Skipping %s: %s.", checkpoint, problem)
    return bool(problem)


def changed_file(folder: Path, digests: dict[str, str]) -> str:
    """Return the problem with the first file that differs from its SHA-256 in `digests`; "" if none does."""
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256_of(path) != digest:
            return f"{name} was altered"
    return ""


def begin_checkpoint(checkpoint: Path) -> None:
    """Remove the marks of a checkpoint that is written again; all processes must call this."""
    if PartialState().is_main_process:
        for mark in (COMPLETE, INTERRUPTED):
            (checkpoint / mark).unlink(missing_ok=True)
    PartialState().wait_for_everyone()


def finish_checkpoint(checkpoint: Path, keep: float, best_step: int | None, is_interrupted: bool) -> None:
    """Mark a checkpoint complete and delete older ones beyond `keep` except the best; all processes must call this."""
    PartialState().wait_for_everyone()  # every process has written its files
    if PartialState().is_main_process:
        if is_interrupted:
            (checkpoint / INTERRUPTED).touch()
        mark_complete(checkpoint)
        run = checkpoint.parents[1]
        (run / STARTED).touch()

        # Later checkpoints, which are damaged, or from which this run did not resume, do not count.
        step = step_of(checkpoint)
        regular = complete_checkpoints(run, with_interrupted=False, last_step=step)
        older = regular[:-1]  # the newest one always stays
        deletable = [path for path in older if step_of(path) != best_step]
        excess = int(max(0, len(regular) - keep))
        interrupted = [path for path in complete_checkpoints(run, last_step=step)[:-1] if path not in regular]
        for path in [*deletable[:excess], *interrupted]:
            (path / COMPLETE).unlink()  # first, so that a deletion that is interrupted leaves no checkpoint
            shutil.rmtree(path)
    PartialState().wait_for_everyone()


def last_checkpoint(run: Path) -> Path | None:
    """Return the newest complete checkpoint with undamaged files, or None if the run has never had a complete one."""
    checkpoints = complete_checkpoints(run)
    for checkpoint in reversed(checkpoints):
        if not is_skipped(checkpoint):
            return checkpoint
    if checkpoints:
        raise UserError(
            f"{checkpoint}: {damage(checkpoint)}, and no other checkpoint is complete and undamaged; restore one, or "
            "choose a different --output_dir."
        )
    if (run / STARTED).exists() or (run / WEIGHTS).exists():
        raise UserError(
            f"{run / CHECKPOINTS}: has lost the checkpoints of the run; got no complete one, expected the last. "
            "Restore them, or choose a different --output_dir."
        )
    return None


def mean_weights(checkpoints: list[Path]) -> dict[str, Tensor]:
    """Return the mean of each weight over checkpoints of a run, summed in float64, in the weight's dtype.

    Raises:
        UserError: a file of a checkpoint is missing or was altered.
    """
    for checkpoint in checkpoints:
        if problem := damage(checkpoint):
            raise damaged(checkpoint, problem)
    return mean_of_undamaged(checkpoints)


def damaged(checkpoint: Path, problem: str) -> UserError:
    return UserError(f"{checkpoint}: {problem}; restore it, or average others with training.average.")


def mean_of_undamaged(checkpoints: list[Path]) -> dict[str, Tensor]:
    """Return the same mean of checkpoints whose files are not checked."""
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for checkpoint in checkpoints:
        for name, weight in load_file(checkpoint / WEIGHTS).items():
            dtypes[name] = weight.dtype
            sums[name] = sums[name].add_(weight) if name in sums else weight.double()
    return {name: (total / len(checkpoints)).to(dtypes[name]) for name, total in sums.items()}


def load_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    state: DictValueType = {**weights}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))


def load_mean(model: PreTrainedModel, checkpoints: list[Path]) -> list[Path]:
    """Load the mean of the undamaged ones of a run's checkpoints into a model that may be sharded, and return these.

    Raises:
        UserError: all are damaged.
    """
    undamaged = [checkpoint for checkpoint in checkpoints if not is_skipped(checkpoint)]
    if not undamaged:
        raise damaged(checkpoints[-1], damage(checkpoints[-1]))
    load_weights(model, mean_of_undamaged(undamaged))
    return undamaged
