"""Completion, deletion, resumption and averaging (6.1) of a run's checkpoints.

A checkpoint is complete once it has the file `complete`, which the main process writes after all processes have written
their files. Older checkpoints are deleted after that.
"""

import logging
import shutil
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerState

from vaswani_transformer.support.errors import one_line

logger = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"
COMPLETE = "complete"
INTERRUPTED = "interrupted"  # in a checkpoint that only a signal asked for: the next one replaces it, no mean has it
WEIGHTS = "model.safetensors"
STATE = "trainer_state.json"
SECONDS = "seconds"  # of training up to a checkpoint, interruptions left out


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def complete_checkpoints(run: Path, with_interrupted: bool = True) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    complete = [mark.parent for mark in (run / CHECKPOINTS).glob(f"checkpoint-*/{COMPLETE}")]
    return sorted((path for path in complete if with_interrupted or not (path / INTERRUPTED).exists()), key=step_of)


def begin_checkpoint(checkpoint: Path) -> None:
    """Remove the marks of a checkpoint that is written again; all processes must call this."""
    if PartialState().is_main_process:
        for mark in (COMPLETE, INTERRUPTED):
            (checkpoint / mark).unlink(missing_ok=True)
    PartialState().wait_for_everyone()


def finish_checkpoint(checkpoint: Path, keep: int, best_step: int | None, is_interrupted: bool) -> None:
    """Mark a checkpoint complete and delete older ones beyond `keep` except the best; all processes must call this."""
    PartialState().wait_for_everyone()  # every process has written its files
    if PartialState().is_main_process:
        if is_interrupted:
            (checkpoint / INTERRUPTED).touch()
        (checkpoint / COMPLETE).touch()
        run = checkpoint.parents[1]
        regular = complete_checkpoints(run, with_interrupted=False)
        spare = [path for path in regular[:-1] if step_of(path) != best_step][: max(0, len(regular) - keep)]
        replaced = [path for path in complete_checkpoints(run)[:-1] if path not in regular]
        for path in [*spare, *replaced]:
            (path / COMPLETE).unlink()  # first, so that a deletion that is interrupted leaves no checkpoint
            shutil.rmtree(path)
    PartialState().wait_for_everyone()


def last_checkpoint(run: Path) -> Path | None:
    """Return the newest complete checkpoint that can be loaded, or None."""
    for checkpoint in reversed(complete_checkpoints(run)):
        try:
            for name in ("optimizer.pt", "scheduler.pt"):
                if (checkpoint / name).exists():  # sharded ones have other names
                    torch.load(checkpoint / name, map_location="meta", weights_only=True)
            if (checkpoint / WEIGHTS).exists():
                load_file(checkpoint / WEIGHTS)
            TrainerState.load_from_json(str(checkpoint / STATE))
            return checkpoint
        except Exception as error:  # of torch, safetensors, zip and JSON
            logger.warning("Passed over %s, which cannot be loaded (%s).", checkpoint, one_line(error))
    return None


def mean_weights(checkpoints: list[Path]) -> dict[str, Tensor]:
    """Return the mean of each weight over checkpoints of a run, summed in float64, in the weight's dtype."""
    sums: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        weights = load_file(checkpoint / WEIGHTS)
        sums = {name: weight.double() if not sums else sums[name] + weight for name, weight in weights.items()}
        dtypes = {name: weight.dtype for name, weight in weights.items()}
    return {name: (total / len(checkpoints)).to(dtypes[name]) for name, total in sums.items()}
