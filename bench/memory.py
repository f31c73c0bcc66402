"""Resident memory over long jobs: `python -m bench.memory`. It is flat, or the command exits with 1.

A job is a run, a translation or a distillation with a tiny model. The slope is that of a line through the memory after
the first fifth, for a thousand steps: of training, or windows of lines that are translated or distilled. Of several
processes the one whose memory grows most counts.

With `--recipes` the jobs are the shipped recipes, on invented texts with one word for each entry of the vocabulary,
and only their peaks are measured: of a few steps, the evaluation, the test and the final files.
"""

import json
import random
import string
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import psutil
import yaml

from bench.kills import LAUNCH, SMALL, WORDS, write_recipe
from bench.measuring import ROOT, Row, make_parser, report, resident_mib
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
)

BOUND = 1.0  # MiB in a thousand steps
SECONDS = 0.25  # between two measurements
LINES = 200  # of a window that is translated or distilled
ENGINE = "engine"  # end of the name of the recipe that needs the model of TEACHER
TEACHER = "multi30k-teacher"
TOKENS = 100_000  # that a shipped recipe learns from


@dataclass
class Job:
    """A job: its command, whose last argument the output completes, and its steps."""

    command: list[str]
    steps: int


def small_jobs(folder: Path, steps: int) -> dict[str, Job]:
    """Return runs in one process and in two, and a translation and a distillation of `LINES` lines a step."""
    recipe = write_recipe(folder)
    settings = [f"--training.steps={steps}", "--training.log_steps=50", "--training.evaluation_steps=1000"]
    settings += ["--training.keep_checkpoints=2", "--output_dir="]
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(WORDS, vocab_size=280)
    config = VaswaniTransformerConfig.from_paper("base", **SMALL, vocab_size=len(tokenizer))
    model = str(folder / "model")
    for part in (VaswaniTransformerForConditionalGeneration(config), tokenizer):
        part.save_pretrained(model)
    lines = list(islice(cycle(WORDS), LINES * steps))
    (folder / "lines.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    pairs = (json.dumps({"translation": {"en": line, "de": line}}) for line in lines)
    (folder / "lines.jsonl").write_text("\n".join(pairs), encoding="utf-8")
    search = ["--beams=1", f"--window={LINES}"]
    translate = ["vaswani_transformer.translation", model, f"--input={folder / 'lines.txt'}", *search, "--output="]
    distill = ["training.distill", model, recipe, "--data.train=lines.jsonl", *search, "--output_dir="]
    commands = {
        "training, one process": ["training.train", recipe, *settings],
        "training, two processes": [*LAUNCH, "training.train", recipe, *settings],
        "translation": translate,
        "distillation": distill,
    }
    return {name: Job([sys.executable, "-m", *command], steps) for name, command in commands.items()}


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
                sides |= {name: " ".join(target) for name in ("de", "es", "fr", "reply")}
                pairs.write(json.dumps({"translation": sides}) + "\n")
                trees.write("(TOP " + "".join(f"(S (NN {word}) " for word in source) + ")" * (length + 1) + "\n")


def recipe_jobs(folder: Path) -> dict[str, Job]:
    """Return runs of the shipped recipes; that of ENGINE, after its teacher's, is the last one."""
    write_invented_pairs(folder)
    jobs = {}
    for path in sorted((ROOT / "training/recipes").glob("*.yaml"), key=lambda path: (ENGINE in path.stem, path.stem)):
        recipe = yaml.safe_load(path.read_text())
        data = recipe["data"]
        training = recipe["training"]
        steps = max(3, TOKENS // training["target_tokens"])
        arguments = [str(path), f"--training.steps={steps}"]
        kind = "trees" if data.get("kind") == "trees" else "json"
        arguments += [f"--data.kind={kind}", f"--data.path={folder}"]
        arguments += [f"--data.{split}={split}.{kind}" for split in ("train", "validation", "test")]
        if "subset" in data:
            arguments.append("--data.subset=null")
        if "decoder_steps" in training:
            arguments.append(f"--training.decoder_steps={steps // 2}")
        if ENGINE in path.stem:
            teacher = folder / TEACHER
            arguments += [f"--training.energy_from={teacher}", f"--tokenizer.path={teacher}"]
        jobs[path.stem] = Job([sys.executable, "-m", "training.train", *arguments, "--output_dir="], steps)
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


def measure(name: str, job: Job, folder: Path) -> Row:
    """Run a job, and return its figures.

    Raises:
        RuntimeError: it fails.
    """
    began = time.monotonic()
    samples = {}
    peaks = {}
    log = folder / f"{name}.log"
    *command, last = job.command
    with log.open("wb") as file:
        process = subprocess.Popen([*command, f"{last}{folder / name}"], cwd=ROOT, stdout=file, stderr=file)
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        for pid, size in resident(watched).items():
            seconds, sizes = samples.setdefault(pid, ([], []))
            seconds.append(time.monotonic() - began)
            sizes.append(size["now"])
            peaks[pid] = size["peak"]
        time.sleep(SECONDS)
    seconds = time.monotonic() - began
    if process.returncode:
        raise RuntimeError(f"{name}: ends with {process.returncode}: {log.read_text(encoding='utf-8')[-600:]}")
    long = {pid: sample for pid, sample in samples.items() if sample[0][-1] - sample[0][0] > seconds / 2}
    row: Row = {"job": name, "steps": job.steps, "peak MiB": round(max(peaks[pid] for pid in long))}
    if job.steps >= 1000:  # fewer say nothing of it
        row["MiB more in 1,000 steps"] = max(slope(*sample) for sample in long.values()) * 1000 * seconds / job.steps
    return row


def main(arguments: list[str] | None = None) -> int:
    """Measure the jobs, print the figures, and return 1 if a slope is above the bound."""
    parser = make_parser("memory", __doc__, {"steps": 20, "jobs": ["translation"]})
    parser.add_argument("--steps", type=int, default=5000, help="of a job (5000)")
    parser.add_argument("--jobs", nargs="+", help="the names of some (all)")
    parser.add_argument("--recipes", action="store_true", help="measure the peaks of the shipped recipes instead")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = recipe_jobs(folder) if options.recipes else small_jobs(folder, options.steps)
        for job in options.jobs or jobs:
            rows.append(measure(job, jobs[job], folder))
            print(rows[-1], file=sys.stderr, flush=True)
    report(rows, options)
    return int(not options.recipes and any(row.get("MiB more in 1,000 steps", 0) > BOUND for row in rows))


if __name__ == "__main__":
    sys.exit(main())
