"""Cases in forked processes, so that a crash, a hang or a large allocation costs one case and is reported."""

import argparse
import json
import logging
import mmap
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.campaign import inputs

SECONDS = 60.0  # a case that takes longer hangs
MEMORY = 4 << 30  # bytes that a case may take


def describe(error: BaseException) -> str:
    """Return an error with the places that it passed."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:300]!r} at {places}"


def work(seed: int, name: str, numbers: range, clock: mmap.mmap, results: Path) -> None:
    """Run cases in this process, and write the outcome of each as a line of `results`."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    folder = results.parent / "case"
    with results.open("a", encoding="utf-8") as file:
        for number in numbers:
            clock[:] = struct.pack("qd", number, time.monotonic())
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            started = time.monotonic()
            try:
                outcome, problem = inputs.run_case(seed, name, number, folder), ""
            except BaseException as error:  # a panic of Rust is no Exception
                outcome, problem = "failed", describe(error)
            file.write(f"{json.dumps([number, outcome, problem, time.monotonic() - started])}\n")
            file.flush()


def run_chunk(seed: int, name: str, numbers: range, folder: Path) -> list[list[Any]]:
    """Return number, outcome, problem and seconds of each case, also of those that end or hang their process."""
    results = folder / "results"
    results.unlink(missing_ok=True)
    clock = mmap.mmap(-1, 16)
    rest = numbers
    lost: list[list[Any]] = []
    while len(rest):
        clock[:] = struct.pack("qd", rest[0], time.monotonic())
        if not (child := os.fork()):
            try:
                work(seed, name, rest, clock, results)
            finally:
                os._exit(0)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
            if time.monotonic() - struct.unpack("qd", clock[:])[1] > SECONDS:
                os.kill(child, signal.SIGKILL)
        last = struct.unpack("qd", clock[:])[0]
        done = {json.loads(line)[0] for line in results.open()} if results.exists() else set()
        if last not in done:
            seconds = time.monotonic() - struct.unpack("qd", clock[:])[1]
            problem = f"hangs for {SECONDS:.0f} seconds" if seconds > SECONDS else "ends its process"
            lost.append([last, "failed", problem, seconds])
        rest = range(last + 1, numbers.stop)
    return [json.loads(line) for line in results.open()] + lost


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the cases of the options, and return their log."""
    torch.set_num_threads(1)
    inputs.prepare()
    only, _, number = options.only.partition("/")
    chunks = [(name, numbers) for name, numbers in inputs.cases(options.count) if only in ("", name)]
    if number:
        chunks = [(only, range(int(number), int(number) + 1))]
    counts: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    failures, done, end = [], 0, time.monotonic() + 3600 * options.hours
    total = sum(len(numbers) for _, numbers in chunks)
    with tempfile.TemporaryDirectory() as folder:
        for name, numbers in chunks:
            if time.monotonic() > end:
                break
            for case, outcome, problem, seconds in run_chunk(options.seed, name, numbers, Path(folder)):
                counts[f"{name}: {outcome}"] += 1
                slowest[name] = max(slowest.get(name, 0), round(seconds, 3))
                if problem:
                    failures.append({"case": f"{name}/{case}", "error": problem})
            done += len(numbers)
            print(f"{done:,d} of {total:,d} cases, {len(failures)} failed ({name})", file=sys.stderr, flush=True)
    return {"cases": done, "outcomes": dict(counts), "slowest_seconds": slowest, "failures": failures}
