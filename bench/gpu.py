"""Check an accelerator against the CPU, then measure its speed, in one command that needs no extra.

`python -m bench.gpu --minutes=9 --out=gpu-results` runs every part of `bench.gpu_parts` in a separate process, which
ends at the part's time limit, so that a kernel that hangs does not cost the other results. Rows are printed and
written to `results.json` and `results.md` as they come; the same command with the same `--out` continues with the
parts that had no time. A part is skipped, with its reason, if memory, a kernel or a package is missing, and fails if a
difference is above its bound; the status is then 1. Without an accelerator, and with `--tiny`, shapes are tiny and
speeds mean nothing.
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
CPU_PATIENCE = 5  # times a part's limit on a CPU, which does other work too
NO_TIME = "the minutes were over; the same command with the same --out continues here"


def perform(part: Part, device: str, is_tiny: bool, log: Path, limit: float, results: Connection) -> None:
    """Run a part in this process, and send its rows, then its status with the reason."""
    os.setsid()  # its group contains it and its children
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
                if "bound" in row and not row["difference"] <= row["bound"]:  # NaN is not
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
        return TOO_SLOW, f"not done after {limit:.0f} s; {log} shows where"
    except EOFError:
        process.join(10)
        return FAILED, f"the process ended with status {process.exitcode}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join(10)


def find_device() -> tuple[str, str]:
    """Return the accelerator and its name, or the CPU; it initializes the driver, so it needs a separate process."""
    found = torch.accelerator.current_accelerator(check_available=True)
    device = "cpu" if found is None else found.type
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
                problem = f"{folder} contains results of {saved['about']}, not of {machine}"
                sys.exit(f"--out: {problem}. Choose an empty folder.")
            self.parts = saved["parts"]

    def tables(self) -> str:
        """Return all rows by table, then the parts that did not pass, with reasons."""
        lines = [", ".join(f"{name} {value}" for name, value in self.machine.items())]
        for name in dict.fromkeys(part.partition(":")[0] for part in self.parts):
            named = {part: result for part, result in self.parts.items() if part.startswith(f"{name}:")}
            rows = [{"part": part.partition(": ")[2]} | row for part, result in named.items() for row in result["rows"]]
            lines += [f"### {name}", table(rows)] if rows else []
        others = {name: result for name, result in self.parts.items() if result["status"] != PASSED}
        rows = [{"part": name, "status": each["status"], "reason": each["reason"]} for name, each in others.items()]
        return "\n\n".join([*lines, "### Not passed", table(rows)] if rows else lines) + "\n"

    def write(self) -> None:
        tree = json.dumps({"about": self.machine, "parts": self.parts}, indent=2)
        (self.folder / RESULTS).write_text(tree + "\n", encoding="utf-8")
        (self.folder / TABLES).write_text(self.tables(), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0 if nothing failed, 1 if a part failed or was too slow."""
    parser = make_parser("gpu", __doc__, {"device": "cpu"})
    parser.add_argument("--minutes", type=float, default=9.0, help="the time of the whole command (9)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results; continues there")
    parser.add_argument("--device", help="cuda, cpu, ...; the accelerator where there is one")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of parts' names, such as 'train*'")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    chosen = [part for part in all_parts() if fnmatch.fnmatch(part.name, options.only)]
    if not chosen:
        names = ", ".join(part.name for part in all_parts())
        parser.error(f"--only: matches none of the parts; got {options.only}, expected a pattern of {names}.")
    with ProcessPoolExecutor(1, FORKS) as process:
        found, name = process.submit(find_device).result(120)
    device = options.device or found
    results = Results(options.out, about() | {"device": name if device == found else device})
    for part in chosen:
        if results.parts.get(part.name, {}).get("status", NOT_RUN) != NOT_RUN:
            continue
        result: Row = {"status": NOT_RUN, "reason": NO_TIME, "rows": []}
        results.parts[part.name] = result
        full = part.limit * (CPU_PATIENCE if device == "cpu" else 1)
        limit = min(full, end - time.monotonic())
        began = time.monotonic()
        if limit > 1:

            def keep(row: Row, result: Row = result) -> None:
                result["rows"].append(row)
                results.write()

            status, reason = run_part(part, device, device == "cpu", options.out / LOG, limit, keep)
            if (status, limit < full) != (TOO_SLOW, True):
                result |= {"status": status, "reason": reason}
            print(f"{result['status']:<8} {part.name} ({time.monotonic() - began:.0f} s) {reason}", flush=True)
        results.write()
    print(f"\n{results.tables()}\nThese tables are in {options.out / TABLES}.")
    return int(any(results.parts[part.name]["status"] in (FAILED, TOO_SLOW) for part in chosen))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the process of a part too
    sys.exit(main())
