"""Every format gives back the texts that were written, or an error of one line that names the place."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import user_error
from training import texts as texts_module
from training.data import load_pairs
from training.recipe import Recipe, recipe_of

Pairs = list[tuple[str, str]]

# Texts that readers change: numbers, dates, truth values, missing values, quotes, line ends, spaces, decomposed letters
CHANGEABLE = [
    *(
        "007",
        "1.50",
        "1e2",
        "+1",
        "0x10",
        "1_000",
        "NaN",
        "2009-03-01",
        "2009-03-01T10:00:00Z",
        "12:30",
        "TRUE",
        "false",
    ),
    *(
        "NA",
        "N/A",
        "null",
        "None",
        "nan",
        "#N/A",
        '"',
        '"a"',
        'say "a"',
        "'",
        "a,b",
        "a;b",
        "a\tb",
        "a\\tb",
        "\\",
        "a\\",
    ),
    *("a\rb", "a\r\rb", "a\nb", "a\r\nb", "a\x85b", "a\u2028b", "a\u2029b", "a\x0cb", "a\x0bb", "a\x1eb", "a\xa0b"),
    *(
        "a\u202fb",
        "e\u0301",
        "\u00e9",
        "\ufeffa",
        "a\ufeff",
        "\u200ba",
        "</s>",
        "<pad>",
        "[",
        "{}",
        "# a",
        "\U0001f600",
    ),
    *("", " ", "\u3000", " a ", "x" * 200_000, "ä, " * 40_000 + "."),
]


def some_texts(without: str) -> st.SearchStrategy[str]:
    """Return texts without some characters."""
    letters = st.characters(exclude_characters=f"\0{without}", exclude_categories=["Cs"])
    known = [text for text in CHANGEABLE if not set(text) & set(without)]
    return st.sampled_from(known) | st.text(letters) | st.tuples(st.sampled_from(known), st.text(letters)).map("".join)


def csv_bytes(pairs: Pairs, **style: Any) -> bytes:
    file = io.StringIO()
    csv.writer(file, **style).writerows([("en", "de"), *pairs])
    return file.getvalue().encode()


def tsv_bytes(pairs: Pairs) -> bytes:
    return "".join(f"{source}\t{target}\n" for source, target in [("en", "de"), *pairs]).encode()


def json_lines(pairs: Pairs) -> bytes:
    return "".join(json.dumps({"en": en, "de": de}, ensure_ascii=False) + "\n" for en, de in pairs).encode()


def nested_json(pairs: Pairs) -> bytes:
    return "\r\n".join(json.dumps({"translation": {"de": de, "en": en}}) for en, de in pairs).encode()


def json_list(pairs: Pairs) -> bytes:
    return json.dumps([{"id": 1, "en": en, "de": de} for en, de in pairs], indent=1).encode()


def parquet(pairs: Pairs) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(dict(zip(("en", "de"), zip(*pairs, strict=True), strict=True))), file, row_group_size=3)
    return file.getvalue()


def nested_parquet(pairs: Pairs) -> bytes:
    file, rows = io.BytesIO(), [{"en": en, "de": de} for en, de in pairs]
    pq.write_table(pa.table({"translation": rows, "id": range(len(rows))}), file)
    return file.getvalue()


FORMATS: dict[str, tuple[str, str, str, Callable[[Pairs], bytes]]] = {
    "commas and CRLF": ("csv", "train.csv", "", csv_bytes),
    "quoted cells": (
        "csv",
        "train.csv",
        "",
        lambda pairs: csv_bytes(pairs, quoting=csv.QUOTE_ALL, lineterminator="\n"),
    ),
    "tabs": ("csv", "train.tsv", "\t\n", tsv_bytes),
    "JSON Lines": ("json", "train.jsonl", "", json_lines),
    "a byte order mark": ("json", "train.jsonl", "", lambda pairs: b"\xef\xbb\xbf" + json_lines(pairs)),
    "a field of both languages": ("json", "train.jsonl", "", nested_json),
    "a list of objects": ("json", "train.json", "", json_list),
    "Parquet": ("parquet", "train.parquet", "", parquet),
    "a Parquet field of both languages": ("parquet", "train.parquet", "", nested_parquet),
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pa.Codec("zstd").compress(content, asbytes=True),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, beside that of the cached pairs."""
    monkeypatch.setattr(texts_module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def recipe_for(folder: Path, kind: str, train: str, **data: Any) -> Recipe:
    return recipe_of({"data": {"kind": kind, "path": str(folder), "train": train} | data})


def read(recipe: Recipe) -> Pairs:
    rows = load_pairs(recipe, ["train"])["train"]
    return list(zip(rows["source"][:], rows["target"][:], strict=True))


def pairs_of(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Pairs]:
    return st.lists(st.tuples(texts, texts), max_size=12).map(lambda pairs: [*pairs, ("a", "b")])


def stripped(pairs: Pairs) -> Pairs:
    return [(source.strip(), target.strip()) for source, target in pairs if source.strip() and target.strip()]


def check_format(folder: Path, name: str, compress: Callable[[bytes], bytes] = bytes) -> None:
    kind, file, without, write = FORMATS[name]
    recipe = recipe_for(folder, kind, file, empty="drop")

    @given(pairs_of(some_texts(without)))
    def check(pairs: Pairs) -> None:
        (folder / file).write_bytes(compress(write(pairs)))
        assert read(recipe) == stripped(pairs)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_texts_come_out_as_they_went_in(folder: Path, name: str) -> None:
    check_format(folder, name)


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", ["quoted cells", "tabs", "a list of objects", "Parquet"])
def test_texts_come_out_of_compressed_files_as_they_went_in(folder: Path, name: str, compression: str) -> None:
    check_format(folder, name, COMPRESSIONS[compression])


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_lines_of_text_files_come_out_as_they_went_in(folder: Path, end: str) -> None:
    recipe = recipe_for(folder, "text", "train.{language}", empty="drop")

    @given(pairs_of(some_texts("\n")))
    def check(pairs: Pairs) -> None:
        for code, side in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            text = end.join(side)  # without an end of the last line
            (folder / f"train.{code}").write_text(f"\ufeff{text}", encoding="utf-8", newline="")
        assert read(recipe) == stripped(pairs)

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_every_changeable_text_is_read(folder: Path, name: str) -> None:
    kind, file, without, write = FORMATS[name]
    pairs = [(text, f"{text}!") for text in CHANGEABLE if text.strip() and not set(text) & set(without)]
    (folder / file).write_bytes(write(pairs))
    assert read(recipe_for(folder, kind, file)) == stripped(pairs)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_files_may_be_compressed_whatever_their_names(folder: Path, compression: str) -> None:
    (folder / "a.tsv").write_bytes(COMPRESSIONS[compression](b"en\tde\none\teins\n"))
    assert read(recipe_for(folder, "csv", "a.tsv")) == [("one", "eins")]


def test_lines_end_at_line_feeds_only(folder: Path) -> None:
    (folder / "a.en").write_bytes("\ufeffone\u2028more\r\ntwo\ra\n\x0cthree\x0cb".encode())
    (folder / "a.de").write_bytes("\ufeffeins\nzwei\x85mehr\ndrei\n".encode())
    recipe = recipe_for(folder, "text", "a.{language}")
    assert read(recipe) == [("one\u2028more", "eins"), ("two\ra", "zwei\x85mehr"), ("three\x0cb", "drei")]
    (folder / "a.de").write_text("eins\n")
    with user_error(r"^data\.train: .*a\.en has 3 lines, and .*a\.de 1; pair the files line by line"):
        read(recipe)


@pytest.mark.parametrize("name", ["data[12]", "a::b", "*", "{language}", "~"])
def test_path_is_a_path(folder: Path, name: str) -> None:
    for other in ("data1", name):
        (folder / other).mkdir()
        (folder / other / "a[1].csv").write_text(f"en,de\n{other},x\n")
        (folder / other / "a1.csv").write_text("en,de\nwrong,falsch\n")
    assert read(recipe_for(folder / name, "csv", "a[1].csv")) == [(name, "x")]


def test_changed_file_is_read_again_whatever_its_time(folder: Path) -> None:
    (folder / "a.csv").write_text("en,de\none,eins\n")
    recipe, time = recipe_for(folder, "csv", "a.csv"), (folder / "a.csv").stat().st_mtime_ns
    assert read(recipe) == [("one", "eins")]
    (folder / "a.csv").write_text("en,de\ntwo,zwei\n")
    os.utime(folder / "a.csv", ns=(time, time))
    assert read(recipe) == [("two", "zwei")]


def test_file_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.csv").write_text("en,de\none,eins\n")
    recipe = recipe_for(folder, "csv", "a.csv")
    first = load_pairs(recipe, ["train"])["train"]
    monkeypatch.setitem(texts_module.FORMATS, "csv", Mock(return_value=iter([])))
    again = load_pairs(recipe, ["train"])["train"]
    assert (again.to_dict(), again.cache_files) == (first.to_dict(), first.cache_files)


def test_same_bytes_under_a_name_of_tab_separated_values_are_other_pairs(folder: Path) -> None:
    for name, pairs in {"a.csv": [("a", "b")], "a.tsv": [("d", "e")]}.items():
        (folder / name).write_text("en,de,x\ten\tde\na,b,c\td\te\n")
        assert read(recipe_for(folder, "csv", name)) == pairs


def test_plain_column_may_be_named_translation(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "one", "translation": "eins"}')
    assert read(recipe_for(folder, "json", "a.jsonl", source="text", target="translation")) == [("one", "eins")]


COLUMNS = r"Set data\.source and data\.target\.$"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"en": "a", "de": "b"}\n{',
            r"a\.jsonl, line 2: is not valid JSON \(.*\); see data\.path and data",
        ),
        (
            "a.jsonl",
            b'\n{"en": "a", "de": 7}',
            r"a\.jsonl, line 2, 'de': got 7, expected a text; write it in quotation",
        ),
        ("a.jsonl", b'{"en": ["a"], "de": "b"}', r"a\.jsonl, line 1, 'en': got \[\"a\"\], expected a text"),
        ("a.jsonl", b'{"text": "x"}', rf"a\.jsonl, line 1: 'en' is missing; got text\. {COLUMNS}"),
        ("a.jsonl", b'{"translation": {"en": "a"}}', rf"a\.jsonl, line 1: 'de' is missing; got en\. {COLUMNS}"),
        ("a.jsonl", b'"text"', r"a\.jsonl, line 1: got \"text\", expected an object with en and de"),
        (
            "a.jsonl",
            b'{"en": "a", "en": "b", "de": "c"}',
            r"line 1: is not valid JSON \(an object has the same key twice",
        ),
        ("a.jsonl", b'{"en": "a", "de": "b"}\n[]', r"a\.jsonl, line 2: got \[\], expected an object with en and de"),
        ("a.jsonl", b'{"en": "\\ud800", "de": "b"}', r"line 1, 'en': contains half a surrogate pair"),
        ("a.jsonl", b'{"en": "a\\u0000", "de": "b"}', r"line 1, 'en': contains a NUL character"),
        (
            "a.json",
            b'\n[{"en": "a", "de": "b"},\n {"en": "a", ]',
            r"a\.json, line 3: is not valid JSON",
        ),
        ("a.json", b'[{"en": "a", "de": "b"},\n {"en": "a", "de": true}]', r"a\.json, row 2, 'de': got true, expected"),
        ("a.jsonl", b'{"en": "x", "de": "  "}', r"line 1, 'de': the text is empty; correct it or set data\.empty=drop"),
        ("a.jsonl", b'{"en": null, "de": "x"}', r"line 1, 'en': the text is empty; correct it"),
        ("a.csv", b"en,de\na,b\nc,\n", r"a\.csv, line 3, 'de': the text is empty; correct it"),
        ("a.csv", b'en,de\n"a\n\nb",c\nd,e,f', r"a\.csv, line 5: has 3 cells, separated by ',', and the header 2; "),
        ("a.csv", b"en,de\na;b\n", r"a\.csv, line 2: has 1 cells, separated by ',', and the header 2; correct it"),
        (
            "a.csv",
            b"en|de\na|b\n",
            r"line 1: has 0 columns 'en', separated by ','; got en\|de\. Separate the col.* or set data\.delimiter",
        ),
        ("a.tsv", b'"en"\t"de"\n"a"\t"b"\n', r"line 1: has 0 columns 'en', .* set data\.quoting=cells"),
        ("a.tsv", b'en\tde\n"a\tb"\tc\n', r"line 2: has 3 cells, .* set data\.quoting=cells"),
        (
            "a.tsv",
            b"en,de\na,b\n",
            r"a\.tsv, line 1: has 0 columns 'en', .*; got en,de\. Separate the columns by '\\t'",
        ),
        ("a.csv", b"en,de,de\na,b,c\n", r"a\.csv, line 1: has 2 columns 'de'"),
        ("a.csv", b'en,de\na,b\n"c"d,e\n', r"a\.csv, line 3: is not comma-separated values \(.*\); correct its quot"),
        ("a.csv", b'en,de\na,b\n"c,d\ne,f\n', r"a\.csv, line 3: is not comma-separated values \(unexpected end of"),
        ("a.tsv", b"en\tde\na\t\n", r"a\.tsv, line 2, 'de': the text is empty; correct it"),
        ("a.tsv", b"en\tde\na,b\n", r"a\.tsv, line 2: has 1 cells, separated by '\\t', and the header 2"),
        ("a.csv", b"", r"contains no pairs; choose a different file or split"),
        ("a.csv", b"en,de\n", r"contains no pairs; choose a different file or split"),
        ("a.jsonl", b"\n", r"contains no pairs; choose a different file or split"),
        ("a.csv", "en,de\na,b\nc,ü".encode("latin1"), r"line 3: is not UTF-8; .* iconv -f latin1 -t utf-8"),
        ("a.csv", "en,de\nü,b\nc,\x96".encode("cp1252", "replace") + b"\x96", r"line 2: .* iconv -f cp1252 -t utf-8"),
        ("a.csv", "en,de\nü,b\n".encode() + b"c,\xfc", r"line 3: is not UTF-8; .*The lines before it are; correct"),
        ("a.csv", "en,de\na,b".encode("utf-16"), r"line 1: is not UTF-8; .* iconv -f utf-16 -t utf-8"),
        ("a.csv", "e,d\na,b".encode("utf-16-le"), r"line 1: is not UTF-8; .* iconv -f utf-16le -t utf-8"),
        ("a.csv", "e,d\na,b".encode("utf-16-be"), r"line 1: is not UTF-8; .* iconv -f utf-16be -t utf-8"),
        ("a.csv", "e,d\na,b".encode("utf-32"), r"line 1: is not UTF-8; .* iconv -f utf-32 -t utf-8"),
        ("a.csv", "一,一\n一,一".encode("utf-16-le"), r"line 1: is not UTF-8; .* iconv -f utf-16le -t utf-8"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1\n", r"a\.csv: is a pointer of Git LFS .* git lfs pull"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", r"is a pointer of Git LFS"),
        ("a.csv", b"\n<!DOCTYPE html>\n", r"a\.csv: is a web page, not the file; download the file itself"),
        ("a.csv", gzip.compress(b"<HTML lang=en>\n", mtime=0), r"a\.csv: is a web page"),
        ("a.csv", b'<refset setid="x">\n', r"a\.csv: is SGML or XML; write its sentences, without tags"),
        (
            "a.csv",
            "en,de\n你好,你好".encode("gb18030"),
            r"line 2: is not UTF-8; .* iconv -f ENCODING .* such as cp1251",
        ),
        ("a.csv", b"en,de\n\x02\x80", r"line 2: is not UTF-8; .*It is not a text; decompress or export it"),
        (
            "a.csv",
            gzip.compress(gzip.compress(b"en,de\n", mtime=0), mtime=0),
            r"a\.csv: is compressed twice, or in a format that",
        ),
        ("a.csv", lzma.compress(b"en,de\na,b\n", format=lzma.FORMAT_ALONE), r"a\.csv: is compressed .* decompress it"),
        ("a.csv", b"en,de\ra,b\r", r"a\.csv: has no line feed; convert the ends of its lines"),
        ("a.csv", b'<tmx version="1.4">\n', r"a\.csv: is SGML or XML"),
        ("a.csv", b"PAR1", r"a\.csv: is a Parquet file; set data\.kind=parquet"),
        ("a.csv", b"PK\x03\x04\xff", r"a\.csv: is a zip archive; unpack it"),
        (
            "a.csv",
            gzip.compress(b"en,de\na,b\n", mtime=0)[:-9],
            r"cannot be read as csv \(.*\); see data\.path and data\.kind",
        ),
        ("a.parquet", b"no table", r"cannot be read as parquet \(.*\); see data\.path and data\.kind"),
    ],
)
def test_text_that_cannot_be_read_is_an_error_with_its_place(
    folder: Path, file: str, content: bytes, message: str
) -> None:
    (folder / file).write_bytes(content)
    kind = {".jsonl": "json", ".tsv": "csv"}.get(Path(file).suffix, Path(file).suffix[1:])
    with user_error(rf"^data\.train: .*{message}"):
        read(recipe_for(folder, kind, file))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_bytes_behind_a_compressed_stream_are_read_or_an_error(folder: Path, compression: str) -> None:
    compress = COMPRESSIONS[compression]
    first, second = compress(b"en,de\none,eins\n"), compress(b"two,zwei\n")
    (folder / "a.csv").write_bytes(first + second)
    assert read(recipe_for(folder, "csv", "a.csv")) == [("one", "eins"), ("two", "zwei")]
    for behind in (b"two,zwei\n", b"x" + second[1:], second[:-3]):
        (folder / "a.csv").write_bytes(first + behind)
        with user_error(r"^data\.train: .*(compress the whole file again|cannot be read as csv)"):
            read(recipe_for(folder, "csv", "a.csv"))


