"""Reading of pairs: a text is what the file contains, character by character, or an error names the line.

White space at both ends of a text is stripped, and a text without anything else is empty. The pairs of a split are
written once to an Arrow file, which all processes and later runs map into memory. Its name is the digest of what they
are read from, so a changed file is read again.
"""

import bz2
import codecs
import contextlib
import csv
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import logging
import lzma
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset, DownloadManager, config, load_dataset, load_dataset_builder
from filelock import FileLock

from training.recipe import FileData, HubData
from vaswani_transformer.parsing import linear, trees
from vaswani_transformer.parsing.linear import linearize
from vaswani_transformer.parsing.trees import ROOT, Tree, evaluation_tree, read_trees
from vaswani_transformer.support.command import UserError, one_line
from vaswani_transformer.support.files import POINTER, WEB_PAGE, atomic_folder, write_errors

logger = logging.getLogger(__name__)
SIDES = ("source", "target")
SURROGATE = re.compile("[\ud800-\udfff]")
STRINGS = ("string", "large_string", "dictionary<values=string", "null")  # Arrow's types
CLONE = Path(__file__).parents[1]
ROWS = 1000  # pairs written to Arrow at a time
CHUNK = 1 << 16  # compressed bytes read at a time
TABS = {".tsv", ".tab"}  # ends of the names of tab-separated files
BINARY = re.compile(rb"[\0-\x08\x0e-\x19\x1c-\x1f]")  # no text has them
CONVERT = "Convert the file, for example with iconv -f {} -t utf-8."
CARRIAGE_RETURNS = r"convert the ends of its lines, for example with tr '\r' '\n'."
WITHOUT_PAIRS = {  # how they begin
    rb"PK\x03\x04": "is a zip archive; unpack it, or save a workbook of Excel as CSV UTF-8",
    rb"(?s)\xd0\xcf\x11\xe0|7z\xbc\xaf|Rar!|.{257}ustar": "is an archive or a workbook; unpack it, or save it as CSV",
    POINTER: "is a pointer of Git LFS or git-annex, not the file; run git lfs pull or git annex get",
    rb"(?s)\x1f[\x8b\x9d]|BZh[1-9]1AY|\xfd7zXZ|\x28\xb5\x2f\xfd|\x04\x22M\x18|LZIP\x01|\x89LZO|\x5d\0\0": (
        "is compressed twice, or in a format that is not supported; decompress it"
    ),
    WEB_PAGE: "is a web page, not the file; download the file itself",
    rb"(?i)<(!--|(!doctype|\?xml|srcset|refset|tstset|mteval|doc|url|tmx|xliff)\b)": (
        "is SGML or XML; write its sentences, without tags, to a text file with a line each"
    ),
}
DAMAGED = r"[\x{80}-\x{9f}\x{fffd}]"
DOUBLED = r"[ÃÂÐÑ][\x{a1}-\x{aa}\x{ac}-\x{ba}\x{bc}-\x{bf}]|â€"  # UTF-8 that was read as cp1252
QUOTED = r'(?s)^"([^"]|"")*(,|"")([^"]|"")*"$'  # cells that Excel or pandas enclosed in quotation marks
CODE = [Path(str(file)).read_text(encoding="utf-8") for file in (__file__, linear.__file__, trees.__file__)]
"""The code that reads files; after a change of it, no pairs in the cache are used."""

Row = tuple[str, object, object]
"""Location of a pair, such as "pairs.csv, line 3", with its source and target as they are read."""
Names = tuple[str, str]
"""Names of the columns of source and target."""


