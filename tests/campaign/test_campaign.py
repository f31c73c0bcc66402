"""The campaigns in a short form: nothing fails, and what fails is reported."""

import argparse
import contextlib
import errno
import faulthandler
import os
import signal
import time
from pathlib import Path

import pytest

from tests.campaign import inputs, kills, workers
from tests.campaign.failing_writes import FailingWrites
from tests.campaign.inputs import Case
from tests.forks import run_forked
from tests.helpers import ROOT
from vaswani_transformer.support.files import write_atomically


def campaign(*arguments: str) -> None:
    """Run a campaign that must not fail, in a separate process: a fork of this one would lose its threads."""
    run_forked("tests.campaign", *arguments, folder=ROOT)


@pytest.mark.slow
def test_hostile_input_ends_no_reader(tmp_path: Path) -> None:
    campaign("inputs", "--count=600", f"--output={tmp_path / 'log.json'}")


@pytest.mark.slow
def test_five_kills_change_no_bit() -> None:
    campaign("kills", "--kills=5", "--hours=0.2")


@pytest.mark.slow
@pytest.mark.parametrize("job", ["average", "translate", "torn"])
def test_failed_writes_full_disks_and_torn_files_lose_nothing(job: str) -> None:
    campaign("disks", f"--only={job}", "--every=9", "--torn=20")


def write_with_failures(path: Path, number: int, is_lasting: bool) -> bool:
    """Write a file twice in a forked process whose n-th write fails; return whether the second time succeeds."""
    if not (child := os.fork()):
        FailingWrites(str(path.parent), number, errno.ENOSPC, is_lasting).install()
        status = 1
        for text in ("first", "second"):
            with contextlib.suppress(OSError):
                write_atomically(path, text)
                status = 0 if text == "second" else 1
        os._exit(status)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("is_lasting", [False, True])
def test_write_that_fails_is_the_one_that_was_named(tmp_path: Path, is_lasting: bool) -> None:
    """A file is begun, written and renamed: the first three writes, and the next three."""
    path = tmp_path / "file"
    contents = []
    for number in range(7):
        path.write_text("old")
        has_second = write_with_failures(path, number, is_lasting)
        contents.append(path.read_text())
        assert has_second == (contents[-1] == "second")
    assert contents == (["old"] * 3 if is_lasting else ["second"] * 3) + ["first"] * 3 + ["second"]


def crash(case: Case) -> bool:
    faulthandler.disable()  # pytest's would print a stack as if a test had crashed
    os.kill(os.getpid(), signal.SIGSEGV)
    return True


def hang(case: Case) -> bool:
    time.sleep(60)
    return True


def fail(case: Case) -> bool:
    raise TypeError("no UserError")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "problem"), [(crash, "ends its process"), (hang, "hangs for 1 seconds"), (fail, "TypeError: 'no User")]
)
def test_reader_that_fails_costs_one_case_and_is_reported(
    monkeypatch: pytest.MonkeyPatch, target: inputs.Check, problem: str
) -> None:
    monkeypatch.setattr(workers, "SECONDS", 1.0)
    monkeypatch.setattr(inputs, "TARGETS", {"text": inputs.TARGETS["text"], "bad": (1, target)})
    log = workers.run(argparse.Namespace(seed=1, count=22, only="", hours=1.0))
    assert log["cases"] == 22
    assert [failure["case"] for failure in log["failures"]] == ["bad/0", "bad/1"]
    assert all(failure["error"].startswith(problem) for failure in log["failures"])


def test_phase_of_a_killed_process_is_read_from_its_stack(tmp_path: Path) -> None:
    frames = ["write_text", "mark_complete", "writing", "_inner_training_loop", "main"]
    stack = "\n".join(f'  File "x.py", line 1 in {name}' for name in frames)
    (tmp_path / "log").write_text(f"Current thread 0x1 (most recent call first):\n{stack}\n")
    assert kills.phase_of(tmp_path / "log") == "checkpoint"
