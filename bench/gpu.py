"""Check an accelerator against the CPU, then measure its speed, in one command that needs no extra.

`python -m bench.gpu --minutes=9 --out=gpu-results` runs every part of `bench.gpu_parts` in a separate process, which is
ended at the part's time limit, so that a kernel that hangs does not cost the other results. The rows of each part are
written to `results.json` and `results.md` as they come. The same command with the same `--out` continues with the parts
that had no time. A part is skipped, with its reason, if memory, a kernel or a package is missing. It fails if a
difference is above its bound, and then the command exits with 1. Without an accelerator, and with `--tiny`, shapes are
tiny and speeds mean nothing.
"""

import fnmatch
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from faulthandler import dump_traceback_later
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA, once initialized, cannot be used in a fork

import torch
from transformers.utils import logging

from bench.gpu_models import Setting, SkipPart
from bench.gpu_parts import Part, all_parts
from bench.measuring import Row, about, make_parser, table

FORKS = multiprocessing.get_context("fork")  # what is imported is imported once
RESULTS = "results.json"
TABLES = "results.md"
LOG = "log.txt"
PASSED = "passed"
FAILED = "failed"
TOO_SLOW = "too slow"
SKIPPED = "skipped"
NOT_RUN = "not run"
CPU_PATIENCE = 5  # a part's limit is this number of times longer on a CPU, which does other work too
NO_TIME = "the minutes were over; run the same command again to continue here"


def perform(part: Part, device: str, is_tiny: bool, log: Path, limit: float, results: Connection) -> None:
    """Run a part in this process, and send its rows, then its status with the reason."""
    # A separate process group, which can be killed with its children, and a log that says where it hung.
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    dump_traceback_later(max(1.0, limit - 1), file=2)
    logging.set_verbosity_error()

    torch.manual_seed(0)
    status = PASSED
    reasons = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for row in part.run(Setting(torch.device(device), is_tiny, Path(folder))):
                results.send(row)
                if "bound" in row and not row["difference"] <= row["bound"]:  # true of NaN too
                    status = FAILED
                    reasons.append(f"{row['compared']} is off by {row['difference']:.3g}")
    except (SkipPart, torch.OutOfMemoryError) as error:
        status = SKIPPED
        reasons = [str(error)[:300]]
    except Exception as error:
        traceback.print_exc()
        status = FAILED
        reasons = [f"{type(error).__name__}: {str(error)[:300]}"]
    results.send((status, "; ".join(reasons)))


def run_part(part: Part, device: str, is_tiny: bool, log: Path, limit: float, keep: Callable[[Row], None]) -> Any:
    """Run a part in a new process; return its status and the reason."""
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=perform, args=(part, device, is_tiny, log, limit, sender))
    process.start()
    sender.close()
    end = time.monotonic() + limit
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            event = receiver.recv()
            if isinstance(event, tuple):
                return event
            keep(event)
        return TOO_SLOW, f"not finished after {limit:.0f} s; {log} shows where it was"
    except EOFError:
        process.join(10)
        return FAILED, f"the process ended with status {process.exitcode}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join(10)


def find_device() -> tuple[str, str]:
    """Return the accelerator and its name, or the CPU. It initializes the driver, so it needs a separate process."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "cpu" if accelerator is None else accelerator.type
    return device, torch.cuda.get_device_name() if device == "cuda" else device


class Results:
    """The results of the parts in a folder, written after every row."""

    def __init__(self, folder: Path, machine: Row) -> None:
        self.folder = folder
        self.machine = machine
        self.parts: dict[str, Row] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / RESULTS).exists():
            saved = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
            if saved["about"] != machine:
                sys.exit(
                    f"--out: {folder} contains results of a different machine or version; got {machine}, expected "
                    f"{saved['about']}. Choose a new folder."
                )
            self.parts = saved["parts"]

    def tables(self) -> str:
        """Return all rows by table, then the parts that did not pass, with reasons."""
        blocks = [", ".join(f"{name} {value}" for name, value in self.machine.items())]

        # The words of a part's name before the colon are its table.
        tables: dict[str, list[Row]] = {}
        for part, result in self.parts.items():
            title, _, name = part.partition(": ")
            tables.setdefault(title, []).extend({"part": name, **row} for row in result["rows"])
        for title, rows in tables.items():
            if rows:
                blocks += [f"### {title}", table(rows)]

        not_passed: list[Row] = []
        for part, result in self.parts.items():
            if result["status"] != PASSED:
                not_passed.append({"part": part, "status": result["status"], "reason": result["reason"]})
        if not_passed:
            blocks += ["### Not passed", table(not_passed)]
        return "\n\n".join(blocks) + "\n"

    def write(self) -> None:
        tree = json.dumps({"about": self.machine, "parts": self.parts}, indent=2)
        (self.folder / RESULTS).write_text(tree + "\n", encoding="utf-8")
        (self.folder / TABLES).write_text(self.tables(), encoding="utf-8")


def take(part: Part, device: str, results: Results, end: float) -> None:
    """Run a part, unless the time is over at `end`, and keep its result."""
    result: Row = {"status": NOT_RUN, "reason": NO_TIME, "rows": []}
    results.parts[part.name] = result
    full_limit = part.limit * (CPU_PATIENCE if device == "cpu" else 1)
    limit = min(full_limit, end - time.monotonic())

    def keep(row: Row) -> None:
        result["rows"].append(row)
        results.write()

    if limit > 1:
        start = time.monotonic()
        status, reason = run_part(part, device, device == "cpu", results.folder / LOG, limit, keep)
        was_cut_short = status == TOO_SLOW and limit < full_limit
        if not was_cut_short:  # otherwise the part has not run, and the next command runs it
            result["status"] = status
            result["reason"] = reason
        print(f"{result['status']:<8} {part.name} ({time.monotonic() - start:.0f} s) {reason}", flush=True)
    results.write()


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0 if nothing failed, 1 if a part failed or was too slow."""
    parser = make_parser("gpu", __doc__, {"device": "cpu"})
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes for the whole command (9)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results (gpu-results)")
    parser.add_argument("--device", help="cuda, cpu, ... (the accelerator, or the CPU without one)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="run only parts with such names: 'train*' (all)")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    chosen = [part for part in all_parts() if fnmatch.fnmatch(part.name, options.only)]
    if not chosen:
        names = ", ".join(part.name for part in all_parts())
        parser.error(f"--only: matches none of the parts; got {options.only}, expected a pattern of {names}.")

    # The device, and the results that the folder has.
    with ProcessPoolExecutor(1, FORKS) as process:
        accelerator, name = process.submit(find_device).result(120)
    device = options.device or accelerator
    results = Results(options.out, {**about(), "device": name if device == accelerator else device})

    for part in chosen:
        if results.parts.get(part.name, {}).get("status", NOT_RUN) == NOT_RUN:
            take(part, device, results, end)
    print(f"\n{results.tables()}\nThese tables are in {options.out / TABLES}.")
    return int(any(results.parts[part.name]["status"] in (FAILED, TOO_SLOW) for part in chosen))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the process of a part too
    sys.exit(main())
