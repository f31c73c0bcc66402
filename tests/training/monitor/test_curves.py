"""TensorBoard's curves end where the disk fails, and the run does not."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter
from transformers import Seq2SeqTrainingArguments, TrainerControl, TrainerState

from tests.helpers import no_space
from training.monitor.curves import CurvesCallback, report_thread

STATE = TrainerState(is_world_process_zero=True)


def test_failed_write_of_the_curves_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    """The disk fills after the first entry; the writer's thread meets the error, the next entries may see it."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    monkeypatch.setattr(threading, "excepthook", report_thread)
    event: Any = (Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True), STATE, TrainerControl())
    curves = CurvesCallback()
    curves.on_train_begin(*event)
    curves.on_log(*event, logs={"loss": 3.0})
    assert not caplog.records

    monkeypatch.setattr(RecordWriter, "write", no_space)
    for _ in range(20):
        curves.on_log(*event, logs={"loss": 3.0})
        time.sleep(0.01)
    curves.on_train_end(*event)
    message = f"{tmp_path / 'tensorboard'}: cannot be written: No space left on device; the run continues without it."
    assert [record.getMessage() for record in caplog.records] == [message]
    assert "Traceback" not in capsys.readouterr().err


def test_run_without_a_folder_for_its_curves_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "file" / "tensorboard"))
    event: Any = (Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True), STATE, TrainerControl())
    curves = CurvesCallback()
    curves.on_train_begin(*event)
    curves.on_log(*event, logs={"loss": 3.0})
    curves.on_train_end(*event)
    assert len(caplog.records) == 1


def test_other_threads_print_their_tracebacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(threading, "excepthook", report_thread)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert "ZeroDivisionError" in capsys.readouterr().err
