"""The latest figures of a run, in the progress bar or as lines of the log."""

import logging
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)
# What is shown while a run goes on: the name in the log, the one on the screen, and the format.
SHOWN = (
    ("loss", "loss", ".3f"),
    ("target_tokens_per_second", "tokens/s", ",.0f"),
    ("mfu", "MFU", ".1%"),
    ("eval_bleu", "BLEU", ".2f"),
    ("eval_perplexity", "perplexity", ".4g"),
)


def shown(logs: dict[str, Any]) -> dict[str, str]:
    """The few figures of a log entry that are shown while a run goes on."""
    return {label: format(logs[name], spec) for name, label, spec in SHOWN if name in logs}


class ProgressBarCallback(ProgressCallback):
    """The Trainer's progress bar with the latest figures behind it instead of a line for every log entry."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: dict[str, str] = {}

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        self.latest |= shown(logs)
        if self.training_bar is not None:  # on the main process, while it trains
            self.training_bar.set_postfix(self.latest)


class LogLineCallback(TrainerCallback):
    """The same figures as lines of the log, for output that goes to a file."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and (figures := shown(logs)):
            text = ", ".join(f"{label} {figure}" for label, figure in figures.items())
            logger.info("Step %d of %d: %s", state.global_step, state.max_steps, text)
