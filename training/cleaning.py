"""What is often wrong with sentence pairs: the rows of each kind, with an example, and which of them to drop."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray

from training.texts import SIDES

PATTERNS = {  # of a source or target, in the order of the report
    "markup": "</?[A-Za-z][^<>]*>",
    "entities": "&(#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]{2,8});",
    "placeholders": r"(?i)^(#?n/?a|null|nan|tbd|-+|\?+)$",
    "capitals": r"^(\P{Ll}*\p{Lu}){4}\P{Ll}*$",  # four or more, and no small letter
}
DESCRIPTIONS = {
    "markup": "markup such as <b>",
    "entities": "HTML entities such as &amp;",
    "placeholders": "placeholders such as n/a",
    "capitals": "capitals only",
    "copies": "target equal to the source",
    "duplicates": "repetitions of an earlier pair",
    "ratios": "length ratio more than 3 times the usual one, or less than a third",
}
RATIO = 3.0  # of the number of characters in target and source, relative to the median
SMOOTHING = 10  # characters added to both, so that short texts have no odd ratio
SHOWN = 60  # characters of an example
Rows = NDArray[np.intp]


def find_rows(pairs: Dataset) -> dict[str, Rows]:
    """Return the rows of each kind of `DESCRIPTIONS`, in ascending order."""
    masks: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in (*PATTERNS, "copies")}
    keys = [np.empty(0, dtype=np.uint64)]
    ratios = [np.empty(0)]
    for table in pairs.with_format("arrow").iter(100_000):
        texts = [table[side] for side in SIDES]
        for name, pattern in PATTERNS.items():
            options = pc.MatchSubstringOptions(pattern)
            matches = [pc.call_function("match_substring_regex", [side], options).to_numpy() for side in texts]
            masks[name].append(np.logical_or(*matches))
        masks["copies"].append(pc.call_function("equal", texts).to_numpy())
        source_keys, target_keys = map(text_keys, texts)
        keys.append(source_keys * np.uint64(3) + target_keys)  # modulo 2^64
        sources, targets = (pc.call_function("utf8_length", [side]).to_numpy() + SMOOTHING for side in texts)
        ratios.append(np.log(targets / sources))

    found = {name: np.flatnonzero(np.concatenate([[], *parts])) for name, parts in masks.items()}
    found["duplicates"] = repetitions(np.concatenate(keys))
    logs = np.concatenate(ratios)
    found["ratios"] = np.flatnonzero(abs(logs - np.median(logs)) > np.log(RATIO)) if len(logs) else np.empty(0, np.intp)
    return found


def text_keys(texts: pa.ChunkedArray) -> NDArray[np.uint64]:
    """Return a hash of each text."""
    hash_array: Any = pandas.util.hash_array
    return hash_array(texts.to_numpy(), categorize=False)


def repetitions(keys: NDArray[np.uint64]) -> Rows:
    """Return the rows whose key an earlier row has too."""
    _, first = np.unique(keys, return_index=True)
    is_first = np.zeros(len(keys), dtype=bool)
    is_first[first] = True
    return np.flatnonzero(~is_first)


def report(name: str, pairs: Dataset) -> Iterator[str]:
    """Yield lines with the number and lengths of pairs, and for each kind that occurs its number and an example."""
    if not len(pairs):
        return
    lengths = []
    for side in SIDES:
        parts = [
            pc.call_function("utf8_length", [table[side]]).to_numpy()
            for table in pairs.with_format("arrow").iter(100_000)
        ]
        characters = np.concatenate(parts)
        lengths.append(f"{side} {np.median(characters):,.0f} (median) to {characters.max():,} characters")
    yield f"{name}: {len(pairs):,} pairs, {', '.join(lengths)}"
    found = find_rows(pairs)
    for kind, description in DESCRIPTIONS.items():
        if len(found[kind]):
            pair = pairs[int(found[kind][0])]
            shown = " -> ".join(quoted(pair[side]) for side in SIDES)
            yield f"  {kind}: {len(found[kind]):,} pairs ({description}), first {shown}"


def quoted(text: str) -> str:
    """Return the beginning of a text in quotation marks, with its line breaks and control characters escaped."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def without(pairs: Dataset, kinds: Iterable[str]) -> tuple[Dataset, dict[str, int]]:
    """Return the pairs that are of none of these kinds, and the number of each kind."""
    found = find_rows(pairs)
    is_kept = np.ones(len(pairs), dtype=bool)
    for kind in kinds:
        is_kept[found[kind]] = False
    return pairs.select(np.flatnonzero(is_kept)), {kind: len(found[kind]) for kind in kinds}