def test_padding_and_skippable_frames_are_no_text(folder: Path) -> None:
    frame = b"\x50\x2a\x4d\x18\4\0\0\0abcd"
    for content in (frame + COMPRESSIONS["zst"](b"en,de\na,b\n"), lzma.compress(b"en,de\n") + bytes(8)):
        (folder / "a.csv").write_bytes(content + lzma.compress(b"a,b\n") * content.endswith(b"\0"))
        assert read(recipe_for(folder, "csv", "a.csv")) == [("a", "b")]


@pytest.mark.parametrize(
    ("file", "content", "fields"),
    [
        ("a.csv", b"en;de\r\na, c;b\r\n", {}),
        ("a.csv", b"sep=;\r\nen;de\r\na, c;b\r\n", {}),
        ("a.csv", b'en;de;"x, y"\na, c;b;\n', {}),
        ("a.txt", b"en\tde\na, c\tb\n", {}),
        ("A.TSV", b"en\tde\tx, y\na, c\tb\t\n", {}),
        ("a.Tab.GZ", gzip.compress(b"en\tde\tx, y\na, c\tb\t\n", mtime=0), {}),
        ("a.csv", b"en|de\na, c|b\n", {"delimiter": "|"}),
        ("a.csv", b"en\tde\tx, y\na, c\tb\t\n", {"delimiter": r"\t"}),
        ("a.tsv", b'en\tde\n"a, c"\tb\n', {"quoting": "cells"}),
    ],
)
def test_cells_are_separated_as_header_name_or_field_say(
    folder: Path, file: str, content: bytes, fields: dict[str, str]
) -> None:
    (folder / file).write_bytes(content)
    assert read(recipe_for(folder, "csv", file, **fields)) == [("a, c", "b")]


