"""Folders that are written whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path

MARKER = "config.json"
"""The file that makes a folder one of a model: no other is replaced."""


def refuse_folder(path: Path, force: bool) -> None:
    """Refuse a folder that is in use, and a file.

    Raises:
        ValueError: something stands at `path` that may not be replaced.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: a file; name a folder.")
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


__all__ = ["new_folder", "refuse_folder"]
