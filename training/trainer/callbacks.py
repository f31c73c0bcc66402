"""Callbacks between the steps of a run: stop, save, log, and choose the best checkpoint."""

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

from accelerate.utils import broadcast_object_list
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.data.stream import PairStream
from training.monitor.monitor import TrainingMonitor
from training.recipe.families import RecipeModel
from training.recipe.fields import Recipe, TrainingRecipe
from training.run.checkpoints import STREAM_FILE, fix_of
from training.run.launch import AgreedStop
from training.tasks import selection_metric
from vaswani_transformer.batching import TokenBudgetBatches
from vaswani_transformer.support.errors import Terminated
from vaswani_transformer.support.files import read_json


def broadcast_from_main(seconds: float) -> float:
    """Return the main process's number of seconds, so that all ranks decide alike; they must call it together."""
    return broadcast_object_list([seconds])[0]


class RecipeFlowCallback(TrainerCallback):
    """Log, save and stop at a recipe's steps and minutes, in addition to the evaluations and the end of the Trainer.

    The Trainer would log at the steps of the checkpoint that it resumes. `checkpoint_minutes` count from the latest
    checkpoint, and `minutes` are those of training, over all interruptions of the run.
    """

    def __init__(self, training: TrainingRecipe, monitor: TrainingMonitor) -> None:
        self.training, self.monitor = training, monitor
        self.saved = time.monotonic()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.saved = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        training, step, minutes = self.training, state.global_step, self.training.checkpoint_minutes
        if step % training.log_steps == 0:
            control.should_log = True
        if training.checkpoint_steps is not None and step % training.checkpoint_steps == 0:
            control.should_save = True
        if minutes is not None and broadcast_from_main(time.monotonic() - self.saved) > 60 * minutes:
            control.should_save = True
        if training.minutes is not None and broadcast_from_main(self.monitor.trained) > 60 * training.minutes:
            control.should_evaluate = control.should_save = control.should_training_stop = True


class StopSignalCallback(TrainerCallback):
    """Write a checkpoint at the end of the step after SIGINT or SIGTERM, and then end the process.

    After one in an evaluation, whose scores a checkpoint needs, the process ends at once, and so it does at a second
    signal. The last checkpoint stays then. A process that ignores a signal still does.
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
        if self.signal is not None and self.agreed is not None and not self.agreed.is_requested():
            self.end()


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

    Steps count from 0, and 0 `steps` are as one.

    Its `name` is `glancing_ratio`, the share of mistakes that GLAT shows, or `kl_scale`, the weight of KL divergences.
    """

    def __init__(self, model: Any, name: str, first: float, last: float, steps: int, begin: int = 0) -> None:
        self.model, self.name, self.steps, self.begin = model, name, steps, begin
        self.first, self.last = first, last

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        done = min(1.0, max(0, state.global_step - self.begin) / max(1, self.steps))
        setattr(self.model, self.name, self.first + (self.last - self.first) * done)


def read_stream(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's `position` in the stream, and the fingerprints of the `pairs` up to it."""
    return read_json(checkpoint / STREAM_FILE, fix_of(checkpoint), position=dict, pairs=dict)


class StreamCallback(TrainerCallback):
    """Log the epoch of a `PairStream`, which the Trainer cannot compute without its length, and keep its position."""

    def __init__(self, batches: TokenBudgetBatches) -> None:
        self.batches = batches

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.epoch = float(self.batches.epoch)

    def save(self, checkpoint: Path) -> None:
        """Write the position, and the fingerprints of the pairs up to it."""
        state = {"position": self.batches.state_dict(), "pairs": self.batches.source_state}
        (checkpoint / STREAM_FILE).write_text(json.dumps(state), encoding="utf-8")

    def restore(self, checkpoint: Path) -> None:
        """Continue at a checkpoint's position."""
        state = read_stream(checkpoint)
        self.batches.load_state_dict(state["position"])
        cast(PairStream, self.batches.source).load_state_dict(state["pairs"], skipped=state["position"]["items"])


def recipe_callbacks(recipe: Recipe, model: RecipeModel, monitor: TrainingMonitor) -> Iterator[TrainerCallback]:
    """Yield the callbacks of a recipe's limits, its best metric, and the schedules of its kind of model."""
    training, selection = recipe.training, selection_metric(recipe)
    yield RecipeFlowCallback(training, monitor)
    if selection.greater_is_better:
        yield LossTieBreaker(selection.key)
    if training.patience is not None:
        yield EarlyStoppingCallback(training.patience)
    if training.glancing is not None:
        steps = training.glancing_steps or training.steps
        yield TrainingRateCallback(model, "glancing_ratio", *training.glancing, steps)
    if (steps := training.kl_warmup_steps) is not None:
        begin = training.decoder_steps - 1 if recipe.kind == "flowseq" else -1
        yield TrainingRateCallback(model, "kl_scale", 0.0, training.kl_scale, steps, begin)
