"""Registration with the Auto classes and pipelines of Transformers."""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.pipelines import PIPELINE_REGISTRY

from .cmlm import VaswaniCmlmForConditionalGeneration
from .ctc import VaswaniCtcForConditionalGeneration
from .flowseq import VaswaniFlowSeqForConditionalGeneration
from .iterative_vae import VaswaniIterativeVaeForConditionalGeneration
from .model import ProjectedModel, VaswaniTransformerForConditionalGeneration
from .nat import VaswaniNatForConditionalGeneration
from .pipeline import TASK, VaswaniTransformerTranslationPipeline
from .tokenizer import VaswaniTransformerTokenizer

FAMILIES = (
    VaswaniTransformerForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
    VaswaniCtcForConditionalGeneration,
    VaswaniCmlmForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniFlowSeqForConditionalGeneration,
)
"""The model with output projection of each family; its attributes name configuration and body."""


def register_family(model: type[ProjectedModel]) -> None:
    """Register a model with output projection, its configuration and its body with the Auto classes; idempotent."""
    config: Any = model.config_class
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, model.body_class, exist_ok=True)
    AutoModelForSeq2SeqLM.register(config, model, exist_ok=True)
    AutoTokenizer.register(config, fast_tokenizer_class=VaswaniTransformerTokenizer, exist_ok=True)


def register() -> None:
    """Register every model family with the Auto classes, and the task with `pipeline()`; idempotent."""
    for model in FAMILIES:
        register_family(model)
    if PIPELINE_REGISTRY.supported_tasks.get(TASK, {}).get("impl") is not VaswaniTransformerTranslationPipeline:
        PIPELINE_REGISTRY.register_pipeline(
            TASK, VaswaniTransformerTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
        )
