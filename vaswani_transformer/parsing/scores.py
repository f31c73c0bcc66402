"""Labeled precision, recall and F1 of brackets by the conventions of EVALB (Sekine and Collins) with COLLINS.prm."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields

from ..support.errors import UserError
from .trees import EMPTY_TAG, ROOT, Leaf, Tree, evaluation_label

PUNCTUATION = frozenset({",", ":", "``", "''", "."})
DELETED = PUNCTUATION | {ROOT, EMPTY_TAG}
"""Tags of words, and labels of constituents, that do not count."""
EQUAL = {"PRT": "ADVP"}
"""Labels that count as another one."""


@dataclass(frozen=True)
class BracketScores:
    """The counts of a set of sentences, and the scores in percent that follow from them.

    Attributes:
        matched: brackets that are in both trees.
        gold: brackets of the gold trees.
        predicted: brackets of the predicted trees.
        exact: sentences in which all brackets match.
        correct_tags: words with the right tag, without punctuation.
        words: words without punctuation.
        sentences: sentences that count.
        skipped: sentences of nothing but punctuation.
        errors: sentences that EVALB does not count, because without punctuation the two trees have different words.
    """

    matched: int = 0
    gold: int = 0
    predicted: int = 0
    exact: int = 0
    correct_tags: int = 0
    words: int = 0
    sentences: int = 0
    skipped: int = 0
    errors: int = 0

    def __add__(self, other: "BracketScores") -> "BracketScores":
        return BracketScores(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def precision(self) -> float:
        """The share of predicted brackets that are right."""
        return percent(self.matched, self.predicted)

    @property
    def recall(self) -> float:
        """The share of gold brackets that were predicted."""
        return percent(self.matched, self.gold)

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0

    @property
    def exact_match(self) -> float:
        """The share of sentences in which all brackets match."""
        return percent(self.exact, self.sentences)

    @property
    def tagging_accuracy(self) -> float:
        """The share of words with the right tag."""
        return percent(self.correct_tags, self.words)


def percent(share: int, total: int) -> float:
    return 100 * share / total if total else 0.0


def deleted_words(tree: Tree) -> set[int]:
    """Return the indices of words that do not count."""
    return {index for index, leaf in enumerate(tree.leaves) if leaf.tag in DELETED}


def brackets(tree: Tree, deleted: set[int]) -> Counter[tuple[str, int, int]]:
    """Return the brackets that count, each as label, first word and word after the last, without deleted words."""
    counts: Counter[tuple[str, int, int]] = Counter()
    starts, index, counted = [], 0, 0
    for event, node in tree.events():
        if isinstance(node, Leaf):
            counted += index not in deleted
            index += 1
        elif event == "open":
            starts.append(counted)
        elif (start := starts.pop()) < counted and (label := evaluation_label(node.label)) not in DELETED:
            counts[EQUAL.get(label, label), start, counted] += 1
    return counts


def score_sentence(gold: Tree, predicted: Tree, own_punctuation: bool) -> BracketScores:
    """Return the counts of one sentence; see `score_trees`."""
    deleted = deleted_words(gold)
    deleted_others = deleted_words(predicted) if own_punctuation else deleted
    kept = [leaf for index, leaf in enumerate(gold.leaves) if index not in deleted]
    kept_others = [leaf for index, leaf in enumerate(predicted.leaves) if index not in deleted_others]
    if not kept_others:
        return BracketScores(skipped=1)
    if [leaf.word for leaf in kept] != [leaf.word for leaf in kept_others]:
        return BracketScores(errors=1)
    right, predicted_brackets = brackets(gold, deleted), brackets(predicted, deleted_others)
    pairs = zip(kept, kept_others, strict=True)
    return BracketScores(
        matched=(right & predicted_brackets).total(),
        gold=right.total(),
        predicted=predicted_brackets.total(),
        exact=right == predicted_brackets,
        correct_tags=sum(EQUAL.get(one.tag, one.tag) == EQUAL.get(other.tag, other.tag) for one, other in pairs),
        words=len(kept),
        sentences=1,
    )


def score_trees(gold: Iterable[Tree], predicted: Iterable[Tree], own_punctuation: bool = False) -> BracketScores:
    """Return the scores of predicted trees against gold trees of the same sentences.

    As in EVALB with COLLINS.prm: a bracket is a label with its first and last word, TOP does not count, words with a
    tag of punctuation are deleted, ADVP and PRT are equal, and brackets without words do not count.

    Args:
        gold, predicted: the trees, sentence by sentence.
        own_punctuation: whether each tree's own tags say which of its words are punctuation, as in EVALB. A sentence
            in which they disagree is then an error, which EVALB does not count. Otherwise the gold tags say so for both
            trees, and every sentence counts. Without such disagreements the two are equal.

    Raises:
        UserError: there are not as many trees of both, or two trees differ in their words.
    """
    total = BracketScores()
    pairs = list(gold), list(predicted)
    if len(pairs[0]) != len(pairs[1]):
        raise UserError(f"predicted: got {len(pairs[1])} trees, expected {len(pairs[0])} as in gold. Pair them.")
    for number, (right, predicted_brackets) in enumerate(zip(*pairs, strict=True), start=1):
        if right.words != predicted_brackets.words and not own_punctuation:
            raise UserError(f"predicted, tree {number}: its words are not those of the gold tree. Pair the trees.")
        total += score_sentence(right, predicted_brackets, own_punctuation)
    return total
