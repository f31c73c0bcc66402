"""Linear trees (Vinyals et al. 2015, "Grammar as a Foreign Language"): a tree as a sequence of tokens, and back.

`(TOP (S (NP (PRP I)) (VP (VBP know))))` becomes `(S(NP()PRP)NP(VP()VBP)VP)S`: opening labels `(NP`, places of words
with their tags `()PRP`, closing labels `)NP`. The root is left out. Vinyals et al. write `XX` for every tag; tags stay
here, so that tagging accuracy can be measured and evaluation knows punctuation. Every token has a bracket, which no
word of a treebank has. So a source holds no token of a target.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .trees import ROOT, Leaf, Tree
from .words import SPACES

LINEAR_TOKEN = re.compile(r"(?:\(\)|\(|\))LABEL".replace("LABEL", r"[^() \t\r\n\f\v]+"))
PLACE = "()"
UNKNOWN_TAG = "XX"
"""The tag of a word that the output has no place for."""


class ParsedSentence(NamedTuple):
    """The tree of a sentence, and whether the output was malformed and had to be repaired."""

    tree: Tree
    is_repaired: bool


def linearize(tree: Tree) -> str:
    """Return a tree with the root `TOP` as a linear tree."""
    texts = []
    for event, node in tree.events():
        if isinstance(node, Leaf):
            texts.append(f"{PLACE}{node.tag}")
        elif node is not tree:
            texts.append(f"({node.label}" if event == "open" else f"){node.label}")
    return "".join(texts)


def linear_tokens(texts: Iterable[str]) -> set[str]:
    """Return the different tokens of linear trees."""
    return {token for text in texts for token in LINEAR_TOKEN.findall(text)}


def place_count(text: str) -> int:
    """Return the number of words that a linear tree has places for."""
    return sum(token.startswith(PLACE) for token in LINEAR_TOKEN.findall(text))


def close_innermost(stack: list[tuple[str, list[Tree | Leaf]]]) -> bool:
    """Close the innermost open constituent, and return whether it has words; one without words is dropped."""
    label, children = stack.pop()
    if children:
        stack[-1][1].append(Tree(label, tuple(children)))
    return bool(children)


def close_label(stack: list[tuple[str, list[Tree | Leaf]]], label: str) -> bool:
    """Close the innermost open constituent of that label and those within it; return whether it was well-formed."""
    depths = [depth for depth, (name, _) in enumerate(stack) if depth and name == label]
    if not depths:
        return False
    is_well_formed = depths[-1] == len(stack) - 1
    while len(stack) > depths[-1]:
        is_well_formed &= close_innermost(stack)
    return is_well_formed


def delinearize(text: str, words: Sequence[str]) -> ParsedSentence:
    """Return the tree of a linear tree over a sentence's words; every text gives a tree with exactly these words.

    The inverse of `linearize` on a well-formed text. A malformed one is repaired:

    1. Text that is no token, and places beyond the last word, are dropped.
    2. A closing label closes the innermost open constituent of that label, and those within it. Without one, it
       is dropped.
    3. Words without a place join the innermost constituent that is open at the end, or else the last one below the
       root, with the tag `XX`.
    4. Constituents that are open at the end are closed. Those without a word are dropped.
    """
    tokens = LINEAR_TOKEN.findall(text)
    is_well_formed = "".join(tokens) == SPACES.sub("", text)
    stack: list[tuple[str, list[Tree | Leaf]]] = [(ROOT, [])]
    used = 0
    for token in tokens:
        label = token.strip("()")
        if token[0] == ")":
            is_well_formed &= close_label(stack, label)
        elif not token.startswith(PLACE):
            stack.append((label, []))
        elif used < len(words):
            stack[-1][1].append(Leaf(label, words[used]))
            used += 1
        else:
            is_well_formed = False
    is_well_formed &= used == len(words) and len(stack) == 1
    if leftover := [Leaf(UNKNOWN_TAG, word) for word in words[used:]]:
        children = stack[-1][1]
        if len(stack) == 1 and children and isinstance(last := children[-1], Tree):
            children[-1] = Tree(last.label, (*last.children, *leftover))
        else:
            children.extend(leftover)
    while len(stack) > 1:
        close_innermost(stack)
    return ParsedSentence(Tree(ROOT, tuple(stack[0][1])), not is_well_formed)
