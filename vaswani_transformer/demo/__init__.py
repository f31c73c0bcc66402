"""Web page to try a model: the command `vaswani-demo MODEL`, and the Space that `training.publish` writes.

It needs Gradio (`pip install "vaswani-transformer[demo]"`).
"""

from .page import load_page, make_page

__all__ = ["load_page", "make_page"]