def draw_key(text: str) -> int:
    """Return the first 64 bits of a text's SHA-256, in whose order pairs are held out wherever they are in the data."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


# Files as lines


class Streams(io.RawIOBase):
    """Content of a file of one or more bzip2 or xz streams; bytes that are no stream are an error, unlike in `open`."""

    def __init__(self, path: Path, decompressor: Callable[[], Any]) -> None:
        self.path = path
        self.file = path.open("rb")
        self.new = decompressor
        self.stream = decompressor()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        content = b""
        while not content:
            given = b""
            if self.stream.eof:  # zeros may follow a stream
                given = self.stream.unused_data.lstrip(b"\0")
                while not given and (more := self.file.read(CHUNK)):
                    given = more.lstrip(b"\0")
                if not given:
                    return 0
                self.stream = self.new()
            elif self.stream.needs_input:
                given = self.file.read(CHUNK)
            try:
                if self.stream.needs_input and not given:
                    raise EOFError("it ends too early")
                content = self.stream.decompress(given, len(buffer))
            except (OSError, EOFError, lzma.LZMAError) as error:
                problem = f"is damaged, or has other bytes behind its compressed ones ({one_line(error)})"
                raise UserError(f"{self.path}: {problem}; compress the whole file again.") from error
        buffer[: len(content)] = content
        return len(content)


def open_file(path: Path) -> io.BufferedReader:
    """Open a file, decompressed if it is compressed by gzip, bzip2, xz or Zstandard.

    Raises:
        UserError: it begins like a file without pairs.
    """
    with path.open("rb") as file:
        magic = file.read(10)
    raw: Any = None
    if magic.startswith(b"\x1f\x8b"):
        raw = gzip.GzipFile(path)
    elif re.match(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", magic):  # with a block, or empty
        raw = Streams(path, bz2.BZ2Decompressor)
    elif magic.startswith(b"\xfd7zXZ\0"):
        raw = Streams(path, lzma.LZMADecompressor)
    elif re.match(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", magic):  # a frame, or one to skip
        raw = pa.input_stream(str(path), compression="zstd")
    file = path.open("rb") if raw is None else io.BufferedReader(raw)
    start = file.peek().removeprefix(codecs.BOM_UTF8).lstrip()
    for pattern, problem in WITHOUT_PAIRS.items():
        if re.match(pattern, start):
            file.close()
            raise UserError(f"{path}: {problem}.")
    return file


def wide_encoding(start: bytes) -> str | None:
    """Return iconv's name of the UTF-16 or UTF-32 of a file that begins so; None for other encodings."""
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"

    # Without a mark: in the right byte order there are spaces and line ends, and no NUL characters.
    texts = {name: start.decode(name, "ignore") for name in ("utf-16le", "utf-16be", "utf-32le", "utf-32be")}
    spaces = {name: "\0" not in text and len(re.findall("[\n ]", text)) for name, text in texts.items()}
    return max(spaces, key=spaces.__getitem__) if any(spaces.values()) else None


