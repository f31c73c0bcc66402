"""Translation of many texts: the function `translate` and the command `vaswani-translate`."""

from .details import Details
from .reranking import rerank
from .targets import TargetScore, score_targets
from .translator import Hypothesis, TooLongError, Translation, Translator, translate

__all__ = [
    "Details",
    "Hypothesis",
    "TargetScore",
    "TooLongError",
    "Translation",
    "Translator",
    "rerank",
    "score_targets",
    "translate",
]
