"""Makes the package known to the Auto classes and to the pipelines of Transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.pipelines import PIPELINE_REGISTRY

from .config import VaswaniTransformerConfig
from .model import VaswaniTransformerForConditionalGeneration, VaswaniTransformerModel
from .pipeline import TASK, VaswaniTransformerTranslationPipeline
from .tokenizer import VaswaniTransformerTokenizer


def register() -> None:
    """Tell the Auto classes of configurations, models and tokenizers, and `pipeline()`; as often as one likes."""
    AutoConfig.register(VaswaniTransformerConfig.model_type, VaswaniTransformerConfig, exist_ok=True)
    AutoModel.register(VaswaniTransformerConfig, VaswaniTransformerModel, exist_ok=True)
    AutoModelForSeq2SeqLM.register(VaswaniTransformerConfig, VaswaniTransformerForConditionalGeneration, exist_ok=True)
    AutoTokenizer.register(VaswaniTransformerConfig, fast_tokenizer_class=VaswaniTransformerTokenizer, exist_ok=True)
    if PIPELINE_REGISTRY.supported_tasks.get(TASK, {}).get("impl") is not VaswaniTransformerTranslationPipeline:
        PIPELINE_REGISTRY.register_pipeline(
            TASK, VaswaniTransformerTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
        )