def how_to_convert(line: bytes, rest: Iterable[bytes]) -> str:
    """Return the advice for a file without a letter in UTF-8, by the first line that is not ASCII and the others."""
    if BINARY.search(line):
        return "It is not a text; decompress or export it, and see data.kind."
    high = len(re.findall(rb"[\x80-\xff]", line))
    if high > len(re.findall(b"[A-Za-z]", line)):
        return CONVERT.format("ENCODING") + " ENCODING is that of its language, such as cp1251, gb18030 or shift_jis."
    is_windows = any(re.search(rb"[\x80-\x9f]", more) for more in itertools.chain([line], rest))
    fix = CONVERT.format("cp1252" if is_windows else "latin1")
    return f"{fix} Languages outside Western Europe have other encodings, such as cp1250 or cp1251."


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""Yield the lines of a UTF-8 file with their numbers and ends; only \n ends a line, also as \r\n."""
    with open_file(path) as file:
        start = file.peek()
        if start.startswith(b"PAR1"):
            raise UserError(f"{path}: is a Parquet file; set data.kind=parquet.")
        if encoding := wide_encoding(start):
            raise UserError(f"{path}, line 1: is not UTF-8; got {encoding}. {CONVERT.format(encoding)}")
        is_utf8 = False  # by letters outside ASCII
        for number, line in enumerate(file, start=1):
            if number == 1 and b"\r" in line.rstrip() and not line.endswith(b"\n"):
                raise UserError(f"{path}: has no line feed; {CARRIAGE_RETURNS}")
            try:
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode()
            except UnicodeDecodeError as error:
                fix = "The lines before it are; correct this line." if is_utf8 else how_to_convert(line, file)
                problem = f"is not UTF-8; got the byte {line[error.start]:#x}"
                raise UserError(f"{path}, line {number}: {problem}. {fix}") from error
            is_utf8 = is_utf8 or not text.isascii()
            yield number, text


# Formats


def text_rows(paths: list[Path]) -> Iterator[Row]:
    """Yield the lines of a file per language."""
    for source, target in itertools.zip_longest(*map(read_lines, paths)):
        if source is None or target is None:
            lengths = [sum(1 for _ in read_lines(path)) for path in paths]
            raise UserError(
                f"{paths[0]} has {lengths[0]:,} lines, and {paths[1]} {lengths[1]:,}; pair the files line by line."
            )
        yield f"{paths[0]} and {paths[1]}, line {source[0]}", source[1], target[1]


def find_delimiter(path: Path, data: FileData) -> str:
    """Return data.delimiter, or a tab for a .tsv file, or the semicolon or tab of a header without a comma."""
    if data.delimiter is not None:
        return data.delimiter.replace(r"\t", "\t")
    if TABS & {suffix.lower() for suffix in path.suffixes}:
        return "\t"
    header = next((line for _, line in read_lines(path) if line.rstrip("\r\n")), "")
    header = re.sub('"[^"]*"', "", header)  # quoted names
    others = [] if "," in header else [delimiter for delimiter in ";\t" if delimiter in header]
    return max(others, key=header.count, default=",")


def has_quoted_cells(data: FileData, delimiter: str) -> bool:
    """Return whether quotation marks enclose cells; by default they are text between tabs."""
    return delimiter != "\t" if data.quoting is None else data.quoting == "cells"


def csv_cells(path: Path, separator: str, is_quoted: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each row that is not an empty line, with the number of its first line."""
    csv.field_size_limit(sys.maxsize)  # a text may be a whole page
    lines = read_lines(path)
    for number, line in lines:
        if not is_quoted or '"' not in line:
            if text := line.rstrip("\r\n"):
                yield number, text.split(separator)
            continue
        try:  # a quoted cell may have several lines
            rest = itertools.chain([line], (more for _, more in lines))
            yield number, next(csv.reader(rest, delimiter=separator, strict=True))
        except csv.Error as error:
            problem = f"is not comma-separated values ({one_line(error)})"
            raise UserError(f"{path}, line {number}: {problem}; correct its quotation marks.") from error


def csv_rows(path: Path, data: FileData) -> Iterator[Row]:
    """Yield the pairs of values below a header, separated by `find_delimiter`."""
    separator = find_delimiter(path, data)
    is_quoted = has_quoted_cells(data, separator)
    cells = csv_cells(path, separator, is_quoted)
    header_line, header = next(cells, (1, []))
    if header == ["sep=", ""]:  # Excel's name of the separator
        header_line, header = next(cells, (2, []))
    for name in data.columns if header else ():
        if header.count(name) != 1:
            problem = f"has {header.count(name)} columns {name!r}, separated by {separator!r}"
            has_other_separator = len(header) == 1 and re.search(r"[;,|\t]", header[0])
            fix = SET_COLUMNS
            if has_other_separator:
                fix = f"Separate the columns by {separator!r}, name a file with tabs .tsv, or set data.delimiter."
            elif not is_quoted and f'"{name}"' in header:
                fix = SET_QUOTING
            raise missing_column(f"{path}, line {header_line}", problem, header, fix)
    if not header:
        return
    source, target = map(header.index, data.columns)
    for number, row in cells:
        if len(row) != len(header):
            has_marks = not is_quoted and any('"' in cell for cell in row)
            raise UserError(
                f"{path}, line {number}: has {len(row)} cells, separated by {separator!r}, and the header "
                f"{len(header)}; correct it.{f' {SET_QUOTING}' if has_marks else ''}"
            )
        yield f"{path}, line {number}", row[source], row[target]


