"""One record for each family of models, and their registration with the Auto classes and pipelines of Transformers."""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.pipelines import PIPELINE_REGISTRY

from .cmlm import VaswaniCmlmForConditionalGeneration
from .ctc import VaswaniCtcForConditionalGeneration
from .dag import VaswaniDagForConditionalGeneration
from .flowseq import VaswaniFlowSeqForConditionalGeneration
from .iterative_vae import VaswaniIterativeVaeForConditionalGeneration
from .model import VaswaniTransformerForConditionalGeneration
from .nat import VaswaniNatForConditionalGeneration
from .pipeline import TASK, VaswaniTransformerTranslationPipeline
from .tokenizer import VaswaniTransformerTokenizer


@dataclass(frozen=True)
class Family:
    """A family of models: all that the Auto classes, recipes, pages and tests know of it.

    Attributes:
        kind: its name in recipes (`model.kind`) and tests.
        model_class: its model with output projection, whose attributes name configuration and body.
        trained_by: how recipes train it, a `training.families.FamilyRecipe`, or the name of one as "module:name", since
            an installed package has no `training`.
    """

    kind: str
    model_class: type[Any]
    trained_by: Any

    @property
    def recipe(self) -> Any:
        """Return the `FamilyRecipe`."""
        return resolve_name(self.trained_by) if isinstance(self.trained_by, str) else self.trained_by


FAMILIES: dict[str, Family] = {}
"""The families by `kind`, in the order of pages and tests; the first is the default of recipes."""
OF_THIS_PACKAGE = (
    Family("autoregressive", VaswaniTransformerForConditionalGeneration, "training.families:AUTOREGRESSIVE"),
    Family("nat", VaswaniNatForConditionalGeneration, "training.families:NAT"),
    Family("ctc", VaswaniCtcForConditionalGeneration, "training.families:CTC"),
    Family("dag", VaswaniDagForConditionalGeneration, "training.families:DAG"),
    Family("cmlm", VaswaniCmlmForConditionalGeneration, "training.families:CMLM"),
    Family("iterative_vae", VaswaniIterativeVaeForConditionalGeneration, "training.families:ITERATIVE_VAE"),
    Family("flowseq", VaswaniFlowSeqForConditionalGeneration, "training.families:FLOWSEQ"),
)


def register_family(family: Family) -> None:
    """Add a family to `FAMILIES`, and its configuration, body and model to the Auto classes; idempotent."""
    FAMILIES[family.kind] = family
    config: Any = family.model_class.config_class
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, family.model_class.body_class, exist_ok=True)
    AutoModelForSeq2SeqLM.register(config, family.model_class, exist_ok=True)
    AutoTokenizer.register(config, fast_tokenizer_class=VaswaniTransformerTokenizer, exist_ok=True)


def register() -> None:
    """Register every model family with the Auto classes, and the task with `pipeline()`; idempotent."""
    for family in OF_THIS_PACKAGE:
        register_family(family)
    if PIPELINE_REGISTRY.supported_tasks.get(TASK, {}).get("impl") is not VaswaniTransformerTranslationPipeline:
        PIPELINE_REGISTRY.register_pipeline(
            TASK, VaswaniTransformerTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
        )
