"""Output of results: a stream, or a resumable file."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO

from transformers.utils import logging

from ..support.errors import UserError
from ..support.files import write_atomically, write_errors

logger = logging.get_logger(__name__)


def lock(file: IO, message: str) -> None:
    """Lock an open file until it is closed; raise an error with `message` if another process holds the lock.

    Without support of the file system there is a warning; on Windows files are not locked.
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


def digest_of_file(path: Path) -> list[int | str]:
    """Return the size of a file in bytes and the SHA-256 of its content."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return [file.tell(), digest.hexdigest()]


class StreamOutput:
    """Output to a stream, a pipe or a device, which cannot be resumed."""

    done = 0  # texts with a result from an earlier command
    fix = "make room, or give another --output"

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.stream, self.name = stream, name

    def write(self, lines: list[str]) -> None:
        """Write and flush the result of a text."""
        with write_errors(self.name, self.fix):
            self.stream.write("".join(f"{line}\n" for line in lines).encode())
            self.stream.flush()

    def finish(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Leave the stream open."""


def describe_option(name: str, value: Any) -> str:
    """Describe a recorded setting as an option: "without --beams", "with --beams=4"."""
    if value is None or value is False:
        return f"without --{name}"
    return f"with --{name}" if value is True else f"with --{name}={value}"


class ResumableFile(StreamOutput):
    """Output file with a record, `FILE.record`, from which a later command can resume.

    The record contains the settings, and the number and digest of the texts read so far; it is written before their
    results. At the end it gets the size and digest of the file. On resuming, an unfinished file is truncated after its
    last complete result.

    Args:
        path: the file.
        lines_per_text: the lines of a text's result.
        settings: what the results depend on, besides the texts.
        batches: what they depend on only by the rounding of sums.

    Attributes:
        record: content of the record; the command adds the search, and the weight layouts of a prepared model, which
            affect rounding.
        done: number of texts with a result from an earlier command.
        is_finished: whether all texts have one.
        batching_changed: whether the unfinished file was started with other `batches`.

    Raises:
        UserError: the file has other settings or no record, was changed, or is being written by another command.
    """

    fix = "make room, and the same command resumes it"

    def __init__(self, path: Path, lines_per_text: int, settings: dict[str, Any], batches: list[int]) -> None:
        with write_errors(path, "name another --output"):
            super().__init__(path.open("ab"), str(path))
        self.path, self.record_path = path, path.with_name(f"{path.name}.record")
        self.record: dict[str, Any] = {"settings": settings, "batches": batches, "layouts": {}}
        self.count, self.digest = 0, hashlib.sha256()  # of the texts read, each followed by a zero byte
        try:
            lock(self.stream, f"{path}: another command is writing it; wait for that one, or give another --output.")
            before = self.record if path.stat().st_size == 0 else self.read_record()
            for name, value in settings.items():
                if (old := before["settings"].get(name)) != value:
                    differ = f"{describe_option(name, old)}, not {describe_option(name, value)}"
                    raise self.conflict(f"was made {'by another model' if name == 'model' else differ}")
            self.batching_changed = before["batches"] != batches
            self.record["layouts"] = before["layouts"]
            self.known, self.expected = before.get("texts", 0), before.get("sha256", "")
            self.is_finished = "output" in before
            self.done, end = self.count_results(lines_per_text)
            if self.done > self.known or (self.is_finished and digest_of_file(path) != before["output"]):
                raise self.conflict("was changed by another program")
            self.stream.truncate(end)
        except UserError:
            self.close()
            raise

    def conflict(self, problem: str) -> UserError:
        """Return the error for a file that must not be changed."""
        fix = f"give the same command as then, another --output, or remove it and {self.record_path.name}"
        return UserError(f"{self.path}: {problem}; it stays unchanged: {fix}.")

    def read_record(self) -> dict[str, Any]:
        """Return the record of an earlier command."""
        if not self.record_path.exists():
            raise self.conflict("exists already, without its record")
        types = {"settings": dict, "batches": list, "layouts": dict, "texts": int, "sha256": str}
        try:
            record = json.loads(self.record_path.read_bytes())
            if not all(isinstance(record[name], types[name]) for name in types):
                raise TypeError("a value has another type")
        except (ValueError, TypeError, KeyError) as error:
            raise self.conflict("has a damaged record") from error
        return record

    def count_results(self, lines_per_text: int) -> tuple[int, int]:
        """Return the number of complete results, and the byte offset of their end."""
        count = end = position = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                position += len(line)
                if number % lines_per_text == 0 and line.endswith(b"\n"):
                    count, end = count + 1, position
        return count, end

    def watch(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts, after checking that those read by an earlier command are the same."""

        def counted() -> Iterator[str]:
            for text in texts:
                self.count += 1
                self.digest.update(text.encode() + b"\0")
                yield text

        remaining = counted()
        yield from islice(remaining, self.done)
        ahead = list(islice(remaining, self.known - self.done))
        if self.known and (self.count, self.digest.hexdigest()) != (self.known, self.expected):
            raise self.conflict(f"was made from another input, whose first {self.known} texts differ")
        yield from ahead
        for text in remaining:
            if self.is_finished:
                raise self.conflict(f"is finished, and the input has more than its {self.known} texts")
            yield text

    def write(self, lines: list[str]) -> None:
        """Append a text's result, after updating the record with all texts read so far."""
        if self.count != self.record.get("texts"):
            self.write_record()
        super().write(lines)

    def write_record(self, **more: Any) -> None:
        self.record |= {"texts": self.count, "sha256": self.digest.hexdigest()} | more
        with write_errors(self.path, self.fix):
            write_atomically(self.record_path, json.dumps(self.record))

    def finish(self) -> None:
        """Record that all texts have results."""
        self.write_record(output=digest_of_file(self.path))

    def close(self) -> None:
        """Close the file, which a later command can resume."""
        with contextlib.suppress(OSError):  # the failed write is already reported
            self.stream.close()
