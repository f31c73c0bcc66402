"""Translations by a teacher in place of training targets: the folder that `training.distill` writes.

    distillation.json   the inputs of the translations: teacher, sources, search and settings
    00000.jsonl         the pairs that were kept of the first `window` sources, one JSON line each
    00000.json          their counts and digest, written last: with it the part is complete

Processes and shards write different parts, so that parts from several machines make one folder. A folder with all parts
is complete.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from training.recipe.fields import DataRecipe
from vaswani_transformer.support.errors import UserError, one_line
from vaswani_transformer.support.files import TextDigest, digest_of_file, parse_json, write_atomically

RECORD = "distillation.json"
REPEAT = "remove it and repeat the distillation."
FIRST_SOURCES = 1000  # that a stream's check compares


def digest_sources(sources: Iterable[str]) -> dict[str, Any]:
    """Return the number of texts and their SHA-256, and the same of the first thousand."""
    digest, first = TextDigest(), {"sources": 0, "sha256": TextDigest().hexdigest()}
    for source in sources:
        digest.add(source)
        if digest.count <= FIRST_SOURCES:
            first = {"sources": digest.count, "sha256": digest.hexdigest()}
    return {"sources": digest.count, "sha256": digest.hexdigest(), "first": first}


class Distillation:
    """A folder of distilled pairs."""

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.folder, self.record = folder, record
        self.sources: int = record["data"]["sources"]
        self.sort_lines: int = record["settings"]["window"]
        self.num_parts = math.ceil(self.sources / self.sort_lines)

    @classmethod
    def load(cls, folder: Path) -> "Distillation":
        """Return the distillation in a folder, complete or not."""
        try:
            record = parse_json((folder / RECORD).read_bytes())
            sizes = record["data"]["sources"], record["settings"]["window"]
            if not all(isinstance(size, int) and 0 < size < 2**63 for size in sizes):
                raise ValueError(f"its sizes are {sizes}")
            distillation = cls(folder, record)
            _ = distillation.identity  # has every field
            return distillation
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{folder}: has no readable {RECORD}, so it is no folder of python -m training.distill; name one."
            ) from error

    @property
    def inputs(self) -> dict[str, Any]:
        """The teacher, sources and settings that the translations depend on, without a folder's name."""
        names = {name: self.record[name] for name in ("data", "search", "settings")}
        return {"teacher": self.record["teacher"]["digest"]} | names

    @cached_property
    def identity(self) -> str:
        """The SHA-256 of everything that the translations depend on."""
        return hashlib.sha256(json.dumps(self.inputs, sort_keys=True).encode()).hexdigest()

    def sources_of(self, number: int) -> int:
        return min(self.sort_lines, self.sources - number * self.sort_lines)

    def paths(self, number: int) -> tuple[Path, Path]:
        return self.folder / f"{number:05d}.jsonl", self.folder / f"{number:05d}.json"

    def write_part(self, number: int, pairs: list[dict[str, str]], dropped: Counter[str]) -> None:
        """Write a part; a kill at any moment leaves it complete or incomplete, never wrong."""
        data, counts = self.paths(number)
        lines = (json.dumps({"translation": pair}, ensure_ascii=False) for pair in pairs)
        write_atomically(data, "".join(f"{line}\n" for line in lines))
        size, sha256 = digest_of_file(data)
        content = {"distillation": self.identity, "kept": len(pairs), "dropped": dict(sorted(dropped.items()))}
        write_atomically(counts, json.dumps(content | {"bytes": size, "sha256": sha256}))

    def counts(self, number: int) -> dict[str, Any] | None:
        """Return the counts of a part; None if it is missing or incomplete."""
        data, path = self.paths(number)
        try:
            counts = parse_json(path.read_bytes())
            numbers = [counts["kept"], *counts["dropped"].values()]
            is_complete = data.stat().st_size == counts["bytes"] and all(isinstance(each, int) for each in numbers)
            is_complete &= isinstance(counts["sha256"], str) and "distillation" in counts
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        if is_complete and counts["distillation"] != self.identity:
            raise UserError(
                f"{path}: is of another distillation than {self.folder / RECORD}; put only parts of one teacher, one "
                "data set and one search into a folder."
            )
        return counts if is_complete else None

    def missing_parts(self) -> Iterator[int]:
        return (number for number in range(self.num_parts) if self.counts(number) is None)

    def check_complete(self) -> None:
        if (missing := next(self.missing_parts(), None)) is not None:
            raise UserError(
                f"{self.folder}: the distillation is unfinished; part {missing:05d} of {self.num_parts} is missing. "
                "Repeat its command, or copy the other shards' parts there."
            )

    @cached_property
    def totals(self) -> dict[str, Any]:
        """Return the numbers of sources and of kept pairs, of dropped pairs by reason, and the SHA-256 of all parts."""
        kept, dropped, digest = 0, Counter[str](), hashlib.sha256()
        for number in range(self.num_parts):
            if counts := self.counts(number):
                kept += counts["kept"]
                dropped.update(counts["dropped"])
                digest.update(counts["sha256"].encode())
        return {
            "sources": self.sources,
            "kept": kept,
            "dropped": dict(sorted(dropped.items())),
            "sha256": digest.hexdigest(),
        }

    def fingerprint(self) -> dict[str, Any]:
        """Return the record of the pairs in `results.json`: teacher, sources, search, settings and counts."""
        names = {name: self.record[name] for name in ("teacher", "search", "settings")}
        sources = {"sources_sha256": self.record["data"]["sha256"]}
        return names | sources | self.totals

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield the kept pairs in the order of their sources."""
        languages = [self.record["data"][side] for side in ("source", "target")]
        for number in range(self.num_parts):
            (path, _), counts = self.paths(number), self.counts(number)
            try:
                content = path.read_bytes()
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({one_line(error, with_file=False)}); {REPEAT}") from error
            lines = content.splitlines()
            is_same = counts is not None and counts["kept"] == len(lines)
            if not is_same or hashlib.sha256(content).hexdigest() != counts["sha256"]:
                raise UserError(f"{path}: was changed after it was written; {REPEAT}")
            for line in lines:
                try:
                    source, target = (parse_json(line)["translation"][language] for language in languages)
                except (ValueError, LookupError, TypeError) as error:
                    raise UserError(f"{path}: has a line that is no pair ({one_line(error)}); {REPEAT}") from error
                yield source, target


def open_distilled(recipe: DataRecipe) -> Distillation:
    """Return the distillation that a recipe names, complete and of its languages."""
    distillation = Distillation.load(Path(recipe.distilled or ""))
    name, data = f"data.distilled: {recipe.distilled}", distillation.record["data"]
    if (data["source"], data["target"]) != (recipe.source, recipe.target):
        raise UserError(
            f"{name} has other sides; got {data['source']}-{data['target']}, expected "
            f"{recipe.source}-{recipe.target}. Name another folder, or set data.source and data.target."
        )
    distillation.check_complete()
    if not distillation.totals["kept"]:
        raise UserError(
            f"{name} has no pairs, since all were dropped; distill by another teacher or with other limits."
        )
    return distillation


def check_sources(distillation: Distillation, sources: Iterable[str], is_stream: bool) -> None:
    """Check that a recipe's training sources, of a stream the first ones, are those that the teacher translated."""
    data = distillation.record["data"]
    before = data["first"] if is_stream else {name: data[name] for name in ("sources", "sha256")}
    present = digest_sources(islice(sources, FIRST_SOURCES) if is_stream else sources)
    if {name: present[name] for name in before} != before:
        raise UserError(
            f"data.distilled: {distillation.folder} was written for other sources than data.train has; got "
            f"{before['sources']:,d} of another text, expected {present['sources']:,d}. Name the data that was "
            "distilled, or distill this one."
        )
