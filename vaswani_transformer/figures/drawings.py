"""Attention weights as Matplotlib figures: lines between words, and heat maps.

N layers, H heads, Q queries, K keys.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .style import INK, MUTED, RULE, head_colors, new_figure, words_style
from .weights import AttentionMaps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}
CAPTIONS = {
    "encoder": "each source word above attends to source words below",
    "decoder": "to predict a word above, the decoder attends to the target so far, below",
    "cross": "to predict a word above, the decoder attends to source words below",
}
FAINTEST = 0.04
"""Largest weight that is not drawn as a line."""


def indices(name: str, numbers: Sequence[int] | int | None, count: int) -> list[int]:
    """Return the indices of things that are counted from 1; all for None."""
    if numbers is None:
        return list(range(count))
    if isinstance(numbers, int):
        numbers = [numbers]
    for number in numbers:
        if not 1 <= number <= count:
            raise ValueError(f"{name}: out of range; got {number}, expected 1 to {count}.")
    return [number - 1 for number in numbers]


def longest(words: Sequence[str]) -> int:
    """Return the length of the longest word."""
    return max(map(len, words))


def draw_attention(
    maps: AttentionMaps,
    stack: str = "encoder",
    layer: int | None = None,
    heads: Sequence[int] | int | None = None,
    word: int | None = None,
) -> "Figure":
    """Draw attention weights as lines between words, as in Figures 3 to 5 of the paper.

    Words above attend to words below. The opacity of a line shows the weight, and its color the head. The decoder's
    words above are its predictions. Layers, heads and words are counted from 1.

    Args:
        maps: the result of `attention_maps`.
        stack: "encoder", "decoder" or "cross".
        layer: number of the layer; None for the last.
        heads: numbers of the heads; None for all.
        word: number of a word above, to draw only its lines; None for all words.

    Raises:
        ValueError: the model does not have such a layer, head or word.
        ImportError: Matplotlib is not installed.
    """
    weights = maps.weights(stack)  # (N, H, Q, K)
    queries = maps.queries(stack)
    keys = maps.keys(stack)
    index = indices("layer", layer, len(weights))[-1]  # the last for None
    head_indices = indices("head", heads, weights.shape[1])
    query_indices = indices("word", word, len(queries))

    # Words are vertical, so their number sets the width and the longest ones the height.
    width = max(5, 0.33 * max(len(queries), len(keys)) + 0.6)
    height = 2 + 0.06 * width + 0.085 * (longest(queries) + longest(keys))
    figure = new_figure(width, height)
    axes = figure.subplots()
    draw_lines(axes, weights[index], head_indices, query_indices)
    draw_words(axes, queries, keys, query_indices)
    figure.suptitle(f"{TITLES[stack]}, layer {index + 1} of {len(weights)}", fontsize=11, color=INK)
    add_legend(figure, CAPTIONS[stack], head_indices, weights.shape[1])
    return figure


def draw_lines(axes: "Axes", weights: np.ndarray, heads: list[int], queries: list[int]) -> None:
    """Draw the weights (H, Q, K) of some heads and queries as lines, with a small offset between heads."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    colors = head_colors(len(weights))
    gap = min(0.1, 0.6 / len(heads))
    for rank, head in enumerate(heads):
        offset = gap * (rank - (len(heads) - 1) / 2)
        lines = []
        rgba = []
        for query, key in np.argwhere(weights[head] > FAINTEST):
            if query in queries:
                lines.append(((query + offset, 1.0), (key + offset, 0.0)))
                rgba.append((*to_rgb(colors[head]), float(weights[head, query, key])))
        axes.add_collection(LineCollection(lines, colors=rgba, linewidths=1.6, capstyle="round"))


def draw_words(axes: "Axes", queries: Sequence[str], keys: Sequence[str], drawn: list[int]) -> None:
    """Draw vertical words above and below; mute those above that are not `drawn`."""
    style: dict[str, Any] = {**words_style(), "rotation": 90, "ha": "center", "fontsize": 11}
    for index, word in enumerate(queries):
        style["color"] = INK if index in drawn else MUTED
        axes.text(index, 1.05, word, va="bottom", **style)
    style["color"] = INK
    for index, word in enumerate(keys):
        axes.text(index, -0.05, word, va="top", **style)
    axes.set_xlim(-0.6, max(len(queries), len(keys)) - 0.4)
    axes.set_ylim(-0.05, 1.05)
    axes.set_axis_off()


def add_legend(figure: "Figure", title: str, heads: Sequence[int], count: int) -> None:
    from matplotlib.patches import Patch

    colors = head_colors(count)
    labels = [str(head + 1) for head in heads]
    labels[0] = f"head {labels[0]}"
    handles = [Patch(color=colors[head], label=label) for head, label in zip(heads, labels, strict=True)]
    legend = figure.legend(
        handles=handles, title=title, ncols=int(2 * figure.get_figwidth()) - 2, loc="outside lower center",
        frameon=False, handlelength=0.9, handleheight=0.9, handletextpad=0.4, columnspacing=1.2, fontsize=9,
        title_fontsize=9, labelcolor=MUTED,
    )  # fmt: skip
    legend.get_title().set_color(MUTED)


def draw_heat_maps(
    maps: AttentionMaps, stack: str = "encoder", layer: int | None = None, heads: Sequence[int] | int | None = None
) -> "Figure":
    """Draw the attention weights of one layer's heads, in rows of at most four heads and 16 inches.

    Rows are queries and columns are keys. Arguments and errors are those of `draw_attention`.
    """
    weights = maps.weights(stack)  # (N, H, Q, K)
    queries = maps.queries(stack)
    keys = maps.keys(stack)
    index = indices("layer", layer, len(weights))[-1]  # the last for None
    head_indices = indices("head", heads, weights.shape[1])

    # Inches of a map with its title, and of the words left of and below all maps.
    map_width = 0.19 * len(keys) + 0.3
    map_height = 0.19 * len(queries) + 0.45
    columns = max(1, min(4, len(head_indices), int(16 / map_width)))
    rows = math.ceil(len(head_indices) / columns)
    width = columns * map_width + 0.085 * longest(queries) + 1.2
    height = rows * map_height + 0.085 * longest(keys) + 0.5
    figure = new_figure(width, height, "compressed")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(head_indices) :]:
        axes.set_axis_off()

    # Only the first map of a row and the last of a column have words.
    style = {**words_style(), "fontsize": 9}
    for cell, (axes, head) in enumerate(zip(grid.flat, head_indices, strict=False)):
        axes.spines[:].set_color(RULE)
        axes.set_title(f"head {head + 1}", fontsize=9, color=MUTED, pad=4)
        image = axes.imshow(weights[index, head], cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        is_lowest = cell + columns >= len(head_indices)
        axes.tick_params(length=0, labelbottom=is_lowest, labelleft=cell % columns == 0)
        axes.set_xticks(range(len(keys)), keys, rotation=90, **style)
        axes.set_yticks(range(len(queries)), queries, **style)

    # The color bar of all maps.
    shrink = min(0.9, 2.4 / figure.get_figheight())
    bar = figure.colorbar(image, ax=figure.axes, shrink=shrink, aspect=22, pad=0.02, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=9, labelcolor=MUTED)
    figure.suptitle(f"{TITLES[stack]}, layer {index + 1} of {len(weights)}", fontsize=11, color=INK)
    return figure
