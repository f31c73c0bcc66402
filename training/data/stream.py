"""Training pairs as a stream: read anew in every epoch, never all in memory."""

from collections.abc import Iterable, Iterator
from typing import Any

from training.data.files import has_both_sides, read_file, warn_of_empty
from training.data.pairs import open_hub_split
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

    Files are read in their order. A data set of the Hub is shuffled as `datasets` shuffles streams, with a buffer of
    `recipe.buffer` pairs: `set_epoch` gives its shards another order in every epoch.

    Raises:
        UserError: during iteration, for a line that `load_pairs` would not accept either.
    """

    def __init__(self, recipe: DataRecipe, seed: int) -> None:
        self.recipe = recipe
        self.rows = None
        if recipe.kind == "hub":
            self.rows = open_hub_split(recipe, "train").shuffle(seed=seed, buffer_size=recipe.buffer)

    def set_epoch(self, epoch: int) -> None:
        if self.rows is not None:
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        if self.rows is not None:
            return read_rows(self.recipe, self.rows)
        return read_file(self.recipe, self.recipe.train)
