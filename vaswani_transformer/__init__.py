"""The original Transformer of "Attention Is All You Need" as a Hugging Face model.

Importing the package registers its models with the Auto classes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .batching import PairCollator, PairTokens, TokenBudgetBatchSampler
from .batching.schedule import learning_rate, paper_adam, paper_schedule
from .cmlm import MaskingCollator, VaswaniCmlmConfig, VaswaniCmlmForConditionalGeneration, VaswaniCmlmModel
from .config import VaswaniTransformerConfig
from .cpu.model import prepare_for_inference
from .flowseq import VaswaniFlowSeqConfig, VaswaniFlowSeqForConditionalGeneration, VaswaniFlowSeqModel
from .iterative_vae import (
    VaswaniIterativeVaeConfig,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniIterativeVaeModel,
)
from .model import VaswaniTransformerForConditionalGeneration, VaswaniTransformerModel
from .nat import VaswaniNatConfig, VaswaniNatForConditionalGeneration, VaswaniNatModel
from .parsing import (
    BracketScores,
    Leaf,
    ParsedSentence,
    Tree,
    TreeTokens,
    WellFormedTrees,
    delinearize,
    draw_tree_text,
    evaluation_tree,
    linearize,
    parse,
    read_trees,
    score_trees,
)
from .pretrained import VaswaniTransformerPreTrainedModel
from .registration import register
from .tokenizer import VaswaniTransformerTokenizer
from .translation import Hypothesis, Translation, translate

if TYPE_CHECKING:
    from .convert import ImportResult, from_fairseq, from_fsmt, from_marian, to_ctranslate2
    from .figures import (
        AttentionMaps,
        attention_maps,
        attention_page,
        draw_attention,
        draw_heat_maps,
    )
    from .parsing.figure import draw_tree

__version__ = "0.1.0"

__all__ = [
    "AttentionMaps",
    "BracketScores",
    "Hypothesis",
    "ImportResult",
    "Leaf",
    "MaskingCollator",
    "PairCollator",
    "PairTokens",
    "ParsedSentence",
    "TokenBudgetBatchSampler",
    "Translation",
    "Tree",
    "TreeTokens",
    "VaswaniCmlmConfig",
    "VaswaniCmlmForConditionalGeneration",
    "VaswaniCmlmModel",
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
    "WellFormedTrees",
    "attention_maps",
    "attention_page",
    "delinearize",
    "draw_attention",
    "draw_heat_maps",
    "draw_tree",
    "draw_tree_text",
    "evaluation_tree",
    "from_fairseq",
    "from_fsmt",
    "from_marian",
    "learning_rate",
    "linearize",
    "paper_adam",
    "paper_schedule",
    "parse",
    "prepare_for_inference",
    "read_trees",
    "score_trees",
    "to_ctranslate2",
    "translate",
]

# Each module is imported when one of its names is first used, so that importing the package stays fast.
LAZY_MODULES = {
    "convert": ("ImportResult", "from_fairseq", "from_fsmt", "from_marian", "to_ctranslate2"),
    "figures": ("AttentionMaps", "attention_maps", "attention_page", "draw_attention", "draw_heat_maps"),
    "parsing.figure": ("draw_tree",),
}
LAZY_NAMES = {name: module for module, names in LAZY_MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{LAZY_NAMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
