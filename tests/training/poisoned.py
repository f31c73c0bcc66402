"""`training.train`, in whose fifth step the second process's second loss is nan; under FSDP2 on a CPU too.

Usage: accelerate launch ... -m tests.training.poisoned RECIPE.yaml --output_dir=FOLDER ...
"""

import os
import sys
from typing import Any

from tests.training.sharding_on_cpu import pretend_accelerators
from training import train
from training.trainer.trainer import RecipeTrainer


def poison(compute_loss: Any) -> Any:
    passes: dict[int, int] = {}

    def poisonous(trainer: RecipeTrainer, *arguments: Any, **keywords: Any) -> Any:
        loss, step = compute_loss(trainer, *arguments, **keywords), trainer.state.global_step + 1
        passes[step] = passes.get(step, 0) + 1
        is_bad = (step, passes[step], trainer.args.process_index) == (5, 2, 1)
        return loss * float("nan") if is_bad else loss

    return poisonous


if __name__ == "__main__":
    if "ACCELERATE_USE_FSDP" in os.environ:
        pretend_accelerators()
    RecipeTrainer.compute_loss = poison(RecipeTrainer.compute_loss)
    train.main(sys.argv[1:])
