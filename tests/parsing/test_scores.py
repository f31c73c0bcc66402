"""Labeled brackets: EVALB's digits, and properties of any trees."""

import pytest
from hypothesis import given

from tests.commands import user_error
from tests.trees import GOLD, PREDICTED, TREES, read
from vaswani_transformer.parsing import Leaf, Tree, score_trees
from vaswani_transformer.parsing.scores import BracketScores

SCORES = ("recall", "precision", "f1", "exact_match", "tagging_accuracy")


def printed(scores: BracketScores) -> list[str]:
    return [f"{getattr(scores, name):.2f}" for name in SCORES]


def test_sentences_are_scored_as_evalb_prints_them() -> None:
    """Of `evalb -p COLLINS.prm gold predicted`, EVALB of 2013, for `GOLD` and `PREDICTED`.

    The columns "Matched Bracket", "Bracket gold", "test", "Words" and "Correct Tags", and the table's last lines.
    """
    table = [(3, 3, 3, 3, 3), (5, 6, 6, 5, 4), (6, 7, 7, 5, 5), (5, 7, 7, 6, 6), (6, 6, 8, 3, 3)]
    for gold, predicted, row in zip(read(GOLD), read(PREDICTED), table, strict=False):
        scores = score_trees([gold], [predicted], own_punctuation=True)
        assert (scores.matched, scores.gold, scores.predicted, scores.words, scores.correct_tags) == row
    scores = score_trees(read(GOLD), read(PREDICTED), own_punctuation=True)
    assert printed(scores) == ["86.21", "80.65", "83.33", "20.00", "95.45"]
    assert (scores.sentences, scores.skipped, scores.errors) == (5, 1, 1)


def test_sentence_that_evalb_skips_counts_with_the_punctuation_of_gold_trees() -> None:
    scores = score_trees(read(GOLD), read(PREDICTED))
    assert (scores.sentences, scores.skipped, scores.errors) == (6, 1, 0)
    assert (scores.matched, scores.gold, scores.predicted) == (25 + 4, 29 + 4, 31 + 4)


def test_predicted_tree_with_only_punctuation_is_skipped_and_such_a_gold_tree_is_an_error() -> None:
    """As EVALB, which tests the number of predicted words before it compares both numbers."""
    words, marks = read("(TOP (NP (NN dog)))\n(TOP (NP (. dog)))")
    assert score_trees([words], [marks], own_punctuation=True) == BracketScores(skipped=1)
    assert score_trees([marks], [words], own_punctuation=True) == BracketScores(errors=1)


@given(TREES, TREES)
def test_brackets_match_at_most_once_and_as_often_the_other_way(one: Tree, other: Tree) -> None:
    other = Tree("TOP", tuple(Leaf("NN", word) for word in one.words)) if other.words != one.words else other
    scores, swapped = (score_trees([gold], [predicted], True) for gold, predicted in ((one, other), (other, one)))
    assert scores.matched <= min(scores.gold, scores.predicted)
    if not scores.errors + scores.skipped:
        assert (scores.precision, scores.recall) == (swapped.recall, swapped.precision)


def test_trees_of_other_words_or_another_number_are_an_error() -> None:
    one, other = read("(TOP (NP (NN dog)))\n(TOP (NP (NN cat)))")
    with user_error("tree 1: its words"):
        score_trees([one], [other])
    with pytest.raises(ValueError, match="shorter"):
        score_trees([one, other], [one])