def test_name_of_one_file_for_both_languages_is_an_error(folder: Path) -> None:
    (folder / "a.txt").write_text("one\n")
    with user_error(r"^data\.train: names one file for both languages; got a\.txt\. Put \{language\} into the name"):
        read(recipe_for(folder, "text", "a.txt"))


def test_one_file_under_two_names_is_an_error(folder: Path) -> None:
    (folder / "a.en").write_text("one\n")
    (folder / "a.de").symlink_to("a.en")
    with user_error(r"^data\.train: both languages are the same file; got a\.en and a\.de\. Set data\.target\.$"):
        read(recipe_for(folder, "text", "a.{language}"))


def test_missing_file_is_an_error(folder: Path) -> None:
    with user_error(r"^data\.train: cannot be read as csv \(.*a\.csv: No such file or directory\); see data\.path"):
        read(recipe_for(folder, "csv", "a.csv"))


def test_parquet_error_names_the_column_and_the_row(folder: Path) -> None:
    pq.write_table(pa.table({"en": ["a"], "de": [7]}), folder / "a.parquet")
    with user_error(r"a\.parquet: the column 'de' is of type int64, expected string; convert it"):
        read(recipe_for(folder, "parquet", "a.parquet"))
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["en", "de", "en"]), folder / "a.parquet")
    with user_error(r"a\.parquet: has 2 columns 'en'; got en, de, en"):
        read(recipe_for(folder, "parquet", "a.parquet"))
    pq.write_table(pa.table({"en": ["a", "b", None], "de": ["a"] * 3}), folder / "a.parquet")
    with user_error(r"a\.parquet, row 3, 'en': the text is empty"):
        read(recipe_for(folder, "parquet", "a.parquet"))


