"""Registration of the package with the Auto classes and pipelines of Transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.pipelines import PIPELINE_REGISTRY

from .cmlm import VaswaniCmlmConfig, VaswaniCmlmForConditionalGeneration, VaswaniCmlmModel
from .config import VaswaniTransformerConfig
from .flowseq import VaswaniFlowSeqConfig, VaswaniFlowSeqForConditionalGeneration, VaswaniFlowSeqModel
from .iterative_vae import (
    VaswaniIterativeVaeConfig,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniIterativeVaeModel,
)
from .model import VaswaniTransformerForConditionalGeneration, VaswaniTransformerModel
from .nat import VaswaniNatConfig, VaswaniNatForConditionalGeneration, VaswaniNatModel
from .pipeline import TASK, VaswaniTransformerTranslationPipeline
from .tokenizer import VaswaniTransformerTokenizer

FAMILIES = (
    (VaswaniTransformerConfig, VaswaniTransformerModel, VaswaniTransformerForConditionalGeneration),
    (VaswaniNatConfig, VaswaniNatModel, VaswaniNatForConditionalGeneration),
    (VaswaniCmlmConfig, VaswaniCmlmModel, VaswaniCmlmForConditionalGeneration),
    (VaswaniIterativeVaeConfig, VaswaniIterativeVaeModel, VaswaniIterativeVaeForConditionalGeneration),
    (VaswaniFlowSeqConfig, VaswaniFlowSeqModel, VaswaniFlowSeqForConditionalGeneration),
)
"""Configuration, body and complete model of each family; all share a tokenizer and a pipeline."""


def register() -> None:
    """Register every family with the Auto classes, and the task with `pipeline()`; repeated calls change nothing."""
    for config, body, model in FAMILIES:
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModel.register(config, body, exist_ok=True)
        AutoModelForSeq2SeqLM.register(config, model, exist_ok=True)
        AutoTokenizer.register(config, fast_tokenizer_class=VaswaniTransformerTokenizer, exist_ok=True)
    if PIPELINE_REGISTRY.supported_tasks.get(TASK, {}).get("impl") is not VaswaniTransformerTranslationPipeline:
        PIPELINE_REGISTRY.register_pipeline(
            TASK, VaswaniTransformerTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
        )
