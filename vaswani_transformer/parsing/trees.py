"""Constituency trees: words, reading and writing of Penn Treebank brackets, text drawings, normalization."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..support.command import UserError

ROOT = "TOP"
"""Label of every root, which evaluation ignores."""
ROOTS = frozenset({"", "ROOT", "S1", ROOT})
"""Root labels of treebanks, replaced by `TOP`."""
EMPTY_TAG = "-NONE-"
"""Tag of traces and other empty elements."""
BRACKET_TOKEN = re.compile(r"[()]|[^() \t\r\n\f\v]+")
SPACES = re.compile(r"[ \t\r\n\f\v]+")
ALWAYS_WORDS = re.compile(r"\.{3,}|…|--+|[\u2013—;!?\"“”„«»()\[\]{}$%]")
NOT_IN_NUMBERS = re.compile(r"[,:](?!\d)|(?<!\d)[,:]")
LAST_PERIOD = re.compile(r"(?<![.\s])(?<!\.[a-z])\.(?=['\u2019\"”)\]\s]*$)", re.IGNORECASE)
CONTRACTIONS = re.compile(
    r"(?<=\w)n['\u2019]t\b|(?<=[\w.])['\u2019](?:s|re|ve|ll|d|m)\b|(?<=\w)['\u2019](?!\w)", re.IGNORECASE
)
CANNOT = re.compile(r"\b(can)(not)\b", re.IGNORECASE)


def escape_brackets(word: str) -> str:
    """Replace round brackets by `-LRB-` and `-RRB-`, as in treebanks."""
    return word.replace("(", "-LRB-").replace(")", "-RRB-")


def split_tokenized(text: str) -> list[str]:
    """Return the words of tokenized text, separated by spaces."""
    return [escape_brackets(word) for word in SPACES.split(text) if word]


def split_plain(text: str) -> list[str]:
    """Return the words of plain text, by rules close to those of the Penn Treebank.

    It is split at white space, and then:

    1. `, ; : ! ?`, quotation marks, brackets, `$`, `%`, ellipses and dashes are words, except for a comma, colon or
       period within a number.
    2. A period at the end of the line is a word, unless it ends an abbreviation such as `U.S.`.
    3. `n't`, `'s`, `'re`, `'ve`, `'ll`, `'d`, `'m` and a final apostrophe are words. `cannot` is two words.

    Hyphenated words are one word. Quotation marks are not changed.
    """
    text = re.sub(r"\s", " ", text)  # such as a no-break space
    for punctuation in (ALWAYS_WORDS, NOT_IN_NUMBERS, LAST_PERIOD):
        text = punctuation.sub(r" \g<0> ", text)
    text = CONTRACTIONS.sub(r" \g<0>", text)
    text = CANNOT.sub(r"\1 \2", text)
    return split_tokenized(text)


@dataclass(frozen=True)
class Leaf:
    """Word with its part-of-speech tag; round brackets are written `-LRB-` and `-RRB-`, as in treebanks."""

    tag: str
    word: str

    def __str__(self) -> str:
        return f"({self.tag} {self.word})"


@dataclass(frozen=True)
class Tree:
    """Constituent with a label and children; the root of a sentence is `TOP`.

    `str(tree)` is the tree in brackets on one line. Trees may have any depth, since no method recurses.
    """

    label: str
    children: tuple["Tree | Leaf", ...]

    def events(self) -> Iterator[tuple[Literal["open", "word", "close"], "Tree | Leaf"]]:
        """Yield the start and end of each constituent, and each word, from left to right."""
        stack: list[tuple[Literal["open", "word", "close"], Tree | Leaf]] = [("open", self)]
        while stack:
            event, node = stack.pop()
            yield event, node
            if event == "open" and isinstance(node, Tree):
                stack.append(("close", node))
                for child in node.children[::-1]:
                    stack.append(("word" if isinstance(child, Leaf) else "open", child))

    @property
    def leaves(self) -> list[Leaf]:
        """Words with tags, in order."""
        return [node for _, node in self.events() if isinstance(node, Leaf)]

    @property
    def words(self) -> list[str]:
        """Words in order."""
        return [leaf.word for leaf in self.leaves]

    def __str__(self) -> str:
        texts = []
        for event, node in self.events():
            if isinstance(node, Leaf):
                texts.append(str(node))
            else:
                texts.append(f"({node.label}" if event == "open" else ")")
        return " ".join(texts).replace(" )", ")")


def draw_tree_text(tree: Tree) -> str:
    """Draw a tree with box characters, one line per constituent or word."""
    lines = [tree.label]
    stack = [(child, "", index == 0) for index, child in enumerate(tree.children[::-1])]
    while stack:
        node, indent, is_last = stack.pop()
        branch = "└── " if is_last else "├── "
        if isinstance(node, Leaf):
            lines.append(f"{indent}{branch}{node.tag} {node.word}")
        else:
            lines.append(f"{indent}{branch}{node.label}")
            inner = indent + ("    " if is_last else "│   ")
            stack.extend((child, inner, index == 0) for index, child in enumerate(node.children[::-1]))
    return "\n".join(lines)


@dataclass
class OpenBracket:
    """Open bracket, with its line and its contents so far."""

    line: int
    label: str = ""
    words: list[str] = field(default_factory=list)
    children: list[Tree | Leaf] = field(default_factory=list)

    def close(self, where: str) -> Tree | Leaf:
        """Return the constituent or word of a complete bracket; `where` is for errors."""
        if bool(self.children) + len(self.words) != 1:
            problem = f"the bracket {self.label!r} contains {len(self.words)} words and {len(self.children)} brackets"
            raise UserError(f"{where}: {problem}, expected one word or brackets. Correct the tree.")
        if self.children:
            return Tree(self.label, tuple(self.children))
        return Leaf(self.label, self.words[0])


def add_root(node: Tree | Leaf) -> Tree:
    """Return a tree with the root `TOP`, in place of a treebank's root."""
    if isinstance(node, Tree) and node.label in ROOTS:
        return Tree(ROOT, node.children)
    return Tree(ROOT, (node,))


