"""The comparison of the non-autoregressive models by one command: `python -m bench.family FOLDER --output_dir=DIR`.

FOLDER contains `train.jsonl.gz`, `validation.jsonl.gz` and `test.jsonl.gz`, as `python -m training.prepare
multi30k-tokenized --output=FOLDER` writes them. The command trains a teacher, translates the training sources with it,
trains each model on these translations, those of `RAW` on the references, and measures all of them in turn. The models
of `SEVERAL_SEEDS` are trained with each of `--seeds`, the others and the teacher with the first.

It prints the expected minutes of training in all before it starts, the command of each step and the minutes that it
took, and at the end the table and the tests of `bench.family_table`. DIR/kept has all that these need, and no texts. If
it is interrupted, run the same command again: it skips the finished steps, and the interrupted step resumes where it
stopped.

`--tiny` tries the command in minutes, with a few pairs and two training steps for each model; the scores then mean
nothing. `--pairs`, `--steps` and `--minutes` limit the training of each model.
"""

import argparse
import gzip
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

from bench import family_table
from bench.measuring import ROOT, make_parser
from vaswani_transformer.support.command import UserError, exit_on_user_error, positive_argument
from vaswani_transformer.support.files import read_json, write_atomically

DATA_FILES = ("train.jsonl.gz", "validation.jsonl.gz", "test.jsonl.gz")  # those that the recipes name
RECIPES = Path(os.path.relpath(ROOT / "training" / "recipes"))
FAST = ["--training.learning_rate_scale=0.7", "--model.dropout=0.1"]
GLANCING = "--training.glancing=[0.5, 0.3]"
DISCRETE = ["--model.latent=discrete", "--model.label_smoothing=0"]
FEW_STEPS = [  # half as many as the recipe: the same peak of the learning rate, earlier, and as many checkpoints
    *("--training.warmup_steps=500", "--training.learning_rate_scale=0.495", "--training.checkpoint_steps=100"),
]
WITHOUT_LATENT = ["--model.latent=discrete", "--model.hint=false"]
MODELS: dict[str, tuple[str, list[str]]] = {  # the recipe of each model, and what its run changes besides its steps
    "student": ("multi30k-student", FAST),
    "nat": ("multi30k-nat", FAST),
    "glat": ("multi30k-glat", FAST),
    "glat-by-layer": ("multi30k-iterative-vae", [*WITHOUT_LATENT, GLANCING]),
    "cmlm": ("multi30k-cmlm", FAST),
    "iterative-vae-revealed": ("multi30k-iterative-vae", []),
    "iterative-vae-discrete": ("multi30k-iterative-vae", DISCRETE),
    "ctc": ("multi30k-ctc", []),
    "ctc-glat": ("multi30k-ctc", [GLANCING]),
    "flowseq": ("multi30k-flowseq", FAST),
    "autoregressive-raw": ("multi30k-teacher", []),
    "ctc-raw": ("multi30k-ctc", [GLANCING]),
    "dag": ("multi30k-dag", FEW_STEPS),
}
"""The recipes of CTC, DAG and IterativeVAE have the values of FAST; autoregressive-raw has its own."""
RAW = ("autoregressive-raw", "ctc-raw", "dag")
"""Models that learn the references themselves, and get only the vocabulary from the teacher."""
STEPS = {
    "student": 10_380,
    "nat": 8690,
    "glat": 7150,
    "glat-by-layer": 3630,
    "cmlm": 9760,
    "iterative-vae-revealed": 8240,
    "iterative-vae-discrete": 2400,
    "ctc": 4630,
    "ctc-glat": 3420,
    "flowseq": 2430,
    "autoregressive-raw": 9650,
    "ctc-raw": 3460,
    "dag": 1610,
}
"""Steps that take MINUTES of one core: medians of `bench.step_times`, fixed before the first run of the comparison.

Measured on an AMD EPYC without AMX, in fp32 with torch 2.13.0; those of `RAW` later, by the ratio to "ctc-glat".
"""
MINUTES = 60
TEACHER_STEPS = 8000
TEACHER_MINUTES = 50  # of one core, by the ratio of its steps to those of "autoregressive-raw"
SEVERAL_SEEDS = ("ctc", "iterative-vae-revealed", "student")
KEPT = "kept"


