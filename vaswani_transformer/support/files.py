"""Files and folders that are written completely or not at all, locks, and digests."""

import codecs
import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from transformers.utils import logging

from .errors import OutputError, UserError, one_line

logger = logging.get_logger(__name__)

PARTIAL = ".part"
"""The suffix of a file or folder that is not finished yet."""
MODEL_MARKER = "config.json"
"""The file that every model folder has; `atomic_folder` replaces no other folder."""
MODEL_FILES = (
    "*.bin", "*.index.json", "*.model", "*.py", "*.safetensors", "*.spm", "*config.json", "*vocab*",
    "added_tokens.json", "merges.txt", "special_tokens_map.json", "tokenizer.json",
)  # fmt: skip
"""The files of a saved model: weights, settings, code and tokenizer."""
BLOCK = 1 << 20  # bytes
JSON_TYPES = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}


@contextlib.contextmanager
def read_errors(name: str | os.PathLike[str]) -> Generator[None]:
    """Turn an OSError into a UserError that names the input."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}; name a file that can be read.") from error


@contextlib.contextmanager
def write_errors(name: str | os.PathLike[str], fix: str, *more_errors: type[Exception]) -> Generator[None]:
    """Turn a failed write, or one of `more_errors` by which a library reports it, into an OutputError.

    `name` is the file or the stream, and `fix` ends the message. A broken pipe passes through.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, *more_errors) as error:
        problem = getattr(error, "strerror", None) or one_line(error)
        raise OutputError(f"{name}: cannot be written: {problem}; {fix}.") from error


def write_atomically(path: Path, text: str) -> None:
    """Write a text file in UTF-8 completely or not at all."""
    partial = path.with_name(f"{path.name}{PARTIAL}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@contextlib.contextmanager
def staged_files(folder: Path) -> Generator[Path]:
    """Yield a staging folder whose files move into `folder` at the end; an error before that changes nothing there."""
    staging = folder / f"files{PARTIAL}"
    shutil.rmtree(staging, ignore_errors=True)  # of a killed command
    staging.mkdir(parents=True)
    try:
        yield staging
        for path in staging.iterdir():
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_new_folder(path: Path, force: bool = False) -> None:
    """Check that a model folder can be written at `path`; by `force` it may replace a model."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; name a folder.")
    if not path.exists() or not any(path.iterdir()):
        return
    if not force:
        raise UserError(f"{path}: the folder is in use; name another, or replace the model in it with --force.")
    if not (path / MODEL_MARKER).is_file():
        raise UserError(f"{path}: the folder has no {MODEL_MARKER}, so it holds no model to replace; name another.")


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str], force: bool = False) -> Generator[Path]:
    """Yield a staging folder that becomes `path` at the end; an error before that changes nothing at `path`.

    Missing parents are made, and by `force` it may replace a model. A link at `path` stays, and leads to the folder.
    """
    target, mark = Path(path).resolve(), secrets.token_hex(4)
    check_new_folder(target, force)
    staging, backup = (target.with_name(f".{target.name}.{role}-{mark}") for role in ("new", "old"))
    try:
        with write_errors(path, "name another folder"):
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


def parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_json_line(line: str, where: str, fix: str = "correct the line.") -> Any:
    """Return the value of a line of JSON Lines; `where` names the line in an error, which `fix` ends."""
    try:
        return parse_json(line)
    except ValueError as error:  # also of a number with thousands of digits
        is_syntax = isinstance(error, json.JSONDecodeError)
        problem = f"{error.msg} at column {error.colno}" if is_syntax else one_line(error)
        raise UserError(f"{where}: not JSON ({problem}); {fix}") from error


def json_type(value: Any) -> str:
    """Return JSON's name of a value's type."""
    return JSON_TYPES.get(type(value), "a number")


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """Return the JSON object in a file that a command has written; `fix` ends the message of a damaged one."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); {fix}") from error


def check_unicode(text: str, where: str) -> None:
    """Check that a text can be written as UTF-8, as JSON's `\\ud800` without its other half cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise UserError(
            f"{where} holds {code} at character {error.start + 1}, half of a surrogate pair; correct the line."
        ) from error


def lines_of(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream: a line feed ends one, or a carriage return in a text without line feeds."""
    for number, line in enumerate(stream):
        if number == 0 and not line.endswith(b"\n"):
            yield from line.splitlines()
        else:
            yield line


def utf8_lines(stream: Iterable[bytes], name: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lines of UTF-8 text without line ends; a byte order mark is skipped."""
    for number, line in enumerate(lines_of(stream), start=1):
        try:
            yield (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode().rstrip("\n")
        except UnicodeDecodeError as error:
            byte = error.object[error.start]  # of the line without its mark
            raise UserError(
                f"{name}, line {number}: not UTF-8 (byte 0x{byte:02x} at byte {error.start + 1} of the "
                "line); correct the line, or convert the file, for example with iconv."
            ) from error


def lock(file: IO, message: str) -> None:
    """Lock an open file until it is closed or the process ends; `message` says that another process holds the lock.

    Windows has no such locks; a file system without them causes a warning.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(message) from error
    except OSError:
        logger.warning("%s: its file system has no locks; check that no other process writes it.", file.name)


class TextDigest:
    """The SHA-256 of texts in UTF-8, each followed by a zero byte, and their `count`."""

    def __init__(self) -> None:
        self.count = 0
        self._sha256 = hashlib.sha256()

    def add(self, text: str) -> None:
        self.count += 1
        self._sha256.update(text.encode() + b"\0")

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def digest_of_file(path: Path, algorithm: Any = "sha256") -> list[int | str]:
    """Return the size of a file in bytes and the digest of its content, by an algorithm of `hashlib.file_digest`."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm)
        return [file.tell(), digest.hexdigest()]


def digest_of_model(folder: Path) -> str:
    """Return the SHA-256 of the names, sizes and contents of `MODEL_FILES` in a folder."""
    sha256 = hashlib.sha256()
    for path in sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)}):
        if path.is_file():
            sha256.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    sha256.update(block)
    return sha256.hexdigest()
