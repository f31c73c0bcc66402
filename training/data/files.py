"""Sentence pairs in files, JSON Lines, parallel text or trees: read line by line, and checked."""

import bz2
import gzip
import itertools
import logging
import lzma
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from accelerate import PartialState

from training.recipe.fields import DataRecipe
from vaswani_transformer.parsing.linear import linearize
from vaswani_transformer.parsing.trees import ROOT, Tree, evaluation_tree, read_trees
from vaswani_transformer.support.errors import UserError, one_line
from vaswani_transformer.support.files import check_unicode, json_type, parse_json_line, utf8_lines

logger = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
LONGEST_LINE = 2**28  # bytes
EXPANDED_BYTES, EXPANDED_TIMES = 2**30, 100  # a compressed file may expand to the larger of so many bytes and times
COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
NO_TEXT = (".7z", ".parquet", ".tar", ".tgz", ".zip", ".zst")

LocatedPair = tuple[str, str, str]
"""Where a pair stands, for an error, its source and its target."""


def open_file(path: Path) -> BinaryIO:
    """Open a file, compressed or not, for reading bytes."""
    if not path.is_file():
        raise UserError(
            f"{path}: there is no such file; set data.path to its folder, data.train, data.validation and data.test to "
            "the names, and data.source and data.target to the languages in them."
        )
    if path.suffix in NO_TEXT:
        raise UserError(f"{path}: is no text; got {path.suffix}, expected text, plain or .gz, .bz2 or .xz. Unpack it.")
    return cast(BinaryIO, COMPRESSED.get(path.suffix, open)(path, "rb"))


def bounded_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, and end at one, or at a compressed file, that could fill the memory."""
    most = max(EXPANDED_BYTES, EXPANDED_TIMES * path.stat().st_size) if path.suffix in COMPRESSED else sys.maxsize
    total = 0
    for number in itertools.count(1):
        if not (line := file.readline(LONGEST_LINE + 1)):
            return
        if len(line) > LONGEST_LINE:
            raise UserError(f"{path}, line {number}: is longer than {LONGEST_LINE:,d} bytes; correct the line.")
        if (total := total + len(line)) > most:
            raise UserError(f"{path}, line {number}: has expanded to more than {most:,d} bytes; decompress it first.")
        yield line


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers from 1, without line ends; a byte order mark is skipped.

    Only a line feed ends a line, or a carriage return in a file without line feeds. A line of more than `LONGEST_LINE`
    bytes is an error, and so is a compressed file that expands to more than `EXPANDED_BYTES` and `EXPANDED_TIMES` its
    size.
    """
    number = 0
    try:
        with open_file(path) as file:
            for number, line in enumerate(utf8_lines(bounded_lines(file, path), path), start=1):
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise UserError(
            f"{path}, after line {number}: not readable ({error}); it must be text, plain or in a complete file."
        ) from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({one_line(error, with_file=False)}); make it readable, or name another."
        ) from error


def with_both_sides(recipe: DataRecipe, pairs: Iterable[LocatedPair], name: object) -> Iterator[tuple[str, str]]:
    """Yield the pairs that have both sides; the others end the run, or are dropped with a warning that names `name`."""
    empty = 0
    for where, source, target in pairs:
        if source and target:
            yield source, target
        elif recipe.empty == "error":
            side = recipe.target if source else recipe.source
            raise UserError(f"{where}: the side {side!r} is empty; correct the line or set data.empty=drop.")
        else:
            empty += 1
    if empty and PartialState().is_main_process:
        logger.warning("%s: dropped %d pairs with an empty side.", name, empty)


