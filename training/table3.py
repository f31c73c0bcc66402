"""Table 3 of the paper at any size: `python -m training.table3 RECIPE.yaml --output_dir=DIR [--rows=A-h1,...]`.

The recipe's model is the base. A row's sizes and counts keep the paper's ratio to it; its rates are the paper's own.
Each row is a run of `training.train` in `DIR/ROW/seed-N`. The same command resumes, and repeats no finished run.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from accelerate import PartialState
from datasets import DatasetDict
from transformers import PreTrainedTokenizerBase

from training.recipe.families import AUTOREGRESSIVE
from training.recipe.fields import SEEDS, Recipe, check, load_recipe
from training.recipe.help import parse_with_recipe, recipe_parser
from training.recipe.reading import Scope
from training.report.results import RESULTS, RESULTS_FIX
from training.report.table3 import PAPER_FIGURES, orderings, row_summary, to_markdown
from training.run.checkpoints import RECIPE, run_write_errors
from training.run.checks import check_data_fits, config_for_tokenizer
from training.run.command import flush_stdout, start_log
from training.run.distributed import exit_together, init_distributed
from training.run.folder import open_folder, prepare_folder, read_folder, scope_of
from training.run.preparation import load_inputs, prepare
from training.tasks import make_task
from training.train import run as train
from vaswani_transformer import VaswaniTransformerConfig
from vaswani_transformer.config import PAPER_SETTINGS
from vaswani_transformer.support.errors import OutputError, UserError
from vaswani_transformer.support.files import read_json, write_atomically

logger = logging.getLogger(__name__)
BASE_FIELDS = ("encoder_layers", "decoder_layers", "d_model", "d_ff", "num_heads", "dropout", "label_smoothing")
PAPER_BASE = VaswaniTransformerConfig()
SIZES = {"encoder_layers", "decoder_layers", "d_model", "d_ff", "num_heads", "d_k"}


def names_among(options: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return an argument's type: different names of `options`, separated by commas."""

    def read(text: str) -> list[str]:
        given = text.split(",")
        for name in given:
            if name not in options:
                raise argparse.ArgumentTypeError(f"got {name!r}, expected some of {', '.join(options)}")
            if given.count(name) > 1:
                raise argparse.ArgumentTypeError(f"{name} is given twice; name it once")
        return [name for name in options if name in given]  # in the table's order

    return read


def seed_list(text: str) -> list[int]:
    given = text.split(",")
    if not all(seed.isdecimal() and int(seed) < SEEDS for seed in given) or len(set(map(int, given))) < len(given):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected different numbers such as 1,2,3, each below {SEEDS}")
    return [int(seed) for seed in given]


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    description = "Train the rows of the paper's Table 3 around a recipe's model, and print the table."
    parser = recipe_parser("table3", description, "such as --model.d_model=128")
    rows = tuple(PAPER_FIGURES)
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file of the base model, its data and its steps")
    parser.add_argument("--rows", type=names_among(rows), default=list(rows), help=f"rows among {','.join(rows)} (all)")
    parser.add_argument("--seeds", type=seed_list, help="seeds of each row, such as 1,2,3 (the recipe's)")
    parser.add_argument("--output_dir", type=Path, required=True, help="the folder of all runs and of the table")
    return parse_with_recipe(parser, arguments)


def scaled(row: str, name: str, base: VaswaniTransformerConfig) -> int:
    """Return a size or count of a row, in the paper's ratio to the base."""
    base_value, paper = ((config.head_dim if name == "d_k" else getattr(config, name)) for config in (base, PAPER_BASE))
    value = int(PAPER_SETTINGS[row][name])
    size, remainder = divmod(base_value * value, paper)
    if remainder:
        raise UserError(
            f"row {row}: {name} has the ratio {value}:{paper} to the base's {base_value}; "
            f"got {base_value * value / paper:g}, expected a whole number. Give a base whose {name} is a multiple of "
            f"{paper // math.gcd(value, paper)}, or leave the row out of --rows."
        )
    return size


