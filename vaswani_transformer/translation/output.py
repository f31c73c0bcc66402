"""Output of results: a stream, or a resumable file."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from transformers.utils import logging

from ..support.errors import UserError
from ..support.files import read_json, write_atomically, write_errors

logger = logging.get_logger(__name__)


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


class ResumableFile(StreamOutput):
    """Output file with a record, `FILE.record`, from which a later command can resume.

    The record contains the settings, and the number and digest of the texts read so far; it is written before their
    results. At the end it gets the size and digest of the file. On resuming, an unfinished file is truncated after its
    last complete result. The open file is locked, where the system has such locks.

    `settings` are what the results depend on, besides the texts, and `batches` what they depend on only by the rounding
    of sums. The command adds to the record the search, and the weight layouts of a prepared model, which affect
    rounding.

    Attributes:
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
            self.lock()
            fix = "the file that it belongs to stays unchanged: remove that, or give another --output."
            before = read_json(self.record_path, fix) if path.stat().st_size else self.record
            changed = [name for name, value in settings.items() if before.get("settings", {}).get(name) != value]
            if changed:
                raise self.conflict(f"was made with another {' and '.join(changed)}")
            self.batching_changed = before.get("batches") != batches
            self.record["layouts"] = before.get("layouts", {})
            self.known, self.expected = before.get("texts", 0), before.get("sha256", "")
            self.is_finished = "output" in before
            self.done, end = self.count_results(lines_per_text)
            if self.done > self.known or (self.is_finished and digest_of_file(path) != before["output"]):
                raise self.conflict("was changed by another program")
            self.stream.truncate(end)
        except UserError:
            self.close()
            raise

    def lock(self) -> None:
        """Lock the file until it is closed."""
        try:
            import fcntl

            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            fix = "wait for that one, or give another --output."
            raise UserError(f"{self.path}: another command is writing it; {fix}") from error
        except (ImportError, OSError):  # Windows, or a file system without locks
            logger.warning("%s: cannot be locked; check that no other process writes it.", self.path)

    def conflict(self, problem: str) -> UserError:
        """Return the error for a file that must not be changed."""
        fix = f"give the same command as then, another --output, or remove it and {self.record_path.name}"
        return UserError(f"{self.path}: {problem}; it stays unchanged: {fix}.")

    def count_results(self, lines_per_text: int) -> tuple[int, int]:
        """Return the number of complete results, and the byte offset of their end."""
        count = end = position = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                position += len(line)
                if number % lines_per_text == 0 and line.endswith(b"\n"):
                    count, end = count + 1, position
        return count, end

    def read(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield texts, and count them."""
        for text in texts:
            self.count += 1
            self.digest.update(text.encode() + b"\0")
            yield text

    def watch(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts, after checking that those read by an earlier command are the same."""
        remaining = self.read(texts)
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
