"""Time of a training step of each model of `bench.family`: `python -m bench.step_times FOLDER --tokenizer=TEACHER`.

The models take turns in one process, on one thread: in each round every model makes a few steps, and each round begins
with a different model. A time is CPU time, from the batch to the changed weights, as the recipe of the comparison makes
them. The table has the median over the rounds, and the steps that fit into the minutes of the comparison, from which
`STEPS` in `bench/family.py` is set once, before its first run.

FlowSeq is measured with its prior, since the steps before it take less time.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.nn.utils import clip_grad_norm_

from bench.family import MINUTES, MODELS, RAW, RECIPES, STEPS
from bench.measuring import Row, in_turns, make_parser, report
from training.data import load_data
from training.machine import init_processes
from training.models import make_model
from training.recipe import load_recipe
from training.trainer import PaperTrainer
from vaswani_transformer.support.command import exit_on_user_error

AS_MEASURED = {"flowseq": ["--training.decoder_steps=0"]}


def make_trainer(name: str, options: argparse.Namespace, folder: Path) -> PaperTrainer:
    """Return the trainer of a model of the comparison, with random weights; its optimizer has made no step."""
    recipe_name, changes = MODELS[name]
    fields = [f"--data.path={options.data}", f"--tokenizer.path={options.tokenizer}", *changes]
    fields += [*AS_MEASURED.get(name, []), f"--training.steps={STEPS[name]}", f"--output_dir={folder / name}"]
    if options.distilled is not None and name not in RAW:
        fields.append(f"--data.distilled={options.distilled}")
    recipe = load_recipe(str(RECIPES / f"{recipe_name}.yaml"), fields)
    data = load_data(recipe, None)
    return recipe.family.recipe.make_trainer(recipe, make_model(recipe, data.tokenizer), data, folder / name)


def timed_steps(trainer: PaperTrainer, count: int) -> Callable[[], float]:
    """Return a function that makes `count` training steps and returns the CPU milliseconds of one."""
    batches = chain.from_iterable(repeat(trainer.get_train_dataloader()))  # epoch after epoch
    optimizer: Any = trainer.optimizer
    schedule: Any = trainer.lr_scheduler
    trainer.model.train()

    def run() -> float:
        start = time.process_time()
        for _ in range(count):
            (batch,), tokens = trainer.get_batch_samples(batches, 1, torch.device("cpu"))
            trainer.training_step(trainer.model, batch, tokens)
            if (largest := trainer.training.max_grad_norm) > 0:
                clip_grad_norm_(trainer.model.parameters(), largest)
            optimizer.step()
            schedule.step()
            trainer.model.zero_grad()
            trainer.state.global_step += 1
        return 1000 * (time.process_time() - start) / count

    return run


def measure(options: argparse.Namespace) -> list[Row]:
    """Return the median time of a step of each model, and the steps that fit into the minutes of the comparison."""
    torch.set_num_threads(1)
    init_processes()
    with tempfile.TemporaryDirectory() as folder:
        trainers = {name: make_trainer(name, options, Path(folder)) for name in options.models}
        calls = {name: timed_steps(trainer, options.steps) for name, trainer in trainers.items()}
        for call in calls.values():  # the first steps allocate the optimizer's memory
            call()
        times = in_turns(calls, options.rounds)
    rows = []
    for name, milliseconds in times.items():
        median = statistics.median(milliseconds)
        row: Row = {"model": name, "CPU ms a step, median": median, "lowest": min(milliseconds)}
        row |= {"highest": max(milliseconds), f"steps in {MINUTES} minutes": int(60_000 * MINUTES / median)}
        rows.append(row)
    return rows


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("step_times", __doc__, {"rounds": 1, "steps": 1}, rounds=11)
    parser.add_argument("data", type=Path, metavar="FOLDER", help="the folder of bench.family")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="TEACHER", help="the teacher's folder")
    parser.add_argument("--distilled", type=Path, metavar="DIR", help="its translations (the references)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to time (all)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of a model in each round (4)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    datasets.disable_progress_bars()
    with exit_on_user_error(OSError, ValueError):
        report(measure(options), options)


if __name__ == "__main__":
    main()
