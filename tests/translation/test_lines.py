"""Texts come from lines, and an invalid line is named by its number; a translation is one line."""

import io

import pytest

from tests.helpers import user_error
from vaswani_transformer.translation.lines import LineFormat, json_texts, text_lines
from vaswani_transformer.translation.options import TranslationOptions
from vaswani_transformer.translation.translator import Hypothesis, Translation


def test_line_ends_only_at_a_line_feed_and_a_byte_order_mark_is_no_text() -> None:
    stream = io.BytesIO("\ufeffone\r\n\n  two\rthree \u2028four\n\ufefffive".encode())
    assert list(text_lines(stream, "f")) == ["one", "", "two\rthree \u2028four", "\ufefffive"]
    assert list(text_lines(io.BytesIO("\ufeffone\r\rtwo \u2028\r".encode()), "f")) == ["one", "", "two"]


def test_line_that_is_not_utf8_is_an_error_that_names_it() -> None:
    lines = text_lines(io.BytesIO(b"one\ntw\xff\n"), "some.txt")
    assert next(lines) == "one"
    with user_error(r"some\.txt, line 2: not UTF-8 \(byte 0xff at byte 3 of the line\); correct"):
        next(lines)


def test_texts_are_fields_of_json_lines() -> None:
    stream = io.BytesIO(b'{"text": " a ", "id": 1}\n\n{"text": "b\\nc"}')
    assert list(json_texts(stream, "f", "text")) == ["a", "", "b\nc"]
    stream = io.BytesIO(b'{"translation": {"en": "a", "de": "b"}}\n')
    assert list(json_texts(stream, "f", "text", "de")) == ["b"]


@pytest.mark.parametrize(
    ("line", "language", "message"),
    [
        ('{"text": ', None, "f, line 2: not JSON"),
        ('{"text": "a\\ud800"}', None, r"f, line 2: the text holds \\ud800 at character 2, half of a surrogate pair"),
        ('{"txt": "a"}', None, r'f, line 2: got \{"txt": "a"\}, expected \{"text": "\.\.\."\}; correct the'),
        *((line, None, "f, line 2: got .*, exp") for line in ('{"text": 3}', '{"text": ["a"]}', "{}", "[1]", '"t"')),
        ('{"text": "a"}', "en", r'f, line 2: got .*, expected \{"translation": \{"en": "\.\.\."\}\}'),
        ('{"translation": {"en": null}}', "en", r"f, line 2: got .*, expected"),
    ],
)
def test_line_without_a_text_is_an_error_that_names_it(line: str, language: str | None, message: str) -> None:
    first = b'{"text": "a", "translation": {"en": "a"}}\n'
    texts = json_texts(io.BytesIO(first + line.encode()), "f", "text", language)
    assert next(texts) == "a"
    with user_error(message):
        next(texts)


def test_translation_is_written_on_one_line() -> None:
    translation = Translation([Hypothesis("a\nb\r\nc\rd", 1, None)], 1, False, 1)
    assert LineFormat(TranslationOptions("m")).write(translation, 1) == ["a b  c d"]
