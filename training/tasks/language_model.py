"""A trigram language model of the training targets, by interpolated Kneser-Ney smoothing (Kneser and Ney 1995).

It has no seed and no weights: the same texts give the same model everywhere, within seconds.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"

Gram = tuple[str, ...]


class DiscountedCounts:
    """Counts of the n-grams of one order, and what interpolation needs of each context.

    Attributes:
        discount: D = n1 / (n1 + 2 n2), where n1 and n2 n-grams have the counts 1 and 2 (Ney et al. 1994); 0.5 where
            either is 0.
    """

    def __init__(self, counts: dict[Gram, int]) -> None:
        self.counts = counts
        self.totals: dict[Gram, int] = defaultdict(int)
        self.followers: dict[Gram, int] = defaultdict(int)
        for gram, count in counts.items():
            self.totals[gram[:-1]] += count
            self.followers[gram[:-1]] += 1
        once, twice = (sum(count == n for count in counts.values()) for n in (1, 2))
        self.discount = once / (once + 2 * twice) if once and twice else 0.5

    def interpolate(self, gram: Gram, lower: float) -> float:
        """Return P(last word | words before it), where `lower` is its probability after one word less."""
        context = gram[:-1]
        if context not in self.totals:
            return lower
        kept = max(self.counts.get(gram, 0) - self.discount, 0.0)
        return (kept + self.discount * self.followers[context] * lower) / self.totals[context]


class TrigramModel:
    """P(word | the two words before it), an interpolation of three orders.

    Trigrams count how often they occur. Bigrams and single words count the different words before them. The last order
    falls back on 1 / |V|, where V holds the words of the texts, `</s>` and `<unk>`. A word that the texts lack is
    `<unk>`, which gets a share of the fallback only. Words are split at white space. Each text has two `<s>` before it
    and one `</s>` after it.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        trigrams: Counter[Gram] = Counter()
        for text in texts:
            words = [BEGIN, BEGIN, *text.split(), END]
            trigrams.update(zip(words, words[1:], words[2:], strict=False))
        bigrams = Counter(gram[1:] for gram in trigrams)
        unigrams = Counter(gram[1:] for gram in bigrams)
        self.orders = [DiscountedCounts(dict(counts)) for counts in (unigrams, bigrams, trigrams)]
        self.words = {word for (word,) in unigrams}
        self.fallback = 1 / len(self.words | {UNKNOWN})  # </s> is among the words

    def probability(self, first: str, second: str, word: str) -> float:
        """Return P(word | first second); unknown words are given as `<unk>`."""
        gram, probability = (first, second, word), self.fallback
        for order, counts in enumerate(self.orders, start=1):
            probability = counts.interpolate(gram[-order:], probability)
        return probability

    def mean_nll(self, texts: Iterable[str]) -> float:
        """Return the mean negative log-likelihood of a word in nats, each text's `</s>` counted."""
        total, count = 0.0, 0
        for text in texts:
            known = (word if word in self.words else UNKNOWN for word in text.split())
            words = [BEGIN, BEGIN, *known, END]
            for gram in zip(words, words[1:], words[2:], strict=False):
                total -= math.log(self.probability(*gram))
                count += 1
        return total / max(count, 1)


def lm_scores(training_targets: list[str], predictions: list[str], references: list[str]) -> dict[str, Any]:
    """Return the score of the predictions and of the references under a model of the training targets.

    Returns:
        `score` and `reference` in nats a word, the lower the likelier, and their `definition`.
    """
    model = TrigramModel(training_targets)
    return {
        "score": model.mean_nll(predictions),
        "reference": model.mean_nll(references),
        "definition": "mean nll of a word in nats, </s> counted, under an interpolated Kneser-Ney trigram of "
        f"{len(training_targets):,} training targets",
    }