def json_rows(path: Path, data: FileData) -> Iterator[Row]:
    """Yield the pairs of JSON Lines, or of a file with one list of objects."""
    lines = ((number, line) for number, line in read_lines(path) if line.strip())
    for index, (number, line) in enumerate(lines):
        if index == 0 and line.lstrip().startswith("["):
            objects = parse_json(path, number, line + "".join(rest for _, rest in lines))
            for row, value in enumerate(objects if isinstance(objects, list) else [objects], start=1):
                yield json_row(f"{path}, row {row}", value, data.columns)
        else:
            yield json_row(f"{path}, line {number}", parse_json(path, number, line), data.columns)


def parse_json(path: Path, number: int, text: str) -> object:
    """Return the value of a text that begins at a line."""

    def unique(members: list[tuple[str, object]]) -> dict[str, object]:
        if len(members) > len(keys := dict(members)):
            raise ValueError("an object has the same key twice")
        return keys

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        line = number
        problem = one_line(error)
        if isinstance(error, json.JSONDecodeError):
            line = number + error.lineno - 1
            problem = f"{error.msg}, column {error.colno}"
        raise UserError(f"{path}, line {line}: is not valid JSON ({problem}); see data.path and data.kind.") from error


def json_row(location: str, value: object, names: Names) -> Row:
    """Return the texts of an object with both names, or with an object `translation` of both."""
    if isinstance(value, dict) and "translation" not in names and isinstance(value.get("translation"), dict):
        value = value["translation"]
    if not isinstance(value, dict):
        raise UserError(f"{location}: got {json.dumps(value)[:40]}, expected an object with {' and '.join(names)}.")
    for name in names:
        if name not in value:
            raise missing_column(location, f"{name!r} is missing", value)
    return location, value[names[0]], value[names[1]]


def parquet_rows(path: Path, data: FileData) -> Iterator[Row]:
    with open_file(path) as file:
        table = pq.ParquetFile(file if file.seekable() else io.BytesIO(file.read()))
        batches = (pa.Table.from_batches([batch]) for batch in table.iter_batches(ROWS))
        yield from arrow_rows(str(path), table.schema_arrow, batches, data.columns)


def arrow_rows(name: str, schema: pa.Schema, tables: Iterable[pa.Table], names: Names) -> Iterator[Row]:
    """Yield the pairs of tables with columns of strings, or with a column `translation` of both."""
    types = {field.name: field.type for field in schema}
    is_nested = "translation" not in names and pa.types.is_struct(types.get("translation", pa.null()))
    if is_nested:
        types = {field.name: field.type for field in types["translation"]}
    for column in names:
        if column not in types:
            raise missing_column(name, f"{column!r} is missing", types)
        if schema.names.count(column) > 1:
            raise missing_column(name, f"has {schema.names.count(column)} columns {column!r}", schema.names)
        if not str(types[column]).startswith(STRINGS):
            raise UserError(f"{name}: the column {column!r} is of type {types[column]}, expected string; convert it.")
    number = 0
    for table in tables:
        if is_nested:
            table = table.select(["translation"]).flatten().rename_columns(list(types))
        for source, target in zip(*(table[column].to_pylist() for column in names), strict=True):
            number += 1
            yield f"{name}, row {number}", source, target


def tree_rows(path: Path, _: FileData) -> Iterator[Row]:
    """Yield the sentences of a bracketed file with their normalized linear trees."""
    for number, tree in read_trees(read_lines(path), str(path)):
        cleaned = evaluation_tree(tree) or Tree(ROOT, ())
        yield f"{path}, line {number}", " ".join(cleaned.words), linearize(cleaned)


SET_COLUMNS = "Set data.source and data.target."
SET_QUOTING = "If quotation marks enclose its cells, set data.quoting=cells."


def missing_column(location: str, problem: str, columns: Iterable[str], fix: str = SET_COLUMNS) -> UserError:
    shown = ", ".join(repr(column)[1:-1] for column in columns)
    return UserError(f"{location}: {problem}; got {shown[:200]}. {fix}")


