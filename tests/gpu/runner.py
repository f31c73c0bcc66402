"""Run parts in separate processes, each within its time limit, and write every result at once."""

import contextlib
import dataclasses
import json
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.helpers import ROOT
from vaswani_transformer.support.errors import one_line
from vaswani_transformer.support.files import write_atomically

Row = dict[str, Any]
RESULTS, TABLES, LOG = "results.json", "results.md", "log.txt"
PASSED, FAILED, TOO_SLOW, SKIPPED, NOT_RUN = "passed", "failed", "too slow", "skipped", "not run"
START_LIMIT = 180.0  # seconds for a process to import everything
CPU_PATIENCE = 5  # times a part's limit on a CPU, which does other work too
LEAST_TIME = 1.0  # seconds that must be left for a part to start
NO_TIME = "the minutes were over; the same command with the same --out continues here"
STACK_SIGNAL = signal.SIGUSR1  # a worker writes its Python stack to the log
OWN_PACKAGES = ("tests", "training", "vaswani_transformer")


class SkipPart(Exception):  # noqa: N818 - it is no error
    """A part cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """The device, size and folder that parts run with.

    Attributes:
        device: the device under test.
        is_tiny: whether shapes are tiny, for a CPU.
        folder: an empty folder for what a part writes.
    """

    device: torch.device
    is_tiny: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def compiler(self) -> str:
        """The backend of torch.compile; a CPU checks only that there is one graph and that it is right."""
        return "eager" if self.device.type == "cpu" else "inductor"

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def nothing(setting: Setting) -> None:
    """Return None: the part runs anywhere."""


@dataclass(frozen=True)
class Part:
    """A check or measurement.

    Attributes:
        name: its name in the results.
        table: the heading of the table of its rows.
        run: yields rows; the part fails if a row's `difference` is above its `bound`.
        limit: seconds until the runner ends its process; `CPU_PATIENCE` times as many on a CPU.
        needs: returns the reason why it cannot run here, or None.
        compiles: whether it compiles kernels first, which takes minutes; such parts come last.
    """

    name: str
    table: str
    run: Callable[[Setting], Iterator[Row]]
    limit: float = 60.0
    needs: Callable[[Setting], str | None] = nothing
    compiles: bool = False


@dataclass
class Result:
    """The result of a part, as `results.json` holds it."""

    name: str
    table: str
    status: str = NOT_RUN
    reason: str | None = None
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


def is_within(row: Row) -> bool:
    """Return whether a row's difference is within its bound; NaN never is."""
    return "bound" not in row or row["difference"] <= row["bound"]


def is_missing_here(error: Exception) -> bool:
    """Return whether a part lacks a package that this machine may lack, and no module of the project."""
    is_own = isinstance(error, ImportError) and (error.name or "").partition(".")[0] in OWN_PACKAGES
    return isinstance(error, SkipPart | ImportError) and not is_own


def perform(part: Part, setting: Setting, send: Callable[[Row], None]) -> tuple[str, str | None]:
    """Run a part in this process; return its status and the reason for it."""
    try:
        if (reason := part.needs(setting)) is not None:
            return SKIPPED, reason
        outside = []
        for row in part.run(setting):
            send(row)
            if not is_within(row):
                outside.append(row)
    except torch.OutOfMemoryError as error:
        return SKIPPED, f"out of memory: {one_line(error)}"
    except Exception as error:
        if is_missing_here(error):
            return SKIPPED, one_line(error, is_complete=True)
        traceback.print_exc()
        return FAILED, f"{type(error).__name__}: {one_line(error, is_complete=True)[:300]}"
    if outside:
        return FAILED, "; ".join(f"{row.get('compared', 'a row')} is off by {row['difference']:.3g}" for row in outside)
    return PASSED, None


