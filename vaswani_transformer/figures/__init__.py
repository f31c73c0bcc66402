"""Figures: attention maps, positions, learning rate, loss and Table 1, and a page that shows attention in a browser.

The figures need Matplotlib (`pip install "vaswani-transformer[figures]"`); the page needs a browser.
"""

from .complexity import draw_layer_complexity
from .curves import draw_label_smoothing, draw_learning_rate, draw_loss, draw_positional_encoding
from .heat_maps import draw_heat_maps, draw_masks
from .lines import draw_attention
from .page import attention_page, render_page
from .weights import AttentionMaps, attention_maps

__all__ = [
    "AttentionMaps",
    "attention_maps",
    "attention_page",
    "draw_attention",
    "draw_heat_maps",
    "draw_label_smoothing",
    "draw_layer_complexity",
    "draw_learning_rate",
    "draw_loss",
    "draw_masks",
    "draw_positional_encoding",
    "render_page",
]
