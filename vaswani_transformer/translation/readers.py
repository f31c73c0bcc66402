"""Texts from lines, checked line by line, and a digest of the texts that were read."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, BinaryIO

from ..support.errors import UserError
from ..support.files import TextDigest, check_unicode, json_type, parse_json_line, read_errors, utf8_lines


def readable_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    lines = iter(stream)
    while True:
        with read_errors(name):
            line = next(lines, None)
        if line is None:
            return
        yield line


def text_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of UTF-8 text without white space at their ends.

    Only a line feed ends a line, or a carriage return in a text without line feeds.
    """
    return (line.strip() for line in utf8_lines(readable_lines(stream, name), name))


def describe_value(holder: Any, key: str) -> str:
    """Describe the JSON value that is not an object with a text under `key`."""
    if not isinstance(holder, dict):
        return json_type(holder)
    if key in holder:
        return f"{json_type(holder[key])} in the field {key}"
    return f"the fields {', '.join(holder)}" if holder else "no fields"


def json_texts(stream: BinaryIO, name: str, field: str, language: str | None = None) -> Iterator[str]:
    """Yield the texts of JSON Lines; an empty line has the empty text.

    They are in `field`, or with a `language` under it in the field `translation`; messages call the stream `name`.
    """
    key = field if language is None else language
    expected = f'{{"{field}": "..."}}' if language is None else f'{{"translation": {{"{language}": "..."}}}}'
    for number, line in enumerate(text_lines(stream, name), start=1):
        if not line:
            yield ""
            continue
        where = f"{name}, line {number}"
        row = parse_json_line(line, where)
        holder = row if language is None or not isinstance(row, dict) else row.get("translation")
        text = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(text, str):
            raise UserError(
                f"{where}: got {describe_value(holder, key)}, expected {expected}; correct the line, or "
                "give another --field or --source."
            )
        check_unicode(text, f"{where}: the text")
        yield text.strip()


class DigestedInput:
    """Texts that are counted and digested as they are read, so that a later run can check that it gets the same ones.

    Args:
        texts: the texts.
        name: their name in messages.
        done: how many of them an earlier run finished.
        known: how many it had read; those after the first `done` are read and compared before any is passed on.
        expected: the digest of the texts that it had read.
    """

    def __init__(self, texts: Iterable[str], name: str, done: int = 0, known: int = 0, expected: str = "") -> None:
        self.texts, self.name = iter(texts), name
        self.done, self.known, self.expected = done, known, expected
        self._digest = TextDigest()

    @property
    def count(self) -> int:
        return self._digest.count

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[str]:
        yield from map(self._read, islice(self.texts, self.done))
        ahead = [self._read(text) for text in islice(self.texts, self.known - self.done)]
        if self.known and (self.count, self.digest) != (self.known, self.expected):
            raise UserError(
                f"{self.name}: is not the text of the unfinished output, whose first {self.known} lines must be "
                "unchanged; give the same text, or another --output."
            )
        yield from ahead
        yield from map(self._read, self.texts)

    def _read(self, text: str) -> str:
        self._digest.add(text)
        return text