class Worker:
    """A process that runs parts of `catalog` one after another until it is closed.

    Args:
        catalog: the module whose `parts()` names the parts.
        device: the device under test.
        log: the file for the output of the process.
        start_limit: seconds until the process must be ready.
    """

    def __init__(self, catalog: str, device: str, log: Path, start_limit: float) -> None:
        self.log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.worker", catalog, device],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.is_ready = self.next_event(time.monotonic() + start_limit) == {"ready": True}
        except queue.Empty:
            self.is_ready = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))
        self.events.put(None)

    def next_event(self, deadline: float) -> dict[str, Any] | None:
        """Return the next event, or None if the process has ended.

        Raises:
            queue.Empty: no event came until `deadline`, by `time.monotonic`.
        """
        return self.events.get(timeout=max(0.0, deadline - time.monotonic()))

    def run(self, part: Part, limit: float, send: Callable[[Row], None]) -> tuple[str, str | None]:
        """Run a part; return its status and the reason for it."""
        assert self.process.stdin is not None
        deadline = time.monotonic() + limit
        try:
            self.process.stdin.write(f"{part.name}\n".encode())
            self.process.stdin.flush()
            while (event := self.next_event(deadline)) is not None:
                if "row" not in event:
                    return event["status"], event["reason"]
                send(event["row"])
        except queue.Empty:
            self.log_stack()
            return TOO_SLOW, f"not done after {limit:.0f} s; {self.log.name} shows where"
        except BrokenPipeError:
            pass
        try:
            return FAILED, f"the process ended with status {self.process.wait(10)}"
        except subprocess.TimeoutExpired:
            return FAILED, "the process broke off and does not end"

    def log_stack(self) -> None:
        """Let the process write the Python stack of each thread to its log, even if it hangs in a kernel."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.kill(self.process.pid, STACK_SIGNAL)
            self.process.wait(0.5)

    def close(self) -> None:
        """End the process and its children, without waiting for one that hangs in a driver."""
        try:
            # The process leads its session, so its group holds it and its children.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        self.log.close()


class Report:
    """The results of a run in a folder, written after every row.

    Args:
        folder: where `results.json`, `results.md` and the log go.
        about: the device, commit and versions that the results belong to.
        command: the command line.

    Raises:
        ValueError: the folder holds results of another device, commit or version, or others' files, or cannot be
            written to.
    """

    def __init__(self, folder: Path, about: dict[str, Any], command: list[str]) -> None:
        self.folder, self.about, self.command = folder, about, shlex.join(command)
        self.results: dict[str, Result] = {}
        self.is_written = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / RESULTS).exists():
                self.read()
            (folder / LOG).open("ab").close()
            write_atomically(folder / TABLES, self.tables())
        except OSError as error:
            problem = f"got {error.strerror or error}, expected a folder that can be written to. Name another"
            raise ValueError(f"--out: {folder} takes no results; {problem}.") from error

    def read(self) -> None:
        """Read the results of an earlier call."""
        try:
            saved = json.loads((self.folder / RESULTS).read_text(encoding="utf-8"))
            results, about = {one["name"]: Result(**one) for one in saved["parts"]}, saved["about"]
        except (ValueError, KeyError, TypeError) as error:
            problem = "is no file of this command; got other contents, expected its results. Name an empty folder"
            raise ValueError(f"--out: {self.folder / RESULTS} {problem}.") from error
        for name, value in self.about.items():
            if about.get(name) != value:
                raise ValueError(
                    f"--out: {self.folder} holds results with another {name}; got {about.get(name)!r}, "
                    f"expected {value!r}. Name an empty folder."
                )
        self.results = results

    def is_settled(self, part: Part) -> bool:
        """Return whether the part has a final result from an earlier call."""
        return part.name in self.results and self.results[part.name].status != NOT_RUN

    def add(self, result: Result) -> None:
        self.results[result.name] = result
        self.write()

    def tables(self) -> str:
        return render(self.about, self.command, list(self.results.values()))

    def write(self) -> None:
        """Write all results; a disk that fails ends no run, because every later write holds them all again."""
        parts = [dataclasses.asdict(result) for result in self.results.values()]
        tree = {"about": self.about, "command": self.command, "parts": parts}
        try:
            write_atomically(self.folder / RESULTS, json.dumps(tree, indent=2, ensure_ascii=False) + "\n")
            write_atomically(self.folder / TABLES, self.tables())
            self.is_written = True
        except OSError:
            self.is_written = False


def spell(value: Any) -> str:
    """Return the text of a value in a cell of a table."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value).replace("|", "\\|").replace("\n", " ")
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def render_table(results: Iterable[Result]) -> list[str]:
    """Return the rows of parts as a Markdown table with the columns of all rows, in order of appearance."""
    rows = [{"part": result.name} | row for result in results for row in result.rows]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    return lines + [f"| {' | '.join(spell(row.get(column)) for column in columns)} |" for row in rows]


