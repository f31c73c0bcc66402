"""Lines in and out of a command: texts, checked line by line, and a file of results that a later run goes on with."""

import contextlib
import hashlib
import json
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineError(ValueError):
    """What is read or written cannot be used; the message is one line with the way out."""


class UnwritableError(LineError):
    """The system refuses to write."""


def reason(error: BaseException) -> str:
    """What an error says, on one line: of several lines the first, or all where the first opens a list.

    An error of the system is told by its file and what is wrong with it, without the error's number.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    first, _, others = str(error).strip().partition("\n")
    if first.rstrip().endswith((":", ",", "(")):
        first = " ".join(f"{first} {others}".split())
    return first or type(error).__name__


@contextlib.contextmanager
def reading(name: str) -> Generator[None]:
    """What the system does not read becomes a LineError."""
    try:
        yield
    except OSError as error:
        raise LineError(f"{name}: cannot be read: {error.strerror}; name a file that can be.") from error


def readable_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines of a stream.

    Raises:
        LineError: the system stops reading.
    """
    lines = iter(stream)
    while True:
        with reading(name):
            line = next(lines, None)
        if line is None:
            return
        yield line


@contextlib.contextmanager
def writing(name: str, way_out: str) -> Generator[None]:
    """What the system refuses to write becomes an UnwritableError, unless it is that nobody reads on."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnwritableError(f"{name}: cannot be written: {error.strerror}; {way_out}.") from error


def text_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """The lines of UTF-8 text without white space around them; only a line feed ends one.

    Raises:
        LineError: a line is not UTF-8, and the message gives its number; or the stream cannot be read.
    """
    for number, line in enumerate(readable_lines(stream, name), start=1):
        try:
            yield (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).decode().strip()
        except UnicodeDecodeError as error:
            raise LineError(
                f"{name}, line {number}: not UTF-8 (byte 0x{line[error.start]:02x} at byte {error.start + 1} of the "
                "line); mend the line, or convert the whole, for example with iconv."
            ) from error


JSON_TYPES = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}


def json_type(value: Any) -> str:
    """What JSON calls a value of this type."""
    return JSON_TYPES.get(type(value), "a number")


def what_stands_there(holder: Any, key: str) -> str:
    """What a line of JSON has where it should have a text by this key."""
    if not isinstance(holder, dict):
        return json_type(holder)
    if key in holder:
        return f"{json_type(holder[key])} in the field {key}"
    return f"the fields {', '.join(holder)}" if holder else "no fields"


def json_texts(stream: BinaryIO, name: str, field: str, language: str | None = None) -> Iterator[str]:
    """The texts of JSON Lines: those of a field, or, where a language is given, of that side of `translation`.

    An empty line has the empty text.

    Raises:
        LineError: a line is not UTF-8 or not JSON, or has no such text; the message gives its number.
    """
    key = field if language is None else language
    wanted = f'{{"{field}": "..."}}' if language is None else f'{{"translation": {{"{language}": "..."}}}}'
    for number, line in enumerate(text_lines(stream, name), start=1):
        if not line:
            yield ""
            continue
        try:
            row = json.loads(line)
            holder = row if language is None or not isinstance(row, dict) else row.get("translation")
            text = holder.get(key) if isinstance(holder, dict) else None
            if isinstance(text, str):
                text.encode()
        except UnicodeEncodeError as error:
            raise LineError(
                f"{name}, line {number}: the text holds {error.object[error.start]!a}, half of a surrogate pair and no "
                "character; correct the line."
            ) from error
        except (ValueError, RecursionError) as error:  # also of a number with thousands of digits
            raise LineError(
                f"{name}, line {number}: not JSON that can be read ({reason(error)}); correct the line."
            ) from error
        if not isinstance(text, str):
            raise LineError(
                f"{name}, line {number}: found {what_stands_there(holder, key)}, expected {wanted}; correct the line, "
                "or give another --field or --source."
            )
        yield text.strip()


def one_line(text: str) -> str:
    """A text that stays on its line."""
    return " ".join(text.replace("\r", "\n").split("\n"))


class Texts:
    """Texts on their way, counted and digested, so that a later run can tell whether it is given the same ones.

    Args:
        texts: the texts.
        name: where they come from.
        done: how many of them an earlier run finished.
        known: how many it had read; those behind the `done` first are read and compared before they are handed on.
        expected: the digest of those that it had read.

    Raises:
        LineError: on the way, where the texts are others.
    """

    def __init__(self, texts: Iterable[str], name: str, done: int = 0, known: int = 0, expected: str = "") -> None:
        self.texts, self.name = iter(texts), name
        self.done, self.known, self.expected = done, known, expected
        self.count, self.sha256 = 0, hashlib.sha256()

    @property
    def digest(self) -> str:
        """Of the texts so far."""
        return self.sha256.hexdigest()

    def __iter__(self) -> Iterator[str]:
        yield from map(self._take, islice(self.texts, self.done))
        ahead = [self._take(text) for text in islice(self.texts, self.known - self.done)]
        if self.known and (self.count, self.digest) != (self.known, self.expected):
            raise LineError(
                f"{self.name}: not what the unfinished output was begun with, whose first {self.known} lines must be "
                "as they were; give the same text, or another --output."
            )
        yield from ahead
        yield from map(self._take, self.texts)

    def _take(self, text: str) -> str:
        self.count += 1
        self.sha256.update(text.encode() + b"\0")
        return text


class Stream:
    """Results that go where they cannot be taken up again: to standard output, a pipe or a device."""

    done, known, digest, has_other_batches = 0, 0, "", False

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.stream, self.name = stream, name

    def write(self, lines: list[str], texts: Texts | None = None) -> None:
        """Hand a text's result on at once.

        Raises:
            UnwritableError: it cannot be written.
            BrokenPipeError: nobody reads on.
        """
        with writing(self.name, "make room, or give another --output"):
            self.stream.write("".join(f"{line}\n" for line in lines).encode())
            self.stream.flush()

    def close(self) -> None:
        """What is open stays so."""

    def finish(self, texts: Texts) -> None:
        """All texts have their result."""


def described(name: str, value: Any) -> str:
    """A setting of a record as the command has it: "without --beams", "with --beams=4"."""
    if value is None or value is False:
        return f"without --{name}"
    return f"with --{name}" if value is True else f"with --{name}={value}"


def check_settings(path: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Check that results were made by the settings that are given now.

    Raises:
        LineError: naming the first that differs.
    """
    for name, value in settings.items():
        if (old := before.get(name)) != value:
            differ = "by another model" if name == "model" else f"{described(name, old)}, not {described(name, value)}"
            raise LineError(
                f"{path}: was translated {differ}; it is left as it is: give the same command as then, another "
                f"--output, or remove it and {record_of(path).name}."
            )


