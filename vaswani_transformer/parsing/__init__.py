"""Constituency parsing (6.3): trees, linear trees, scores, the function `parse` and the command `vaswani-parse`."""

from .command import parse
from .constraint import TreeTokens, WellFormedTrees
from .linear import ParsedSentence, delinearize, linearize
from .scores import BracketScores, score_trees
from .trees import Leaf, Tree, draw_tree_text, evaluation_tree, read_trees

__all__ = [
    "BracketScores",
    "Leaf",
    "ParsedSentence",
    "Tree",
    "TreeTokens",
    "WellFormedTrees",
    "delinearize",
    "draw_tree_text",
    "evaluation_tree",
    "linearize",
    "parse",
    "read_trees",
    "score_trees",
]
