"""The comparison of the non-autoregressive models by one command: `python -m bench.family FOLDER --output_dir=DIR`.

FOLDER contains `train.jsonl.gz`, `validation.jsonl.gz` and `test.jsonl.gz`, as `python -m training.prepare
multi30k-tokenized --output=FOLDER` writes them. The command trains a teacher, translates the training sources with it,
trains each model on these translations, and measures all of them in turn. It prints the command of each step and the
minutes that it took, and at the end a table and the sum of the minutes. If it is interrupted, run the same command
again: it skips the finished steps, and the interrupted step resumes where it stopped.

`--tiny` tries the command in minutes, with two training steps for each model; the scores then mean nothing. `--steps`
and `--minutes` limit the training of each model.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from jsonargparse.typing import PositiveFloat

from bench.measuring import ROOT, Row, make_parser, report
from vaswani_transformer.support.command_line import positive_argument
from vaswani_transformer.support.errors import UserError, exit_on_user_error
from vaswani_transformer.support.files import read_json, write_atomically

DATA_FILES = ("train.jsonl.gz", "validation.jsonl.gz", "test.jsonl.gz")  # those that the recipes name
RECIPES = Path(os.path.relpath(ROOT / "training" / "recipes"))
FAST = ["--training.learning_rate_scale=0.7", "--model.dropout=0.1"]
GLANCING = "--training.glancing=[0.5, 0.3]"
DISCRETE = ["--model.latent=discrete", "--model.label_smoothing=0"]
WITHOUT_LATENT = ["--model.latent=discrete", "--model.hint=false"]
MODELS: dict[str, tuple[str, list[str]]] = {  # the recipe of each model, and what its run changes
    "student": ("multi30k-student", ["--training.steps=14400"]),
    "nat": ("multi30k-nat", [*FAST, "--training.steps=11200"]),
    "glat": ("multi30k-glat", [*FAST, "--training.steps=9100"]),
    "glat-by-layer": ("multi30k-iterative-vae", [*WITHOUT_LATENT, GLANCING, "--training.steps=4650"]),
    "cmlm": ("multi30k-cmlm", ["--training.steps=14200"]),
    "iterative-vae-revealed": ("multi30k-iterative-vae", []),
    "iterative-vae-discrete": ("multi30k-iterative-vae", [*DISCRETE, "--training.steps=3070"]),
    "ctc": ("multi30k-ctc", ["--training.glancing=null", "--training.steps=4670"]),
    "ctc-glat": ("multi30k-ctc", []),
    "flowseq": ("multi30k-flowseq", []),
}
"""They make the steps that took 40 minutes of one core with AMX (FlowSeq: without)."""
COLUMNS = (  # of `bench.decode_family` that the table repeats
    "model",
    "passes",
    "BLEU",
    "95% interval",
    "BP",
    "BLEU without repeats",
    "repeats",
    "ms a sentence, median",
    "sentences a second, batch 32",
)


@dataclass(frozen=True)
class Step:
    """A step of the comparison: its name, arguments of `python`, and the file that a training writes last."""

    name: str
    arguments: list[str]
    last_file: Path | None = None

    @property
    def command(self) -> str:
        return shlex.join(["python", *self.arguments])


def steps_of(options: argparse.Namespace) -> Iterator[Step]:
    """Yield the steps in order: the teacher, its translations, the models, and the measurement of all."""
    data = f"--data.path={options.data}"
    runs = options.output_dir
    teacher = runs / "teacher"
    distilled = runs / "distilled"
    seed = f"--seed={options.seed}"
    limits = training_limits(options)

    # The teacher, and its translations of the training sources.
    recipe_of_teacher = [str(RECIPES / "multi30k-teacher.yaml"), data]
    fields = [seed, *limits]
    if options.steps is not None:  # a teacher that has hardly trained never ends a translation
        fields.append("--decoding.max_source_relative_length=0")
    yield training_step("teacher", [*recipe_of_teacher, *fields], runs)
    search = ["--length_penalty=1.4", f"--output_dir={distilled}"]
    yield Step("distilled", ["-m", "training.distill", str(teacher), *recipe_of_teacher, *search])

    # The models, which start from the teacher's encoder and learn its translations.
    fields = [f"--tokenizer.path={teacher}", f"--training.encoder_from={teacher}", f"--data.distilled={distilled}"]
    fields.append(seed)
    for name in options.models:
        recipe, changes = MODELS[name]
        yield training_step(name, [str(RECIPES / f"{recipe}.yaml"), data, *fields, *changes, *limits], runs)

    # The measurement.
    measurement = ["-m", "bench.decode_family"]
    measurement += [f"--model={name}={runs / name}" for name in ("teacher", *options.models)]
    measurement += [f"--data={options.data}", "--beams", "1", "4", "--iterations", "1", "10", "--threads", "1"]
    measurement += [f"--sentences={options.sentences}", f"--warmup={options.warmup}", "--tokenize=none"]
    measurement += [f"--output={runs / 'decoding.json'}", "--significance"]
    measurement += ["--distilled", *options.models]
    yield Step("decoding", measurement)


def check_data(folder: Path) -> None:
    """Raise a UserError if a folder lacks a file, before a training spends its time."""
    if missing := [name for name in DATA_FILES if not (folder / name).is_file()]:
        raise UserError(
            f"{folder}: files are missing; got no {', '.join(missing)}. Choose a folder that python -m "
            "training.prepare multi30k-tokenized --output=FOLDER has written."
        )


def training_step(name: str, arguments: list[str], runs: Path) -> Step:
    arguments = ["-m", "training.train", *arguments, f"--output_dir={runs / name}"]
    return Step(name, arguments, runs / name / "results.json")


def training_limits(options: argparse.Namespace) -> list[str]:
    """Return the fields of a recipe that end a training sooner."""
    fields = []
    if options.steps is not None:
        names = ("steps", "evaluation_steps", "checkpoint_steps")
        fields += [f"--training.{name}={options.steps}" for name in names]
    if options.minutes is not None:
        fields.append(f"--training.minutes={options.minutes:g}")
    return fields


class Record:
    """The seconds that each step has taken, and the command of each finished step, in a file of the folder.

    Raises:
        UserError: the folder was started with a different seed, or other data, steps or minutes.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.path = options.output_dir / "steps.json"
        settings = {name: getattr(options, name) for name in ("seed", "steps", "minutes")}
        settings["data"] = str(options.data)
        self.tree: dict[str, Any] = {"settings": settings, "steps": {}}
        if self.path.exists():
            self.tree = read_json(self.path, "choose a different --output_dir")
        if self.tree["settings"] != settings:
            raise UserError(
                f"{options.output_dir}: was started with other settings; got {settings}, expected "
                f"{self.tree['settings']}. Choose a different --output_dir."
            )
        self.steps = self.tree["steps"]

    def save(self) -> None:
        write_atomically(self.path, json.dumps(self.tree, indent=2))

    def take(self, step: Step) -> None:
        """Run the command of a step, unless it is finished."""
        entry = self.steps.setdefault(step.name, {"seconds": 0.0, "finished": None})
        is_trained = step.last_file is not None and step.last_file.exists()  # also if a kill prevented the record
        if entry["finished"] == step.command or is_trained:
            print(f"{step.command}\n# finished before, {entry['seconds'] / 60:.1f} minutes\n", flush=True)
            return

        # The seconds count even if the command fails or is interrupted.
        print(step.command, flush=True)
        start = time.monotonic()
        process = Popen([sys.executable, *step.arguments])
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()  # the training saves a checkpoint
            raise
        finally:
            entry["seconds"] += time.monotonic() - start
            self.save()
        if status:
            raise UserError(
                f"{step.name}: the command above failed with status {status}. Correct the problem that it reports, "
                "then run the comparison again."
            )
        entry["finished"] = step.command
        self.save()
        print(f"# {entry['seconds'] / 60:.1f} minutes\n", flush=True)

    def minutes(self, name: str) -> float:
        return round(self.steps[name]["seconds"] / 60, 1)


