"""`training.train`, which also saves the gradient of its first step as `gradient.safetensors` in the run's folder.

Usage: python -m tests.training.gradients RECIPE.yaml --output_dir=FOLDER ...; under FSDP2 on a CPU too.
"""

import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tests.training.sharding_on_cpu import pretend_accelerators
from training import train


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


def make_trainer(*arguments: Any, make: Any = train.make_trainer) -> Any:
    trainer = make(*arguments)
    trainer.add_callback(FirstGradient())
    return trainer


def main(arguments: list[str]) -> None:
    before = train.make_trainer
    train.make_trainer = make_trainer  # ty: ignore[invalid-assignment] - passes its arguments on
    try:
        train.main(arguments)
    finally:
        train.make_trainer = before


if __name__ == "__main__":
    if "ACCELERATE_USE_FSDP" in os.environ:
        pretend_accelerators()
    main(sys.argv[1:])
