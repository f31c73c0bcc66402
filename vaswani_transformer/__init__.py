"""The original Transformer of "Attention Is All You Need" as a Hugging Face model.

Importing the package registers its models with the Auto classes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .batching import PairCollator, PairTokens, TokenBudgetBatchSampler
from .batching.optimization import paper_adam, paper_schedule
from .cmlm import MaskingCollator, VaswaniCmlmConfig, VaswaniCmlmForConditionalGeneration, VaswaniCmlmModel
from .config import VaswaniTransformerConfig
from .cpu.model import prepare_for_inference
from .ctc import VaswaniCtcConfig, VaswaniCtcForConditionalGeneration, VaswaniCtcModel
from .dag import VaswaniDagConfig, VaswaniDagForConditionalGeneration, VaswaniDagModel
from .flowseq import VaswaniFlowSeqConfig, VaswaniFlowSeqForConditionalGeneration, VaswaniFlowSeqModel
from .iterative_vae import (
    VaswaniIterativeVaeConfig,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniIterativeVaeModel,
)
from .model import VaswaniTransformerForConditionalGeneration, VaswaniTransformerModel
from .nat import VaswaniNatConfig, VaswaniNatForConditionalGeneration, VaswaniNatModel
from .pretrained import VaswaniTransformerPreTrainedModel
from .registration import register
from .tokenizer import VaswaniTransformerTokenizer
from .translation import rerank, score_targets, translate

if TYPE_CHECKING:
    from .convert import from_fairseq, from_fsmt, from_marian, to_ctranslate2, to_onnx
    from .figures import attention_maps, attention_page, search_page
    from .parsing import parse

__version__ = "0.1.0"

__all__ = [
    "MaskingCollator",
    "PairCollator",
    "PairTokens",
    "TokenBudgetBatchSampler",
    "VaswaniCmlmConfig",
    "VaswaniCmlmForConditionalGeneration",
    "VaswaniCmlmModel",
    "VaswaniCtcConfig",
    "VaswaniCtcForConditionalGeneration",
    "VaswaniCtcModel",
    "VaswaniDagConfig",
    "VaswaniDagForConditionalGeneration",
    "VaswaniDagModel",
    "VaswaniFlowSeqConfig",
    "VaswaniFlowSeqForConditionalGeneration",
    "VaswaniFlowSeqModel",
    "VaswaniIterativeVaeConfig",
    "VaswaniIterativeVaeForConditionalGeneration",
    "VaswaniIterativeVaeModel",
    "VaswaniNatConfig",
    "VaswaniNatForConditionalGeneration",
    "VaswaniNatModel",
    "VaswaniTransformerConfig",
    "VaswaniTransformerForConditionalGeneration",
    "VaswaniTransformerModel",
    "VaswaniTransformerPreTrainedModel",
    "VaswaniTransformerTokenizer",
    "attention_maps",
    "attention_page",
    "from_fairseq",
    "from_fsmt",
    "from_marian",
    "paper_adam",
    "paper_schedule",
    "parse",
    "prepare_for_inference",
    "rerank",
    "score_targets",
    "search_page",
    "to_ctranslate2",
    "to_onnx",
    "translate",
]

# Imported on first use, to keep importing the package fast.
LAZY_NAMES = dict.fromkeys(("from_fairseq", "from_fsmt", "from_marian", "to_ctranslate2", "to_onnx"), "convert")
LAZY_NAMES |= dict.fromkeys(("attention_maps", "attention_page", "search_page"), "figures")
LAZY_NAMES["parse"] = "parsing"


def __getattr__(name: str) -> Any:
    if name not in LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{LAZY_NAMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
