"""The folder of a run: check it, initialize it, and extend its run by larger limits."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import DatasetDict
from transformers import PreTrainedTokenizerBase

from training.data.vocabulary import make_tokenizer
from training.monitor.monitor import trained_seconds
from training.recipe.fields import CHOSEN_FIELDS, Recipe, to_dict
from training.recipe.reading import build
from training.report.results import RESULTS, RESULTS_FIX, fingerprints
from training.run.checkpoints import (
    LOCK,
    RECIPE,
    STATE,
    has_ended,
    intact_checkpoint,
    is_beyond,
    run_lock,
    run_write_errors,
    settle,
    step_of,
)
from training.run.distributed import RunError, raise_together
from vaswani_transformer.support.checked_loading import load_tokenizer
from vaswani_transformer.support.errors import UserError, one_line
from vaswani_transformer.support.files import PARTIAL, read_json, staged_files, write_atomically

TRAINED_STATE = STATE
DATA_FILE = "data.json"  # fingerprints of the data at the start of the run
TOKENIZER = "tokenizer_config.json"  # the file that every tokenizer has, the last one of a new run
LIMIT_FIELDS = ("training.steps", "training.minutes")  # a resumed run may have larger ones
# Where equal pairs and the same teacher lie: the run has the digests of both.
LOCATION_FIELDS = ("data.path", "data.distilled", "training.energy_from")
DESCRIPTIVE_FIELDS = ("expected", "published", "note")  # for readers
# Execution and output only: they do not change what a step computes.
EXECUTION_FIELDS = (
    "training.device_tokens",
    "training.gradient_checkpointing",
    "training.evaluation_batch_size",
    "training.log_steps",
    "training.on_divergence",
    "training.skip_limit",
)
FREE_FIELDS = (*LIMIT_FIELDS, *EXECUTION_FIELDS, *LOCATION_FIELDS)


@contextlib.contextmanager
def open_folder(recipe: Recipe) -> Generator[Path]:
    """Lock and yield the run's folder: new, or with a run of the same recipe to resume or extend."""
    folder = writable_folder(recipe)
    with run_lock(folder):
        check_folder(folder, recipe)
        if (folder / RECIPE).exists() and (not (folder / TRAINED_STATE).exists() or changed_fields(folder, recipe)):
            PartialState().wait_for_everyone()  # every process checks the folder before one changes it
            raise_together(lambda: settle(folder) if PartialState().is_main_process else None)
        yield folder


def prepare_folder(recipe: Recipe) -> Path:
    """Return the run's folder, which a run can use now; a new one is not made."""
    folder = writable_folder(recipe)
    check_folder(folder, recipe)
    if (folder / LOCK).exists():
        with run_lock(folder):
            pass
    return folder


def check_folder(folder: Path, recipe: Recipe) -> None:
    """Check that a folder is new, or holds a run of the same recipe to resume or to extend by larger limits."""
    if not (folder / RECIPE).exists():
        if folder.exists() and any(path.suffix != PARTIAL and path.name != LOCK for path in folder.iterdir()):
            raise UserError(f"{folder}: holds files that are not a run; give another --output_dir.")
        return
    names = changed_fields(folder, recipe)
    check_chosen_fields(folder, recipe, names)
    checkpoint = intact_checkpoint(folder) if names else None
    is_longer = names and checkpoint is not None and not has_ended(checkpoint, recipe.training)
    if (folder / RESULTS).exists() and not (is_longer and set(names) <= {*FREE_FIELDS}):
        raise UserError(
            f"{folder}: holds a finished run; give another --output_dir, remove the folder, or raise training.steps or "
            "training.minutes, whichever ended it, and nothing else, to extend it."
        )
    for name in names:
        if name not in FREE_FIELDS or (name == "data.path" and recipe.data.streaming):
            raise UserError(
                f"{folder}: holds an unfinished run of another recipe, {name} differs; give the same command to resume "
                "it, or another --output_dir."
            )
    if names and checkpoint is not None and is_beyond(checkpoint, recipe.training):
        minutes = trained_seconds(checkpoint) / 60
        raise UserError(
            f"{folder}: holds an unfinished run of {step_of(checkpoint)} steps in {minutes:.1f} minutes so far; give "
            "training.steps and training.minutes beyond them, or another --output_dir."
        )


def check_chosen_fields(folder: Path, recipe: Recipe, names: list[str]) -> None:
    """Check that a run which gets other steps or another machine keeps what its recipe left open."""
    for name in CHOSEN_FIELDS:
        if name in names and set(names) <= {*CHOSEN_FIELDS, *FREE_FIELDS}:
            group, _, field = name.partition(".")
            before, now = stored_recipe(folder)[group][field], getattr(getattr(recipe, group), field)
            raise UserError(
                f"{name}: the run in {folder} was begun with another; got {now}, expected {before}. "
                f"Give --{name}={before} to resume or extend it."
            )


def writable_folder(recipe: Recipe) -> Path:
    """Return the run's folder, which can be written or made."""
    if recipe.output_dir is None:
        raise UserError("output_dir: the run needs a folder; give --output_dir=...")
    check_writable(folder := Path(recipe.output_dir))
    return folder


