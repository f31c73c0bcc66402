"""Heat maps of attention weights: one layer with words, or an overview of all layers.

N layers, H heads, Q queries, K keys.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .style import INK, MUTED, RULE, TITLES, head_indices, index_from_1, longest, new_figure, words_style
from .weights import AttentionMaps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_heat_map(axes: "Axes", weights: np.ndarray, title: str) -> Any:
    """Draw weights (Q, K) from 0 (white) to 1 (dark blue)."""
    axes.spines[:].set_color(RULE)
    axes.set_title(title, fontsize=9, color=MUTED, pad=4)
    return axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")


def add_title_and_scale(figure: "Figure", image: Any, grid: np.ndarray, title: str) -> "Figure":
    shrink = min(0.9, 2.4 / figure.get_figheight())
    bar = figure.colorbar(image, ax=grid, shrink=shrink, aspect=22, pad=0.02, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=9, labelcolor=MUTED)
    figure.suptitle(title, fontsize=11, color=INK)
    return figure


def draw_one_layer(
    weights: np.ndarray, heads: Sequence[int], queries: Sequence[str], keys: Sequence[str], title: str
) -> "Figure":
    """Draw weights (H, Q, K) in rows of at most four heads and 16 inches, with words at the edges."""
    width, height = 0.19 * len(keys) + 0.3, 0.19 * len(queries) + 0.45
    columns = max(1, min(4, len(heads), int(16 / width)))
    rows = math.ceil(len(heads) / columns)
    label_width, label_height = 0.085 * longest(queries), 0.085 * longest(keys)
    figure = new_figure(columns * width + label_width + 1.2, rows * height + label_height + 0.5, "compressed")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    style = words_style() | {"fontsize": 9}
    for axes in grid.flat[len(heads) :]:
        axes.set_axis_off()
    for index, (axes, head) in enumerate(zip(grid.flat, heads, strict=False)):
        image = draw_heat_map(axes, weights[head], f"head {head + 1}")
        is_lowest = index + columns >= len(heads)
        axes.tick_params(length=0, labelbottom=is_lowest, labelleft=index % columns == 0)
        axes.set_xticks(range(len(keys)), keys, rotation=90, **style)
        axes.set_yticks(range(len(queries)), queries, **style)
    return add_title_and_scale(figure, image, grid, title)


def draw_all_layers(weights: np.ndarray, heads: Sequence[int], title: str) -> "Figure":
    """Draw weights (N, H, Q, K) as small heat maps, with a row per layer and a column per head."""
    layers, _, queries, keys = weights.shape
    side = 1.15 / max(queries, keys)
    figure = new_figure(len(heads) * (keys * side + 0.15) + 1.5, layers * (queries * side + 0.15) + 0.8, "compressed")
    grid = figure.subplots(layers, len(heads), squeeze=False)
    for (layer, column), axes in np.ndenumerate(grid):
        head = heads[column]
        image = draw_heat_map(axes, weights[layer, head], f"head {head + 1}" if layer == 0 else "")
        axes.set(xticks=[], yticks=[])
        if column == 0:
            axes.set_ylabel(f"layer {layer + 1}", fontsize=9, color=MUTED)
    return add_title_and_scale(figure, image, grid, title)


def draw_heat_maps(
    maps: AttentionMaps, stack: str = "encoder", layer: int | None = None, heads: Sequence[int] | int | None = None
) -> "Figure":
    """Draw the attention weights of one layer's heads, or an overview of all layers.

    Rows are queries and columns are keys. Layers and heads are counted from 1.

    Args:
        maps: the result of `attention_maps`.
        stack: "encoder", "decoder" or "cross".
        layer: number of the layer; None for all layers, without words.
        heads: numbers of the heads; None for all.

    Raises:
        ValueError: there is no such stack, layer or head.
        ImportError: Matplotlib is not installed.
    """
    weights = maps.weights(stack)
    indices = head_indices(heads, weights.shape[1])
    if layer is None:
        return draw_all_layers(weights, indices, TITLES[stack])
    index = index_from_1("layer", layer, len(weights))
    title = f"{TITLES[stack]}, layer {layer} of {len(weights)}"
    return draw_one_layer(weights[index], indices, maps.queries(stack), maps.keys(stack), title)
