"""`python -m tests.gpu`: correctness on an accelerator against the CPU, then speed; see docs/gpu.md."""

import fnmatch
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.gpu.parts import parts
from tests.gpu.runner import TABLES, Report, run_parts, summary
from tests.helpers import ROOT
from tests.measuring import make_parser
from vaswani_transformer.support.errors import one_line


def commit() -> str:
    """Return the commit of the checkout, with "-dirty" if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:  # there is no git
        described = ""
    return described or "unknown"


def about(device: str) -> dict[str, Any]:
    """Return the device, commit and versions that results belong to.

    Raises:
        ValueError: the device cannot be used.
    """
    try:
        index = torch.device(device)
        if index.type != "cpu" and not torch.get_device_module(index).is_available():
            raise RuntimeError("torch finds none")
        name = torch.cuda.get_device_name(index) if index.type == "cuda" else platform.processor() or platform.machine()
    except (RuntimeError, AssertionError) as error:
        problem = one_line(error).rstrip(".")
        raise ValueError(
            f"--device: {device!r} cannot be used; got: {problem}. Give cpu or a device of torch."
        ) from error
    return {
        "device": f"{device} ({name})",
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def default_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0 if nothing failed, 1 if a part failed or was too slow, 2 if it cannot run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser("tests.gpu", __doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="the time of the whole command (9)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results; continues there")
    parser.add_argument("--device", default=None, help="cuda, cpu, ...; the accelerator where there is one")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of parts' names, such as 'speed*'")
    options = parser.parse_args(arguments)
    device = options.device or default_device()
    chosen = [part for part in parts() if fnmatch.fnmatch(part.name, options.only)]
    if not chosen:
        names = ", ".join(part.name for part in parts())
        print(f"--only: no part has such a name; got {options.only!r}. The parts are {names}.", file=sys.stderr)
        return 2
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        report = Report(options.out, about(device), ["python", "-m", "tests.gpu", *arguments])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    is_good = run_parts(chosen, "tests.gpu.parts", device, report, options.minutes)
    if report.is_written:
        print(f"\n{summary(report.results.values())}\nThe tables are in {options.out / TABLES}.")
        return 0 if is_good else 1
    print(f"\n{report.tables()}\n{summary(report.results.values())}")
    print(f"--out: {options.out} did not take the last results, which stand above. Free some space.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the process of the parts too
    sys.exit(main())
