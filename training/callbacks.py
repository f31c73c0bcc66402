"""Callbacks of the trainer: when a run evaluates, saves and stops, which evaluation is the best, the progress bar."""

import contextlib
import logging
import math
import signal
import sys
import time
from collections.abc import Generator, Mapping
from types import FrameType
from typing import NoReturn

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import (
    EarlyStoppingCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from training.recipe import Recipe
from vaswani_transformer.support.command import UserError

logger = logging.getLogger(__name__)


def rank(evaluation: Mapping[str, float], args: TrainingArguments) -> tuple[float, float]:
    """Return a key that is larger for a better evaluation, or for an equal one with a lower loss."""
    score = evaluation[f"eval_{args.metric_for_best_model}"]
    return (score if args.greater_is_better else -score), -evaluation["eval_loss"]


def evaluation_at(state: TrainerState, step: int | None) -> dict[str, float] | None:
    """Return the logged evaluation of a step."""
    return next((entry for entry in state.log_history if "eval_loss" in entry and entry["step"] == step), None)


def is_best_evaluation(state: TrainerState, args: TrainingArguments) -> bool:
    """Return whether the last evaluation is better than the best before it, or equal with a lower loss."""
    last = next(entry for entry in reversed(state.log_history) if "eval_loss" in entry)
    best = evaluation_at(state, state.best_global_step)
    return rank(last, args) > ((-math.inf, -math.inf) if best is None else rank(best, args))


class Patience(EarlyStoppingCallback):
    """Callback that ends training after a number of evaluations that are not better than the best."""

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Leave out Transformers' warning: the trainer restores the best checkpoint, as `save_final_model` says."""

    def check_metric_value(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metric_value: float
    ) -> None:
        is_better = is_best_evaluation(state, args)
        self.early_stopping_patience_counter = 0 if is_better else self.early_stopping_patience_counter + 1


class Progress(TrainerCallback):
    """Callback that saves and stops at a recipe's steps and minutes, excluding interruptions, and at a signal.

    After SIGTERM or Ctrl-C it saves the current step; several processes end without saving. A second signal ends the
    process immediately. The same command resumes the run.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.training = recipe.training
        self.first_step = 0
        self.seconds = 0.0  # of training, evaluation and saving before this process began
        self.begun = self.saved = time.monotonic()
        self.signal: int | None = None
        self.is_interrupted = False  # only the signal asked for the next checkpoint

    def seconds_trained(self) -> float:
        """Return the seconds of training, evaluation and saving, excluding interruptions."""
        return self.seconds + time.monotonic() - self.begun

    def minutes_left(self, state: TrainerState) -> float:
        """Return the minutes, at the pace so far, until the limit of steps or of time, whichever comes first."""
        elapsed = time.monotonic() - self.begun
        pace = elapsed / max(1, state.global_step - self.first_step)
        seconds = pace * (state.max_steps - state.global_step)
        if self.training.minutes is not None:
            seconds = min(seconds, 60 * self.training.minutes - self.seconds - elapsed)
        return max(0.0, seconds) / 60

    def check_time_left(self) -> None:
        """Raise a UserError if an extended run has used its time before."""
        minutes = self.training.minutes
        if minutes is not None and self.seconds > 60 * minutes:
            raise UserError(
                f"training.minutes: the run has trained for {self.seconds / 60:.1f} minutes; got {minutes:g}, expected "
                "more. Raise it too."
            )

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.end()
        self.signal = number

    def end(self) -> NoReturn:
        raise SystemExit(128 + (self.signal or 0))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        self.begun = self.saved = time.monotonic()
        self.first_step = state.global_step
        self.handlers = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        training = self.training
        if training.checkpoint_steps is not None and state.global_step % training.checkpoint_steps == 0:
            control.should_save = True

        # Limits of time, by the clock of the main process.
        if training.minutes is not None or training.checkpoint_minutes is not None:
            times = [self.seconds_trained(), time.monotonic() - self.saved]
            seconds_trained, seconds_since_save = broadcast_object_list(times)
            if training.checkpoint_minutes is not None and seconds_since_save > 60 * training.checkpoint_minutes:
                control.should_save = True
            if training.minutes is not None and seconds_trained > 60 * training.minutes:
                control.should_evaluate = True
                control.should_save = True
                control.should_training_stop = True

        # After a signal, one process saves this step, and several end without saving.
        if self.signal is not None and args.world_size > 1:
            self.end()
        if self.signal is not None:
            logger.warning("Interrupted: saving step %d; the same command resumes the run.", state.global_step)
            self.is_interrupted = not control.should_save
            control.should_save = True

    def on_save(self, *_: object, **__: object) -> None:
        self.saved = time.monotonic()
        if self.signal is not None:
            self.end()

    def on_train_end(self, *_: object, **__: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


class ProgressBar(ProgressCallback):
    """Callback that shows the steps as a bar at the foot of a terminal, with the values of the last log line."""

    layout = "{percentage:3.0f}% {bar} {n_fmt}/{total_fmt}{postfix}"

    def __init__(self) -> None:
        super().__init__()
        self.is_shown = sys.stderr.isatty() and PartialState().is_main_process

    @contextlib.contextmanager
    def above(self) -> Generator[None]:
        """Write lines of the log above the bar, and end the bar's line even if training fails."""
        if not self.is_shown:
            yield
            return
        with logging_redirect_tqdm([logging.getLogger(), logging.getLogger("transformers")]):
            try:
                yield
            finally:
                if self.training_bar is not None:
                    self.training_bar.close()

    def show(self, values: str) -> None:
        """Show values to the right of the bar."""
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(values)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        self.current_step = state.global_step  # of a resumed run
        self.training_bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            dynamic_ncols=True,
            bar_format=self.layout,
            disable=not self.is_shown,
        )

    def on_log(self, *_: object, **__: object) -> None:
        """Leave the values to `PaperTrainer.log`."""