def pair_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the texts of a row by side: those in its group `translation`, or its own columns."""
    return group if isinstance(group := row.get("translation"), dict) else row


def json_pair(recipe: DataRecipe, where: str, row: Any) -> tuple[str, str]:
    if not isinstance(row, dict):
        schema = f'{{"translation": {{"{recipe.source}": "...", "{recipe.target}": "..."}}}}'
        raise UserError(f"{where}: is {json_type(row)}; each line must be {schema}, or the inner group alone.")
    pair = pair_of(row)
    for language in (recipe.source, recipe.target):
        if language not in pair:
            raise UserError(
                f"{where}: no side {language!r} (found: {', '.join(pair)}); set data.source and data.target to "
                "sides of the file."
            )
        if not isinstance(text := pair[language], str):
            raise UserError(f"{where}: the side {language!r} is {json_type(text)}, no text; correct the line.")
        check_unicode(text, f"{where}: the side {language!r}")
    return pair[recipe.source], pair[recipe.target]


def read_json_lines(recipe: DataRecipe, folder: Path, name: str) -> Iterator[LocatedPair]:
    """Yield the pairs of a JSON Lines file, `{"translation": {"en": "...", "de": "..."}}` or `{"en": ...}` a line."""
    for number, line in numbered_lines(folder / name):
        where = f"{folder / name}, line {number}"
        row = parse_json_line(line, where, "correct the line, or set data.kind=text for plain text.")
        source, target = json_pair(recipe, where, row)
        yield where, source.strip(), target.strip()


def read_text(recipe: DataRecipe, folder: Path, name: str) -> Iterator[LocatedPair]:
    """Yield the pairs of two text files, line n of one with line n of the other; `name` holds `{language}`."""
    if "{language}" not in name:
        raise UserError(
            f"{name}: the name of parallel text files needs {{language}} in it; set data.train, data.validation and "
            "data.test, as in --data.train='train.{language}'."
        )
    source_path, target_path = (folder / name.replace("{language}", code) for code in (recipe.source, recipe.target))
    sources, targets = numbered_lines(source_path), numbered_lines(target_path)
    for number, source in sources:
        other = next(targets, None)
        if other is None:
            raise UserError(f"{target_path}: ends before line {number} of {source_path}; pair the files line by line.")
        yield f"{source_path}, line {number}", source.strip(), other[1].strip()
    if (other := next(targets, None)) is not None:
        raise UserError(f"{source_path}: ends before line {other[0]} of {target_path}; pair the files line by line.")


def matching_files(folder: Path, names: str) -> list[Path]:
    """Return the files of one name, or of patterns separated by spaces, each pattern's in alphabetical order."""
    if os.path.isdir(folder / names):  # pathlib raises an error for a list that is longer than a name may be
        raise UserError(f"{folder / names}: is a folder; name its files by a pattern such as '{names}/*.mrg'.")
    if os.path.exists(folder / names):
        return [folder / names]
    paths = []
    for pattern in names.split():
        root = Path(pattern).anchor  # "/" of an absolute pattern, which pathlib accepts in no folder
        is_name = not any(sign in pattern for sign in "*?[")
        base = Path(root) if root else folder
        matches = [folder / pattern] if is_name else sorted(base.glob(pattern.removeprefix(root)))
        if not matches:
            raise UserError(f"{folder}: no file matches {pattern!r}; set data.path to the folder of the trees.")
        paths += matches
    return paths


def read_tree_pairs(recipe: DataRecipe, folder: Path, name: str) -> Iterator[LocatedPair]:
    """Yield the sentences of bracketed files with their linear trees, without functional tags and empty elements."""
    for path in matching_files(folder, name):
        for line, tree in read_trees(numbered_lines(path), str(path)):
            cleaned = evaluation_tree(tree) or Tree(ROOT, ())
            yield f"{path}, line {line}", " ".join(cleaned.words), linearize(cleaned)


READERS = {"json": read_json_lines, "text": read_text, "trees": read_tree_pairs}


def read_file(recipe: DataRecipe, name: str) -> Iterator[tuple[str, str]]:
    folder = Path(recipe.path or "")
    pairs = READERS[recipe.kind](recipe, folder, name)
    return with_both_sides(recipe, pairs, folder / name.replace("{language}", recipe.source))


def files_of(recipe: DataRecipe, name: str) -> list[Path]:
    """Return the files of a split; a name that `read_file` cannot read may be among them."""
    folder = Path(recipe.path or "")
    if recipe.kind == "text":
        return [folder / name.replace("{language}", code) for code in (recipe.source, recipe.target)]
    return matching_files(folder, name) if recipe.kind == "trees" else [folder / name]
