"""A run that diverges: no gradient that is not finite reaches the weights, and no such weights are saved."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.checkpoints import last_checkpoint, step_of
from training.distributed import RunError
from training.recipe import TrainingRecipe

logger = logging.getLogger(__name__)

NAMED = 5  # pairs that a message names
EXCERPT = 40  # characters of the first of them


def is_finite(weights: list[Tensor]) -> bool:
    """Whether all weights are finite, of a sharded model on all processes, which must call together."""
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    found = torch.stack([weight.isfinite().all() for weight in local]).all()
    return all(gather_object([bool(found)]))


@dataclass
class MicroBatch:
    """Pairs that one process has trained on at once.

    numbers: of the pairs in the training set, from 1; none of a stream.
    tokens: of the first source.
    loss: its share of the step's.
    """

    numbers: list[int]
    tokens: list[int]
    loss: Tensor


@dataclass
class Step:
    """An optimizer step that nobody has looked at yet: its `flag` is 1 where the gradient is not finite, or else 0."""

    number: int
    flag: Tensor
    micro_batches: list[MicroBatch] = field(default_factory=list)


class DivergenceGuard(TrainerCallback):
    """Keeps a gradient that is not finite from the weights, and ends the run or lets it skip the step.

    The norm of the gradient, which the Trainer computes in any case, gives a flag that stays on the device. The
    optimizer gets it as `found_inf`, by which torch's GradScaler has a fused Adam leave weights, moments and its
    own count of steps as they are: no step waits for the host. The host reads the flags where it waits for the device
    anyway, before a log entry, an evaluation, a checkpoint and the end; on a CPU, which it never waits for, after
    every step. Under "stop" the first flag stays up until then, so that no later update follows either.

    The gradient is that of the whole step, so all micro-batches and processes come to the same decision, and it is
    not finite where a loss is not. Before an evaluation and a checkpoint the weights are checked too, since a finite
    gradient can make an update that is not.

    Args:
        training: the recipe's; `on_divergence` and `skip_limit` count.
        tokenizer: which turns the first of the pairs to name into text.
        device: where the model trains.
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
        """Have each step of an optimizer leave out an update whose gradient `inspect` has found not finite."""
        optimizer.register_step_pre_hook(self._leave_out)

    def _leave_out(self, optimizer: Any, *_: Any) -> None:
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # as GradScaler asks
            optimizer.found_inf = self.flag
        elif self.flag.item():  # an optimizer that is not fused passes over weights without a gradient
            optimizer.zero_grad()

    def add(self, numbers: Tensor | None, source: Tensor, loss: Tensor) -> None:
        """Note a micro-batch of the step at hand: its pairs' numbers, its first source (S,), and its loss."""
        self.micro_batches.append(MicroBatch([] if numbers is None else numbers.tolist(), source.tolist(), loss))

    def inspect(self, grad_norm: Tensor) -> None:
        """Raise the flag for the step at hand if the norm of its gradient is not finite."""
        norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        bad = norm.isfinite().logical_not().to(self.device, torch.float32)
        self.flag = torch.maximum(self.flag, bad) if self.training.on_divergence == "stop" else bad
        self.steps.append(Step(self.next_step, self.flag, self.micro_batches))
        self.micro_batches, self.next_step = [], self.next_step + 1

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Read the flags where the host waits for the device anyway, and check weights before they count.

        Raises:
            RunError: the run has diverged.
        """
        run = Path(cast(str, args.output_dir)).parent
        is_counted = control.should_evaluate or control.should_save
        if is_counted or control.should_log or control.should_training_stop or self.device.type == "cpu":
            self.read_flags(run)
        if is_counted and not is_finite(list(model.parameters())):
            self.stop(f"step {state.global_step}: its update has made weights that are not finite", run)

    def read_flags(self, run: Path) -> None:
        """End the run, or say what was skipped, for each step since the last call.

        Raises:
            RunError: a step's gradient is not finite, and it may not be skipped.
        """
        steps, self.steps = self.steps, []
        flags = torch.stack([step.flag for step in steps]).tolist() if steps else []
        for step, flag in zip(steps, flags, strict=True):
            self.skipped = self.skipped + 1 if flag else 0
            if not flag:
                continue
            what = f"step {step.number}: the loss or its gradient is not finite, of {self.name(step)}"
            if self.training.on_divergence == "stop":
                raise RunError(f"{what}; {remedy(run)}, or leave such steps out by --training.on_divergence=skip.")
            if self.skipped > self.training.skip_limit:
                raise RunError(f"{what}, as of {self.training.skip_limit} steps before it in a row; {remedy(run)}.")
            logger.warning("S%s; its update is left out.", what.removeprefix("s"))

    def stop(self, what: str, run: Path) -> None:
        """End the run.

        Raises:
            RunError: always.
        """
        raise RunError(f"{what}; {remedy(run)}.")

    def name(self, step: Step) -> str:
        """The pairs of a step in words, those of the losses that are not finite where there are such.

        All processes must call together.
        """
        found = gather_object([(bool(part.loss.isfinite()), part.numbers, part.tokens) for part in step.micro_batches])
        suspects = [part for part in found if not part[0]] or found
        numbers = sorted(number for _, of, _ in suspects for number in of)
        text = str(self.tokenizer.decode(suspects[0][2], skip_special_tokens=True))
        shown = f"{text[:EXCERPT]!r}{'...' if len(text) > EXCERPT else ''}"
        if not numbers:
            return f"a batch of the pair {shown}"
        more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
        return f"the training pairs {', '.join(map(str, numbers[:NAMED]))}{more} (one is {shown})"


def remedy(run: Path) -> str:
    """The way out of a run that has diverged."""
    checkpoint = last_checkpoint(run)
    kept = "no checkpoint was written yet" if checkpoint is None else f"checkpoint {step_of(checkpoint):,} is kept"
    return f"{kept}; begin anew with a smaller training.learning_rate_scale"
