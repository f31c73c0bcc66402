"""Prefix beam search of CTC (Graves et al. 2006; Hannun et al. 2014): targets whose alignments are likely together.

A path is one alignment of a target, which has many. The search keeps k prefixes of targets, and for each the
probability of all alignments of the slots so far, in two parts: those that end in a blank, and those that end in the
last word. Only after a blank the same word again begins a new one. It runs over lists, since for so few numbers at a
time Python takes less time than torch.
"""

from collections import defaultdict
from collections.abc import Sequence
from heapq import nlargest
from math import log

BEST_TOKENS = 8
"""Most probable words of a slot that may extend a prefix: more of them, or more beams, find no better translations."""


def prefix_beam_search(
    slots: Sequence[tuple[Sequence[float], Sequence[int], float]], num_beams: int, bonus: float, limit: int
) -> list[tuple[int, ...]]:
    """Return up to k targets, best first by log-probability plus `bonus` for each word.

    Args:
        slots: of each slot the probabilities and ids of its best words, and the probability of the blank.
        num_beams: k.
        bonus: added for each word; above 0 it favors longer targets.
        limit: largest number of words.
    """
    prefixes = {(): (1.0, 0.0)}  # probability of the alignments that end in a blank, and in the last word
    for probabilities, words, blank in slots:
        in_blank: dict[tuple[int, ...], float] = {}
        in_word: dict[tuple[int, ...], float] = defaultdict(float)
        choices = list(zip(probabilities, words, strict=True))
        for prefix, (after_blank, after_word) in prefixes.items():
            total = after_blank + after_word
            last = prefix[-1] if prefix else None
            in_blank[prefix] = total * blank
            can_grow = len(prefix) < limit
            for probability, word in choices:
                if word == last:
                    in_word[prefix] += after_word * probability
                if can_grow:
                    in_word[*prefix, word] += (after_blank if word == last else total) * probability

        # The k best, relative to the largest, so that no product of many slots becomes 0.
        pairs = {prefix: (in_blank.get(prefix, 0.0), in_word.get(prefix, 0.0)) for prefix in in_blank | in_word}
        totals = {prefix: sum(pair) for prefix, pair in pairs.items()}
        scores = {prefix: log(total) + bonus * len(prefix) for prefix, total in totals.items() if total > 0}
        best = nlargest(num_beams, scores, key=scores.__getitem__)
        scale = 1 / max((totals[prefix] for prefix in best), default=1.0)
        prefixes = {}
        for prefix in best:
            after_blank, after_word = pairs[prefix]
            prefixes[prefix] = (after_blank * scale, after_word * scale)
    return list(prefixes)
