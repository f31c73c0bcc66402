"""Attention weights as lines between words, as in Figures 3 to 5 of the paper.

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
FAINTEST = 0.04
"""Largest weight that is not drawn."""


def draw_lines(axes: "Axes", weights: np.ndarray, heads: Sequence[int]) -> None:
    """Draw the weights (H, Q, K) of some heads as lines, with a small offset between heads."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    colors = head_colors(len(weights))
    gap = min(0.1, 0.6 / len(heads))
    for rank, head in enumerate(heads):
        offset = gap * (rank - (len(heads) - 1) / 2)
        is_drawn = weights[head] > FAINTEST  # (Q, K)
        lines = [((query + offset, 1.0), (key + offset, 0.0)) for query, key in np.argwhere(is_drawn)]
        rgba = [(*to_rgb(colors[head]), float(weight)) for weight in weights[head][is_drawn]]
        axes.add_collection(LineCollection(lines, colors=rgba, linewidths=1.6, capstyle="round"))


def draw_words(axes: "Axes", queries: Sequence[str], keys: Sequence[str], only: int | None) -> None:
    """Draw vertical words above and below; mute those above other than `only`, if given."""
    style: dict[str, Any] = words_style() | {"rotation": 90, "ha": "center", "fontsize": 11}
    for index, word in enumerate(queries):
        text = axes.text(index, 1.05, word, va="bottom", **style)
        text.set_color(INK if only in (None, index) else MUTED)
    for index, word in enumerate(keys):
        axes.text(index, -0.05, word, va="top", **style)
    axes.set_xlim(-0.6, max(len(queries), len(keys)) - 0.4)
    axes.set_ylim(-0.05, 1.05)
    axes.set_axis_off()


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
        ValueError: there is no such stack, layer, head or word.
        ImportError: Matplotlib is not installed.
    """
    weights = maps.weights(stack)
    layers, count = weights.shape[:2]
    index = layers - 1 if layer is None else index_from_1("layer", layer, layers)
    indices = head_indices(heads, count)
    queries, keys = maps.queries(stack), maps.keys(stack)
    only = None if word is None else index_from_1("word", word, len(queries))
    shown = weights[index] if only is None else weights[index] * (np.arange(len(queries)) == only)[:, None]
    width = max(5, 0.33 * max(len(queries), len(keys)) + 0.6)
    figure = new_figure(width, 2 + 0.06 * width + 0.085 * (longest(queries) + longest(keys)))
    axes = figure.subplots()
    draw_lines(axes, shown, indices)
    draw_words(axes, queries, keys, only)
    figure.suptitle(f"{TITLES[stack]}, layer {index + 1} of {layers}", fontsize=11, color=INK)
    add_legend(figure, CAPTIONS[stack], indices, count)
    return figure
