"""Files that are written completely or not at all, and output that a later command resumes."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from transformers.utils import logging

from .command import OutputError, UserError, one_line

logger = logging.get_logger(__name__)

FAILED_WRITE = re.compile(r"PytorchStreamWriter|inline_container|iostream error|\(os error \d+\)")
"""In errors of torch (the first three), safetensors and tokenizers, which do not have a class for it."""

POINTER = rb"version https://(git-lfs|hawser)\.github\.com/|/annex/objects/"
"""Beginning of the file that Git LFS or git-annex leaves in place of a large one."""
WEB_PAGE = rb"(?i)\s*<(!doctype html|html)\b"
"""Beginning of a web page, which a failed download may leave."""

MODEL_MARKER = "config.json"
"""File in every model folder; `atomic_folder` replaces only folders with it."""
MODEL_FOLDERS = ("onnx", ".cache")
"""Folders in a model's folder: of an export, and of a download."""


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


def check_new_folder(path: Path, force: bool | None = None) -> None:
    """Check that a model folder can be written to `path`; with `force` it may replace a model, but not a run.

    `force` is None if the command has no option `--force`, which the error would name.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; choose a folder.")
    if not path.exists() or not any(path.iterdir()):
        return
    if not force:
        option = ", or replace the model in it with --force" if force is False else ""
        raise UserError(f"{path}: the folder is in use; choose a different one{option}.")
    if not (path / MODEL_MARKER).is_file():
        raise UserError(
            f"{path}: the folder does not contain a model ({MODEL_MARKER} is missing); choose a different one."
        )
    if others := [each.name for each in path.iterdir() if each.is_dir() and each.name not in MODEL_FOLDERS]:
        raise UserError(f"{path}: contains more than a model; got the folder {min(others)}. Choose a different one.")


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str], force: bool | None = None) -> Generator[Path]:
    """Yield a staging folder that becomes `path` on success; an error leaves `path` unchanged.

    Missing parents are created. With `force` the folder may replace a model. A link at `path` is followed. What is
    written to `path` meanwhile stays, and is an error.
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
        check_new_folder(target, force)
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


class Encodable(Protocol):
    """A text, or what else a line of the input asks for, as bytes."""

    def encode(self) -> bytes: ...


@dataclass
class StreamOutput:
    """Output to a stream, a pipe or a device, which cannot be resumed."""

    stream: BinaryIO
    name: str
    done = 0  # texts with a result from an earlier command
    fix = "make room, or choose a different --output"

    def write(self, texts: Sequence[Encodable], lines: list[str]) -> None:
        """Write and flush the lines of the results of texts."""
        with write_errors(self.name, self.fix):
            self.stream.writelines(f"{line}\n".encode() for line in lines)
            self.stream.flush()

    def finish(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Leave the stream open."""


class ResumableFile(StreamOutput):
    """Output file with a record, `FILE.record`, from which a later command can resume.

    After each write the record says how many texts have results, with the digest of these texts and the size of the
    file. On resuming, an unfinished file is truncated to that size. The open file is locked, where the system has such
    locks.

    `settings` are what the results depend on, besides the texts. The command adds to the record the search, and the
    weight layouts of a prepared model, which affect rounding.

    Attributes:
        done: number of texts with a result from an earlier command.
        is_finished: whether all texts have one.

    Raises:
        UserError: the file has other settings, the wrong size or no record, or is being written by a different command.
    """

    fix = "make room, and the same command resumes it"

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        with write_errors(path, "choose a different --output"):
            super().__init__(path.open("ab"), str(path))
        self.path = path
        self.record_path = path.with_name(f"{path.name}.record")
        self.texts_digest = hashlib.sha256()  # a zero byte follows each text
        self.record: dict[str, Any] = {
            "settings": settings,
            "layouts": {},
            "texts": 0,
            "size": 0,
            "is_finished": False,
            "texts_sha256": self.texts_digest.hexdigest(),
        }

        # The lock comes before the record is read, which a running command may be writing.
        try:
            self.lock()
            if path.stat().st_size:
                self.read_record()
        except UserError:
            self.close()
            raise
        self.done = self.record["texts"]
        self.is_finished = self.record["is_finished"]

    def lock(self) -> None:
        """Lock the file until it is closed."""
        try:
            import fcntl

            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            fix = "wait until it ends, or choose a different --output."
            raise UserError(f"{self.path}: a different command is writing it; {fix}") from error
        except (ImportError, OSError):  # Windows, or a file system without locks
            logger.warning("%s: cannot be locked; check that no other process writes it.", self.path)

    def read_record(self) -> None:
        """Read the record of an earlier command, and truncate the file after the results that it counts."""
        fix = "its output file stays unchanged; remove that file, or choose a different --output."
        new = self.record
        self.record = read_json(self.record_path, fix)
        for name, value in new.items():
            if type(self.record.get(name)) is not type(value):
                raise self.conflict(f"has a damaged record with {name} {self.record.get(name)!r}")
        before = self.record["settings"]
        changed = [name for name, value in new["settings"].items() if before.get(name) != value]
        if changed:
            raise self.conflict(f"was written with different settings ({', '.join(changed)})")

        # A finished file has exactly the recorded size; a killed command may have written more than it recorded.
        size = self.record["size"]
        file_size = self.path.stat().st_size
        least = file_size if self.record["is_finished"] else 0
        if not least <= size <= file_size:
            raise self.conflict("was changed by a different program")
        self.stream.truncate(size)

    def conflict(self, problem: str) -> UserError:
        """Return the error for a file that must not be changed."""
        fix = f"rerun the original command, choose a different --output, or remove it and {self.record_path.name}"
        return UserError(f"{self.path}: {problem}; it stays unchanged: {fix}.")

    def skip(self, texts: Iterator[Encodable]) -> None:
        """Read the texts that have results, and check that they have not changed."""
        count = 0
        for text in islice(texts, max(0, self.done)):
            self.texts_digest.update(text.encode() + b"\0")
            count += 1
        if count != self.done or self.texts_digest.hexdigest() != self.record["texts_sha256"]:
            raise self.conflict(f"was written from a different input: the first {self.done} texts differ")
        if self.is_finished and next(texts, None) is not None:
            raise self.conflict(f"is finished, and the input has more than its {self.done} texts")

    def write(self, texts: Sequence[Encodable], lines: list[str]) -> None:
        """Append the lines of the results of texts, and then record them."""
        super().write(texts, lines)
        for text in texts:
            self.texts_digest.update(text.encode() + b"\0")
        self.save_record(texts=self.record["texts"] + len(texts), size=self.path.stat().st_size)

    def save_record(self, **changes: Any) -> None:
        """Write the record with changed fields, after the results have reached the disk."""
        self.record["texts_sha256"] = self.texts_digest.hexdigest()
        self.record.update(changes)
        with write_errors(self.path, self.fix):
            os.fsync(self.stream.fileno())
            write_atomically(self.record_path, json.dumps(self.record))

    def finish(self) -> None:
        """Record that all texts have results."""
        self.save_record(is_finished=True)

    def close(self) -> None:
        """Close the file, which a later command can resume."""
        with contextlib.suppress(OSError):  # the failed write is already reported
            self.stream.close()
