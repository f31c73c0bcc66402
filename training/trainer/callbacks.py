"""Callbacks between the steps of a run: stop, save, log, and choose the best checkpoint."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Generator
from typing import Any, NoReturn

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.monitor.monitor import TrainingMonitor
from training.run.launch import AgreedStop
from vaswani_transformer.batching import TokenBudgetBatches
from vaswani_transformer.support.interrupts import Terminated


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


class StopSignalCallback(TrainerCallback):
    """Write a checkpoint at the end of the step after SIGINT or SIGTERM, and then end the process.

    In an evaluation, whose scores a checkpoint needs, the process ends at once, and so it does at a second signal.
    The last checkpoint stays then. A process that ignores a signal still does.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.is_extra = False  # the checkpoint that is written now is there only because of the signal
        self.agreed: AgreedStop | None = None

    @contextlib.contextmanager
    def handlers(self) -> Generator[None]:
        """Handle the signals inside the context, which the main thread enters."""
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
        heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        self.agreed = AgreedStop()
        try:
            for number in heeded:
                signal.signal(number, self.receive)
            yield
            if self.signal is not None:  # training has ended before the step to stop at
                self.end()
        finally:
            for number in heeded:
                signal.signal(number, before[number])

    def receive(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            self.end()
        self.signal = number
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"Saving a checkpoint at the end of this step; a second signal ends the run at once.\n")

    def end(self) -> NoReturn:
        raise Terminated if self.signal == signal.SIGTERM else KeyboardInterrupt

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.agreed is not None
        if self.signal is not None:
            self.agreed.request(state.global_step)
        if self.agreed.is_due(state.global_step):
            self.is_extra = not control.should_save
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.agreed is not None and self.agreed.is_due(state.global_step):
            self.end()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.signal is not None:
            self.end()


class LogEveryCallback(TrainerCallback):
    """Log an entry every `steps` steps; the Trainer would use the steps of the checkpoint that it resumes."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            control.should_log = True


class LossTieBreaker(TrainerCallback):
    """Prefer the lower loss among evaluations with the same best `metric`, such as BLEU 0 at the start of a run.

    The Trainer and `EarlyStoppingCallback`, which is called later, take an evaluation if its metric is above the best
    one so far. So this callback lowers the best one by the smallest possible amount.
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


class TrainingRateCallback(TrainerCallback):
    """Set a `TrainingRate` of the model: `first` up to step `begin`, linear to `last` over `steps` steps, then `last`.

    Args:
        model: the model.
        name: of its rate: `glancing_ratio`, the share of mistakes that GLAT shows, or `kl_scale`, the weight of KL
            divergences.
    """

    def __init__(self, model: Any, name: str, first: float, last: float, steps: int, begin: int = 0) -> None:
        self.model, self.name, self.steps, self.begin = model, name, steps, begin
        self.first, self.last = first, last

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        done = min(1.0, max(0, state.global_step - self.begin) / self.steps)
        setattr(self.model, self.name, self.first + (self.last - self.first) * done)


class StreamEpochCallback(TrainerCallback):
    """Log the epoch of a stream, which the Trainer cannot compute without its length."""

    def __init__(self, batches: TokenBudgetBatches) -> None:
        self.batches = batches

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.epoch = float(self.batches.epoch)
