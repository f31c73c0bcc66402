"""The original Transformer of "Attention Is All You Need" as a Hugging Face model; importing it registers it."""

from .config import VaswaniTransformerConfig
from .model import VaswaniTransformerForConditionalGeneration, VaswaniTransformerModel
from .pretrained import VaswaniTransformerPreTrainedModel
from .registration import register
from .tokenizer import VaswaniTransformerTokenizer

__version__ = "0.1.0"

__all__ = [
    "VaswaniTransformerConfig",
    "VaswaniTransformerForConditionalGeneration",
    "VaswaniTransformerModel",
    "VaswaniTransformerPreTrainedModel",
    "VaswaniTransformerTokenizer",
]

register()
