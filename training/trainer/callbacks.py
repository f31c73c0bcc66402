"""Callbacks between the steps of a run: stop, save, log, and choose the best checkpoint."""

import math
import time
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.monitor.monitor import TrainingMonitor
from vaswani_transformer import (
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
)
from vaswani_transformer.batching import TokenBudgetBatches


def broadcast_from_main(seconds: float) -> float:
    """Return the main process's number of seconds, so that all ranks decide alike; they must call it together."""
    return broadcast_object_list([seconds])[0]


class TimeLimitCallback(TrainerCallback):
    """End a run at the first step after `minutes` of training, counted over all its interruptions."""

    def __init__(self, minutes: float, monitor: TrainingMonitor) -> None:
        self.seconds = 60 * minutes
        self.monitor = monitor

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if broadcast_from_main(self.monitor.trained) > self.seconds:
            control.should_evaluate = control.should_save = control.should_training_stop = True


class PeriodicCheckpointCallback(TrainerCallback):
    """Write a checkpoint every `steps` steps or `minutes` minutes, in addition to those after evaluations."""

    def __init__(self, steps: int | None, minutes: float | None) -> None:
        self.steps = steps
        self.seconds = None if minutes is None else 60 * minutes
        self.last = time.monotonic()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.last = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        is_due = self.steps is not None and state.global_step % self.steps == 0
        if is_due or (self.seconds is not None and broadcast_from_main(time.monotonic() - self.last) > self.seconds):
            control.should_save = True


class LogEveryCallback(TrainerCallback):
    """Log an entry every `steps` steps; the Trainer would use the steps of the checkpoint that it resumes."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            control.should_log = True


class LossTieBreaker(TrainerCallback):
    """Prefer the lower loss among evaluations with the same best metric, such as BLEU 0 at the start of a run.

    The Trainer and `EarlyStoppingCallback`, which is called later, take an evaluation if its metric is above the best
    one so far. So this callback lowers the best one by the smallest possible amount.

    Args:
        metric: the key of the best metric.
    """

    def __init__(self, metric: str) -> None:
        self.metric = f"eval_{metric}"

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        best = state.best_metric
        losses = {entry["step"]: entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry}
        before = losses.get(state.best_global_step, -math.inf)
        if best is not None and metrics.get(self.metric) == best and metrics["eval_loss"] < before:
            state.best_metric = math.nextafter(best, -math.inf)


class GlancingCallback(TrainerCallback):
    """Set the share of mistakes that GLAT shows: linear from `first` to `last` over `steps` steps, then `last`."""

    def __init__(self, model: VaswaniNatForConditionalGeneration, first: float, last: float, steps: int) -> None:
        self.model, self.first, self.last, self.steps = model, first, last, steps

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        done = min(1.0, state.global_step / self.steps)
        self.model.glancing_ratio = self.first + (self.last - self.first) * done


DivergenceModel = VaswaniIterativeVaeForConditionalGeneration | VaswaniFlowSeqForConditionalGeneration
"""A model whose loss has a KL divergence, weighed by its `kl_scale`."""


class KlScaleCallback(TrainerCallback):
    """Set the weight of KL divergences: 0 to step `first`, linear to `scale` over `steps` steps, then `scale`."""

    def __init__(self, model: DivergenceModel, scale: float, steps: int, first: int = 0) -> None:
        self.model, self.scale, self.steps, self.first = model, scale, steps, first

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.model.kl_scale = self.scale * min(1.0, max(0, state.global_step - self.first) / self.steps)


class StreamEpochCallback(TrainerCallback):
    """Log the epoch of a stream, which the Trainer cannot compute without its length."""

    def __init__(self, batches: TokenBudgetBatches) -> None:
        self.batches = batches

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.epoch = float(self.batches.epoch)
