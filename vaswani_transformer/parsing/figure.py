"""A constituency tree as a figure: constituents above, the words in a row below.

A word takes the width of its text or tag; a constituent is one level above its highest part.
"""

from typing import TYPE_CHECKING, Any

from ..figures.style import COLORS, MUTED, RULE, new_figure, words_style
from .trees import Leaf, Tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHARACTER = 0.105
"""The width of a character, in inches."""
LEVEL = 0.46
"""The height of a level, in inches."""


def node_positions(tree: Tree) -> list[tuple[Tree | Leaf, float, int, tuple[float, float] | None]]:
    """Return each node with its x in inches, its level (words 0), and the position of its parent."""
    open_nodes: list[list[int]] = [[]]
    nodes: list[Tree | Leaf] = []
    positions: list[tuple[float, int]] = []
    parents: dict[int, int] = {}
    right = 0.0
    for event, node in tree.events():
        if event == "open":
            open_nodes.append([])
            continue
        if isinstance(node, Leaf):
            width = CHARACTER * (max(len(node.word), len(node.tag)) + 2)
            position, children = (right + width / 2, 0), []
            right += width
        else:
            children = open_nodes.pop()
            ends = positions[children[0]][0], positions[children[-1]][0]
            position = sum(ends) / 2, 1 + max(positions[child][1] for child in children)
        parents |= dict.fromkeys(children, len(nodes))
        open_nodes[-1].append(len(nodes))
        nodes.append(node)
        positions.append(position)
    above = [positions[parents[index]] if index in parents else None for index in range(len(nodes))]
    return [(node, *position, parent) for node, position, parent in zip(nodes, positions, above, strict=True)]


def draw_tree(tree: Tree) -> "Figure":
    """Draw a constituency tree: its labels, the tags and, in a row below, the words.

    `draw_tree(tree).savefig("tree.svg")` writes it as SVG; other endings write other formats.

    Args:
        tree: a tree with at least one word.

    Raises:
        ValueError: the tree has no word.
        ImportError: Matplotlib is not installed.
    """
    if not tree.leaves:
        raise ValueError("tree: there is nothing to draw; got a tree without words, expected at least one.")
    nodes = node_positions(tree)
    width = max(x for _, x, _, _ in nodes) + max(1.0, CHARACTER * len(tree.leaves[-1].word)) / 2 + 0.3
    height = LEVEL * (max(level for _, _, level, _ in nodes) + 2)
    figure = new_figure(max(2.0, width), height)
    axes = figure.subplots()
    axes.set_xlim(0, max(2.0, width))
    axes.set_ylim(-0.7 * LEVEL, height - 0.7 * LEVEL)
    axes.set_axis_off()
    style: dict[str, Any] = words_style() | {"ha": "center", "va": "center"}
    for node, x, level, parent in nodes:
        if parent is not None:
            axes.plot((x, parent[0]), (level * LEVEL, parent[1] * LEVEL), color=RULE, linewidth=1.2, zorder=1)
        color, label = (MUTED, node.tag) if isinstance(node, Leaf) else (COLORS[0], node.label)
        text = axes.text(x, level * LEVEL, label, **style)
        text.set(color=color, fontsize=9.5, bbox={"facecolor": "white", "linewidth": 0, "pad": 1.5})
        if isinstance(node, Leaf):
            axes.text(x, -0.42 * LEVEL, node.word, **style).set_fontsize(11)
    return figure
