"""Files and folders that are written completely or not at all, locks, and digests."""

import codecs
import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
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
OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS}  # that it has failed, whatever was written
JSON_TYPES = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}


def free_megabytes(path: Path) -> int:
    """Return the free space, in MB, of the disk that holds a path or its nearest existing folder."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free >> 20


@contextlib.contextmanager
def read_errors(name: str | os.PathLike[str]) -> Generator[None]:
    """Turn an OSError into a UserError that names the input."""
    try:
        yield
    except OSError as error:
        problem = one_line(error, with_file=False)
        raise UserError(f"{name}: cannot be read: {problem}; name a file that can be read.") from error


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


def check_unicode(text: str, where: str) -> None:
    """Check that a text can be written as UTF-8, as JSON's `\\ud800` without its other half cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise UserError(
            f"{where} holds {code} at character {error.start + 1}, half of a surrogate pair; correct the line."
        ) from error


def read_json(path: Path, fix: str, **fields: type) -> dict[str, Any]:
    """Return the JSON object in a file that a command has written, in which `fields` have these types.

    `fix` says what the user can do with a damaged one, and ends the message.
    """
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error, with_file=False)}); {fix}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: is damaged; got {type(content).__name__}, expected dict; {fix}")
    for name, kind in fields.items():
        if not isinstance(content.get(name), kind):
            raise UserError(
                f"{path}: {name} is damaged; got {json.dumps(content.get(name))[:40]}, expected {kind.__name__}; {fix}"
            )
    return content


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


def is_write_error(error: Exception) -> bool:
    """Return whether the system could not write: torch reports that by the place in its source, Rust by a number."""
    is_of_library = (
        re.search(r"inline_container|PytorchStreamWriter|basic_ios|\(os error \d+\)", str(error)) is not None
    )
    return isinstance(error, OSError) or (is_of_library and not isinstance(error, UserError))


def failed_write(error: Exception) -> Exception:
    """Return the disk's error that a library hid by one of its own while it tidied up, or else the error."""
    hidden = error.__context__
    is_of_disk = isinstance(hidden, OSError) and hidden.errno in OF_A_DISK and not isinstance(error, UserError)
    return hidden if is_of_disk else error


@contextlib.contextmanager
def write_errors(
    name: str | os.PathLike[str], fix: str | Callable[[], str], *more_errors: type[Exception]
) -> Generator[None]:
    """Turn a failed write, or one of `more_errors` by which a library reports it, into an OutputError.

    `name` is the file or the stream. `fix`, or what it returns then, ends the message. A broken pipe passes through.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        problem = failed_write(error)
        if not (isinstance(error, more_errors) or is_write_error(problem)):
            raise
        end = fix if isinstance(fix, str) else fix()
        raise OutputError(f"{name}: cannot be written: {one_line(problem, with_file=False)}; {end}.") from error


def write_atomically(path: Path, text: str) -> None:
    """Write a text file in UTF-8 completely or not at all."""
    partial = path.with_name(f"{path.name}{PARTIAL}")
    partial.unlink(missing_ok=True)  # it may be a link to another file
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def holds_files(folder: Path) -> bool:
    """Return whether a path is a file, or a folder with more than what a killed command has left unfinished."""
    return folder.exists() and not (folder.is_dir() and all(path.suffix == PARTIAL for path in folder.iterdir()))


@contextlib.contextmanager
def staged_files(folder: Path, last: str = "") -> Generator[Path]:
    """Yield a staging folder whose files move into `folder` at the end, the file `last` after all others.

    An error leaves no new file there. A missing folder is made, and what a killed command has left unfinished in it is
    deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for partial in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
    with tempfile.TemporaryDirectory(dir=folder, suffix=PARTIAL) as staging:
        yield Path(staging)
        added: list[Path] = []
        try:
            for path in sorted(Path(staging).iterdir(), key=lambda path: (path.name == last, path.name)):
                is_new = not (folder / path.name).exists()
                moved = path.replace(folder / path.name)
                added += [moved] if is_new else []
        except OSError:
            for path in added:
                path.unlink()
            raise


def check_new_folder(path: Path, force: bool = False) -> None:
    """Check that a model folder can be written at `path`; by `force` it may replace a model."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; name a folder.")
    if os.path.ismount(path):  # also the root, which has no parent
        raise UserError(f"{path}: is a mount point, whose place no new folder can take; name a folder in it.")
    parent = next(each for each in path.absolute().parents if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{path}: {parent} is not a writable folder; name a folder elsewhere.")
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
    target, mark = Path(path).resolve(), secrets.token_hex(4)  # a killed process may have had the same number
    check_new_folder(target, force)
    staging, backup = (target.with_name(f".{target.name}.{role}-{mark}") for role in ("new", "old"))
    try:
        with write_errors(path, "name another folder"):
            target.parent.mkdir(parents=True, exist_ok=True)
            staging.mkdir()
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


def open_lock(path: Path) -> IO:
    """Open the file of a lock, which is made if it is missing."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder, where a file that locks the other files belongs; remove or rename it.")
    return path.open("a")


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
