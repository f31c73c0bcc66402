"""Linear trees are lossless both ways, and any text gives a tree with the sentence's words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import TREES
from vaswani_transformer.parsing import Tree, delinearize, linearize
from vaswani_transformer.parsing.linear import linear_tokens, place_count

TOKENS = ["(S", "(NP", "(VP", ")S", ")NP", ")VP", "()NN", "()VB", "()S", "noise", " "]
MALFORMED = st.lists(st.sampled_from(TOKENS), max_size=20).map("".join)


@given(TREES)
def test_linear_tree_is_lossless(tree: Tree) -> None:
    assert delinearize(linearize(tree), tree.words) == (tree, False)


@given(TREES)
def test_linear_tree_has_a_place_a_word_and_tokens_that_no_word_has(tree: Tree) -> None:
    text = linearize(tree)
    assert place_count(text) == len(tree.words)
    assert not any(token in " ".join(tree.words) for token in linear_tokens([text]))


@given(st.one_of(MALFORMED, st.text()), st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=6))
def test_any_text_gives_a_tree_of_exactly_the_words(text: str, words: list[str]) -> None:
    tree, is_repaired = delinearize(text, words)
    assert tree.words == words
    again = delinearize(linearize(tree), words)
    assert again == (tree, False)
    if not is_repaired:
        assert linearize(tree) == "".join(text.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(S()DT()NN", "(TOP (S (DT the) (NN dog)))"),  # open at the end: closed
        ("(S(NP()DT)S", "(TOP (S (NP (DT the)) (XX dog)))"),  # closes the S and the NP within it; dog joins the last
        ("(S()DT(NP()NN)VP)NP)S", "(TOP (S (DT the) (NP (NN dog))))"),  # no VP is open: dropped
        ("(S()DT()NN()NN)S", "(TOP (S (DT the) (NN dog)))"),  # a place too many
        ("(S(NP()DT", "(TOP (S (NP (DT the) (XX dog))))"),  # joins the innermost that is open
        ("(S(NP)NP()DT()NN)S", "(TOP (S (DT the) (NN dog)))"),  # no word within: dropped
        ("(S)VP()DT()NN)S", "(TOP (S (DT the) (NN dog)))"),  # an opening label before a closing one is not a place
        ("", "(TOP (XX the) (XX dog))"),
        ("(S ()DT dog ()NN )S", "(TOP (S (DT the) (NN dog)))"),  # text outside the tokens
    ],
)
def test_malformed_text_is_repaired_by_the_rules(text: str, expected: str) -> None:
    tree, is_repaired = delinearize(text, ["the", "dog"])
    assert (str(tree), is_repaired) == (expected, True)