def test_pairs_with_an_empty_text_are_dropped_on_request_and_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a.csv").write_text('en,de\na,b\n,x\ny,\u2003\n\nc,d\n" ",""\n', encoding="utf-8")
    recipe = recipe_for(folder, "csv", "a.csv", empty="drop")
    for _ in range(2):
        assert read(recipe) == [("a", "b"), ("c", "d")]
    assert caplog.messages == ["data.train: dropped pairs with an empty text: 3."] * 2
    with user_error(r"a\.csv, line 3, 'en': the text is empty"):  # though the cache has these pairs
        read(recipe_for(folder, "csv", "a.csv"))


def test_quotation_marks_between_tabs_are_text(folder: Path) -> None:
    (folder / "a.tsv").write_text('en\tde\n"Hi" she said.\t"Hallo\nNA\tnull"\n')
    assert read(recipe_for(folder, "csv", "a.tsv")) == [('"Hi" she said.', '"Hallo'), ("NA", 'null"')]


def test_quotation_marks_that_may_enclose_cells_are_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "a.tsv").write_text('en\tde\n"a ""b"""\tc\nd\t"e, f"\n')
    for _ in range(2):
        read(recipe_for(folder, "csv", "a.tsv"))
    (line, again) = caplog.messages
    assert line == again
    assert line.startswith("data.train: quotation marks are read as text; all of them look")
    assert "in 1 sources and 1 targets" in line
    caplog.clear()
    assert read(recipe_for(folder, "csv", "a.tsv", quoting="cells")) == [('a "b"', "c"), ("d", "e, f")]
    (folder / "a.tsv").write_text('en\tde\n"a, b"\tc\nd\t5" f\n')
    read(recipe_for(folder, "csv", "a.tsv"))
    assert not caplog.messages