def is_finished(path: Path, settings: dict[str, Any], texts: Iterable[str], name: str) -> bool:
    """Whether a file holds the results of these texts by these settings, to their end, as its record says.

    Nothing of `texts` is read unless the record says so. A file that is not there, is empty or unfinished is not
    finished.

    Args:
        path: the file of results.
        settings: what the results depend on, beside the texts.
        texts: the texts.
        name: where they come from.

    Raises:
        LineError: the file has no record, or holds something else than its record or these arguments say.
    """
    record = read_record(path)
    if not path.exists() or path.stat().st_size == 0:
        return False
    if record is None:
        raise LineError(
            f"{path}: is there already, without the {record_of(path).name} of a translation; it is left as it is: give "
            "another --output, or remove it."
        )
    check_settings(path, record["settings"], settings)
    if "output" not in record:
        return False
    if digest_of_file(path) != record["output"]:
        raise LineError(
            f"{path}: was changed after it was finished; it is left as it is: give another --output, or remove it and "
            f"{record_of(path).name}."
        )
    counted = Texts(texts, name)
    read = sum(1 for _ in islice(counted, record["texts"] + 1))
    if (read, counted.digest) != (record["texts"], record["sha256"]):
        more = f"has more lines than the {read - 1} of" if read > record["texts"] else "is another text than that of"
        raise LineError(
            f"{name}: {more} the finished {path}, which is left as it is; give the same text, another --output, or "
            f"remove it and {record_of(path).name}."
        )
    return True