@dataclass(frozen=True)
class Step:
    """A step of the comparison: its name, arguments of `python`, and the file that a training writes last."""

    name: str
    arguments: list[str]
    last_file: Path | None = None

    @property
    def command(self) -> str:
        return shlex.join(["python", *self.arguments])


def runs_of(options: argparse.Namespace) -> dict[str, tuple[str, int]]:
    """Return the model and the seed of each run by its name: that of the model, and of a further seed with the seed."""
    runs = {}
    for model in options.models:
        first, *others = options.seeds
        runs[model] = model, first
        for seed in others if model in SEVERAL_SEEDS else []:
            runs[f"{model}-{seed}"] = model, seed
    return runs


def expected_minutes(options: argparse.Namespace) -> float:
    """Return the minutes of one core that all trainings together take, without evaluations and measurement."""
    total = 0.0
    full = {"teacher": (TEACHER_STEPS, TEACHER_MINUTES)}
    full.update({run: (STEPS[model], MINUTES) for run, (model, _) in runs_of(options).items()})
    for steps, minutes in full.values():
        share = 1.0 if options.steps is None else min(1.0, options.steps / steps)
        total += min(minutes * share, options.minutes or minutes)
    return total


def steps_of(options: argparse.Namespace) -> Iterator[Step]:
    """Yield the steps in order: the teacher, its translations, the models, and the measurement of all."""
    data = f"--data.path={data_folder(options)}"
    runs = options.output_dir
    teacher = runs / "teacher"
    distilled = runs / "distilled"
    limits = training_limits(options)

    # The teacher, and its translations of the training sources.
    recipe_of_teacher = [str(RECIPES / "multi30k-teacher.yaml"), data]
    fields = [f"--seed={options.seeds[0]}", *limits]
    if options.steps is not None:  # a teacher that has hardly trained never ends a translation
        fields.append("--decoding.max_source_relative_length=0")
    yield training_step("teacher", [*recipe_of_teacher, *fields], runs)
    search = ["--length_penalty=1.4", f"--output_dir={distilled}"]
    yield Step("distilled", ["-m", "training.distill", str(teacher), *recipe_of_teacher, *search])

    # The models, which start from the teacher's encoder and learn its translations, or learn the references.
    names = runs_of(options)
    for name, (model, seed) in names.items():
        recipe, changes = MODELS[model]
        fields = [f"--tokenizer.path={teacher}"]
        if model not in RAW:
            fields += [f"--training.encoder_from={teacher}", f"--data.distilled={distilled}"]
        changes = [f"--seed={seed}", *changes, f"--training.steps={STEPS[model]}", *limits]
        yield training_step(name, [str(RECIPES / f"{recipe}.yaml"), data, *fields, *changes], runs)

    # The measurement.
    measurement = ["-m", "bench.decode_family"]
    measurement += [f"--model={name}={runs / name}" for name in ("teacher", *names)]
    measurement += [f"--data={data_folder(options)}", "--beams", "1", "4", "--iterations", "4", "10", "--threads", "1"]
    measurement += [f"--sentences={options.sentences}", f"--warmup={options.warmup}", "--tokenize=none"]
    measurement += [f"--output={runs / KEPT / 'decoding.json'}", f"--counts={runs / KEPT}", f"--lm={distilled}"]
    measurement += [f"--rerank={teacher}", "--refinement", "--reference_lengths"]
    if further := [name for name, (model, _) in names.items() if name != model]:
        measurement += ["--untimed", *further]
    if distilled_runs := [name for name, (model, _) in names.items() if model not in RAW]:
        measurement += ["--distilled", *distilled_runs]
    yield Step("decoding", measurement)


