"""Lines in, lines out: texts of text files and JSON Lines, and their translations as lines."""

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from ..support.errors import UserError
from ..support.files import check_unicode, parse_json_line, utf8_lines
from .loading import load_model_and_tokenizer, make_translator
from .options import TranslationOptions
from .translator import Translation, Translator


def text_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of UTF-8 text without white space at their ends.

    Only a line feed ends a line, or a carriage return in a text without line feeds.
    """
    return (line.strip() for line in utf8_lines(stream, name))


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
        holder = row.get("translation") if language is not None and isinstance(row, dict) else row
        text = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(text, str):
            raise UserError(
                f"{where}: got {line[:80]}, expected {expected}; correct the line, or give another --field or --source."
            )
        check_unicode(text, f"{where}: the text")
        yield text.strip()


class LineFormat:
    """The lines that `vaswani-translate` reads and writes; `vaswani-parse` overrides what is different there.

    Attributes:
        lines_per_text: the number of output lines of a line.
    """

    def __init__(self, options: TranslationOptions) -> None:
        self.options = options
        self.lines_per_text = options.nbest or 1 if options.format == "text" else 1

    def load(self) -> Translator:
        """Return the translator with the command's model."""
        return make_translator(self.options, *load_model_and_tokenizer(self.options))

    def source_text(self, line: str) -> str:
        """Return the text to translate of a line of text."""
        return line

    def read(self, stream: BinaryIO) -> Iterator[str]:
        """Yield the texts in the input's lines."""
        options = self.options
        if options.format == "jsonl":
            return json_texts(stream, options.input_name, options.field or "text", options.source)
        return map(self.source_text, text_lines(stream, options.input_name))

    def write(self, translation: Translation, number: int) -> list[str]:
        """Return the output lines of a line's translations."""
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
        """Return what to log after `count` new lines; nothing where it is empty."""
        return ""
