"""Resident memory over long jobs: `python -m tests.benchmarks.memory`. It is flat, or the command exits with 1.

A job is a run, a translation or a distillation with a tiny model. The slope is that of a line through the memory after
the first fifth, for a thousand steps: of training, or windows of lines that are translated or distilled. Of several
processes the one whose memory grows most counts.

With `--recipes` the jobs are the shipped recipes, on invented texts with as many words as the vocabulary has entries,
and only their peaks are measured: of a few steps, the evaluation, the test and the final files.
"""

import json
import random
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from tests.benchmarks.text_pace import write_inputs
from tests.helpers import PAIRS, ROOT, model_of_pairs, save
from tests.measuring import add_tiny, make_parser, report, resident_mib
from tests.training.runs import SPLITS, TINY, TWO_PROCESSES, last_of_each, make_arguments, start
from training.report.results import commit, cpu_name

BOUND = 1.0  # MiB in a thousand steps
SECONDS = 0.25  # between two measurements
LINES = 200  # of a window that is translated, and of a part
ENGINE, TEACHER = "engine", "multi30k-teacher"  # recipes: the first one's name ends so, and needs the second's model
TOKENS = 100_000  # that a shipped recipe learns from
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
    save(folder / "model", *model_of_pairs())
    write_inputs(folder, islice(cycle(PAIRS), LINES * steps))
    data = {"kind": "json", "path": str(folder), "train": "train.jsonl", "test": None}
    (folder / "own.yaml").write_text(yaml.safe_dump({"name": "own", "data": data} | TINY))
    search = ["--beams=1", f"--window={LINES}"]
    commands = {
        "translation": ["vaswani_transformer.translation", f"--input={folder / 'lines.txt'}", "--output"],
        "distillation": ["training.distill", str(folder / "own.yaml"), "--output_dir"],
    }

    def job(module: str, *arguments: str) -> Job:
        *given, option = arguments
        command = [sys.executable, "-m", module, str(folder / "model"), *given, *search]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return Job(lambda output: subprocess.Popen([*command, f"{option}={output}"], cwd=ROOT, **pipes), steps)

    return {name: job(*command) for name, command in commands.items()}


def write_invented_pairs(folder: Path) -> None:
    """Write pairs with the sides of every shipped recipe, and trees, of sentences of 5 to 60 words, most about 15."""
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9))) for _ in range(40_000)]
    for split, count in (("train", 20_000), ("validation", 8), ("test", 8)):
        with (folder / f"{split}.json").open("w") as pairs, (folder / f"{split}.trees").open("w") as trees:
            for _ in range(count):
                length = min(max(round(draw.lognormvariate(2.7, 0.5)), 5), 60)
                source, target = (draw.choices(words, k=length) for _ in range(2))
                sides = {name: " ".join(source) for name in ("en", "prompt")}
                sides |= {name: " ".join(target) for name in ("de", "fr", "reply")}
                pairs.write(json.dumps({"translation": sides}) + "\n")
                trees.write("(TOP " + "".join(f"(S (NN {word}) " for word in source) + ")" * (length + 1) + "\n")


def recipe_jobs(folder: Path) -> dict[str, Job]:
    """Return runs of the shipped recipes; that of ENGINE, after its teacher's, is the last one."""
    write_invented_pairs(folder)
    jobs = {}
    for path in sorted((ROOT / "training/recipes").glob("*.yaml"), key=lambda path: (ENGINE in path.stem, path.stem)):
        recipe = yaml.safe_load(path.read_text())
        data, training = recipe["data"], recipe["training"]
        steps = max(3, TOKENS // training["target_tokens"])
        arguments = [str(path), f"--training.steps={steps}"]
        if data["kind"] != "grammar":
            kind = "trees" if data["kind"] == "trees" else "json"
            arguments += [f"--data.kind={kind}", f"--data.path={folder}"]
            arguments += [f"--data.{split}={split}.{kind}" for split in SPLITS]
        if "subset" in data:
            arguments.append("--data.subset=null")
        if "decoder_steps" in training:
            arguments.append(f"--training.decoder_steps={steps // 2}")
        if ENGINE in path.stem:
            teacher = folder.parent / TEACHER
            arguments += [f"--training.energy_from={teacher}", f"--tokenizer.path={teacher}"]

        def run(output: Path, arguments: list[str] = arguments) -> Any:
            return start(arguments, output, is_fork=False)

        jobs[path.stem] = Job(run, steps)
    return jobs


def resident(process: psutil.Process) -> dict[int, dict[str, float]]:
    """Return the resident memory of a process and those that it started."""
    pids: list[int] = []
    with suppress(psutil.NoSuchProcess):
        pids = [process.pid, *(each.pid for each in process.children(recursive=True))]
    return {pid: size for pid in pids if (size := resident_mib(pid))}


def slope(seconds: list[float], sizes: list[float]) -> float:
    """Return the slope of a line through MiB over seconds, after the first fifth."""
    first = next(number for number, moment in enumerate(seconds) if moment >= seconds[-1] / 5)
    return float(np.polyfit(seconds[first:], sizes[first:], 1)[0])


def measure(job: Job, output: Path) -> dict[str, Any]:
    """Run a job, and return its figures.

    Raises:
        RuntimeError: it fails.
    """
    began, samples, peaks = time.monotonic(), {}, {}
    process = job.start(output)
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.communicate()[1]))  # a full pipe would stop the job
    reader.start()
    watched = psutil.Process(process.pid)
    while reader.is_alive():
        for pid, size in resident(watched).items():
            seconds, sizes = samples.setdefault(pid, ([], []))
            seconds.append(time.monotonic() - began)
            sizes.append(size["now_MiB"])
            peaks[pid] = size["peak_MiB"]
        time.sleep(SECONDS)
    seconds = time.monotonic() - began
    if process.returncode:
        raise RuntimeError(f"{output.name}: ends with {process.returncode}: {''.join(errors)[-600:]}")
    long = {pid: sample for pid, sample in samples.items() if sample[0][-1] - sample[0][0] > seconds / 2}
    thousand = 1000 * seconds / job.steps  # seconds
    return {
        "peak_MiB": [round(peaks[pid]) for pid in long],
        "MiB_per_1000_steps": round(max(slope(*sample) for sample in long.values()) * thousand, 3),
        "steps": job.steps,
        "seconds": round(seconds),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure the jobs, print the figures as JSON, and return 1 if a slope is above the bound."""
    parser = make_parser("tests.benchmarks.memory", __doc__)
    parser.add_argument("--steps", type=int, default=5000, help="of a job (5000)")
    parser.add_argument("--jobs", nargs="+", help="the names of some (all)")
    parser.add_argument("--recipes", action="store_true", help="measure the peaks of the shipped recipes instead")
    add_tiny(parser, steps=20, jobs=["training, files, one process", "translation"])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("runs", "texts", "recipes"):
            (folder / name).mkdir()
        if options.recipes:
            jobs = recipe_jobs(folder / "recipes")
        else:
            jobs = training_jobs(folder / "runs", options.steps) | text_jobs(folder / "texts", options.steps)
        figures = {}
        for name in options.jobs or jobs:
            figures[name] = measure(jobs[name], folder / name)
            if options.recipes or options.steps < 1000:
                del figures[name]["MiB_per_1000_steps"]  # so few steps say nothing of it
            print(name, figures[name], file=sys.stderr, flush=True)
    report({"commit": commit(), "cpu": cpu_name(), "jobs": figures})
    return int(any(each.get("MiB_per_1000_steps", 0) > BOUND for each in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
