"""Commands in forks of a process that has imported what they need, because imports take longer than a small run.

A fork is a separate process: it can be killed, and shares no memory and no open files with the tests. What a test says
about imports, about Transformers' own log or about torch's launcher needs a new interpreter instead.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import get_free_port, prepare_multi_gpu_env

from tests import ROOT

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.forks", "training.distill", "training.train"])


def launch_environment(launch: Sequence[str]) -> dict[str, str]:
    """Return what `accelerate launch` with these arguments sets for two processes here, other than their ranks."""
    settings, _, _ = _validate_launch_command(launch_command_parser().parse_args([*launch, "module"]))
    assert settings.num_processes == 2
    prepared = prepare_multi_gpu_env(settings)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    changed = {name: value for name, value in prepared.items() if os.environ.get(name) != value}
    return changed | address | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def run_program(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[str], folder: Path
) -> None:
    """Run a module's name, or a file, as Python does in a folder, in this process, whose output goes to two files."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    sys.path.insert(0, str(ROOT))
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


class ForkedCommand:
    """A running command, with what tests use of `subprocess.Popen`.

    With the arguments of `accelerate launch` it has two processes; the first one gives `pid`, and `returncode` is that
    of the first one that failed.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        folder: Path = ROOT,
        launch: Sequence[str] = (),
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.files = [str(Path(self.folder.name) / name) for name in ("output", "errors")]
        for file in self.files:
            Path(file).touch()
        shared = {**os.environ, **(launch_environment(launch) if launch else {})}
        ranks = [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"] if launch else [{}]
        self.members = [
            FORKS.Process(target=run_program, args=(program, arguments, shared | rank, self.files, folder))
            for rank in ranks
        ]
        for member in self.members:
            member.start()
        pid = self.members[0].pid
        assert pid is not None
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        codes = [member.exitcode for member in self.members]
        return None if None in codes else next((code for code in codes if code), 0)

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return the command's output and its errors; kill it at the timeout."""
        end = None if timeout is None else time.monotonic() + timeout
        for member in self.members:
            if not wait([member.sentinel], None if end is None else max(0.0, end - time.monotonic())):
                self.kill()
                raise subprocess.TimeoutExpired(member.name, timeout or 0)
            member.join()
        output, errors = (Path(file).read_text(encoding="utf-8") for file in self.files)
        return output, errors

    def kill(self) -> None:
        """Kill all of its processes by SIGKILL."""
        for member in self.members:
            member.kill()
            member.join()


def run_forked(program: str, *arguments: str, folder: Path, launch: Sequence[str] = ()) -> str:
    """Run a module or a file in a folder, with the arguments of `accelerate launch` twice, and return its output."""
    command = ForkedCommand(program, arguments, folder=folder, launch=launch)
    output, errors = command.communicate(timeout=800)
    assert command.returncode == 0, output[-2000:] + errors
    return output