def comparison(record: Record, decoded: list[Row]) -> list[Row]:
    """Return the rows of the table: the measurement of each search, and the minutes of each model's training."""
    rows = []
    for measured in decoded:
        row = {column: measured[column] for column in COLUMNS}
        name = measured["model"].rpartition(", ")[0]  # without its search
        row["minutes of training"] = record.minutes(name)
        rows.append(row)
    return rows


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("family", __doc__, {"steps": 2, "sentences": 4, "warmup": 2})
    files = "folder with train.jsonl.gz, validation.jsonl.gz and test.jsonl.gz, from training.prepare"
    parser.add_argument("data", type=Path, metavar="FOLDER", help=files)
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="folder for all runs")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to compare (all)")
    seed = "seed of each training; repeat the comparison with a different seed and --output_dir (2017)"
    parser.add_argument("--seed", type=int, default=2017, metavar="N", help=seed)
    limit = "optimizer steps of each model (the recipe's)"
    parser.add_argument("--steps", type=positive_argument, metavar="N", help=limit)
    parser.add_argument("--minutes", type=PositiveFloat, metavar="M", help="minutes of each training (no limit)")
    parser.add_argument("--sentences", type=int, default=150, help="sentences timed one by one (150)")
    parser.add_argument("--warmup", type=int, default=20, help="untimed sentences before them (20)")
    options = parser.parse_args(arguments)
    options.data = options.data.resolve()  # the same commands, however a resumed comparison spells the folder
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    with exit_on_user_error(OSError, what_now="; the same command resumes the comparison"):
        check_data(options.data)
        options.output_dir.mkdir(parents=True, exist_ok=True)
        record = Record(options)
        for step in steps_of(options):
            record.take(step)
        decoded = json.loads((options.output_dir / "decoding.json").read_text(encoding="utf-8"))["rows"]
        report(comparison(record, decoded), options)
        print(f"\n{sum(record.minutes(name) for name in record.steps):.1f} minutes in all.")


if __name__ == "__main__":
    main()
