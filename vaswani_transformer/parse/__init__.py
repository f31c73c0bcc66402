"""Constituency parsing (section 6.3): trees, linear trees and their scores."""

from .linear import ParsedSentence, delinearize, linearize
from .scores import BracketScores, score_trees
from .trees import Leaf, Tree, evaluation_tree, read_trees

__all__ = [
    "BracketScores",
    "Leaf",
    "ParsedSentence",
    "Tree",
    "delinearize",
    "evaluation_tree",
    "linearize",
    "read_trees",
    "score_trees",
]
