"""Figures of constituency trees, with constituents above and words in a row below."""

from typing import TYPE_CHECKING, Any

from ..figures.style import COLORS, MUTED, RULE, new_figure, words_style
from .trees import Leaf, Tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHARACTER = 0.105
"""Width of a character in inches."""
LEVEL = 0.46
"""Height of a level in inches."""


def draw_tree(tree: Tree) -> "Figure":
    """Draw a constituency tree with labels, tags and, in a row below, words.

    `draw_tree(tree).savefig("tree.svg")` saves it as SVG; other extensions give other formats.

    Args:
        tree: a tree with at least one word.

    Raises:
        ValueError: the tree has no word.
        ImportError: Matplotlib is not installed.
    """
    if not tree.leaves:
        raise ValueError("tree: there is nothing to draw; got a tree without words, expected at least one.")
    figure = new_figure(1, 1)
    axes = figure.subplots()
    axes.set_axis_off()
    style: dict[str, Any] = words_style() | {"ha": "center", "va": "center"}
    open_nodes: list[list[tuple[float, int]]] = [[]]  # x and level of the children of each open constituent
    right = 0.0
    for event, node in tree.events():
        if event == "open":
            open_nodes.append([])
            continue
        if isinstance(node, Leaf):
            width = CHARACTER * (max(len(node.word), len(node.tag)) + 2)
            x, level, label, color = right + width / 2, 0, node.tag, MUTED
            right += width
            axes.text(x, -0.42 * LEVEL, node.word, **style).set_fontsize(11)
        else:
            parts = open_nodes.pop()
            x, level = (parts[0][0] + parts[-1][0]) / 2, 1 + max(level for _, level in parts)
            label, color = node.label, COLORS[0]
            for part, part_level in parts:
                axes.plot((x, part), (level * LEVEL, part_level * LEVEL), color=RULE, linewidth=1.2, zorder=1)
        text = axes.text(x, level * LEVEL, label, **style)
        text.set(color=color, fontsize=9.5, bbox={"facecolor": "white", "linewidth": 0, "pad": 1.5})
        open_nodes[-1].append((x, level))
    ((_, height),) = open_nodes[0]
    axes.set_xlim(0, max(2.0, right + 0.3))
    axes.set_ylim(-0.7 * LEVEL, (height + 1.3) * LEVEL)
    figure.set_size_inches(max(2.0, right + 0.3), (height + 2) * LEVEL)
    return figure
