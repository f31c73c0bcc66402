"""Training pairs as a stream: read again in every epoch, never all in memory, and recognized when a run resumes."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from training.data.distilled import Distillation, open_distilled
from training.data.files import read_file
from training.data.pairs import open_hub_split, read_rows
from training.recipe.fields import DataRecipe
from vaswani_transformer.support.errors import UserError
from vaswani_transformer.support.files import TextDigest


def described(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a stream's pairs, from its state: of a complete epoch, or else of the pairs read in one.

    `complete` says which; pairs after the ones that were read are not known.
    """
    if state["complete"] is not None:
        return {"complete": True} | state["complete"]
    return {"complete": False} | state["read"]


class PairStream:
    """The training pairs as text, read again in every iteration and never all in memory.

    Files are read in their order, and so are distilled pairs. A data set of the Hub is shuffled as `datasets` shuffles
    streams, with a buffer of `recipe.buffer` pairs: `set_epoch` gives its shards another order in every epoch.

    It keeps the fingerprint of the pairs that it has read in this epoch, and of the previous complete epoch where
    epochs are alike. A stream with an earlier one's state compares them.
    """

    def __init__(self, recipe: DataRecipe, seed: int, distillation: Distillation | None = None) -> None:
        self.recipe = recipe
        self.rows = None
        self.distillation = distillation or (None if recipe.distilled is None else open_distilled(recipe))
        if recipe.kind == "hub" and self.distillation is None:
            self.rows = open_hub_split(recipe, "train").shuffle(seed=seed, buffer_size=recipe.buffer)
        self.digest = TextDigest()
        self.complete: dict[str, Any] | None = None
        self.before: dict[str, Any] | None = None
        self.skipped = 0

    def set_epoch(self, epoch: int) -> None:
        if self.rows is not None:
            self.rows.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the fingerprints of the pairs read so far: in this epoch, and of a complete earlier one."""
        return {"read": self.fingerprint(), "complete": self.complete}

    def load_state_dict(self, state: Mapping[str, Any], skipped: int) -> None:
        """Expect the pairs of an earlier stream, of which the reader skips the first ones."""
        self.before, self.complete, self.skipped = state["read"], state["complete"], skipped

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of pairs read in this epoch, and their SHA-256 as in `results.json`."""
        return {"pairs": self.digest.count // 2, "sha256": self.digest.hexdigest()}

    def __iter__(self) -> Iterator[tuple[str, str]]:
        self.digest = TextDigest()
        pairs = map(self.count, self.read())
        if (before := self.before) is not None:
            self.before = None
            yield from islice(pairs, min(self.skipped, before["pairs"]))
            left = before["pairs"] - self.fingerprint()["pairs"]
            ahead = list(islice(pairs, left))  # compared before a step learns from them
            self.check(before)
            yield from ahead
        yield from pairs
        if self.rows is None:  # else each epoch has another order
            self.check(self.complete or self.fingerprint())
            self.complete = self.fingerprint()

    def read(self) -> Iterator[tuple[str, str]]:
        """Return the pairs from the beginning."""
        if self.rows is not None:
            return read_rows(self.recipe, self.rows)
        if self.distillation is not None:
            return self.distillation.pairs()
        return read_file(self.recipe, self.recipe.train)

    def count(self, pair: tuple[str, str]) -> tuple[str, str]:
        """Return a pair that has been read, and add it to the fingerprint."""
        for text in pair:
            self.digest.add(text)
        return pair

    def check(self, before: Mapping[str, Any]) -> None:
        """Check that the pairs read in this epoch are the same as earlier."""
        if (present := self.fingerprint()) != before:
            raise UserError(
                f"data.train: the pairs of {self.recipe.distilled or self.recipe.path} have changed since the run read "
                f"them; got {present['pairs']:,d} pairs, expected the same {before['pairs']:,d}. Restore them, or give "
                "another --output_dir."
            )
