"""The curves of a run for TensorBoard, which a disk that fails interrupts without ending the run."""

import contextlib
import logging
import threading
from collections.abc import Generator
from typing import Any

from transformers import TrainingArguments
from transformers.integrations import TensorBoardCallback

from vaswani_transformer.support.errors import one_line

logger = logging.getLogger(__name__)


class CurvesCallback(TensorBoardCallback):
    """TensorBoard's writer, which a failed write switches off for the rest of the run."""

    @contextlib.contextmanager
    def switched_off_by_errors(self) -> Generator[None]:
        """Warn of a failed write and write no more."""
        try:
            yield
        except OSError as error:
            self.tb_writer = self._SummaryWriter = None
            problem = one_line(error, with_file=False)
            logger.warning("%s: cannot be written: %s; the run continues without it.", self.logging_dir, problem)

    def on_train_begin(self, args: TrainingArguments, *more: Any, **kwargs: Any) -> None:
        with self.switched_off_by_errors():
            super().on_train_begin(args, *more, **kwargs)

    def on_log(self, args: TrainingArguments, *more: Any, **kwargs: Any) -> None:
        with self.switched_off_by_errors():
            super().on_log(args, *more, **kwargs)

    def on_train_end(self, args: TrainingArguments, *more: Any, **kwargs: Any) -> None:
        with self.switched_off_by_errors():
            super().on_train_end(args, *more, **kwargs)


def report_thread(args: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread, but none of TensorBoard's, whose error `CurvesCallback` gets at the next entry.

    It is a `threading.excepthook`.
    """
    if not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)