def check_writable(folder: Path) -> None:
    """Check that a folder can be written or made."""
    ancestor = folder
    try:
        ancestor = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
        with tempfile.TemporaryDirectory(dir=ancestor, suffix=PARTIAL):
            pass
    except OSError as error:
        raise UserError(
            f"{folder}: {ancestor} is not a writable folder ({one_line(error, with_file=False)}); give another "
            "--output_dir."
        ) from error


def stored_recipe(folder: Path) -> dict[str, Any]:
    """Return the recipe of the run in a folder, as a dictionary."""
    path = folder / RECIPE
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        recipe = one_line(error, with_file=False)
    if not isinstance(recipe, dict):
        raise UserError(f"{path}: holds no recipe; got {str(recipe)[:80]!r}. Restore it, or give another --output_dir.")
    return recipe


def changed_fields(folder: Path, recipe: Recipe) -> list[str]:
    """Return the names of the fields in which a recipe differs from the run in a folder, the model's kind first.

    Fields that the run's version did not have count as their defaults.
    """
    before = stored_recipe(folder)
    with contextlib.suppress(UserError):  # a field that this version does not have differs
        before = to_dict(build(Recipe, before, ""))
    names = [name for name in diff_trees(before, to_dict(recipe)) if name not in DESCRIPTIVE_FIELDS]
    return sorted(names, key="model.kind".__ne__)


def extend_run(recipe: Recipe, folder: Path) -> None:
    """Give a run the recipe's limits.

    If the run had finished, its model, tokenizer and results are first copied to `finished-STEPS`.
    """
    if (results := folder / RESULTS).exists():
        kept = folder / f"finished-{read_json(results, RESULTS_FIX, steps=int)['steps']}"
        if not kept.exists():
            partial = kept.with_name(f"{kept.name}{PARTIAL}")
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
            with run_write_errors(kept):
                partial.mkdir()
                for path in [path for path in folder.iterdir() if path.is_file() and path.name != LOCK]:
                    shutil.copy2(path, partial)
                partial.rename(kept)
        results.unlink()
    (folder / TRAINED_STATE).unlink(missing_ok=True)
    write_recipe(recipe, folder)


def write_recipe(recipe: Recipe, folder: Path) -> None:
    write_atomically(folder / RECIPE, yaml.safe_dump(to_dict(recipe), allow_unicode=True, sort_keys=False))


def diff_trees(before: Any, now: Any, prefix: str = "") -> list[str]:
    """Return the names of the fields that differ between two nested dictionaries."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [prefix.rstrip(".")]
    names = sorted(before.keys() | now.keys())
    return [name for key in names for name in diff_trees(before.get(key), now.get(key), f"{prefix}{key}.")]


def check_same_data(folder: Path, present: dict[str, dict[str, Any]]) -> None:
    """Check that the run in a folder, if there is one, started with the same data."""
    if not ((folder / DATA_FILE).exists() and (folder / TOKENIZER).exists()):
        return
    for split, before in read_fingerprints(folder, **dict.fromkeys(present, dict)).items():
        if present.get(split, before) != before:
            raise RunError(
                f"data.{split}: these are not the pairs that the run in {folder} was begun with "
                f"({before.get('pairs')} then, {present[split]['pairs']} now, of other text); restore them, or give "
                "another --output_dir."
            )


def read_fingerprints(folder: Path, **splits: type) -> dict[str, dict[str, Any]]:
    """Return the fingerprints of the data with which the run in a folder started."""
    fix = "restore it, or if the data is the same, remove it, and the same command writes it again."
    return read_json(folder / DATA_FILE, fix, **splits)


def write_new_run(
    recipe: Recipe, folder: Path, tokenizer: PreTrainedTokenizerBase, data: dict[str, dict[str, Any]]
) -> list[Path]:
    """Write the recipe, the fingerprints of the data and the tokenizer into a run's folder, and return the files."""
    with run_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, folder)
        write_atomically(folder / DATA_FILE, json.dumps(data, indent=2))
        with staged_files(folder, last=TOKENIZER) as staging:
            tokenizer.save_pretrained(staging)
            names = [path.name for path in staging.iterdir()]
    return [folder / name for name in (RECIPE, DATA_FILE, *names)]


def initialize_run(recipe: Recipe, folder: Path, pairs: DatasetDict) -> tuple[PreTrainedTokenizerBase, list[Path]]:
    """Write the recipe, the data's fingerprints and the tokenizer into the folder of a new run.

    Existing files stay as they are.
    """
    present, written = fingerprints(recipe, pairs) if PartialState().is_main_process else {}, []
    check_same_data(folder, *broadcast_object_list([present]))
    if PartialState().is_main_process and not (folder / TOKENIZER).exists():
        written = write_new_run(recipe, folder, make_tokenizer(recipe, pairs), present)
    elif PartialState().is_main_process and not (folder / DATA_FILE).exists():
        write_atomically(folder / DATA_FILE, json.dumps(present, indent=2))
    PartialState().wait_for_everyone()
    if not (folder / TOKENIZER).exists():
        raise UserError(
            f"{folder}: this machine does not see what the first process wrote there; name a folder on a disk that all "
            "machines of the launch share."
        )
    return load_tokenizer(str(folder)), written
