"""A run whose last lines standard output cannot take has done its work."""

import io
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from training import train
from training.recipe.fields import load_recipe, to_dict
from training.run.command import flush_stdout


@pytest.fixture
def finished(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments of a training command whose run is finished at once, with an example beyond ASCII."""
    results: dict[str, Any] = {"recipe": to_dict(load_recipe(arguments[0], arguments[1:])), "time": {"forward": 1.0}}
    example = {"source": "coffee", "translation": "caf\u00e9", "reference": "caf\u00e9"}
    results["test"] = {"examples": [example], "sentences": 1, "bleu": 1.0, "signature": "s"}
    monkeypatch.setattr(train, "run", lambda recipe: results)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    return [*arguments, f"--output_dir={tmp_path / 'run'}"]


def test_run_escapes_what_its_output_cannot_encode(finished: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    train.main(finished)
    assert b"translation  caf\\xe9\n" in written.getvalue()


@pytest.mark.parametrize("buffering", [1, 8192])
def test_run_ends_well_after_the_reader_of_its_output(
    finished: list[str], monkeypatch: pytest.MonkeyPatch, buffering: int
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=buffering) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        train.main(finished)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_run_whose_output_the_disk_does_not_hold_says_where_its_scores_are(
    finished: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115 - the command redirects it
    with pytest.raises(SystemExit) as end:
        train.main(finished)
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"^standard output: cannot be written: No space .*; the run is finished, .*results\.json\.$", last)


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="other"), flush_stdout("make room"):
        raise RuntimeError("other")
