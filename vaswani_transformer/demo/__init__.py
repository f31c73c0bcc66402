"""A page in a browser where a model runs: `vaswani-demo MODEL`, and the Space that publishing writes.

The page needs Gradio (`pip install "vaswani-transformer[demo]"`); what it shows is computed without it.
"""

from .page import load_page, make_page
from .steps import Candidate, DecodedText, decode_with_steps

__all__ = ["Candidate", "DecodedText", "decode_with_steps", "load_page", "make_page"]
