"""Bracketed trees: read and written without loss, errors by file and line, cleaned for evaluation."""

import pytest
from hypothesis import given

from tests.commands import user_error
from tests.trees import TREES
from vaswani_transformer.parsing import Leaf, Tree, evaluation_tree, read_trees


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
