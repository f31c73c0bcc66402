"""Labeled bracket precision, recall and F1 as in EVALB (Sekine and Collins) with COLLINS.prm."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields

from ..support.errors import UserError
from .trees import EMPTY_TAG, ROOT, Leaf, Tree, evaluation_label

PUNCTUATION = frozenset({",", ":", "``", "''", "."})
DELETED = PUNCTUATION | {ROOT, EMPTY_TAG}
"""Tags and labels that do not count."""
EQUAL = {"PRT": "ADVP"}
"""Labels that count as a different label."""


@dataclass(frozen=True)
class BracketScores:
    """Bracket counts of a set of sentences, with the scores in percent.

    Attributes:
        matched: number of brackets in both trees.
        gold: number of brackets in gold trees.
        predicted: number of brackets in predicted trees.
        exact: number of sentences in which all brackets match.
        correct_tags: number of words with the correct tag, without punctuation.
        words: number of words without punctuation.
        sentences: number of sentences that count.
        skipped: number of sentences with only punctuation.
        errors: number of sentences that EVALB skips because the trees differ in their words without punctuation.
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
        """Percentage of predicted brackets that are correct."""
        return percent(self.matched, self.predicted)

    @property
    def recall(self) -> float:
        """Percentage of gold brackets that were predicted."""
        return percent(self.matched, self.gold)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall, in percent."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0

    @property
    def exact_match(self) -> float:
        """Percentage of sentences in which all brackets match."""
        return percent(self.exact, self.sentences)

    @property
    def tagging_accuracy(self) -> float:
        """Percentage of words with the correct tag."""
        return percent(self.correct_tags, self.words)


def percent(share: int, total: int) -> float:
    return 100 * share / total if total else 0.0


def deleted_words(tree: Tree) -> set[int]:
    """Return the indices of words that do not count."""
    return {index for index, leaf in enumerate(tree.leaves) if leaf.tag in DELETED}


def brackets(tree: Tree, deleted: set[int]) -> Counter[tuple[str, int, int]]:
    """Return the brackets that count, as (label, start, end) over the words that are not deleted."""
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
    words = [leaf for index, leaf in enumerate(gold.leaves) if index not in deleted]
    others = [leaf for index, leaf in enumerate(predicted.leaves) if index not in deleted_others]
    if not others:
        return BracketScores(skipped=1)
    if [leaf.word for leaf in words] != [leaf.word for leaf in others]:
        return BracketScores(errors=1)
    right, predicted_brackets = brackets(gold, deleted), brackets(predicted, deleted_others)
    tags, other_tags = ([EQUAL.get(leaf.tag, leaf.tag) for leaf in leaves] for leaves in (words, others))
    return BracketScores(
        matched=(right & predicted_brackets).total(),
        gold=right.total(),
        predicted=predicted_brackets.total(),
        exact=right == predicted_brackets,
        correct_tags=sum(tag == other for tag, other in zip(tags, other_tags, strict=True)),
        words=len(words),
        sentences=1,
    )


def score_trees(gold: Iterable[Tree], predicted: Iterable[Tree], own_punctuation: bool = False) -> BracketScores:
    """Score predicted trees against the gold trees of the same sentences, as EVALB does with COLLINS.prm.

    A bracket is a label with its first and last word. TOP and brackets without words do not count, punctuation is
    deleted, and ADVP equals PRT.

    Args:
        gold, predicted: trees of the same sentences in the same order.
        own_punctuation: whether each tree's own tags determine its punctuation, as in EVALB, which skips a sentence if
            the trees disagree. Otherwise the gold tags determine it for both trees, and every sentence counts.

    Raises:
        ValueError: the numbers of trees differ, or two trees differ in their words.
    """
    total = BracketScores()
    for number, (right, other) in enumerate(zip(gold, predicted, strict=True), start=1):
        if right.words != other.words and not own_punctuation:
            raise UserError(f"predicted, tree {number}: its words are not those of the gold tree. Pair the trees.")
        total += score_sentence(right, other, own_punctuation)
    return total
