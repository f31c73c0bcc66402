"""The latest metrics of a run, in the progress bar or as lines of the log."""

import logging
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.tasks import Metric

logger = logging.getLogger(__name__)


class MetricFormat:
    """The metrics of a log entry that a user sees during a run, as text.

    Args:
        best_metric: the task's metric that evaluations log.
    """

    def __init__(self, best_metric: Metric) -> None:
        self.formats = (  # key in the log, name for the reader, format
            ("loss", "loss", ".3f"),
            ("target_tokens_per_second", "tokens/s", ",.0f"),
            ("mfu", "MFU", ".1%"),
            (f"eval_{best_metric.key}", best_metric.title, ".2f"),
            ("eval_perplexity", "perplexity", ".4g"),
        )

    def __call__(self, logs: dict[str, Any]) -> dict[str, str]:
        return {name: format(logs[key], spec) for key, name, spec in self.formats if key in logs}


class ProgressBarCallback(ProgressCallback):
    """The Trainer's progress bar, followed by the latest metrics instead of a line for every log entry."""

    def __init__(self, format_metrics: MetricFormat) -> None:
        super().__init__()
        self.format_metrics = format_metrics
        self.latest: dict[str, str] = {}

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        self.latest |= self.format_metrics(logs)
        if self.training_bar is not None:  # only in the main process, during training
            self.training_bar.set_postfix(self.latest)


class LogLineCallback(TrainerCallback):
    """The same metrics as lines of the log, for output that goes to a file."""

    def __init__(self, format_metrics: MetricFormat) -> None:
        self.format_metrics = format_metrics

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and (metrics := self.format_metrics(logs)):
            text = ", ".join(f"{name} {value}" for name, value in metrics.items())
            logger.info("Step %d of %d: %s", state.global_step, state.max_steps, text)
