"""Conversion of trees to and from linear trees, sequences of tokens (Vinyals et al. 2015).

`(TOP (S (NP (PRP I)) (VP (VBP know))))` becomes `(S(NP()PRP)NP(VP()VBP)VP)S`, with opening labels `(NP`, places of
words with their tags `()PRP`, and closing labels `)NP`. The root is omitted. Unlike in Vinyals et al., who write `XX`
for every tag, tags are kept, to measure tagging accuracy and recognize punctuation.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from .trees import ROOT, SPACES, Leaf, Tree

LINEAR_TOKEN = re.compile(r"(?:\(\)|\(|\))[^() \t\r\n\f\v]+")
"""A place, an opening label or a closing label."""
PLACE = "()"
UNKNOWN_TAG = "XX"
"""Tag of a word without a place in the output."""


class ParsedSentence(NamedTuple):
    """Tree of a sentence, and whether a malformed output was repaired."""

    tree: Tree
    is_repaired: bool


def linearize(tree: Tree) -> str:
    """Return the linear tree of a tree with the root `TOP`."""
    tokens = []
    for event, node in tree.events():
        if isinstance(node, Leaf):
            tokens.append(f"{PLACE}{node.tag}")
        elif node is not tree:
            tokens.append(f"({node.label}" if event == "open" else f"){node.label}")
    return "".join(tokens)


def linear_tokens(texts: Iterable[str]) -> set[str]:
    """Return the set of tokens of linear trees."""
    return {token for text in texts for token in LINEAR_TOKEN.findall(text)}


def is_parser(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the vocabulary contains places of words, as a parser's does."""
    return any(token.startswith(PLACE) and LINEAR_TOKEN.fullmatch(token) for token in tokenizer.get_vocab())


def place_count(text: str) -> int:
    """Return the number of places in a linear tree."""
    return sum(token.startswith(PLACE) for token in LINEAR_TOKEN.findall(text))


def close_constituents(stack: list[tuple[str, list[Tree | Leaf]]], depth: int) -> bool:
    """Close the open constituents from `depth` inwards, without those that have no word; return whether all had one."""
    have_words = True
    while len(stack) > depth:
        label, children = stack.pop()
        if children:
            stack[-1][1].append(Tree(label, tuple(children)))
        have_words &= bool(children)
    return have_words


def delinearize(text: str, words: Sequence[str]) -> ParsedSentence:
    """Return the tree of a linear tree over a sentence's words.

    It is the inverse of `linearize`. A malformed text is repaired, so that the tree always has exactly these words:

    1. Text that is not a token, and places beyond the last word, are dropped.
    2. A closing label closes the innermost open constituent with that label, and those inside. Without one, it is
       dropped.
    3. Words without a place are added, with the tag `XX`, to the innermost constituent open at the end, or else to the
       last one below the root.
    4. Constituents open at the end are closed. Constituents without a word are dropped.
    """
    # The tokens of the text, from left to right (rules 1 and 2).
    tokens = LINEAR_TOKEN.findall(text)
    is_well_formed = "".join(tokens) == SPACES.sub("", text)
    stack: list[tuple[str, list[Tree | Leaf]]] = [(ROOT, [])]  # labels of open constituents, with their children
    used = 0
    for token in tokens:
        label = token.strip("()")
        if token[0] == ")":
            depths = [depth for depth, (open_label, _) in enumerate(stack) if open_label == label]
            depth = depths[-1] if depths else 0  # 0 is the root, which no label closes
            is_well_formed &= 0 < depth == len(stack) - 1
            if depth:
                is_well_formed &= close_constituents(stack, depth)
        elif not token.startswith(PLACE):
            stack.append((label, []))
        elif used < len(words):
            stack[-1][1].append(Leaf(label, words[used]))
            used += 1
        else:
            is_well_formed = False
    is_well_formed &= used == len(words) and len(stack) == 1

    # Words without a place, and constituents that are still open (rules 3 and 4).
    leftover = [Leaf(UNKNOWN_TAG, word) for word in words[used:]]
    if leftover:
        children = stack[-1][1]
        if len(stack) == 1 and children and isinstance(last := children[-1], Tree):
            children[-1] = Tree(last.label, (*last.children, *leftover))
        else:
            children.extend(leftover)
    close_constituents(stack, 1)
    return ParsedSentence(Tree(ROOT, tuple(stack[0][1])), not is_well_formed)