def row_change(row: str, base: VaswaniTransformerConfig) -> dict[str, Any]:
    return {name: scaled(row, name, base) if name in SIZES else value for name, value in PAPER_SETTINGS[row].items()}


@dataclass(frozen=True)
class RowRun:
    """The training of one row with one seed."""

    row: str
    seed: int
    recipe: Recipe
    folder: Path


def make_run(recipe: Recipe, folder: Path, row: str, seed: int) -> RowRun:
    """Return the run of a row: its model, evaluated once, at the end, by the recipe's search.

    There is no mean of checkpoints, as in the paper.
    """
    training, base = recipe.training, recipe.model_config(vocab_size=recipe.tokenizer.vocab_size)
    run_folder = folder / row / f"seed-{seed}"
    changed = dataclasses.replace(
        recipe,
        name=f"{recipe.name}-{row}",
        expected="",
        published="",
        output_dir=str(run_folder),
        seed=seed,
        data=dataclasses.replace(recipe.data, test=None),
        model=recipe.model | row_change(row, base),
        training=dataclasses.replace(
            training,
            evaluation_steps=training.steps,
            evaluation_beams=recipe.decoding.num_beams,
            checkpoint_steps=training.checkpoint_steps or training.evaluation_steps,
            keep_checkpoints=2,
            average_last=None,
            patience=None,
        ),
    )
    try:
        check(changed)
    except UserError as error:  # of the row's model: its own advice names fields that the row sets
        problem = str(error).partition(";")[0]
        raise UserError(
            f"row {row}: {problem}; give a base of another size, or leave the row out of --rows."
        ) from error
    return RowRun(row, seed, changed, run_folder)


def check_base(recipe: Recipe) -> None:
    """Check that the base is the paper's kind of model without d_k and d_v."""
    if (kind := recipe.kind) != AUTOREGRESSIVE:
        raise UserError(f"model.kind: Table 3 varies the paper's model; got {kind}, expected {AUTOREGRESSIVE}.")
    for name in ("d_k", "d_v"):
        if recipe.model.get(name) is not None:
            raise UserError(f"model.{name}: the rows of Table 3 set it; got {recipe.model[name]}, expected none.")


def check_models(recipe: Recipe, runs: list[RowRun]) -> None:
    vocab_size = recipe.tokenizer.vocab_size
    models = {run.row: run.recipe.model_config(vocab_size=vocab_size).to_dict() for run in runs}
    for one, other in itertools.combinations(models, 2):
        if models[one] == models[other]:
            raise UserError(
                f"row {other}: its model is that of {one}; change the base's "
                f"{' or '.join(PAPER_SETTINGS[other])}, or leave the row out of --rows."
            )


def is_finished(run: RowRun) -> bool:
    changed = [name for name in read_folder(run.folder, run.recipe).changed if scope_of(name) is not Scope.EXECUTION]
    if changed:
        raise UserError(
            f"{run.folder}: holds a run of another recipe, {changed[0]} differs; give the same command to resume, or "
            "another --output_dir."
        )
    if (run.folder / RESULTS).exists():
        return True
    prepare_folder(run.recipe)
    return False


def runs_on_disk(folder: Path) -> list[tuple[str, int]]:
    """Return row and seed of every run in a table's folder, in the table's order."""
    paths = [path.parent for row in PAPER_FIGURES for path in folder.glob(f"{row}/seed-*/{RECIPE}")]
    seeds = {path: path.name.removeprefix("seed-") for path in paths}
    runs = [(path.parent.name, int(seed)) for path, seed in seeds.items() if seed.isdecimal()]
    return sorted(runs, key=lambda run: (list(PAPER_FIGURES).index(run[0]), run[1]))


