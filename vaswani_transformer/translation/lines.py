"""Input and output lines: plain text and JSON Lines."""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from ..support.errors import UserError, one_line
from .loading import load_model_and_tokenizer, make_translator
from .options import TranslationOptions
from .translator import Translation, Translator


def lines_of(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream, which end with a line feed, or in a text without any with a carriage return."""
    for number, line in enumerate(stream):
        if number == 0 and not line.endswith(b"\n"):
            yield from line.splitlines()
        else:
            yield line


def utf8_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of UTF-8 text without line ends and byte order mark."""
    for number, line in enumerate(lines_of(stream), start=1):
        try:
            yield (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode().rstrip("\n")
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise UserError(
                f"{name}, line {number}: not UTF-8 (byte 0x{byte:02x} at byte {error.start + 1} of the "
                "line); correct the line, or convert the file, for example with iconv."
            ) from error


def parse_json_line(line: str, where: str) -> Any:
    """Return the value of a line of JSON Lines; `where` names the line in an error."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for huge integers
        is_syntax = isinstance(error, json.JSONDecodeError)
        problem = f"{error.msg} at column {error.colno}" if is_syntax else one_line(error)
        raise UserError(f"{where}: not JSON ({problem}); correct the line.") from error


def check_unicode(text: str, where: str) -> None:
    """Check that a text can be written as UTF-8, unlike JSON's lone surrogate `\\ud800`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise UserError(
            f"{where} holds {code} at character {error.start + 1}, half of a surrogate pair; correct the line."
        ) from error


def text_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of UTF-8 text, without leading and trailing white space."""
    return (line.strip() for line in utf8_lines(stream, name))


def json_texts(stream: BinaryIO, name: str, field: str, language: str | None = None) -> Iterator[str]:
    """Yield the texts of JSON Lines; an empty line is an empty text.

    A text is in `field`, or with a `language` in that entry of the field `translation`. `name` appears in messages.
    """
    key = field if language is None else language
    expected = f'{{"{field}": "..."}}' if language is None else f'{{"translation": {{"{language}": "..."}}}}'
    for number, line in enumerate(text_lines(stream, name), start=1):
        if not line:
            yield ""
            continue
        where = f"{name}, line {number}"
        row = parse_json_line(line, where)
        holder = row.get("translation") if language is not None and isinstance(row, dict) else row
        text = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(text, str):
            raise UserError(
                f"{where}: got {line[:80]}, expected {expected}; correct the line, or give another --field or --source."
            )
        check_unicode(text, f"{where}: the text")
        yield text.strip()


class LineFormat:
    """Input and output format of `vaswani-translate`; `vaswani-parse` has a subclass.

    Attributes:
        lines_per_text: number of output lines per input line.
    """

    def __init__(self, options: TranslationOptions) -> None:
        self.options = options
        self.lines_per_text = options.nbest or 1 if options.format == "text" else 1

    def load(self) -> Translator:
        """Return the translator with the command's model."""
        return make_translator(self.options, *load_model_and_tokenizer(self.options))

    def source_text(self, line: str) -> str:
        """Return the text to translate in a line of plain text."""
        return line

    def read(self, stream: BinaryIO) -> Iterator[str]:
        """Yield the texts of the input lines."""
        options = self.options
        if options.format == "jsonl":
            return json_texts(stream, options.input_name, options.field or "text", options.source)
        return map(self.source_text, text_lines(stream, options.input_name))

    def write(self, translation: Translation, number: int) -> list[str]:
        """Return the output lines for one input line."""
        options, hypotheses = self.options, translation.hypotheses
        if options.format == "text":
            lines = [re.sub(r"[\r\n]", " ", hypothesis.text) for hypothesis in hypotheses]
            if options.scores:
                lines = [f"{hypothesis.score:.4f}\t{line}" for hypothesis, line in zip(hypotheses, lines, strict=True)]
            return lines if options.nbest is None else [f"{number}\t{line}" for line in lines]
        rows: list[dict[str, Any]] = [{"translation": hypothesis.text} for hypothesis in hypotheses]
        for row, hypothesis in zip(rows, hypotheses, strict=True):
            if hypothesis.score is not None:
                row["score"] = round(hypothesis.score, 4)
        return [json.dumps(rows[0] if options.nbest is None else rows[0] | {"nbest": rows}, ensure_ascii=False)]

    def summary(self, count: int) -> str:
        """Return the message to log after `count` new lines, or an empty string."""
        return ""
