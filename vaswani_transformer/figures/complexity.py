"""Table 1 measured: time, memory and operations of a layer against the length of a text.

n positions of a text, d the width of a layer.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .style import INK, RULE, head_colors, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIELDS = {"seconds": "seconds", "peak_mib": "peak memory (MiB)", "operations": "operations"}
MARKERS = "os^Dv"


def draw_field(axes: "Axes", measurements: Sequence[dict[str, Any]], field: str, layers: Sequence[str]) -> list[Any]:
    """Draw one field of every layer against n, both logarithmic; a number that is missing or 0 is left out."""
    from matplotlib.ticker import LogLocator

    lines = []
    for index, (layer, color) in enumerate(zip(layers, head_colors(len(layers)), strict=True)):
        rows = sorted((row["n"], row[field]) for row in measurements if row["layer"] == layer and row.get(field))
        marker = MARKERS[index % len(MARKERS)]
        lines += axes.plot(
            *zip(*rows, strict=True) if rows else ([], []),
            label=layer, color=color, marker=marker, markersize=3.5, linewidth=1.6,
        )  # fmt: skip
    if any(row.get(field) for row in measurements):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(which="minor", labelleft=False)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    return lines


def draw_layer_complexity(measurements: Sequence[dict[str, Any]]) -> "Figure":
    """Draw Table 1 measured: one row of panels a width d, with time, memory and operations against n.

    Args:
        measurements: as `python -m bench.layer_complexity` writes them: "layer", "n" and "d" of each, and
            "seconds", "peak_mib" and "operations" as far as they are known.

    Raises:
        ValueError: there is no measurement.
        ImportError: Matplotlib is not installed.
    """
    if not measurements:
        raise ValueError("measurements: nothing to draw; got none, expected those of table1.json.")
    widths = sorted({row["d"] for row in measurements})
    layers = list(dict.fromkeys(row["layer"] for row in measurements))
    figure = new_figure(10, 0.9 + 2.7 * len(widths))
    panels = figure.subplots(len(widths), len(FIELDS), squeeze=False)
    handles = []
    for d, row in zip(widths, panels, strict=True):
        for axes, (field, label) in zip(row, FIELDS.items(), strict=True):
            of_width = [measurement for measurement in measurements if measurement["d"] == d]
            handles = draw_field(style_axes(axes), of_width, field, layers)
            axes.set_title(f"{label}, d = {d}", fontsize=10, color=INK)
            axes.set_xlabel("n")
    figure.legend(handles=handles, loc="outside upper center", ncols=len(layers), frameon=False, labelcolor=INK)
    return figure
