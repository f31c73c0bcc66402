"""Divergence: a gradient that is not finite never reaches the weights, and such weights are never saved."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.recipe.fields import TrainingRecipe
from training.run.checkpoints import last_checkpoint, run_folder, step_of
from training.run.distributed import RunError

logger = logging.getLogger(__name__)

NAMED = 5  # pairs that a message names
EXCERPT = 40  # characters of the first of them


def is_finite(weights: list[Tensor]) -> bool:
    """Return whether all weights are finite; all processes must call together."""
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    all_finite = torch.stack([weight.isfinite().all() for weight in local]).all()
    return all(gather_object([bool(all_finite)]))


@dataclass
class MicroBatch:
    """Pairs of one forward and backward pass on one process.

    numbers: of the pairs in the training set, from 1; none of a stream.
    tokens: of the first source.
    loss: its share of the step's.
    """

    numbers: list[int]
    tokens: list[int]
    loss: Tensor


@dataclass
class Step:
    """An optimizer step that the host has not checked yet; `flag` is 1 if its gradient is not finite, else 0."""

    number: int
    flag: Tensor
    micro_batches: list[MicroBatch] = field(default_factory=list)


class DivergenceGuard(TrainerCallback):
    """Keep a gradient that is not finite from the weights, and end the run or skip the step.

    The norm of the gradient, which the Trainer computes anyway, gives a flag that stays on the device. The optimizer
    gets it as `found_inf`, as from torch's GradScaler. A fused Adam then changes neither weights nor moments nor its
    count of steps, so no step waits for the host. The host reads the flags only where it waits for the device anyway:
    before a log entry, an evaluation, a checkpoint and the end; on a CPU after every step. Under "stop" the first flag
    stays set until then, so no later update follows either.

    The gradient is that of the complete step, so all processes make the same decision, and it is not finite if a loss
    is not. Before an evaluation and a checkpoint the guard checks the weights too, because a finite gradient can give
    an infinite update.
    """

    def __init__(self, training: TrainingRecipe, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> None:
        self.training, self.tokenizer, self.device = training, tokenizer, device
        self.micro_batches: list[MicroBatch] = []
        self.steps: list[Step] = []
        self.flag = torch.zeros((), device=device)
        self.skipped = 0  # in a row

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.next_step = state.global_step + 1

    def guard(self, optimizer: Optimizer) -> None:
        """Make an optimizer skip each update whose gradient is not finite, as `inspect` flagged it."""
        optimizer.register_step_pre_hook(self._leave_out)

    def _leave_out(self, optimizer: Any, *_: Any) -> None:
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # the attribute that GradScaler checks
            optimizer.found_inf = self.flag
        elif self.flag.item():  # an optimizer that is not fused skips weights without a gradient
            optimizer.zero_grad()

    def add(self, numbers: Tensor | None, source: Tensor, loss: Tensor) -> None:
        """Record a micro-batch of the present step: its pairs' numbers, its first source (S,), and its loss."""
        self.micro_batches.append(MicroBatch([] if numbers is None else numbers.tolist(), source.tolist(), loss))

    def inspect(self, grad_norm: Tensor) -> None:
        """Set the flag of the present step if the norm of its gradient is not finite."""
        norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        bad = norm.isfinite().logical_not().to(self.device, torch.float32)
        self.flag = torch.maximum(self.flag, bad) if self.training.on_divergence == "stop" else bad
        self.steps.append(Step(self.next_step, self.flag, self.micro_batches))
        self.micro_batches, self.next_step = [], self.next_step + 1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Read the flags where the host waits for the device anyway, and check weights before their use."""
        run = run_folder(args)
        is_counted = control.should_evaluate or control.should_save
        if is_counted or control.should_log or control.should_training_stop or self.device.type == "cpu":
            self.read_flags(run)
        if is_counted and not is_finite(list(model.parameters())):
            self.stop(f"step {state.global_step}: its update has made weights that are not finite", run)

    def read_flags(self, run: Path) -> None:
        """End the run, or log the skipped update, for each flagged step since the last call."""
        steps, self.steps = self.steps, []
        flags = torch.stack([step.flag for step in steps]).tolist() if steps else []
        for step, flag in zip(steps, flags, strict=True):
            self.skipped = self.skipped + 1 if flag else 0
            if not flag:
                continue
            what = f"step {step.number}: the loss or its gradient is not finite, of {self.describe(step)}"
            if self.training.on_divergence == "stop":
                raise RunError(f"{what}; {self.remedy(run)}, or leave such steps out by --training.on_divergence=skip.")
            if self.skipped > self.training.skip_limit:
                self.stop(f"{what}, after {self.training.skip_limit} such steps in a row", run)
            logger.warning("S%s; its update is left out.", what.removeprefix("s"))

    def stop(self, what: str, run: Path) -> NoReturn:
        raise RunError(f"{what}; {self.remedy(run)}.")

    def remedy(self, run: Path) -> str:
        checkpoint = last_checkpoint(run)
        kept = "no checkpoint was written yet" if checkpoint is None else f"checkpoint {step_of(checkpoint):,} is kept"
        rate = "learning_rate_scale" if self.training.optimizer == "paper" else "learning_rate"
        return f"{kept}; start over with a smaller training.{rate}"

    def describe(self, step: Step) -> str:
        """Return the pairs of a step in text, only those with a loss that is not finite if there are any.

        All processes must call together.
        """
        batches = gather_object(
            [(bool(each.loss.isfinite()), each.numbers, each.tokens) for each in step.micro_batches]
        )
        suspects = [batch for batch in batches if not batch[0]] or batches
        numbers = sorted(number for _, pairs, _ in suspects for number in pairs)
        text = str(self.tokenizer.decode(suspects[0][2], skip_special_tokens=True))
        shown = f"{text[:EXCERPT]!r}{'...' if len(text) > EXCERPT else ''}"
        if not numbers:
            return f"a batch of the pair {shown}"
        more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
        return f"the training pairs {', '.join(map(str, numbers[:NAMED]))}{more} (one is {shown})"
