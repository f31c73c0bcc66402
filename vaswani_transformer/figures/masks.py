"""Figures of masks: the positions that each position may attend to (3.2.3).

Q queries, K keys.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from .style import INK, RULE, longest, new_figure, words_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_masks(masks: Mapping[str, tuple[Tensor | np.ndarray, Sequence[str], Sequence[str]]]) -> "Figure":
    """Draw masks side by side: rows are queries, columns keys, blue where a query may attend.

    Args:
        masks: for each title the mask (Q, K), true where a query may attend, and the words of queries and keys.

    Raises:
        ValueError: there is no mask, or one has another shape than its words.
        ImportError: Matplotlib is not installed.
    """
    if not masks:
        raise ValueError("masks: there is nothing to draw; got none, expected at least one.")
    for title, (mask, queries, keys) in masks.items():
        if tuple(mask.shape) != (len(queries), len(keys)):
            raise ValueError(f"{title}: got {tuple(mask.shape)}, expected {len(queries)} queries and {len(keys)} keys.")
    widths = [0.32 * len(keys) + 0.1 * longest(queries) + 0.4 for _, queries, keys in masks.values()]
    heights = [0.32 * len(queries) + 0.1 * longest(keys) + 0.5 for _, queries, keys in masks.values()]
    figure = new_figure(sum(widths), max(heights) + 0.2)
    grid = figure.subplots(1, len(masks), squeeze=False, width_ratios=widths)
    style = words_style() | {"fontsize": 10}
    for axes, (title, (mask, queries, keys)) in zip(grid.flat, masks.items(), strict=True):
        axes.imshow(np.asarray(mask, dtype=float), cmap="Blues", vmin=0, vmax=1.6, interpolation="nearest")
        axes.set_anchor("N")
        axes.set_title(title, fontsize=11, color=INK)
        axes.spines[:].set_color(RULE)
        axes.tick_params(which="both", length=0)
        axes.set_xticks(range(len(keys)), keys, rotation=90, **style)
        axes.set_yticks(range(len(queries)), queries, **style)
        axes.set_xticks(np.arange(-0.5, len(keys)), minor=True)
        axes.set_yticks(np.arange(-0.5, len(queries)), minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
    return figure
