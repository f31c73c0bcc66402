"""Resident memory over long jobs: `python -m bench.memory`, which exits with 1 if the memory of a job grows.

A job is a training run, a translation or a distillation with a tiny model. Its growth is the slope of a line through
the memory after the first fifth of the job, in MiB for a thousand steps; a step of a translation or a distillation is a
window of lines. If a job has several processes, the one whose memory grows most counts.

With `--recipes` the jobs are the shipped recipes, on invented texts with one word for each entry of the vocabulary.
Each run takes a few steps, evaluates, tests and writes its final files, and only its peak is measured.
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
LINES = 200  # in a window that is translated or distilled
ENGINE = "engine"  # in the name of the recipe that needs the model of TEACHER
TEACHER = "multi30k-teacher"
TOKENS = 100_000  # that the run of a shipped recipe learns from


@dataclass
class Job:
    """A job: its command, whose last argument lacks the path of the output, and its steps."""

    command: list[str]
    steps: int


def small_jobs(folder: Path, steps: int) -> dict[str, Job]:
    """Return runs in one process and in two, and a translation and a distillation of `LINES` lines a step."""
    # A model that has learned nothing, and lines for it.
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(WORDS, vocab_size=280)
    config = VaswaniTransformerConfig.from_paper("base", **SMALL, vocab_size=len(tokenizer))
    model = str(folder / "model")
    VaswaniTransformerForConditionalGeneration(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    lines = list(islice(cycle(WORDS), LINES * steps))
    (folder / "lines.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    pairs = (json.dumps({"translation": {"en": line, "de": line}}) for line in lines)
    (folder / "lines.jsonl").write_text("\n".join(pairs), encoding="utf-8")

    # The commands.
    recipe = write_recipe(folder)
    fields = [f"--training.steps={steps}", "--training.log_steps=50", "--training.evaluation_steps=1000"]
    fields += ["--training.keep_checkpoints=2", "--output_dir="]
    search = ["--beams=1", f"--window={LINES}"]
    translate = ["vaswani_transformer.translation", model, f"--input={folder / 'lines.txt'}", *search, "--output="]
    distill = ["training.distill", model, recipe, "--data.train=lines.jsonl", *search, "--output_dir="]
    commands = {
        "training, one process": ["training.train", recipe, *fields],
        "training, two processes": [*LAUNCH, "training.train", recipe, *fields],
        "translation": translate,
        "distillation": distill,
    }
    return {name: Job([sys.executable, "-m", *command], steps) for name, command in commands.items()}


def write_invented_pairs(folder: Path) -> None:
    """Write pairs in the languages of the shipped recipes, and trees; sentences have 5 to 60 words, mostly about 15."""
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9))) for _ in range(40_000)]
    for split, count in (("train", 20_000), ("validation", 8), ("test", 8)):
        with (folder / f"{split}.json").open("w") as pairs, (folder / f"{split}.trees").open("w") as trees:
            for _ in range(count):
                length = min(max(round(draw.lognormvariate(2.7, 0.5)), 5), 60)
                source = draw.choices(words, k=length)
                target = draw.choices(words, k=length)
                texts = dict.fromkeys(("en", "prompt"), " ".join(source))
                texts.update(dict.fromkeys(("de", "es", "fr", "reply"), " ".join(target)))
                pairs.write(json.dumps({"translation": texts}) + "\n")
                trees.write("(TOP " + "".join(f"(S (NN {word}) " for word in source) + ")" * (length + 1) + "\n")


def recipe_jobs(folder: Path) -> dict[str, Job]:
    """Return runs of the shipped recipes; the run of ENGINE is the last one, since it needs its teacher's model."""
    write_invented_pairs(folder)
    paths = (ROOT / "training/recipes").glob("*.yaml")
    jobs = {}
    for path in sorted(paths, key=lambda path: (ENGINE in path.stem, path.stem)):
        recipe = yaml.safe_load(path.read_text())
        data = recipe["data"]
        training = recipe["training"]
        steps = max(3, TOKENS // training["target_tokens"])
        arguments = [str(path), f"--training.steps={steps}"]

        # The invented files in place of the recipe's.
        kind = "trees" if data.get("kind") == "trees" else "json"
        arguments += [f"--data.kind={kind}", f"--data.path={folder}"]
        arguments += [f"--data.{split}={split}.{kind}" for split in ("train", "validation", "test")]
        if "subset" in data:
            arguments.append("--data.subset=null")

        # What depends on the number of steps, or on a different model.
        if "decoder_steps" in training:
            arguments.append(f"--training.decoder_steps={steps // 2}")
        if ENGINE in path.stem:
            teacher = folder / TEACHER
            arguments += [f"--training.energy_from={teacher}", f"--tokenizer.path={teacher}"]
        jobs[path.stem] = Job([sys.executable, "-m", "training.train", *arguments, "--output_dir="], steps)
    return jobs


def resident(process: psutil.Process) -> dict[int, dict[str, float]]:
    """Return the resident memory of a process and of those that it started, by their ids."""
    pids: list[int] = []
    with suppress(psutil.NoSuchProcess):
        pids = [process.pid, *(child.pid for child in process.children(recursive=True))]
    return {pid: memory for pid in pids if (memory := resident_mib(pid))}


def slope(seconds: list[float], sizes: list[float]) -> float:
    """Return the slope of a line through MiB over seconds, after the first fifth."""
    first = next(number for number, second in enumerate(seconds) if second >= seconds[-1] / 5)
    return float(np.polyfit(seconds[first:], sizes[first:], 1)[0])


def measure(name: str, job: Job, folder: Path) -> Row:
    """Run a job, and return its figures.

    Raises:
        RuntimeError: the job fails.
    """
    # Watch the job's processes until it ends.
    start = time.monotonic()
    samples: dict[int, tuple[list[float], list[float]]] = {}  # seconds and MiB of each process
    peaks: dict[int, float] = {}
    log = folder / f"{name}.log"
    *command, last = job.command
    with log.open("wb") as file:
        process = subprocess.Popen([*command, f"{last}{folder / name}"], cwd=ROOT, stdout=file, stderr=file)
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        for pid, memory in resident(watched).items():
            moments, sizes = samples.setdefault(pid, ([], []))
            moments.append(time.monotonic() - start)
            sizes.append(memory["now"])
            peaks[pid] = memory["peak"]
        time.sleep(SECONDS)
    seconds = time.monotonic() - start
    if process.returncode:
        end_of_log = log.read_text(encoding="utf-8")[-600:]
        raise RuntimeError(f"{name}: failed with status {process.returncode}; its log ends with: {end_of_log}")

    # Processes that lived for most of the job count: others are short helpers.
    lasting = [pid for pid, (moments, _) in samples.items() if moments[-1] - moments[0] > seconds / 2]
    row: Row = {"job": name, "steps": job.steps, "peak MiB": round(max(peaks[pid] for pid in lasting))}
    if job.steps >= 1000:  # fewer steps say nothing about growth
        growth = max(slope(*samples[pid]) for pid in lasting)  # MiB a second
        row["MiB more in 1,000 steps"] = growth * 1000 * seconds / job.steps
    return row


def main(arguments: list[str] | None = None) -> int:
    """Measure the jobs, print the figures, and return 1 if a slope is above the bound."""
    parser = make_parser("memory", __doc__, {"steps": 20, "jobs": ["translation"]})
    parser.add_argument("--steps", type=int, default=5000, help="steps of each job (5000)")
    parser.add_argument("--jobs", nargs="+", metavar="JOB", help="names of the jobs to measure (all)")
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
    grows = any(row.get("MiB more in 1,000 steps", 0) > BOUND for row in rows)
    return int(grows and not options.recipes)


if __name__ == "__main__":
    sys.exit(main())
