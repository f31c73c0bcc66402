"""Bracketed trees: read and written without loss, errors by file and line, cleaned for evaluation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import user_error
from tests.trees import TREES
from vaswani_transformer.parsing import Leaf, Tree, evaluation_tree, read_trees
from vaswani_transformer.parsing.trees import split_plain, split_tokenized


def read(text: str) -> list[tuple[int, Tree]]:
    return list(read_trees(enumerate(text.split("\n"), start=1), "some.mrg"))


@given(TREES)
def test_written_tree_is_read_back(tree: Tree) -> None:
    assert read(str(tree)) == [(1, tree)]


@given(TREES)
def test_layout_of_a_tree_changes_nothing(tree: Tree) -> None:
    lines = str(tree).replace(" ", "\n ").replace(")", " )\n")
    assert read(f"\n{lines}\n{tree}") == [(2, tree), (lines.count("\n") + 3, tree)]


@pytest.mark.parametrize("text", ["( (S (NN dog)))", "(ROOT (S (NN dog)))", "(S1 (S (NN dog)))", "(S (NN dog))"])
def test_every_root_becomes_top(text: str) -> None:
    assert read(text) == [(1, Tree("TOP", (Tree("S", (Leaf("NN", "dog"),)),)))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(TOP (S (NN a)))\n(TOP (S (NN b))\n(TOP (S (NN c)))", "line 2: the tree that starts here is not closed"),
        ("(TOP (S (NN a))))", "line 1: a closing bracket without an opening one"),
        ("(TOP (S (NN a)))\ndog", "line 2: 'dog' is not a tree"),
        ("(TOP (S (NP)))", "line 1: the bracket 'NP' contains 0 words and 0 br"),
        ("(TOP\n (S\n  (NN a b)))", "line 3: the bracket 'NN' contains 2 words and 0 br"),
    ],
)
def test_broken_tree_is_named_by_file_and_line(text: str, message: str) -> None:
    with user_error(f"^some.mrg, {message}"):
        read(text)


def test_functional_tags_indices_and_empty_elements_disappear() -> None:
    text = (
        "( (S (NP-SBJ-1 (NNP Ms.) (NNP Haag)) (VP=2 (VBZ tries) (S (NP-SBJ (-NONE- *-1)) (VP (TO to) (VP (VB play)))))"
        " (-LRB- -LRB-) (SBAR (-NONE- 0) (S (-NONE- *T*-2))) (-RRB- -RRB-)))"
    )
    ((_, tree),) = read(text)
    assert str(evaluation_tree(tree)) == (
        "(TOP (S (NP (NNP Ms.) (NNP Haag)) (VP (VBZ tries) (S (VP (TO to) (VP (VB play)))))"
        " (-LRB- -LRB-) (-RRB- -RRB-)))"
    )


def test_deep_tree_needs_no_recursion() -> None:
    text = "(TOP " + "(S " * 5000 + "(NN a)" + ")" * 5001
    ((_, tree),) = read(text)
    assert str(tree) == text
    assert tree.words == ["a"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The dog slept.", "The dog slept ."),
        ('He said, "I can\'t (really) go to the U.S."', 'He said , " I ca n\'t -LRB- really -RRB- go to the U.S. "'),
        ("It costs $3,000.50 at 10:30; the dogs' tails...", "It costs $ 3,000.50 at 10:30 ; the dogs ' tails ..."),
        ("We cannot know Mr. Smith's well-known things!", "We can not know Mr. Smith 's well-known things !"),
        ("They'll don\u2019t \u201cgo\u201d?", "They 'll do n\u2019t \u201c go \u201d ?"),
        ("The U.S.'s and the U.K.\u2019s", "The U.S. 's and the U.K. \u2019s"),
        ("I\u00a0know\u2003him.", "I know him ."),
        (" \t", ""),
    ],
)
def test_plain_text_is_split_close_to_the_treebanks_rules(text: str, words: str) -> None:
    assert split_plain(text) == words.split()


@given(st.text())
def test_words_hold_no_bracket_and_splitting_loses_no_character(text: str) -> None:
    words = split_plain(text)
    assert not any(sign in word for word in words for sign in "() \t\n")
    shown = "".join(words).replace("-LRB-", "(").replace("-RRB-", ")")
    assert shown == "".join(text.split()).replace("-LRB-", "(").replace("-RRB-", ")")


@given(st.lists(st.text(st.characters(exclude_characters="() \t\r\n\f\v"), min_size=1)))
def test_tokenized_words_are_unchanged(words: list[str]) -> None:
    assert split_tokenized(" ".join(words)) == words
