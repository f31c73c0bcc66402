"""Labeled bracket precision, recall and F1 as in EVALB (Sekine and Collins) with COLLINS.prm."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import eq

from ..support.command import UserError
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
        skipped: number of sentences whose predicted tree has only punctuation.
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
        return BracketScores(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

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
    starts: list[int] = []
    num_words = 0
    num_counted = 0
    for event, node in tree.events():
        if isinstance(node, Leaf):
            num_counted += num_words not in deleted
            num_words += 1
        elif event == "open":
            starts.append(num_counted)
        else:
            start = starts.pop()
            label = evaluation_label(node.label)
            if start < num_counted and label not in DELETED:
                counts[EQUAL.get(label, label), start, num_counted] += 1
    return counts


def counted_leaves(tree: Tree, deleted: set[int]) -> list[Leaf]:
    """Return the words that are not deleted, with the tags that count as equal."""
    leaves = [leaf for index, leaf in enumerate(tree.leaves) if index not in deleted]
    return [Leaf(EQUAL.get(leaf.tag, leaf.tag), leaf.word) for leaf in leaves]


def score_sentence(gold: Tree, predicted: Tree, own_punctuation: bool) -> BracketScores:
    """Return the counts of one sentence; see `score_trees`."""
    # What is left without punctuation.
    gold_deleted = deleted_words(gold)
    predicted_deleted = deleted_words(predicted) if own_punctuation else gold_deleted
    gold_leaves = counted_leaves(gold, gold_deleted)
    predicted_leaves = counted_leaves(predicted, predicted_deleted)
    if not predicted_leaves:  # EVALB skips such a sentence whatever the gold tree contains
        return BracketScores(skipped=1)
    if [leaf.word for leaf in gold_leaves] != [leaf.word for leaf in predicted_leaves]:
        return BracketScores(errors=1)

    gold_brackets = brackets(gold, gold_deleted)
    predicted_brackets = brackets(predicted, predicted_deleted)
    return BracketScores(
        matched=(gold_brackets & predicted_brackets).total(),
        gold=gold_brackets.total(),
        predicted=predicted_brackets.total(),
        exact=gold_brackets == predicted_brackets,
        correct_tags=sum(map(eq, gold_leaves, predicted_leaves)),  # their words are equal
        words=len(gold_leaves),
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
    for number, (gold_tree, tree) in enumerate(zip(gold, predicted, strict=True), start=1):
        if gold_tree.words != tree.words and not own_punctuation:
            problem = "its words differ from those of the gold tree"
            raise UserError(f"predicted, tree {number}: {problem}. Put both sets of trees in the same order.")
        total += score_sentence(gold_tree, tree, own_punctuation)
    return total
