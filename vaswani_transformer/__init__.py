"""The original Transformer of "Attention Is All You Need" as a Hugging Face model; importing it registers it."""

from .cmlm import VaswaniCmlmConfig, VaswaniCmlmForConditionalGeneration, VaswaniCmlmModel
from .config import VaswaniTransformerConfig
from .masking import MaskingCollator
from .model import VaswaniTransformerForConditionalGeneration, VaswaniTransformerModel
from .nat import VaswaniNatConfig, VaswaniNatForConditionalGeneration, VaswaniNatModel
from .pretrained import VaswaniTransformerPreTrainedModel
from .registration import register
from .tokenizer import VaswaniTransformerTokenizer

__version__ = "0.1.0"

__all__ = [
    "MaskingCollator",
    "VaswaniCmlmConfig",
    "VaswaniCmlmForConditionalGeneration",
    "VaswaniCmlmModel",
    "VaswaniNatConfig",
    "VaswaniNatForConditionalGeneration",
    "VaswaniNatModel",
    "VaswaniTransformerConfig",
    "VaswaniTransformerForConditionalGeneration",
    "VaswaniTransformerModel",
    "VaswaniTransformerPreTrainedModel",
    "VaswaniTransformerTokenizer",
]

register()
