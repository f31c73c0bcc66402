"""Atomic writing of files and folders."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

from transformers.utils import logging

from .errors import OutputError, UserError, one_line

logger = logging.get_logger(__name__)

FAILED_WRITE = re.compile(r"PytorchStreamWriter|inline_container|iostream error|\(os error \d+\)")
"""In errors of torch (the first three), safetensors and tokenizers, which do not have a class for it."""

MODEL_MARKER = "config.json"
"""File in every model folder; `atomic_folder` replaces only folders with it."""


@contextlib.contextmanager
def write_errors(name: str | os.PathLike[str], fix: str) -> Generator[None]:
    """Convert a failed write to an OutputError; a broken pipe passes through.

    `name` is the file or stream, and `fix` ends the message.
    """
    try:
        yield
    except (BrokenPipeError, UserError):
        raise
    except Exception as error:
        if not (isinstance(error, OSError) or FAILED_WRITE.search(str(error))):
            raise
        problem = getattr(error, "strerror", None) or one_line(error)
        raise OutputError(f"{name}: cannot be written: {problem}; {fix}.") from error


def sha256_of(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 text file, completely or not at all."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@contextlib.contextmanager
def staged_files(folder: Path) -> Generator[Path]:
    """Yield a staging folder whose files move to `folder` on success; an error leaves `folder` unchanged."""
    staging = folder / "files.part"
    shutil.rmtree(staging, ignore_errors=True)  # left by a killed command
    staging.mkdir(parents=True)
    try:
        yield staging
        for path in staging.iterdir():
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_new_file(option: str, path: Path | None) -> None:
    """Check that a file that a command writes does not exist, and that its folder does."""
    if path is not None and (path.exists() or not path.parent.is_dir()):
        raise UserError(f"--{option}={path}: the file exists, or its folder does not; choose a new file.")


def check_new_folder(path: Path, force: bool = False) -> None:
    """Check that a model folder can be written to `path`; with `force` it may replace a model."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; choose a folder.")
    if not path.exists() or not any(path.iterdir()):
        return
    if not force:
        raise UserError(
            f"{path}: the folder is in use; choose a different one, or replace the model in it with --force."
        )
    if not (path / MODEL_MARKER).is_file():
        raise UserError(
            f"{path}: the folder does not contain a model ({MODEL_MARKER} is missing); choose a different one."
        )


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str], force: bool = False) -> Generator[Path]:
    """Yield a staging folder that becomes `path` on success; an error leaves `path` unchanged.

    Missing parents are created. With `force` the folder may replace a model. A link at `path` is followed.
    """
    target = Path(path).resolve()
    check_new_folder(target, force)
    mark = secrets.token_hex(4)
    staging = target.with_name(f".{target.name}.new-{mark}")
    backup = target.with_name(f".{target.name}.old-{mark}")
    try:
        with write_errors(path, "choose a different folder"):
            staging.mkdir(parents=True)
        yield staging
        if target.exists():
            target.rename(backup)
        staging.rename(target)
    except BaseException:
        if backup.exists() and not target.exists():
            backup.rename(target)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(backup, ignore_errors=True)


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """Return the JSON object in a file of an earlier command; `fix` ends the message for a damaged file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); {fix}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: is damaged; got {type(content).__name__}, expected an object; {fix}")
    return content
