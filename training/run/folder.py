"""The folder of a run: check it, initialize it, and extend its run by larger limits."""

import contextlib
import json
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import DatasetDict
from transformers import PreTrainedTokenizerBase

from training.data.distilled import Distillation
from training.data.vocabulary import make_tokenizer
from training.monitor.monitor import trained_seconds
from training.recipe.fields import SETTINGS, Recipe, to_dict
from training.recipe.reading import Scope, build
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
from training.run.command import check_writable
from training.run.distributed import RunError, raise_together
from vaswani_transformer.support.checked_loading import load_tokenizer
from vaswani_transformer.support.errors import UserError, one_line
from vaswani_transformer.support.files import PARTIAL, read_json, staged_files, write_atomically

DATA_FILE = "data.json"  # fingerprints of the data at the start of the run
TOKENIZER = "tokenizer_config.json"  # the file that every tokenizer has, the last one of a new run


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    path: where it is.
    before: the recipe of the run in it; that of the new run if there is none.
    changed: the fields in which the present recipe differs, the model's kind first.
    """

    path: Path
    before: Recipe
    changed: list[str]


@contextlib.contextmanager
def open_folder(recipe: Recipe) -> Generator[RunFolder]:
    """Lock and yield the run's folder: new, or with a run of the same recipe to resume or to extend."""
    path = writable_path(recipe)
    with run_lock(path):
        folder = read_folder(path, recipe)
        check_folder(folder, recipe)
        if (path / RECIPE).exists() and (not (path / STATE).exists() or folder.changed):
            PartialState().wait_for_everyone()  # every process checks the folder before one changes it
            needs_best = recipe.training.average_last is None
            raise_together(lambda: settle(path, needs_best) if PartialState().is_main_process else None)
        yield folder


def prepare_folder(recipe: Recipe) -> RunFolder:
    """Return the run's folder, which a run can use now; a new one is not made."""
    path = writable_path(recipe)
    folder = read_folder(path, recipe)
    check_folder(folder, recipe)
    if (path / LOCK).exists():
        with run_lock(path):
            pass
    return folder


def writable_path(recipe: Recipe) -> Path:
    if recipe.output_dir is None:
        raise UserError("output_dir: the run needs a folder; give --output_dir=...")
    check_writable(path := Path(recipe.output_dir))
    links = (file for file in path.iterdir() if file.is_symlink() and not file.is_dir()) if path.is_dir() else ()
    for link in links:
        raise UserError(f"{link}: is a link, through which a run would write another file; put the file there.")
    return path


def read_folder(path: Path, recipe: Recipe) -> RunFolder:
    """Return what a folder holds; a field that the run's version did not have counts as its default."""
    if not (path / RECIPE).exists():
        return RunFolder(path, recipe, [])
    try:
        tree = yaml.safe_load((path / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        tree = one_line(error, with_file=False)
    if not isinstance(tree, dict):
        raise UserError(
            f"{path / RECIPE}: holds no recipe; got {str(tree)[:80]!r}. Restore it, or give another --output_dir."
        )
    before = recipe
    with contextlib.suppress(UserError):  # a field that this version does not have differs
        before = build(Recipe, tree)
        tree = to_dict(before)
    changed = [name for name in diff_trees(tree, to_dict(recipe)) if scope_of(name) is not Scope.DESCRIPTION]
    return RunFolder(path, before, sorted(changed, key="model.kind".__ne__))


def scope_of(name: str) -> Scope:
    """Return how a recipe that resumes or extends a run may differ in a field; fields of the model have no entry."""
    return SETTINGS[name].rules.scope if name in SETTINGS else Scope.FIXED


def diff_trees(before: Any, now: Any, prefix: str = "") -> list[str]:
    """Return the names of the fields that differ between two nested dictionaries."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [prefix.rstrip(".")]
    names = sorted(before.keys() | now.keys())
    return [name for key in names for name in diff_trees(before.get(key), now.get(key), f"{prefix}{key}.")]


def check_folder(folder: RunFolder, recipe: Recipe) -> None:
    """Check that a folder is new, or holds a run of the same recipe to resume or to extend by larger limits."""
    path, changed = folder.path, folder.changed
    if not (path / RECIPE).exists():
        if path.exists() and any(file.suffix != PARTIAL and file.name != LOCK for file in path.iterdir()):
            raise UserError(f"{path}: holds files that are not a run; give another --output_dir.")
        return
    fixed = [name for name in changed if scope_of(name) in (Scope.FIXED, Scope.OPEN)]
    for name in fixed if all(scope_of(name) is Scope.OPEN for name in fixed) else []:
        now, before = attrgetter(name)(recipe), attrgetter(name)(folder.before)
        raise UserError(
            f"{name}: the run in {path} was begun with another; got {now}, expected {before}. Give --{name}={before} "
            "to resume or extend it."
        )
    checkpoint = intact_checkpoint(path) if changed else None
    is_longer = changed and checkpoint is not None and not has_ended(checkpoint, recipe.training)
    if (path / RESULTS).exists() and (fixed or not is_longer):
        also = f" ({fixed[0]} differs too)" if fixed else ""
        raise UserError(
            f"{path}: holds a finished run; give another --output_dir, remove the folder, or raise training.steps or "
            f"training.minutes, whichever ended it, and nothing else{also}, to extend it."
        )
    for name in changed:
        if name in fixed or (name == "data.path" and recipe.data.streaming):
            raise UserError(
                f"{path}: holds an unfinished run of another recipe, {name} differs; give the same command to resume "
                "it, or another --output_dir."
            )
    if checkpoint is not None and is_beyond(checkpoint, recipe.training):
        minutes = trained_seconds(checkpoint) / 60
        raise UserError(
            f"{path}: holds an unfinished run of {step_of(checkpoint)} steps in {minutes:.1f} minutes so far; give "
            "training.steps and training.minutes beyond them, or another --output_dir."
        )


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
    (folder / STATE).unlink(missing_ok=True)
    write_recipe(recipe, folder)


def write_recipe(recipe: Recipe, folder: Path) -> None:
    write_atomically(folder / RECIPE, yaml.safe_dump(to_dict(recipe), allow_unicode=True, sort_keys=False))


def check_same_data(folder: Path, present: dict[str, dict[str, Any]]) -> None:
    """Check that the run in a folder, if there is one, started with data of the present fingerprints."""
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


def initialize_run(
    recipe: Recipe, folder: Path, pairs: DatasetDict, distillation: Distillation | None
) -> tuple[PreTrainedTokenizerBase, list[Path]]:
    """Return the tokenizer of a run, and the files that this process wrote for a new one.

    A new run gets its recipe, the data's fingerprints and its tokenizer; files that exist stay as they are.
    """
    is_main, written = PartialState().is_main_process, []
    present = fingerprints(recipe.data, pairs, distillation) if is_main else {}
    check_same_data(folder, *broadcast_object_list([present]))
    if is_main and not (folder / TOKENIZER).exists():
        written = write_new_run(recipe, folder, make_tokenizer(recipe, pairs, distillation), present)
    elif is_main and not (folder / DATA_FILE).exists():
        write_atomically(folder / DATA_FILE, json.dumps(present, indent=2))
    PartialState().wait_for_everyone()
    if not (folder / TOKENIZER).exists():
        raise UserError(
            f"{folder}: this machine does not see what the first process wrote there; name a folder on a disk that all "
            "machines of the launch share."
        )
    return load_tokenizer(str(folder)), written
