"""`training.train` with one change: python -m tests.training.changed_run CHANGE RECIPE.yaml --output_dir=FOLDER ...

CHANGE is one of these; under FSDP2 the processes also pretend to have accelerators.

- `gradient`: the gradient of the first step is saved as `gradient.safetensors` in the run's folder.
- `poison`: the second process's second loss of the fifth step is nan.
- `FILE@STEP`: the process is killed while it writes this file of a checkpoint, of which half is there.
"""

import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tests.training.sharding_on_cpu import pretend_accelerators
from training import train
from training.run import checkpoints
from training.trainer.trainer import RecipeTrainer


class FirstGradient(TrainerCallback):
    """Saves the gradient of the first step over all processes."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        complete = {name: part.full_tensor() if isinstance(part, DTensor) else part for name, part in gradients.items()}
        assert args.output_dir is not None
        if state.global_step == 0 and state.is_world_process_zero:
            save_file(complete, Path(args.output_dir).parent / "gradient.safetensors")


def train_with_gradient(arguments: list[str]) -> None:
    """Train, also in the process of the tests, and save the first gradient."""
    make = train.make_trainer

    def make_trainer(*given: Any) -> Any:
        trainer = make(*given)
        trainer.add_callback(FirstGradient())
        return trainer

    train.make_trainer = make_trainer  # ty: ignore[invalid-assignment] - passes its arguments on
    try:
        train.main(arguments)
    finally:
        train.make_trainer = make


def poison(compute_loss: Any, is_bad: Callable[[int, int, int], bool]) -> Any:
    """Return `compute_loss` with a loss of nan where `is_bad` of the step, the pass in it and the process is true."""
    passes: dict[int, int] = {}

    def poisonous(trainer: RecipeTrainer, *arguments: Any, **keywords: Any) -> Any:
        loss, step = compute_loss(trainer, *arguments, **keywords), trainer.state.global_step + 1
        passes[step] = passes.get(step, 0) + 1
        return loss * float("nan") if is_bad(step, passes[step], trainer.args.process_index) else loss

    return poisonous


def die_at(file: str, step: str) -> None:
    """Let this process die while it writes this file of the checkpoint of a step."""
    save, save_to_json, write = torch.save, TrainerState.save_to_json, checkpoints.write_atomically

    def die(path: str | Path, content: bytes) -> None:
        if (Path(path).name, Path(path).parent.name) == (file, f"checkpoint-{step}"):
            Path(path).write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_save(content: Any, path: Any, *arguments: Any, **keywords: Any) -> None:
        buffer = io.BytesIO()
        save(content, buffer)
        die(path, buffer.getvalue())
        save(content, path, *arguments, **keywords)

    def dying_save_to_json(state: TrainerState, path: str) -> None:
        save_to_json(state, path)
        die(path, Path(path).read_bytes())

    def dying_write(path: Path, text: str) -> None:
        die(path, b"")
        write(path, text)

    # These have the name and the place of what they replace, but not all of its parameters
    torch.save = dying_save  # ty: ignore[invalid-assignment]
    TrainerState.save_to_json = dying_save_to_json  # ty: ignore[invalid-assignment]
    checkpoints.write_atomically = dying_write  # ty: ignore[invalid-assignment]


def main(change: str, arguments: list[str]) -> None:
    if "ACCELERATE_USE_FSDP" in os.environ:
        pretend_accelerators()
    if change == "poison":
        RecipeTrainer.compute_loss = poison(RecipeTrainer.compute_loss, lambda *moment: moment == (5, 2, 1))
    elif change != "gradient":
        die_at(*change.split("@"))
    (train_with_gradient if change == "gradient" else train.main)(arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
