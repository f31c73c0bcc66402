"""Translation of many texts: the function `translate` and the command `vaswani-translate`."""

from .translator import Hypothesis, TooLongError, Translation, Translator, translate

__all__ = ["Hypothesis", "TooLongError", "Translation", "Translator", "translate"]
