"""The latest metrics of a run, in the progress bar or as lines of the log."""

import logging
import math
import sys
import time
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.monitor.monitor import TrainingMonitor
from training.tasks import Metric

logger = logging.getLogger(__name__)


def format_metrics(logs: dict[str, Any], best_metric: Metric) -> dict[str, str]:
    """Return the metrics of a log entry that a user sees during a run, as text."""
    formats = (  # key in the log, name for the reader, format
        ("loss", "loss", ".3f"),
        ("target_tokens_per_second", "tokens/s", ",.0f"),
        ("mfu", "MFU", ".1%"),
        (f"eval_{best_metric.key}", best_metric.title, ".2f"),
        ("eval_perplexity", "perplexity", ".4g"),
    )
    return {name: format(logs[key], spec) for key, name, spec in formats if key in logs}


class ProgressBarCallback(ProgressCallback):
    """The Trainer's progress bar, followed by the latest metrics instead of a line for every log entry."""

    def __init__(self, best_metric: Metric) -> None:
        super().__init__()
        self.best_metric = best_metric
        self.latest: dict[str, str] = {}

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        self.latest |= format_metrics(logs, self.best_metric)
        if self.training_bar is not None:  # only in the main process, during training
            self.training_bar.set_postfix(self.latest)


def format_time_left(seconds: float) -> str:
    """Return a time to wait in readable units: "2 h 5 min", "12 min", "40 s"."""
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes >= 2 else f"{seconds:.0f} s"


class LogLineCallback(TrainerCallback):
    """The same metrics and the time that is left as lines of the log, for output that goes to a file."""

    def __init__(self, best_metric: Metric, monitor: TrainingMonitor, minutes: float | None) -> None:
        self.best_metric, self.monitor = best_metric, monitor
        self.time_limit = math.inf if minutes is None else 60 * minutes
        self.started = (0.0, 0)  # moment and step at which this process began to train

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.started = (time.perf_counter(), state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and (metrics := format_metrics(logs, self.best_metric)):
            text = ", ".join(f"{name} {value}" for name, value in metrics.items())
            (moment, step), remaining = self.started, state.max_steps - state.global_step
            if remaining and "loss" in logs:
                seconds = (time.perf_counter() - moment) / (state.global_step - step) * remaining
                seconds = min(seconds, max(0.0, self.time_limit - self.monitor.trained))
                text += f", at most {format_time_left(seconds)} left"
            logger.info("Step %d of %d: %s", state.global_step, state.max_steps, text)


def progress_callback(best_metric: Metric, monitor: TrainingMonitor, minutes: float | None) -> TrainerCallback:
    """Return the callback that shows a run's progress where standard error goes; the run may have a time limit."""
    return ProgressBarCallback(best_metric) if sys.stderr.isatty() else LogLineCallback(best_metric, monitor, minutes)