def test_characters_of_a_wrong_conversion_are_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "a.jsonl").write_text(json_lines([("a \x93b\x94", "c"), ("d", "e \ufffd")]).decode(), encoding="utf-8")
    for _ in range(2):
        read(recipe_for(folder, "json", "a.jsonl"))
    assert len(caplog.messages) == 2
    assert r"(U+FFFD): 2 in source, 1 in target, such as 'a \x93b\x94'." in caplog.messages[1]


def test_texts_that_were_converted_twice_are_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    twice = "grün \u2019".encode().decode("cp1252")
    (folder / "a.jsonl").write_text(json_lines([(twice, "ÑO Ã»"), ("NÃO Ñ", twice)]).decode(), encoding="utf-8")
    read(recipe_for(folder, "json", "a.jsonl"))
    (line,) = caplog.messages
    assert "converted to UTF-8 twice, as Ã¼ for ü: 2 in source, 2 in target, such as 'grÃ¼n" in line


def test_data_set_of_the_hub_is_loaded_by_split(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    pairs = [("007", "1.50"), ("NA", " ü\r")]
    rows = [{"translation": {"en": source, "de": target}, "id": 1} for source, target in pairs]
    load = Mock(return_value=datasets.Dataset.from_list(rows))
    monkeypatch.setattr(texts_module, "load_dataset_builder", Mock(name="parquet"))
    monkeypatch.setattr(texts_module, "load_dataset", load)
    recipe = recipe_for(Path("own/set"), "hub", "train[:2]", subset="de-en", validation="dev", test=None)
    assert {rows["target"][0] for rows in load_pairs(recipe).values()} == {"1.50"}
    assert read(recipe) == [("007", "1.50"), ("NA", "ü")]
    assert load.mock_calls == [call("own/set", "de-en", split=split) for split in ("train[:2]", "dev", "train[:2]")]
    load.return_value = load.return_value.flatten().rename_columns({"translation.en": "en", "id": "de"})
    with user_error("data.train: own/set: the column 'de' is of type int64, expected string"):
        read(recipe)


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_a_data_set_are_read_as_they_are(folder: Path, name: str) -> None:
    _, file, without, write = FORMATS[name]
    pairs = [(text, f"{text}!") for text in CHANGEABLE if text.strip() and not set(text) & set(without)]
    (folder / file).write_bytes(write(pairs))
    assert read(recipe_for(folder, "hub", "train")) == stripped(pairs)
    with user_error(r"^data\.train: .* does not contain a split 'dev', only train"):
        read(recipe_for(folder, "hub", "dev"))


def write_card(folder: Path, file: str, options: str) -> None:
    """Write a card that names one file and options of its reader."""
    files = f"  data_files:\n  - split: train\n    path: {file}\n"
    card = f"---\nconfigs:\n- config_name: default\n  {options}\n{files}---\n"
    (folder / "README.md").write_text(card, encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "content", "options"),
    [
        ("train.csv", "1;A\n007;NA\n", 'sep: ";"\n  column_names: [en, de]\n  header: null'),
        ("train.csv", "de,en\n1,A\n007,NA\n", "skiprows: 1\n  column_names: [en, de]"),
        ("train.json", '{"data": [{"en": "1", "de": "A"}, {"en": "007", "de": "NA"}]}', "field: data"),
    ],
    ids=["separator and names", "skipped header", "field"],
)
def test_options_of_a_card_are_those_of_the_reader(folder: Path, file: str, content: str, options: str) -> None:
    (folder / file).write_text(content, encoding="utf-8")
    write_card(folder, file, options)
    assert read(recipe_for(folder, "hub", "train")) == [("1", "A"), ("007", "NA")]


