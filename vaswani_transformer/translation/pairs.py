"""Sources, each with its target or with the beginning of one."""

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple, cast

from ..support.errors import UserError

ENDED = object()


class Pair(NamedTuple):
    """A source and its target, or the beginning of it."""

    source: str
    target: str

    def encode(self) -> bytes:
        """Return the bytes by which a resumable file knows the pair."""
        return b"\0".join(text.encode() for text in self)


def pairs_of(sources: Iterable[str], targets: Iterable[str], name: str, target_name: str) -> Iterator[Pair]:
    """Yield pairs of `name` and `target_name`; raise UserError if one has more texts than the other."""
    for count, (source, target) in enumerate(zip_longest(sources, targets, fillvalue=ENDED)):
        if source is ENDED or target is ENDED:
            got = f"got {count}" if target is ENDED else f"got more than {count}"
            problem = f"not as many texts as in {name}; {got}"
            raise UserError(f"{target_name}: {problem}, expected one for each. Add or remove texts.")
        yield Pair(cast(str, source), cast(str, target))
