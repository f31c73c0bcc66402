"""Training pairs as a stream: read anew in every epoch, never all in memory."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from training.data.distilled import open_distilled
from training.data.files import has_both_sides, read_file, warn_of_empty
from training.data.pairs import iterate_column, load_real_pairs, open_hub_split
from training.recipe import DataRecipe


def read_rows(recipe: DataRecipe, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a stream in the schema of Hugging Face translation data sets."""
    where, empty = f"{recipe.path}, split {recipe.train}", 0
    for number, row in enumerate(rows, start=1):
        pair = row["translation"] or {}
        source, target = ((pair.get(code) or "").strip() for code in (recipe.source, recipe.target))
        if has_both_sides(recipe, f"{where}, pair {number}", source, target):
            yield source, target
        else:
            empty += 1
    warn_of_empty(where, empty)


class PairStream:
    """The training pairs as text, read again in every iteration and never all in memory.

    Files are read in their order, and so are distilled pairs. A data set of the Hub is shuffled as `datasets` shuffles
    streams, with a buffer of `recipe.buffer` pairs: `set_epoch` gives its shards another order in every epoch.

    Raises:
        UserError: during iteration, for a line that `load_pairs` would not accept either.
    """

    def __init__(self, recipe: DataRecipe, seed: int) -> None:
        self.recipe = recipe
        self.rows = None
        self.distillation = None if recipe.distilled is None else open_distilled(recipe)
        if recipe.kind == "hub" and self.distillation is None:
            self.rows = open_hub_split(recipe, "train").shuffle(seed=seed, buffer_size=recipe.buffer)

    def set_epoch(self, epoch: int) -> None:
        if self.rows is not None:
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        if self.rows is not None:
            return read_rows(self.recipe, self.rows)
        if self.distillation is not None:
            return self.distillation.pairs()
        return read_file(self.recipe, self.recipe.train)


def sources_in_order(recipe: DataRecipe) -> Iterator[str]:
    """Yield the real training sources of a recipe in their order; those of files and streams are never all in memory.

    Raises:
        UserError: as `load_pairs`, for a bad line when it is reached.
    """
    if recipe.kind not in ("grammar", "hub"):
        return (source for source, _ in read_file(recipe, recipe.train))
    others: dict[str, Any] = {"validation": None, "test": None}
    pairs = load_real_pairs(dataclasses.replace(recipe, **others))["train"]
    if recipe.streaming:
        return (source for source, _ in read_rows(recipe, open_hub_split(recipe, "train")))
    return iterate_column(pairs, "source")
