"""The output of results: a stream, or a file that a later command can resume."""

import contextlib
import json
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ..support.errors import UserError
from ..support.files import digest_of_file, lock, parse_json, write_atomically, write_errors
from .readers import DigestedInput

RESUME = "make room, and the same command resumes it"


class StreamOutput:
    """Results that cannot be resumed: on standard output, a pipe or a device."""

    done, known, digest, batching_changed = 0, 0, "", False

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.stream, self.name = stream, name

    def write(self, lines: list[str], texts: DigestedInput | None = None) -> None:
        """Write a text's result at once."""
        with write_errors(self.name, "make room, or give another --output"):
            self.stream.write("".join(f"{line}\n" for line in lines).encode())
            self.stream.flush()

    def close(self) -> None:
        """Leave the stream open."""

    def finish(self, texts: DigestedInput) -> None:
        """Record nothing."""


def describe_option(name: str, value: Any) -> str:
    """Describe a recorded setting as an option: "without --beams", "with --beams=4"."""
    if value is None or value is False:
        return f"without --{name}"
    return f"with --{name}" if value is True else f"with --{name}={value}"


def check_settings(path: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Check that the results in a file were made with the current settings."""
    for name, value in settings.items():
        if (old := before.get(name)) != value:
            differ = f"{describe_option(name, old)}, not {describe_option(name, value)}"
            raise UserError(
                f"{path}: was made {'by another model' if name == 'model' else differ}; it stays unchanged: give the "
                f"same command as then, another --output, or remove it and {record_path(path).name}."
            )


def record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.record")


def is_record(record: Any) -> bool:
    """Return whether a value is what `ResumableFile` writes: without counts before the first result, else with them."""
    if not (isinstance(record, dict) and isinstance(record.get("settings"), dict) and "batches" in record):
        return False
    texts, digest = record.get("texts"), record.get("sha256")
    is_counted = isinstance(texts, int) and 0 <= texts < sys.maxsize and isinstance(digest, str)
    return is_counted or not {"texts", "sha256", "output"} & record.keys()


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the record of a file of results, or None without a record."""
    record_file = record_path(path)
    if not record_file.exists():
        return None
    try:
        record = parse_json(record_file.read_bytes())
        if not is_record(record):
            raise ValueError("a field is missing or has another type")
        return record
    except ValueError as error:
        raise UserError(
            f"{record_file}: not the record of a file of results; remove it, or name another --output."
        ) from error


def is_finished(path: Path, settings: dict[str, Any], texts: Iterable[str], name: str) -> bool:
    """Return whether a file holds all results of these texts with these settings, according to its record.

    It reads `texts`, which messages call `name`, only if the record says that the file is finished. A file that is
    missing, empty or unfinished is not finished.
    """
    record = read_record(path)
    if not path.exists() or path.stat().st_size == 0:
        return False
    if record is None:
        raise UserError(
            f"{path}: exists already, without its record {record_path(path).name}; it stays unchanged: give "
            "another --output, or remove it."
        )
    check_settings(path, record["settings"], settings)
    if "output" not in record:
        return False
    if digest_of_file(path) != record["output"]:
        raise UserError(
            f"{path}: was changed after it was finished; it stays unchanged: give another --output, or remove it and "
            f"{record_path(path).name}."
        )
    counted = DigestedInput(texts, name)
    count = sum(1 for _ in islice(counted, record["texts"] + 1))
    if (count, counted.digest) != (record["texts"], record["sha256"]):
        more = f"has more lines than the {count - 1} of" if count > record["texts"] else "is another text than that of"
        raise UserError(
            f"{name}: {more} the finished {path}, which stays unchanged; give the same text, another --output, or "
            f"remove it and {record_path(path).name}."
        )
    return True


class ResumableFile:
    """A file of results with a record, `FILE.record`, from which a later command can resume it.

    The record holds what the results depend on: the settings, the complete search that they and the model give, and the
    number and digest of the texts that were read.
    It is written before any result of those texts. At the end the size and digest of the file are added to it. An
    unfinished file is truncated after its last complete result; an empty one starts from the beginning.

    Args:
        path: the file.
        lines: the lines of a text's result.
        settings: what the results depend on, besides the texts.
        batches: what they depend on only by the rounding of sums.
        search: the complete search, which settings and model give.

    Attributes:
        done: how many texts have their result.
        known, digest: how many texts had been read, and their digest.
        batching_changed: whether the unfinished file was started with other `batches`.
    """

    def __init__(
        self,
        path: Path,
        lines: int,
        settings: dict[str, Any],
        batches: list[int],
        search: dict[str, Any] | None = None,
    ) -> None:
        self.path, self.lines = path, lines
        self.record: dict[str, Any] = {"settings": settings, "batches": batches, "search": search}
        read_record(path)  # before a file is made
        with write_errors(path, "name another --output"):
            self.file = path.open("ab")
        try:
            lock(self.file, f"{path}: another command is writing it; wait for that one, or give another --output.")
        except UserError:
            self.file.close()
            raise
        before = (read_record(path) if path.stat().st_size else None) or self.record
        check_settings(path, before["settings"], settings)
        if "output" in before:
            raise UserError(f"{path}: another command has finished it meanwhile; it stays unchanged.")
        self.batching_changed = before["batches"] != batches
        self.known: int = before.get("texts", 0)
        self.digest: str = before.get("sha256", "")
        self.done, end = self._count_complete_results()
        if self.done > self.known:
            raise UserError(
                f"{path}: has {self.done} results, more than the {self.known} in {record_path(path).name}; remove "
                "both, or give another --output."
            )
        self.file.truncate(end)

    def _count_complete_results(self) -> tuple[int, int]:
        """Return the number of complete results, and the byte at which the last one ends."""
        count = end = position = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                position += len(line)
                if number % self.lines == 0 and line.endswith(b"\n"):
                    count, end = count + 1, position
        return count, end

    def write(self, lines: list[str], texts: DigestedInput) -> None:
        """Add a text's result, after the record counts all texts that have been read."""
        with write_errors(self.path, RESUME):
            if texts.count != self.record.get("texts"):
                self._write_record(texts)
            self.file.write("".join(f"{line}\n" for line in lines).encode())
            self.file.flush()

    def close(self) -> None:
        """Close the file as it is; a later command can resume it."""
        with contextlib.suppress(OSError):  # a failed write has been reported by then
            self.file.close()

    def _write_record(self, texts: DigestedInput, **more: Any) -> None:
        self.record |= {"texts": texts.count, "sha256": texts.digest} | more
        write_atomically(record_path(self.path), json.dumps(self.record))

    def finish(self, texts: DigestedInput) -> None:
        """Record that all texts have their result, and close the file."""
        with write_errors(self.path, RESUME):
            self.file.flush()
            self._write_record(texts, output=digest_of_file(self.path))
            self.file.close()