def render(about: dict[str, Any], command: str, results: list[Result]) -> str:
    """Return all tables as Markdown, then the parts that did not pass, with reasons."""
    lines = [f"`{command}`", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    for table in dict.fromkeys(result.table for result in results if result.rows):
        lines += [f"### {table}", "", *render_table(result for result in results if result.table == table), ""]
    if others := [result for result in results if result.status != PASSED]:
        lines += ["### Not passed", "", "| part | status | reason |", "| --- | --- | --- |"]
        lines += [f"| {one.name} | {one.status} | {spell(one.reason)} |" for one in others]
    return "\n".join(lines).rstrip() + "\n"


def run_parts(parts: list[Part], catalog: str, device: str, report: Report, minutes: float) -> bool:
    """Run every part without a result, and return whether all passed or were skipped.

    A new process replaces one in which a part did not pass, because a kernel may hang in it or hold memory.
    """
    end, worker = time.monotonic() + 60 * minutes, None
    try:
        for part in parts:
            if report.is_settled(part):
                continue
            result = Result(part.name, part.table)
            report.add(result)
            if end - time.monotonic() < LEAST_TIME:
                result.reason = NO_TIME
                continue

            def send(row: Row, result: Result = result) -> None:
                result.rows.append(row)
                report.write()

            if worker is None:
                worker = Worker(catalog, device, report.folder / LOG, min(START_LIMIT, end - time.monotonic()))
            start, left = time.monotonic(), max(end - time.monotonic(), LEAST_TIME)
            limit = part.limit * (CPU_PATIENCE if device == "cpu" else 1)
            if worker.is_ready:
                result.status, result.reason = worker.run(part, min(limit, left), send)
            else:
                result.status, result.reason = FAILED, f"its process did not start; {report.folder / LOG} says why"
            result.seconds = round(time.monotonic() - start, 2)
            is_cut_at_start = not worker.is_ready and time.monotonic() >= end
            if is_cut_at_start or (result.status == TOO_SLOW and left < limit):
                result.status, result.reason = NOT_RUN, NO_TIME
            report.write()
            print(f"{result.status:<8} {part.name} ({result.seconds:.1f} s){reason_of(result)}", flush=True)
            if result.status not in (PASSED, SKIPPED):
                worker.close()
                worker = None
    finally:
        if worker is not None:
            worker.close()
        report.write()
    return not any(report.results[part.name].status in (FAILED, TOO_SLOW) for part in parts)


def reason_of(result: Result) -> str:
    return "" if result.reason is None else f": {result.reason}"


def summary(results: Iterable[Result]) -> str:
    """Return how many parts have each status, and each one that failed with its reason."""
    results = list(results)
    statuses = (PASSED, SKIPPED, FAILED, TOO_SLOW, NOT_RUN)
    counts = {status: sum(result.status == status for result in results) for status in statuses}
    lines = [", ".join(f"{count} {status}" for status, count in counts.items() if count)]
    lines += [f"{one.status}: {one.name}{reason_of(one)}" for one in results if one.status in (FAILED, TOO_SLOW)]
    return "\n".join(lines)
