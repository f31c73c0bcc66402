"""`training.train` with one change: python -m tests.training.changed_run CHANGE RECIPE.yaml --output_dir=FOLDER ...

CHANGE is one of these. Under FSDP2 the processes also pretend to have accelerators, because Accelerate shards only on
those.

- `none`: nothing else.
- `gradient`: the gradient of the first step is saved as `gradient.safetensors` in the run's folder.
- `late`: the second process writes its random state two seconds late.
- `FILE@STEP`: the process is killed while it writes this file of a checkpoint, of which half is there.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training import train, trainer
from training.checkpoints import COMPLETE, complete_checkpoints


def pretend_accelerators() -> None:
    """Make Accelerate treat the processes of this launch, which use gloo, as processes with GPUs."""
    dist.init_process_group("gloo")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


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


def save_gradient() -> None:
    train_or_resume = trainer.PaperTrainer.train_or_resume

    def with_callback(self: trainer.PaperTrainer, checkpoint: Path | None) -> None:
        self.add_callback(FirstGradient())
        train_or_resume(self, checkpoint)

    trainer.PaperTrainer.train_or_resume = with_callback


def die_at(file: str, step: int) -> None:
    """Let this process die while it writes this file of the checkpoint of a step, or before it marks the checkpoint."""
    save, finish = torch.save, trainer.finish_checkpoint

    def dying_save(content: Any, path: Any, *arguments: Any, **keywords: Any) -> None:
        save(content, path, *arguments, **keywords)
        if (Path(path).name, Path(path).parent.name) == (file, f"checkpoint-{step}"):
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_finish(checkpoint: Path, *arguments: Any) -> None:
        if file == COMPLETE and checkpoint.name == f"checkpoint-{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        finish(checkpoint, *arguments)

    # These have the name and the place of what they replace, but not all of its parameters
    torch.save = dying_save  # ty: ignore[invalid-assignment]
    trainer.finish_checkpoint = dying_finish  # ty: ignore[invalid-assignment]


def write_late() -> None:
    """Let the second process write its random state two seconds late, and each process say what it finds then."""
    save = trainer.PaperTrainer._save_rng_state

    def slow_save(self: Any, folder: str) -> None:
        if self.args.process_index == 1:
            time.sleep(2)
            print(f"complete: {(Path(folder) / COMPLETE).exists()}, others: {len(complete_checkpoints(self.run))}")
        save(self, folder)

    trainer.PaperTrainer._save_rng_state = slow_save  # ty: ignore[invalid-assignment]


def main(change: str, arguments: list[str]) -> None:
    if "ACCELERATE_USE_FSDP" in os.environ:
        pretend_accelerators()
    if change == "gradient":
        save_gradient()
    elif change == "late":
        write_late()
    elif change != "none":
        file, _, step = change.partition("@")
        die_at(file, int(step))
    train.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