def check_rows_share_data(runs: list[RowRun]) -> None:
    """Check that the data fits every run's model and batches; the folder of the first run is prepared for it."""

    def check_rows(encoded: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> None:
        for run in runs:
            try:
                check_data_fits(run.recipe, config_for_tokenizer(run.recipe, tokenizer), encoded)
            except UserError as error:
                raise UserError(f"row {run.row}: {error}") from error

    recipe = runs[0].recipe
    with open_folder(recipe) as folder:
        prepare(recipe, folder, load_inputs(recipe, folder.path), check_rows)


def unfinished_runs(recipe: Recipe, folder: Path, rows: list[str], seeds: list[int]) -> list[RowRun]:
    """Return the runs that are not complete, all rows of one seed before the next seed."""
    check_base(recipe)
    wanted = [make_run(recipe, folder, row, seed) for seed in seeds for row in rows]
    check_models(recipe, wanted)
    for row, seed in runs_on_disk(folder):
        if row not in rows or seed not in seeds:
            is_finished(make_run(recipe, folder, row, seed))
    runs = [run for run in wanted if not is_finished(run)]
    if runs:
        check_rows_share_data(runs)
    return runs


def make_table(recipe: Recipe, folder: Path, errors: dict[str, str]) -> dict[str, Any]:
    """Return the table of all complete runs in the folder, as its JSON file has it."""
    runs_by_row: dict[str, dict[int, dict[str, Any]]] = {}
    for row, seed in runs_on_disk(folder):
        if (path := folder / row / f"seed-{seed}" / RESULTS).exists():
            runs_by_row.setdefault(row, {})[seed] = read_json(path, RESULTS_FIX)
    base = recipe.model_config(vocab_size=recipe.tokenizer.vocab_size)
    metric = make_task(recipe).best_metric
    rows = {row: row_summary(row, row_change(row, base), results, metric) for row, results in runs_by_row.items()}
    first = next((next(iter(results.values())) for results in runs_by_row.values()), {})
    return {
        "name": recipe.name,
        "base": {name: getattr(base, name) for name in BASE_FIELDS},
        "training": vars(recipe.training),
        "decoding": vars(recipe.decoding),
        **{name: first.get(name) for name in ("data", "versions", "hardware")},
        "metric": {"key": metric.key, "title": metric.title},
        "rows": rows,
        "orderings": orderings(rows, metric.key),
        "errors": errors,
    }


def write_table(table: dict[str, Any], folder: Path) -> None:
    with run_write_errors(folder / "table3.json"):
        write_atomically(folder / "table3.json", json.dumps(table, indent=2, ensure_ascii=False))
        write_atomically(folder / "table3.md", to_markdown(table))


def train_rows(recipe: Recipe, folder: Path, rows: list[str], seeds: list[int]) -> dict[str, Any]:
    """Train what is missing, write the table after every run and return it.

    A run that fails, for example because it diverges, is in `errors`, and the next one begins. One that cannot be
    written ends the command, as no other could be.
    """
    init_distributed()
    runs, errors = unfinished_runs(recipe, folder, rows, seeds), {}
    for number, run in enumerate(runs, start=1):
        logger.info("Row %s, seed %d: run %d of %d.", run.row, run.seed, number, len(runs))
        try:
            train(run.recipe)
        except OutputError:  # of one process, for which the others wait
            raise
        except UserError as error:
            logger.warning("%s", error)
            errors[f"{run.row}, seed {run.seed}"] = str(error)
        gc.collect()  # a Trainer and its callbacks refer to each other
        if PartialState().is_main_process:
            write_table(make_table(recipe, folder, errors), folder)
    return make_table(recipe, folder, errors)


def main(arguments: list[str] | None = None) -> None:
    options, overrides = parse_arguments(arguments)
    start_log()
    datasets.disable_progress_bars()
    with exit_together("; the same command resumes the table", OSError):
        recipe = load_recipe(options.recipe, overrides)
        table = train_rows(recipe, options.output_dir, options.rows, options.seeds or [recipe.seed])
        if PartialState().is_main_process:
            write_table(table, options.output_dir)
            with flush_stdout(f"the table is in {options.output_dir}/table3.md"):
                print(to_markdown(table))
    if table["errors"]:
        sys.exit(2)


if __name__ == "__main__":
    main()