FORMATS: dict[str, Callable[[Path, FileData], Iterator[Row]]] = {
    "json": json_rows,
    "csv": csv_rows,
    "parquet": parquet_rows,
    "trees": tree_rows,
}


# Splits


def read_split(data: FileData, split: str, name: str) -> Dataset:
    """Read the pairs of a split from the files, or from the split of a data set on the Hub, that `name` names."""
    field = f"data.{split}"
    if isinstance(data, HubData):
        return read_hub(data, field, name)
    folder = find_folder(data)
    if folder is None:
        candidates = dict.fromkeys((str(Path(str(data.path)).absolute()), str(CLONE / str(data.path))))
        raise UserError(f"data.path: no such folder; looked for {' and '.join(candidates)}. Set --data.path=FOLDER.")
    if data.kind == "trees":
        return read_files(data, field, "trees", tree_files(folder, name))
    if data.kind == "text":
        if "{language}" not in name:
            raise UserError(f"{field}: names one file for both languages; got {name}. Put {{language}} into the name.")
        names = [name.replace("{language}", language) for language in (data.source, data.target)]
        paths = [folder / file_name for file_name in names]
        if paths[0].exists() and paths[1].exists() and paths[0].samefile(paths[1]):
            raise UserError(f"{field}: both languages are the same file; got {' and '.join(names)}. Set data.target.")
        return read_files(data, field, "text", paths)
    return read_files(data, field, data.kind, [folder / name])


def find_folder(data: FileData) -> Path | None:
    """Return the folder of the data's files, in the current folder or else in the clone; None if it is in neither."""
    folders = (Path(str(data.path)), CLONE / str(data.path))
    return next((folder for folder in folders if folder.is_dir()), None)


def tree_files(folder: Path, names: str) -> list[Path]:
    """Return the file of that name, or those that match patterns separated by spaces."""
    patterns = names.split()
    if (folder / names).exists():  # a name that contains spaces
        patterns = [names]
    paths: list[Path] = []
    for pattern in patterns:
        root = Path(pattern).anchor  # "/" of an absolute pattern
        matches = sorted((Path(root) if root else folder).glob(pattern.removeprefix(root)))
        if (folder / pattern).exists():
            matches = [folder / pattern]
        if not matches:
            raise UserError(f"{folder}: no file matches {pattern!r}; set data.path to the folder of the trees.")
        paths += matches
    return paths


def read_files(data: FileData, field: str, kind: str, paths: list[Path]) -> Dataset:
    """Read the pairs of files of a kind; those of kind text are a file per language."""
    with read_errors(field, kind):
        digests = []
        for path in paths:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        delimiters = [find_delimiter(path, data) for path in paths] if kind == "csv" else []
    if kind == "text":
        rows = text_rows(paths)
    else:
        rows = itertools.chain.from_iterable(FORMATS[kind](path, data) for path in paths)
    pairs = load_once(data, field, kind, [digests, delimiters, data.quoting], rows)
    if data.quoting is None and "\t" in delimiters:
        log_quoted(pairs, field)
    return pairs


OF_EVERY_DATA_SET = {"name", "version", "data_dir", "data_files", "description", "features"}


def reader_options(config: Any) -> dict[str, str]:
    """Return the options that the card of a data set sets for the reader of its files."""
    default = type(config)()
    names = {field.name for field in dataclasses.fields(config)} - OF_EVERY_DATA_SET
    values = {name: getattr(config, name) for name in sorted(names)}
    return {name: str(value) for name, value in values.items() if value != getattr(default, name)}


def csv_rows_of_card(paths: list[str], config: Any, columns: tuple[str, str]) -> Iterator[Row]:
    """Yield the rows of CSV files that are read with the options of a card, without guessing types."""
    options: dict[str, Any] = {**config.pd_read_csv_kwargs, "dtype": str, "na_filter": False, "chunksize": ROWS}
    if options["index_col"] is None:
        options["index_col"] = False  # pandas would shift the names if there are fewer than cells
    for path in paths:
        open_file(Path(path)).close()  # an error if it has no pairs
        frames: Any = pandas.read_csv(path, **options)
        tables = (pa.Table.from_pandas(frame, preserve_index=False) for frame in frames)
        for table in tables:  # the first; all are numbered together
            yield from arrow_rows(path, table.schema, itertools.chain([table], tables), columns)