def test_filter_of_a_card_is_that_of_the_reader(folder: Path) -> None:
    pq.write_table(pa.table({"en": ["1", "2"], "de": ["A", "B"]}), folder / "train.parquet")
    write_card(folder, "train.parquet", "filters: [[en, '==', '2']]")
    assert read(recipe_for(folder, "hub", "train")) == [("2", "B")]


@pytest.mark.parametrize(
    ("content", "options", "fields", "error"),
    [
        (
            "1,A,x\n2,B,y\n",
            "column_names: [en, de]",
            {},
            r"cannot be loaded \(Length of header or names does not match",
        ),
        ("1,A\n" * 1500 + ",B\n", "column_names: [en, de]", {}, r"train\.csv, row 1501, 'en': the text is empty"),
        ("1,A\n", "column_names: [en, de]", {"train": "dev"}, r"does not contain a split 'dev', only train"),
        (
            *("1;A\n", "column_names: [en, de]", {"delimiter": ";"}),
            r"data\.delimiter: the card of .* sets the options of its reader; got ';' beside column_names, names\.",
        ),
        ("version https://git-lfs.github.com/spec/v1\n", "column_names: [en, de]", {}, r"is a pointer of Git LFS"),
    ],
    ids=["more cells than names", "an empty text", "a missing split", "a field of the recipe", "a pointer"],
)
def test_options_of_a_card_that_do_not_fit_are_an_error(
    folder: Path, content: str, options: str, fields: dict[str, str], error: str
) -> None:
    (folder / "train.csv").write_text(content, encoding="utf-8")
    write_card(folder, "train.csv", options)
    with user_error(error):
        read(recipe_for(folder, "hub", **{"train": "train"} | fields))


def test_trees_are_read_as_sentences_and_linear_trees(folder: Path) -> None:
    tree = "(S (NP-SBJ (DT the) (NN dog)) (VP (VBZ barks)) (. .))\n"
    for name in ("a.mrg", "b.mrg", "[ab].mrg.old"):
        (folder / name).write_text(tree)
    (folder / "c.mrg.gz").write_bytes(gzip.compress(tree.encode()))
    files = {"train": "[ab].mrg", "validation": "c.mrg.gz", "test": "a.mrg c* [ab].mrg.old"}
    recipe = recipe_for(folder, "trees", target="trees", **files)
    pairs = load_pairs(recipe)
    assert {name: len(rows) for name, rows in pairs.items()} == {"train": 2, "validation": 1, "test": 3}
    assert pairs["test"][1] == {"source": "the dog barks .", "target": "(S(NP()DT()NN)NP(VP()VBZ)VP().)S"}
    (folder / "a.mrg").write_text(tree.replace("dog", "cat"))
    assert load_pairs(recipe)["test"][0]["source"] == "the cat barks ."
    with user_error(r"no file matches 'x\.mrg'"):
        load_pairs(recipe_for(folder, "trees", "x.mrg"))
