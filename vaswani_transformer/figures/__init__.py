"""Searches and attention maps as web pages, and attention maps as figures.

The figures need Matplotlib (`pip install "vaswani-transformer[figures]"`).
"""

from .drawings import draw_attention, draw_heat_maps
from .page import attention_page, render_page, search_page
from .weights import AttentionMaps, attention_maps

__all__ = [
    "AttentionMaps",
    "attention_maps",
    "attention_page",
    "draw_attention",
    "draw_heat_maps",
    "render_page",
    "search_page",
]
