"""Statistics of translations as texts: how varied, how repetitive and how long they are. Words are split at spaces."""

from collections.abc import Iterable
from itertools import pairwise

STATISTICS = {
    "distinct_1": "distinct words / all words of all outputs",
    "distinct_2": "distinct bigrams / all bigrams of all outputs",
    "repeats": "words equal to their left neighbor / all words of the outputs",
    "reference_repeats": "the same of the references",
    "length_ratio": "words of the outputs / words of the references",
}
"""The definition of each statistic. Distinct-n is over the corpus; Li et al. 2016 divide by the number of words."""


def share(count: int, total: int) -> float:
    """Return count / total, or 0 if the total is 0."""
    return count / total if total else 0.0


def distinct(texts: Iterable[str], order: int) -> float:
    """Return the share of different n-grams of `order` words among all of them; none crosses the end of a text."""
    seen: set[tuple[str, ...]] = set()
    count = 0
    for text in texts:
        words = text.split()
        grams = list(zip(*(words[start:] for start in range(order)), strict=False))
        seen.update(grams)
        count += len(grams)
    return share(len(seen), count)


def repeats(texts: Iterable[str]) -> float:
    """Return the share of words that equal the word on their left."""
    rows = [text.split() for text in texts]
    return share(sum(left == right for words in rows for left, right in pairwise(words)), sum(map(len, rows)))


def text_statistics(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Return every statistic of `STATISTICS` by its name."""
    words, reference_words = (sum(len(text.split()) for text in texts) for texts in (predictions, references))
    return {
        "distinct_1": distinct(predictions, 1),
        "distinct_2": distinct(predictions, 2),
        "repeats": repeats(predictions),
        "reference_repeats": repeats(references),
        "length_ratio": share(words, reference_words),
    }
