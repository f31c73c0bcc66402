"""The original Transformer of "Attention Is All You Need" as a Hugging Face model; importing it registers it."""

from .config import VaswaniTransformerConfig
from .cpu import prepare_for_inference
from .model import VaswaniTransformerForConditionalGeneration, VaswaniTransformerModel
from .registration import register
from .stacks import VaswaniTransformerPreTrainedModel
from .tokenizer import VaswaniTransformerTokenizer

__version__ = "0.1.0"

__all__ = [
    "VaswaniTransformerConfig",
    "VaswaniTransformerForConditionalGeneration",
    "VaswaniTransformerModel",
    "VaswaniTransformerPreTrainedModel",
    "VaswaniTransformerTokenizer",
    "prepare_for_inference",
]

register()
