"""Shared style of the figures: colors and fonts."""

import colorsys
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#2f6fdb", "#e0700f", "#2b9a48", "#d03468", "#7d4fd6", "#0d93a5", "#b58a00", "#8a5a3c")
INK = "#1c1d20"
MUTED = "#62646b"
RULE = "#dcdde0"
FALLBACK_FONTS = ("Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Arabic", "Noto Sans Devanagari")


def head_colors(count: int) -> list[str]:
    """Return a "#rrggbb" color for each head: those of `COLORS`, or for more heads evenly spaced hues."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    colors = []
    for index in range(count):
        red, green, blue = colorsys.hls_to_rgb((0.6 + index / count) % 1, 0.46, 0.62)
        colors.append(f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}")
    return colors


def new_figure(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> "Figure":
    """Return an empty figure without a window; sizes are in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'Figures need Matplotlib, which is not installed; run pip install "vaswani-transformer[figures]".'
        ) from error
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def words_style() -> dict[str, Any]:
    """Return text settings for words: installed fonts with many characters, and no formulas."""
    from matplotlib import font_manager, rcParams

    installed = set(font_manager.get_font_names())
    families = [*rcParams["font.family"], *(name for name in FALLBACK_FONTS if name in installed)]
    return {"fontfamily": families, "parse_math": False, "color": INK}