def read_hub(data: HubData, field: str, name: str) -> Dataset:
    """Read a split of a data set: from its files if `datasets` would guess the types of their texts."""
    try:
        builder = load_dataset_builder(str(data.path), data.subset)
        kind = str(builder.name)
        files = builder.config.data_files or {}
        is_local = Path(str(data.path)).is_dir()  # `datasets` would know its files by their time
        reads_files = kind in ("csv", "json") or (kind == "parquet" and is_local)
        if reads_files and name not in files:
            raise UserError(
                f"{field}: {data.path} does not contain a split {name!r}, only {', '.join(map(str, files))}."
            )
        options = reader_options(builder.config) if reads_files else {}
        if options.keys() == {"sep"} and len(options["sep"]) == 1:  # of a card, or by `datasets` for TSV
            separator = options.pop("sep")
            data = dataclasses.replace(data, delimiter=data.delimiter or separator)
        if reads_files and not options:
            paths = [Path(path) for path in DownloadManager().download(list(files[name]))]
            return read_files(data, field, kind, paths)
        if kind == "csv":
            for one, value in (("delimiter", data.delimiter), ("quoting", data.quoting)):
                if value is not None:
                    problem = f"the card of {data.path} sets the options of its reader; got {value!r} beside"
                    raise UserError(f"data.{one}: {problem} {', '.join(options)}. Leave data.{one} out.")
            paths = DownloadManager().download_and_extract(list(files[name]))
            content: list[object] = [options]
            for path in paths:
                with open(path, "rb") as file:
                    content.append(hashlib.file_digest(file, "sha256").hexdigest())
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "Length of header or names")  # cells would be left out
                return load_once(data, field, kind, content, csv_rows_of_card(paths, builder.config, data.columns))
        dataset = load_dataset(str(data.path), data.subset, split=name)
    except UserError:
        raise
    except Exception as error:  # each format has its own classes
        reason = one_line(error.__cause__ or error)
        raise UserError(f"{field}: {data.path} cannot be loaded ({reason}); see data.path and data.kind.") from error
    tables = dataset.with_format("arrow").iter(ROWS)
    rows = arrow_rows(str(data.path), dataset.features.arrow_schema, tables, data.columns)
    return load_once(data, field, kind, [dataset._fingerprint], rows)


# Checked texts