def read_trees(lines: Iterable[tuple[int, str]], name: str) -> Iterator[tuple[int, Tree]]:
    """Yield the trees of a bracketed file, each with the number of its first line.

    A tree may span several lines. `(ROOT`, `(S1`, `(TOP` and a bracket without a label become the root `TOP`, which is
    added to trees without a root.

    Args:
        lines: lines with their numbers.
        name: name of the file in messages.

    Raises:
        UserError: a tree is malformed; the message names the line.
    """
    tokens = ((number, token) for number, line in lines for token in BRACKET_TOKEN.findall(line))
    stack: list[OpenBracket] = []
    for number, token in tokens:
        where = f"{name}, line {number}"
        if token == "(":
            stack.append(OpenBracket(number))
        elif not stack:
            problem = f"{token[:40]!r} is not a tree"
            if token == ")":
                problem = "a closing bracket without an opening one"
            raise UserError(f"{where}: {problem}. Correct the tree before it.")
        elif token != ")":
            if stack[-1].label or stack[-1].children:
                stack[-1].words.append(token)
            else:
                stack[-1].label = token
        else:
            bracket = stack.pop()
            node = bracket.close(where)
            if stack:
                stack[-1].children.append(node)
            else:
                yield bracket.line, add_root(node)
    if stack:
        raise UserError(f"{name}, line {stack[0].line}: the tree that starts here is not closed. Correct its brackets.")


def evaluation_label(label: str) -> str:
    """Return a label without functional tags and indices: NP for NP-SBJ-1 and NP=2."""
    return label[:1] + re.split("[-=]", label[1:], maxsplit=1)[0]


def evaluation_tree(tree: Tree) -> Tree | None:
    """Remove functional tags, empty elements and constituents without words; return None if no word is left."""
    stack: list[list[Tree | Leaf]] = [[]]
    for event, node in tree.events():
        if isinstance(node, Leaf):
            if node.tag != EMPTY_TAG:
                stack[-1].append(node)
        elif event == "open":
            stack.append([])
        elif children := stack.pop():
            stack[-1].append(Tree(evaluation_label(node.label), tuple(children)))
    (cleaned,) = stack[0] or [None]
    return cleaned if isinstance(cleaned, Tree) else None