def data_folder(options: argparse.Namespace) -> Path:
    """Return the folder of the data: the given one, or the one with the first `--pairs` of it."""
    return options.data if options.pairs is None else (options.output_dir / "data").resolve()


def limit_pairs(options: argparse.Namespace) -> None:
    """Write the first `--pairs` training pairs, and the other splits, into the run's own folder."""
    if options.pairs is None:
        return
    folder = data_folder(options)
    folder.mkdir(exist_ok=True)
    for name in DATA_FILES:
        lines = gzip.decompress((options.data / name).read_bytes()).splitlines(keepends=True)
        count = options.pairs if name == "train.jsonl.gz" else len(lines)
        (folder / name).write_bytes(gzip.compress(b"".join(lines[:count]), mtime=0))


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
        UserError: the folder was started with other seeds, data, pairs, steps or minutes.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.path = options.output_dir / "steps.json"
        settings = {name: getattr(options, name) for name in ("seeds", "steps", "minutes", "pairs")}
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


def keep_results(options: argparse.Namespace) -> None:
    """Copy the results of each run to the files that the table is computed from, without texts and local paths."""
    for name in ("teacher", *runs_of(options)):
        results = json.loads((options.output_dir / name / "results.json").read_text(encoding="utf-8"))
        results.get("test", {}).pop("examples", None)
        write_atomically(options.output_dir / KEPT / f"{name}.json", json.dumps(results, indent=2, ensure_ascii=False))
    drop_paths(options.output_dir / KEPT / "decoding.json")


def drop_paths(measurement: Path) -> None:
    """Drop the options of a measurement, which name folders of this machine."""
    tree = json.loads(measurement.read_text(encoding="utf-8"))
    tree.pop("options", None)
    write_atomically(measurement, json.dumps(tree, indent=2) + "\n")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("family", __doc__, {"pairs": 200, "steps": 2, "sentences": 4, "warmup": 2, "samples": 20})
    files = "folder with train.jsonl.gz, validation.jsonl.gz and test.jsonl.gz, from training.prepare"
    parser.add_argument("data", type=Path, metavar="FOLDER", help=files)
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="folder for all runs")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to compare (all)")
    seeds = f"seeds of {', '.join(SEVERAL_SEEDS)}; the others have the first (2017 2018 2019)"
    parser.add_argument("--seeds", type=int, nargs="+", default=[2017, 2018, 2019], metavar="N", help=seeds)
    parser.add_argument("--pairs", type=positive_argument, metavar="N", help="training pairs (all)")
    limit = "optimizer steps of each model (the recipe's)"
    parser.add_argument("--steps", type=positive_argument, metavar="N", help=limit)
    parser.add_argument("--minutes", type=PositiveFloat, metavar="M", help="minutes of each training (no limit)")
    parser.add_argument("--sentences", type=int, default=150, help="sentences timed one by one (150)")
    parser.add_argument("--warmup", type=int, default=20, help="untimed sentences before them (20)")
    parser.add_argument("--samples", type=int, default=10_000, help="bootstrap samples (10000)")
    options = parser.parse_args(arguments)
    options.data = options.data.resolve()  # the same commands, however a resumed comparison spells the folder
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    with exit_on_user_error(OSError, what_now="; the same command resumes the comparison"):
        check_data(options.data)
        options.output_dir.mkdir(parents=True, exist_ok=True)
        record = Record(options)
        (options.output_dir / KEPT).mkdir(exist_ok=True)
        limit_pairs(options)
        minutes = expected_minutes(options)
        print(f"{len(runs_of(options)) + 1} trainings, about {minutes:,.0f} minutes of one core, and evaluations.\n")
        for step in steps_of(options):
            record.take(step)
        keep_results(options)
        table = [str(options.output_dir / KEPT), f"--samples={options.samples}"]
        family_table.main(table if options.output is None else [*table, f"--output={options.output}"])
        print(f"\n{sum(record.minutes(name) for name in record.steps):.1f} minutes in all.")


if __name__ == "__main__":
    main()
