"""Texts come from lines, and an invalid line is named by its number."""

import io

import pytest

from tests.helpers import user_error
from vaswani_transformer.translation.readers import json_texts, text_lines


def test_line_ends_only_at_a_line_feed_and_a_byte_order_mark_is_no_text() -> None:
    stream = io.BytesIO("\ufeffone\r\n\n  two\rthree \u2028four\n\ufefffive".encode())
    assert list(text_lines(stream, "f")) == ["one", "", "two\rthree \u2028four", "\ufefffive"]


def test_carriage_returns_end_lines_in_a_text_without_line_feeds() -> None:
    assert list(text_lines(io.BytesIO("\ufeffone\r\rtwo \u2028\r".encode()), "f")) == ["one", "", "two"]
    assert list(text_lines(io.BytesIO(b"one"), "f")) == ["one"]


def test_line_that_is_not_utf8_is_an_error_that_names_it() -> None:
    lines = text_lines(io.BytesIO(b"one\ntw\xff\n"), "some.txt")
    assert next(lines) == "one"
    with user_error(r"some\.txt, line 2: not UTF-8 \(byte 0xff at byte 3 of the line\); correct"):
        next(lines)
    with user_error(r"some\.txt, line 1: not UTF-8 \(byte 0xff at byte 2 of the line\); correct"):
        next(text_lines(io.BytesIO(b"\xef\xbb\xbfa\xff\n"), "some.txt"))


def test_texts_are_fields_of_json_lines() -> None:
    stream = io.BytesIO(b'{"text": " a ", "id": 1}\n\n{"text": "b\\nc"}')
    assert list(json_texts(stream, "f", "text")) == ["a", "", "b\nc"]
    stream = io.BytesIO(b'{"translation": {"en": "a", "de": "b"}}\n')
    assert list(json_texts(stream, "f", "text", "de")) == ["b"]


@pytest.mark.parametrize(
    ("line", "language", "message"),
    [
        ('{"text": ', None, r"f, line 2: not JSON"),
        ('{"text": "a\\ud800"}', None, r"f, line 2: the text holds \\ud800 at character 2, half of a surrogate pair"),
        ('{"id": ' + "1" * 5000 + "}", None, r"f, line 2: not JSON \(Exceeds the limit"),
        ('{"txt": "a"}', None, r'f, line 2: got the fields txt, expected \{"text": "\.\.\."\}; correct the'),
        ('{"text": 3}', None, r"f, line 2: got a number in the field text, expected"),
        ('{"text": null}', None, r"f, line 2: got null in the field text, expected"),
        ('{"text": ["a"]}', None, r"f, line 2: got a list in the field text, expected"),
        ('{"text": true}', None, r"f, line 2: got a boolean in the field text, expected"),
        ("{}", None, r"f, line 2: got no fields, expected"),
        ("[1]", None, r"f, line 2: got a list, expected"),
        ('"text"', None, r"f, line 2: got a text, expected"),
        ('{"text": "a"}', "en", r'f, line 2: got null, expected \{"translation": \{"en": "\.\.\."\}\}'),
        ('{"translation": {"de": "a"}}', "en", r"f, line 2: got the fields de, expected"),
        ('{"translation": {"en": null}}', "en", r"f, line 2: got null in the field en, expected"),
    ],
)
def test_line_without_a_text_is_an_error_that_names_it(line: str, language: str | None, message: str) -> None:
    texts = json_texts(
        io.BytesIO(b'{"text": "a", "translation": {"en": "a"}}\n' + line.encode()), "f", "text", language
    )
    assert next(texts) == "a"
    with user_error(message):
        next(texts)
