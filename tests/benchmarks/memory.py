"""Resident memory over long jobs: `python -m tests.benchmarks.memory`. It is flat, or the command exits with 1.

A job is a run, a translation or a distillation with a tiny model. The slope is that of a line through the memory after
the first fifth, for a thousand steps: of training, batches that are translated, or parts of a distillation. Of several
processes the one whose memory grows most counts.
"""

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from tests.helpers import PAIRS, ROOT, model_of_pairs
from tests.measuring import make_parser, report
from tests.training.runs import TINY, TWO_PROCESSES, last_of_each, make_arguments, start
from training.report.results import commit, cpu_name

BOUND = 1.0  # MiB in a thousand steps
SECONDS = 0.25  # between two measurements
LINES = 8  # of a batch that is translated, and of a part
STREAM = ["--data.streaming=true", "--data.buffer=200", "--data.max_length=40"]


@dataclass
class Job:
    """A job: how its processes start, and its steps."""

    start: Callable[[Path], Any]
    steps: int


def training_jobs(folder: Path, steps: int) -> dict[str, Job]:
    """Return runs in one process and in two, from files and from a stream, on a thousand pairs."""
    draw = random.Random(0)
    texts = [
        " ".join(draw.choices(["one", "two", "three", "four", "tree", "dog", "house", "sea"], k=5)) for _ in range(1000)
    ]
    (recipe,) = make_arguments(folder, train=texts)
    settings = [f"--training.steps={steps}", "--training.log_steps=50", "--training.evaluation_steps=1000"]

    def job(launcher: tuple[str, ...], more: list[str]) -> Job:
        arguments = [recipe, *last_of_each(*settings, "--training.keep_checkpoints=2", *more)]
        return Job(lambda output: start(arguments, output, launcher=launcher, is_fork=False), steps)

    return {
        f"training, {data}, {processes}": job(launcher, more)
        for processes, launcher in (("one process", ()), ("two processes", TWO_PROCESSES))
        for data, more in (("files", []), ("stream", STREAM))
    }


def text_jobs(folder: Path, steps: int) -> dict[str, Job]:
    """Return a translation and a distillation of `LINES` lines a step."""
    for piece in model_of_pairs():
        piece.save_pretrained(folder / "model")
    sources = (list(PAIRS) * (LINES * steps // len(PAIRS) + 1))[: LINES * steps]
    (folder / "lines").write_text("".join(f"{source}\n" for source in sources))
    rows = [json.dumps({"translation": {"en": source, "de": source}}) for source in sources]
    (folder / "train.jsonl").write_text("\n".join(rows))
    data = {"kind": "json", "path": str(folder), "train": "train.jsonl", "validation": None, "test": None}
    (folder / "own.yaml").write_text(yaml.safe_dump({"name": "own", "data": data} | TINY))
    search = ["--beams=1", f"--window={LINES}"]
    commands = {
        "translation": ["vaswani_transformer.translation", f"--input={folder / 'lines'}", "--output"],
        "distillation": ["training.distill", str(folder / "own.yaml"), "--output_dir"],
    }

    def job(module: str, *arguments: str) -> Job:
        *given, option = arguments
        command = [sys.executable, "-m", module, str(folder / "model"), *given, *search]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return Job(lambda output: subprocess.Popen([*command, f"{option}={output}"], cwd=ROOT, **pipes), steps)

    return {name: job(*command) for name, command in commands.items()}


def resident(process: psutil.Process) -> dict[int, int]:
    """Return the resident bytes of a process and those that it started."""
    sizes = {}
    with suppress(psutil.NoSuchProcess):
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                sizes[each.pid] = each.memory_info().rss
    return sizes


def slope(seconds: list[float], sizes: list[int]) -> float:
    """Return the slope of a line through bytes over seconds, in MiB a second, after the first fifth."""
    first = next(number for number, moment in enumerate(seconds) if moment >= seconds[-1] / 5)
    return float(np.polyfit(seconds[first:], np.array(sizes[first:]) / 2**20, 1)[0])


def measure(job: Job, output: Path) -> dict[str, Any]:
    """Run a job, and return its figures.

    Raises:
        RuntimeError: it fails.
    """
    began, samples = time.monotonic(), {}
    process = job.start(output)
    reader = threading.Thread(target=process.communicate)  # a full pipe would stop the job
    reader.start()
    watched = psutil.Process(process.pid)
    while reader.is_alive():
        for pid, size in resident(watched).items():
            seconds, sizes = samples.setdefault(pid, ([], []))
            seconds.append(time.monotonic() - began)
            sizes.append(size)
        time.sleep(SECONDS)
    seconds = time.monotonic() - began
    if process.returncode:
        raise RuntimeError(f"{output.name}: ends with {process.returncode}")
    long = [sample for sample in samples.values() if sample[0][-1] - sample[0][0] > seconds / 2]
    thousand = 1000 * seconds / job.steps  # seconds
    return {
        "peak_MiB": [round(max(sizes) / 2**20) for _, sizes in long],
        "MiB_per_1000_steps": round(max(slope(*sample) for sample in long) * thousand, 3),
        "steps": job.steps,
        "seconds": round(seconds),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure the jobs, print the figures as JSON, and return 1 if a slope is above the bound."""
    parser = make_parser("tests.benchmarks.memory", __doc__)
    parser.add_argument("--steps", type=int, default=5000, help="of each job (5000)")
    parser.add_argument("--only", default="", metavar="JOB", help="the jobs whose name begins so")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("runs", "texts"):
            (folder / name).mkdir()
        jobs = training_jobs(folder / "runs", options.steps) | text_jobs(folder / "texts", options.steps)
        figures = {name: measure(job, folder / name) for name, job in jobs.items() if name.startswith(options.only)}
    report({"commit": commit(), "cpu": cpu_name(), "jobs": figures})
    return int(any(each["MiB_per_1000_steps"] > BOUND for each in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
