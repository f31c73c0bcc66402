"""Train a model from a recipe: `python -m training.train RECIPE.yaml [--any.field=value]`, or `accelerate launch -m`.

The folder `output_dir` ends up with the best model, its tokenizer, the recipe, `results.json`, TensorBoard's files and
the checkpoints. The same command resumes a run that was interrupted.
"""

import logging
import sys
import threading
import time
from typing import Any

import datasets
from accelerate import PartialState

from training.monitor.curves import report_thread
from training.recipe.fields import Recipe, load_recipe
from training.recipe.help import recipe_help
from training.report.results import RESULTS
from training.report.terminal import opening_line, report, targets_line
from training.run.command import flush_stdout, start_log
from training.run.distributed import exit_together, init_distributed
from training.run.folder import open_folder
from training.run.preparation import load_inputs, prepare
from training.trainer.lifecycle import make_trainer, train_or_resume, write_results
from vaswani_transformer.flow import FlowError

logger = logging.getLogger(__name__)


def run(recipe: Recipe) -> dict[str, Any]:
    """Train by `recipe`, write results.json and return its content; what cannot be used costs no training time."""
    start = time.perf_counter()
    init_distributed()
    with open_folder(recipe) as folder:
        inputs = load_inputs(recipe, folder.path)
        logger.info("%s\n%s", opening_line(recipe), targets_line(recipe, inputs.distillation))
        prepared = prepare(recipe, folder, inputs)
        trainer = make_trainer(recipe, prepared)
        trainer.monitor.count_preparation_from(start)
        train_or_resume(trainer)
        return write_results(trainer, prepared)


USAGE = """usage: python -m training.train RECIPE.yaml [--output_dir=FOLDER] [--any.field=value ...]

Train by a recipe, a YAML file; the project's recipes are in training/recipes. An argument can set each field of the
recipe. These are the fields with their defaults:
"""


def main(arguments: list[str] | None = None) -> None:
    """The command line.

    A recipe that cannot be used, or a run that diverges, ends it with one line and exit status 2, Ctrl-C with one
    line and 130.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        print(f"{USAGE.splitlines()[0]}; --help lists the fields.", file=sys.stderr)
        sys.exit(2)
    if {"-h", "--help"} & set(arguments):
        print(USAGE, recipe_help(), sep="\n")
        sys.exit(0)
    start_log()
    threading.excepthook = report_thread
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    with exit_together("; the same command resumes the run from its last checkpoint", FlowError, OSError):
        recipe = load_recipe(arguments[0], arguments[1:])
        results = run(recipe)
        if PartialState().is_main_process:
            with flush_stdout(f"the run is finished, and its scores are in {recipe.output_dir}/{RESULTS}"):
                report(results, recipe)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
