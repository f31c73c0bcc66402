"""A stock Seq2SeqTrainer with the paper's batches, optimizer and schedule, as in a user's script.

Usage: python -m tests.gpu.training_run JSON, which prints the losses of the run that JSON describes.
"""

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from tests.gpu.models import collate, make_model
from tests.gpu.runner import Setting
from tests.helpers import ROOT
from tests.measuring import Pairs, make_pairs
from vaswani_transformer.batching import TokenBudgetBatchSampler
from vaswani_transformer.batching.schedule import paper_adam, paper_schedule

HIDDEN_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}


class Losses(TrainerCallback):
    """Keeps the loss of each step that is logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def arguments(folder: Path, steps: int, **settings: Any) -> Seq2SeqTrainingArguments:
    """Return a Trainer's arguments for a short run that reports to nobody."""
    defaults: dict[str, Any] = {
        "save_strategy": "no",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "report_to": "none",
        "remove_unused_columns": False,
        "seed": 0,
    }
    made = Seq2SeqTrainingArguments(output_dir=str(folder), max_steps=steps, **(defaults | settings))
    made._n_gpu = min(1, made.n_gpu)  # the Trainer would split a batch over all devices by DataParallel
    return made


class TokenBudgetTrainer(Seq2SeqTrainer):
    """Takes its batches from a sampler, with the paper's optimizer and schedule unless others are given."""

    def __init__(
        self, model: nn.Module, args: Seq2SeqTrainingArguments, pairs: Any, sampler: Any, **kwargs: Any
    ) -> None:
        self.sampler = sampler
        super().__init__(
            model=model, args=args, train_dataset=pairs, data_collator=kwargs.pop("collate", collate), **kwargs
        )
        self.pop_callback(next(type(one) for one in self.callback_handler.callbacks if "Print" in type(one).__name__))

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(
            cast(Dataset, self.train_dataset),
            batch_sampler=self.sampler,
            collate_fn=self.data_collator,
            generator=torch.Generator(),
            pin_memory=torch.accelerator.is_available() and not self.args.use_cpu,
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            self.optimizer = paper_adam(trained.parameters())
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            chosen: Any = optimizer or self.optimizer
            trained: Any = self.model
            self.lr_scheduler = paper_schedule(chosen, trained.config.d_model, warmup_steps=100)
            self._created_lr_scheduler = True
        return self.lr_scheduler


def sampler_of(pairs: Pairs, tokens: int, accumulation: int = 1) -> TokenBudgetBatchSampler:
    """Return batches of `tokens` source and target tokens."""
    sources, targets = ([len(pair[name]) for pair in pairs] for name in ("input_ids", "labels"))
    return TokenBudgetBatchSampler(sources, targets, tokens, tokens, accumulation=accumulation)


@dataclass(frozen=True)
class Run:
    """A short run on one device.

    Attributes:
        folder: the folder of its checkpoints.
        steps: the number of its last step, at which it saves a checkpoint if `saves`.
        device: "cpu" or the accelerator.
        resume: the checkpoint that it resumes from.
    """

    folder: str
    steps: int
    device: str
    is_tiny: bool
    resume: str | None = None
    saves: bool = False

    def losses(self) -> list[float]:
        """Train, and return the loss of each step."""
        setting = Setting(torch.device(self.device), self.is_tiny, Path(self.folder))
        size = {} if self.is_tiny else {"vocab_size": 2000, "d_model": 128, "num_heads": 4, "d_ff": 512}
        model = make_model("C-n2", setting, dropout=0.0, attn_implementation="sdpa", **size)
        pairs = make_pairs(200 if self.is_tiny else 2000, model.config.vocab_size)
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": self.steps} if self.saves else {}
        args = arguments(setting.folder, self.steps, use_cpu=self.device == "cpu", **saving)
        seen = Losses()
        trainer = TokenBudgetTrainer(model, args, pairs, sampler_of(pairs, 400 if self.is_tiny else 2000))
        trainer.add_callback(seen)
        trainer.train(resume_from_checkpoint=self.resume)
        return seen.losses

    def in_a_process(self) -> list[float]:
        """Do the same in a separate process, which for a CPU has no accelerator."""
        hidden = HIDDEN_DEVICES if self.device == "cpu" else {}
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.training_run", json.dumps(dataclasses.asdict(self))],
            cwd=ROOT,
            env=os.environ | hidden,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(Run(**json.loads(sys.argv[1])).losses()))
