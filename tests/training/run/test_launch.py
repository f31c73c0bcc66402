"""The processes of a launch notice one that has stopped, and agree on the step at which they stop."""

import itertools
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from torch.distributed import HashStore

from tests.training.runs import TWO_PROCESSES, kill, last_checkpoint, start, wait_for_checkpoint
from training.run import distributed, launch
from training.run.launch import STOP, AgreedStop, LaunchWatch


class ExitError(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The last words of a process of two whose watch ends it; a look takes 10 ms."""
    words: list[str] = []

    def end(status: int) -> None:
        raise ExitError

    monkeypatch.setattr(launch, "PartialState", lambda: SimpleNamespace(process_index=0, num_processes=2))
    monkeypatch.setattr(launch, "SECONDS_BETWEEN", 0.01)
    monkeypatch.setattr(launch, "SILENCE", 1.0)
    monkeypatch.setattr(launch.os, "_exit", end)
    monkeypatch.setattr(launch.os, "write", lambda file, line: words.append(line.decode()))
    return words


def test_watch_ends_the_process_once_another_has_not_run_for_a_while(
    ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, looks = HashStore(), 0

    def beat(*_: Any) -> None:
        """Let the other process run for 200 looks, and then no more."""
        nonlocal looks
        looks += 1
        if looks <= 200:
            store.add("vaswani/1", 1)

    monkeypatch.setattr(launch.time, "sleep", beat)
    with pytest.raises(ExitError):
        LaunchWatch(store).run()
    assert 300 <= looks <= 303
    line = "Process 1 of the launch has not run for 1 seconds; the launch ends, and the same command resumes it.\n"
    assert ended == [line]


def test_watch_ends_with_the_launch() -> None:
    class Gone:
        def add(self, key: str, value: int) -> int:
            raise RuntimeError("the store is gone")

    watch = LaunchWatch(Gone())  # ty: ignore[invalid-argument-type]
    watch.start()
    watch.join(10)
    assert not watch.is_alive()


def test_runs_of_one_process_have_one_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    store, beats = SimpleNamespace(), itertools.count()
    store.add = lambda *_: next(beats)
    monkeypatch.setattr(distributed, "connect", lambda: store)
    monkeypatch.setattr(launch, "SECONDS_BETWEEN", 0.01)
    with mock.patch.dict(os.environ):
        for _ in range(2):
            distributed.init_distributed()
    watches = [thread for thread in threading.enumerate() if isinstance(thread, LaunchWatch)]
    store.add = mock.Mock(side_effect=RuntimeError("the launch has ended"))
    for watch in watches:
        watch.join(10)
    assert len(watches) == 1


def test_processes_stop_at_the_step_that_the_first_signal_names(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(launch, "connect", lambda: store)
    first, second = AgreedStop(), AgreedStop()
    assert not first.is_due(7)
    assert not second.is_requested()
    first.request(7)
    assert second.is_requested()
    second.request(8)  # too late: the first one counts
    assert [stop.is_due(8) for stop in (first, second)] == [False, False]
    assert [stop.is_due(9) for stop in (first, second)] == [True, True]
    assert store.get(STOP) == b"9"


IMPATIENT = """
import sys

from training import train
from training.run import distributed, launch

launch.SILENCE, launch.SECONDS_BETWEEN = 8.0, 0.5
train.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_stopped_process_ends_the_whole_launch_with_a_line_that_names_it(arguments: list[str], tmp_path: Path) -> None:
    """It ends torch's launcher too, which gives the stopped process half a minute to end."""
    folder, program = tmp_path / "run", tmp_path / "impatient.py"
    program.write_text(IMPATIENT)
    endless = ["--training.steps=100000", "--training.checkpoint_steps=5"]
    process = start(arguments, folder, *endless, launcher=TWO_PROCESSES[:-1], module=str(program), is_fork=False)
    try:
        wait_for_checkpoint(process, folder)
        (second,) = (each for each in psutil.Process(process.pid).children() if each.environ().get("RANK") == "1")
        second.suspend()
        timer = threading.Timer(180, kill, [process])
        timer.start()
        _, errors = process.communicate()
        timer.cancel()
    except BaseException:
        kill(process)
        raise
    assert process.returncode not in (0, -signal.SIGKILL)
    assert "Process 1 of the launch has not run for 8 seconds; the launch ends, and the same command" in errors
    assert last_checkpoint(folder) is not None
