"""Web page to try a model: the command `vaswani-demo MODEL`.

It needs Gradio (`pip install "vaswani-transformer[demo]"`).
"""

from .page import load_page, make_page

__all__ = ["load_page", "make_page"]