class ResumableFile:
    """Results in a file, beside which a file `.record` says what they are.

    It holds what the results depend on: the settings, and how many texts had been read with which digest; and, when
    all texts have their result, the size and digest of the file. It is written before any result of those texts. An
    unfinished file is cut off behind its last whole result; one that holds nothing is begun anew.

    Args:
        path: the file.
        lines: the lines of a text's result.
        settings: what the results depend on, beside the texts.
        batches: what they depend on by no more than the rounding of sums.

    Attributes:
        done: how many texts have their result.
        known, digest: how many texts had been read, and their digest.
        has_other_batches: whether the unfinished file was begun with others.

    Raises:
        LineError: the file was begun with other settings, is no unfinished result, or is being written already.
    """

    def __init__(self, path: Path, lines: int, settings: dict[str, Any], batches: list[int]) -> None:
        self.path, self.beside, self.lines = path, record_of(path), lines
        self.record: dict[str, Any] = {"settings": settings, "batches": batches}
        read_record(path)  # before a file is made
        with writing(str(path), "name another --output"):
            self.file = path.open("ab")
        self._keep_others_out()
        before = read_record(path) if path.stat().st_size else None
        before = before or self.record
        check_settings(path, before["settings"], settings)
        if "output" in before:
            raise LineError(f"{path}: another command has finished it meanwhile; it is left as it is.")
        self.has_other_batches = before["batches"] != batches
        self.known: int = before.get("texts", 0)
        self.digest: str = before.get("sha256", "")
        self.done, end = self._whole_results()
        if self.done > self.known:
            raise LineError(
                f"{path}: holds {self.done} results, more than the {self.known} that {self.beside.name} knows of; "
                "remove both, or give another --output."
            )
        self.file.truncate(end)

    def _keep_others_out(self) -> None:
        """Hold the file alone, until it is closed or the process ends; Windows and some file systems cannot."""
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self.file.close()
                raise LineError(
                    f"{self.path}: another command is writing it; wait for that one, or give another --output."
                ) from error

    def _whole_results(self) -> tuple[int, int]:
        """How many results there are, and the byte at which the last ends."""
        count = end = place = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place += len(line)
                if number % self.lines == 0 and line.endswith(b"\n"):
                    count, end = count + 1, place
        return count, end

    def write(self, lines: list[str], texts: Texts) -> None:
        """Add a text's result, when the progress file knows of all texts that have been read.

        Raises:
            UnwritableError: it cannot be written.
        """
        with writing(str(self.path), "the same command goes on from here when there is room"):
            if texts.count != self.record.get("texts"):
                self._write_record(texts)
            self.file.write("".join(f"{line}\n" for line in lines).encode())
            self.file.flush()

    def close(self) -> None:
        """Leave the file as it is, for a later run to go on with."""
        with contextlib.suppress(OSError):  # what could not be written was told of then
            self.file.close()

    def _write_record(self, texts: Texts, **more: Any) -> None:
        self.record |= {"texts": texts.count, "sha256": texts.digest} | more
        partial = self.beside.with_name(f"{self.beside.name}.part")
        partial.write_text(json.dumps(self.record), encoding="utf-8")
        partial.replace(self.beside)

    def finish(self, texts: Texts) -> None:
        """All texts have their result.

        Raises:
            UnwritableError: the last of it cannot be written.
        """
        with writing(str(self.path), "the same command goes on from here when there is room"):
            self.file.flush()
            self._write_record(texts, output=digest_of_file(self.path))
            self.file.close()


def record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.record")


def read_record(path: Path) -> dict[str, Any] | None:
    """What is known of a file of results; None where there is no record.

    Raises:
        LineError: the record is none.
    """
    beside = record_of(path)
    if not beside.exists():
        return None
    try:
        record = json.loads(beside.read_text(encoding="utf-8"))
        counted = {"texts": int(record["texts"]), "sha256": str(record["sha256"])} if "output" in record else {}
        return record | {"settings": dict(record["settings"]), "batches": record["batches"]} | counted
    except (ValueError, KeyError, TypeError) as error:
        raise LineError(f"{beside}: not the record of a translation; remove it, or name another --output.") from error


def digest_of_file(path: Path) -> list[int | str]:
    """The size of a file in bytes, and the SHA-256 of its content."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


MODEL_FILES = (
    "*.bin", "*.index.json", "*.model", "*.py", "*.safetensors", "*.spm", "*config.json", "*vocab*",
    "added_tokens.json", "merges.txt", "special_tokens_map.json", "tokenizer.json",
)  # fmt: skip


def digest_of_folder(folder: Path) -> str:
    """A digest of the files that make a saved model: its weights, settings, code and tokenizer.

    Translations, scores and results that are written beside them do not count.
    """
    sha256 = hashlib.sha256()
    for path in sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)}):
        if path.is_file():
            sha256.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    sha256.update(block)
    return sha256.hexdigest()


__all__ = [
    "LineError",
    "ResumableFile",
    "Stream",
    "Texts",
    "UnwritableError",
    "digest_of_folder",
    "is_finished",
    "json_texts",
    "one_line",
    "read_record",
    "reading",
    "reason",
    "text_lines",
    "writing",
]
