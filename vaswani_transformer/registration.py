"""Makes the package known to the Auto classes of Transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

from .config import VaswaniTransformerConfig
from .model import VaswaniTransformerForConditionalGeneration, VaswaniTransformerModel
from .tokenizer import VaswaniTransformerTokenizer


def register() -> None:
    """Tell AutoConfig, AutoModel, AutoModelForSeq2SeqLM and AutoTokenizer of the package; as often as one likes."""
    AutoConfig.register(VaswaniTransformerConfig.model_type, VaswaniTransformerConfig, exist_ok=True)
    AutoModel.register(VaswaniTransformerConfig, VaswaniTransformerModel, exist_ok=True)
    AutoModelForSeq2SeqLM.register(VaswaniTransformerConfig, VaswaniTransformerForConditionalGeneration, exist_ok=True)
    AutoTokenizer.register(VaswaniTransformerConfig, fast_tokenizer_class=VaswaniTransformerTokenizer, exist_ok=True)
