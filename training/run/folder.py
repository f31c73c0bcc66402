"""The folder of a run: whether a recipe may use it, to begin a run, to resume the one in it, or to extend that."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState

from training.monitor.monitor import trained_seconds
from training.recipe.fields import SETTINGS, Recipe, to_dict
from training.recipe.reading import Scope, build
from training.report.results import RESULTS
from training.run.checkpoints import (
    LOCK,
    RECIPE,
    STATE,
    has_ended,
    intact_checkpoint,
    is_beyond,
    run_lock,
    settle,
    step_of,
)
from training.run.command import check_writable
from training.run.distributed import raise_together
from vaswani_transformer.support.errors import UserError, one_line
from vaswani_transformer.support.files import PARTIAL


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
    has_other_limits = any(scope_of(name) is Scope.LIMIT for name in changed)
    if checkpoint is not None and has_other_limits and is_beyond(checkpoint, recipe.training):
        minutes = trained_seconds(checkpoint) / 60
        raise UserError(
            f"{path}: holds an unfinished run of {step_of(checkpoint)} steps in {minutes:.1f} minutes so far; give "
            "training.steps and training.minutes beyond them, or another --output_dir."
        )
