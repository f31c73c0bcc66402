"""Attention as lines between words, as in the paper's appendix (Figures 3 to 5).

H heads, Q queries, K keys.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .style import INK, MUTED, TITLES, head_colors, head_indices, index_from_1, longest, new_figure, words_style
from .weights import AttentionMaps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAPTIONS = {
    "encoder": "each source word above attends to source words below",
    "decoder": "to predict a word above, the decoder attends to the target so far, below",
    "cross": "to predict a word above, the decoder attends to source words below",
}
CELLS_WIDTH = 0.8
"""The width of all heads' cells below one word's lines; words are 1 apart."""

FAINTEST = {"all": 0.04, "one": 0.01}
"""The weights that are too small to draw, for all words and for one."""


def word_index(words: Sequence[str], word: str | int) -> int:
    """Return the index of a word, given as it is shown or by its number from 1."""
    if isinstance(word, int):
        return index_from_1("word", word, len(words))
    indices = [index for index, shown in enumerate(words) if shown == word]
    if not indices:
        raise ValueError(f"word: not in the sentence; got {word!r}, expected one of {', '.join(words)}, or a number.")
    if len(indices) > 1:
        numbers = ", ".join(str(index + 1) for index in indices)
        raise ValueError(f"word: {word!r} occurs more than once; give one of the numbers {numbers}.")
    return indices[0]


def draw_lines(axes: "Axes", weights: np.ndarray, heads: Sequence[int], only: int | None) -> None:
    """Draw the weights (H, Q, K) of some heads as lines; those of neighboring heads are a little apart."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    colors = head_colors(weights.shape[0])
    gap = min(0.1, 0.6 / len(heads))
    gap_below = gap if only is None else CELLS_WIDTH / len(heads)
    for rank, head in enumerate(heads):
        offset = rank - (len(heads) - 1) / 2
        is_drawn = weights[head] > FAINTEST["all" if only is None else "one"]  # (Q, K)
        if only is not None:
            is_drawn &= np.arange(len(is_drawn))[:, None] == only
        pairs = np.argwhere(is_drawn)
        lines = [((query + offset * gap, 1.0), (key + offset * gap_below, 0.0)) for query, key in pairs]
        rgba = [(*to_rgb(colors[head]), float(weight)) for weight in weights[head][is_drawn]]
        axes.add_collection(LineCollection(lines, colors=rgba, linewidths=1.6, capstyle="round"))


def draw_words(axes: "Axes", queries: Sequence[str], keys: Sequence[str], only: int | None) -> None:
    """Write upright words above and below; if `only` names one of those above, the others are muted."""
    style: dict[str, Any] = words_style() | {"rotation": 90, "ha": "center", "fontsize": 11}
    lower = -0.05 if only is None else -0.16
    for index, word in enumerate(queries):
        text = axes.text(index, 1.05, word, va="bottom", **style)
        if only is not None:
            text.set(color=INK if index == only else MUTED, fontweight="bold" if index == only else "normal")
    for index, word in enumerate(keys):
        axes.text(index, lower, word, va="top", **style)
    axes.set_xlim(-0.6, max(len(queries), len(keys)) - 0.4)
    axes.set_ylim(lower, 1.05)
    axes.set_axis_off()


def draw_cells(axes: "Axes", weights: np.ndarray, colors: Sequence[str]) -> None:
    """Draw one cell per head between lines and words below, as opaque as its weight (H, K) of the one word above."""
    from matplotlib.patches import Rectangle

    width = CELLS_WIDTH / len(weights)
    for head, color in enumerate(colors):
        for key, weight in enumerate(weights[head]):
            corner = (key - CELLS_WIDTH / 2 + head * width, -0.12)
            axes.add_patch(Rectangle(corner, width, 0.1, color=color, alpha=float(min(1, weight)), linewidth=0))


def add_legend(figure: "Figure", title: str, heads: Sequence[int], count: int) -> None:
    from matplotlib.patches import Patch

    colors = head_colors(count)
    handles = [
        Patch(color=colors[head], label=f"{'' if rank else 'head '}{head + 1}") for rank, head in enumerate(heads)
    ]
    legend = figure.legend(
        handles=handles, title=title, ncols=int(2 * figure.get_figwidth()) - 2, loc="outside lower center",
        frameon=False, handlelength=0.9, handleheight=0.9, handletextpad=0.4, columnspacing=1.2, fontsize=9,
        title_fontsize=9, labelcolor=MUTED,
    )  # fmt: skip
    legend.get_title().set_color(MUTED)


def draw_attention(
    maps: AttentionMaps,
    stack: str = "encoder",
    layer: int | None = None,
    heads: Sequence[int] | int | None = None,
    word: str | int | None = None,
) -> "Figure":
    """Draw attention weights as lines between words, as in the paper's appendix (Figures 3 to 5).

    Each word above attends to words below. The larger a weight, the stronger its line; every head has its color. The
    decoder's words above are those that it predicts.

    Args:
        maps: what `attention_maps` returned.
        stack: "encoder", "decoder" or "cross".
        layer: its number, from 1; None: the last.
        heads: numbers of heads, from 1; None: all.
        word: the only word above whose lines are drawn, as it is shown or by its number, from 1; None: all words.

    Raises:
        ValueError: there is no such stack, layer, head or word, or the word occurs more than once.
        ImportError: Matplotlib is not installed.
    """
    weights = maps.weights(stack)
    layers, count = weights.shape[:2]
    index = layers - 1 if layer is None else index_from_1("layer", layer, layers)
    indices = head_indices(heads, count)
    queries, keys = maps.queries(stack), maps.keys(stack)
    only = None if word is None else word_index(queries, word)
    width = max(5, 0.33 * max(len(queries), len(keys)) + 0.6)
    figure = new_figure(width, 2 + 0.06 * width + 0.085 * longest(queries, keys))
    axes = figure.subplots()
    draw_lines(axes, weights[index], indices, only)
    draw_words(axes, queries, keys, only)
    if only is not None:
        draw_cells(axes, weights[index][indices, only], [head_colors(count)[head] for head in indices])
    figure.suptitle(f"{TITLES[stack]}, layer {index + 1} of {layers}", fontsize=11, color=INK)
    add_legend(figure, CAPTIONS[stack], indices, count)
    return figure
