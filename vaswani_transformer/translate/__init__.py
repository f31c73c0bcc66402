"""Translating many texts: the function `translate`, the engines behind it, and the command `vaswani-translate`."""

from .translator import Hypothesis, OverlongError, Translation, Translator, translate

__all__ = ["Hypothesis", "OverlongError", "Translation", "Translator", "translate"]
