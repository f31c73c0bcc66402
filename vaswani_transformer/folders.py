"""Folders of models: loaded with one line for what is wrong with them, and written whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from .lines import LineError, reason

MARKER = "config.json"
"""The file that makes a folder one of a model: no other is replaced."""


def refuse_missing_folder(model: str) -> None:
    """Refuse what is spelt as a folder and is none, before the Hub is asked for it.

    Raises:
        LineError: naming it.
    """
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise LineError(f"{model}: there is no such folder; name one with a model, or a model on the Hub.")


@contextlib.contextmanager
def loading(name: str) -> Generator[None]:
    """Whatever a broken folder or the network makes the libraries raise becomes a LineError with the model's name."""
    try:
        yield
    except Exception as error:
        raise LineError(f"{name}: cannot be loaded: {reason(error)}") from error


def refuse_folder(path: Path, force: bool) -> None:
    """Refuse a folder that is in use or cannot be made, and a file.

    Raises:
        ValueError: something stands at `path` that may not be replaced, or in its way.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: a file; name a folder.")
    parent = next(each for each in path.absolute().parents if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{path}: {parent} is no folder that may be written to; name a place in another.")
    if not path.exists() or not any(path.iterdir()):
        return
    if not force:
        raise ValueError(f"{path}: the folder is in use; name another, or replace the model in it with --force.")
    if not (path / MARKER).is_file():
        raise ValueError(f"{path}: the folder holds no {MARKER}, so no model that could be replaced; name another.")


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], force: bool = False) -> Generator[Path]:
    """A folder to write in, which stands at `path` at the end; an error on the way leaves what stood there before.

    Args:
        path: where to; its parents are made.
        force: whether a model that stands there is replaced.

    Raises:
        ValueError: the folder is in use and may not be replaced.
    """
    target = Path(path).absolute()
    refuse_folder(target, force)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh, former = (target.with_name(f".{target.name}.{kind}-{os.getpid()}") for kind in ("new", "old"))
    try:
        fresh.mkdir()
        yield fresh
        if target.exists():
            target.rename(former)
        fresh.rename(target)
    except BaseException:
        if former.exists() and not target.exists():
            former.rename(target)
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


__all__ = ["loading", "new_folder", "refuse_folder", "refuse_missing_folder"]
