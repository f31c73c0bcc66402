"""Training pairs as a stream: read again in every epoch, never all in memory."""

from collections.abc import Iterator

from training.data.distilled import open_distilled
from training.data.files import read_file
from training.data.pairs import open_hub_split, read_rows
from training.recipe import DataRecipe


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