@contextlib.contextmanager
def read_errors(field: str, kind: str) -> Generator[None]:
    """Convert the errors of reading to one line."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{field}: {error}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, UnicodeDecodeError) as error:
        reason = one_line(error)
        raise UserError(f"{field}: cannot be read as {kind} ({reason}); see data.path and data.kind.") from error


def load_once(data: FileData, field: str, kind: str, content: list[object], rows: Iterator[Row]) -> Dataset:
    """Return the pairs of `rows` from the cache, which has them if the same `content` was read before."""
    identity = json.dumps([CODE, kind, data.source, data.target, data.empty, content])
    cache = Path(config.HF_DATASETS_CACHE, "vaswani-transformer-pairs")
    folder = cache / hashlib.sha256(identity.encode()).hexdigest()
    with write_errors(cache, "make room, or set HF_DATASETS_CACHE"):
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                with atomic_folder(folder) as staging:
                    write_arrow(staging / "pairs.arrow", checked_pairs(data, field, kind, rows))
    pairs = without_empty(Dataset.from_file(str(folder / "pairs.arrow")), field)
    log_damaged(pairs, field)
    return pairs


def checked_pairs(data: FileData, field: str, kind: str, rows: Iterator[Row]) -> Iterator[tuple[str, str]]:
    with read_errors(field, kind):
        for location, source, target in rows:
            texts = checked_text(location, data.source, source), checked_text(location, data.target, target)
            if data.empty == "error" and not all(texts):
                name = data.source if not texts[0] else data.target
                raise UserError(f"{location}, {name!r}: the text is empty; correct it or set data.empty=drop.")
            yield texts


def checked_text(location: str, name: str, value: object) -> str:
    """Return a text without white space at its ends."""
    if value is None:
        return ""
    if not isinstance(value, str):
        problem = f"got {json.dumps(value)[:40]}, expected a text; write it in quotation marks"
    elif "\0" in value:
        problem = "contains a NUL character; the file is damaged, so get it again"
    elif not value.isascii() and SURROGATE.search(value):
        problem = "contains half a surrogate pair, which is not a character; correct it"
    else:
        return value.strip()
    raise UserError(f"{location}, {name!r}: {problem}.")


def write_arrow(path: Path, pairs: Iterator[tuple[str, str]]) -> None:
    schema = pa.schema(dict.fromkeys(SIDES, pa.string()))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while batch := list(itertools.islice(pairs, ROWS)):
            columns = [pa.array(texts, pa.string()) for texts in zip(*batch, strict=True)]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def without_empty(pairs: Dataset, field: str) -> Dataset:
    """Return the pairs of two texts, and log the number of others."""
    lengths = [pc.call_function("binary_length", [pairs.data.column(side)]).to_numpy() for side in SIDES]
    kept = np.flatnonzero(np.minimum(*lengths))
    if not len(kept):
        raise UserError(f"{field}: contains no pairs; choose a different file or split.")
    if len(kept) < len(pairs):
        logger.warning("%s: dropped pairs with an empty text: %s.", field, f"{len(pairs) - len(kept):,}")
        pairs = pairs.select(kept)
    return pairs


def whole_tables(pairs: Dataset) -> Iterator[pa.Table]:
    """Yield tables of pairs in whole columns; those of selected rows have a chunk for each row, which costs time."""
    for table in pairs.with_format("arrow").iter(100_000):
        yield table.combine_chunks()


def matches(pairs: Dataset, pattern: str) -> tuple[list[int], str]:
    """Count the matches of a pattern in the sources and in the targets; return the first text with one too."""
    options = pc.MatchSubstringOptions(pattern)
    counts = [0, 0]
    example = ""
    for table in whole_tables(pairs):
        for index, side in enumerate(SIDES):
            found = pc.call_function("count_substring_regex", [table[side]], options).to_numpy()
            counts[index] += int(found.sum())
            if found.any() and not example:
                example = table[side][int(found.argmax())].as_py()
    return counts, example


def log_damaged(pairs: Dataset, field: str) -> None:
    """Log the number of characters that a wrong conversion leaves."""
    (sources, targets), example = matches(pairs, DAMAGED)
    if example:
        first = re.search("[\x80-\x9f\ufffd]", example)
        start = max(0, first.start() - 20) if first else 0
        logger.warning(
            "%s: control characters (U+0080 to U+009F) or replacement characters (U+FFFD): %s in source, %s in target, "
            "such as %a. A wrong conversion leaves them; convert the original file again, for example with iconv -f "
            "cp1252 -t utf-8.",
            *(field, f"{sources:,}", f"{targets:,}", example[start : start + 40]),
        )
    (sources, targets), example = matches(pairs, DOUBLED)
    if example:
        logger.warning(
            "%s: letters that were converted to UTF-8 twice, as Ã¼ for ü: %s in source, %s in target, such as %.60r. "
            "Convert the file back, for example with iconv -f utf-8 -t cp1252.",
            *(field, f"{sources:,}", f"{targets:,}", example),
        )


def log_quoted(pairs: Dataset, field: str) -> None:
    """Log that quotation marks were read as text, if each of them looks like one that encloses a cell."""
    quoted, example = matches(pairs, QUOTED)
    if example and quoted == matches(pairs, '(?s)^[^"]*".*$')[0]:
        logger.warning(
            "%s: quotation marks are read as text; all of them look as if they enclosed cells, in %s sources and %s "
            "targets, such as %.60r. If they do, set data.quoting=cells.",
            *(field, f"{quoted[0]:,}", f"{quoted[1]:,}", example),
        )
