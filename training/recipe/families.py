"""The kinds of model that a recipe trains: the classes of each, its search in evaluations, and the work of a step.

A further kind is an entry of `FAMILIES`, with its function in `training.recipe.flops` and its fields in
`training.recipe.fields`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from training.recipe.flops import autoregressive_flops, cmlm_flops, flowseq_flops, iterative_vae_flops, nat_flops
from vaswani_transformer import (
    VaswaniCmlmForConditionalGeneration,
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
)

AUTOREGRESSIVE = "autoregressive"
RecipeModel = (
    VaswaniTransformerForConditionalGeneration
    | VaswaniNatForConditionalGeneration
    | VaswaniCmlmForConditionalGeneration
    | VaswaniIterativeVaeForConditionalGeneration
    | VaswaniFlowSeqForConditionalGeneration
)
TOKENIZER_SETS = {"vocab_size", "bos_token_id", "pad_token_id", "eos_token_id", "mask_token_id"}
NOT_IN_RECIPES = TOKENIZER_SETS | {"is_encoder_decoder"}


@dataclass(frozen=True)
class Family:
    """A kind of model.

    model_class: its complete model.
    evaluation: its search in evaluations during training: a setting of `decoding`, and the value or the field of
        `training` with it.
    flops: the floating-point operations of training such a model on a batch, forward and backward.
    needs_mask: whether the vocabulary needs `<mask>`.
    length_limits: the fields of `model` that bound the lengths which it can predict: the smallest and the largest
        difference of target and source, or the longest target.
    has_idle_weights: whether some steps train only some of its weights.
    defaults: the values of fields of `training` that are None in a recipe.
    log_parts: what the log has of the model's output besides the loss: its name there, and its name in the log. One
        that has a value a layer ends in the layer's number in the log.
    """

    model_class: type[Any]
    evaluation: dict[str, str | int]
    flops: Callable[..., int]
    needs_mask: bool = False
    length_limits: tuple[str, ...] = ()
    has_idle_weights: bool = False
    defaults: dict[str, int] = field(default_factory=dict)
    log_parts: dict[str, str] = field(default_factory=dict)

    @property
    def config_class(self) -> type[VaswaniTransformerConfig]:
        return self.model_class.config_class

    @property
    def is_autoregressive(self) -> bool:
        """Whether it predicts one token after the other; else all at once, from lengths that it predicts first."""
        return self.model_class.is_autoregressive

    @property
    def model_fields(self) -> dict[str, Any]:
        """The fields of `model` in a recipe, with their types: those of the configuration, inherited ones first."""
        classes = [one for one in reversed(self.config_class.__mro__) if issubclass(one, VaswaniTransformerConfig)]
        hints = {name: hint for one in classes for name, hint in one.__annotations__.items()}
        return {name: hint for name, hint in hints.items() if name not in NOT_IN_RECIPES}


FAMILIES = {
    AUTOREGRESSIVE: Family(
        model_class=VaswaniTransformerForConditionalGeneration,
        evaluation={"num_beams": "evaluation_beams"},
        flops=autoregressive_flops,
    ),
    "nat": Family(
        model_class=VaswaniNatForConditionalGeneration,
        evaluation={"length_beam_size": 1},
        flops=nat_flops,
        length_limits=("min_length_difference", "max_length_difference"),
        log_parts={"length_loss": "length_loss", "accuracy": "glancing_accuracy"},
    ),
    "cmlm": Family(
        model_class=VaswaniCmlmForConditionalGeneration,
        evaluation={"num_iterations": "evaluation_iterations", "length_beam_size": 1},
        flops=cmlm_flops,
        needs_mask=True,
        length_limits=("max_target_length",),
        log_parts={"length_loss": "length_loss"},
    ),
    "iterative_vae": Family(
        model_class=VaswaniIterativeVaeForConditionalGeneration,
        evaluation={"length_beam_size": 1},
        flops=iterative_vae_flops,
        length_limits=("min_length_difference", "max_length_difference"),
        defaults={"kl_warmup_steps": 30_000},
        log_parts={
            "length_loss": "length_loss",
            "accuracy": "glancing_accuracy",
            "bound": "bound",
            "kl_loss": "kl_loss",
            "layer_losses": "layer_loss",
            "layer_kl": "layer_kl",
            "prior_weights": "prior_weight",
            "hint_weights": "hint_weight",
        },
    ),
    "flowseq": Family(
        model_class=VaswaniFlowSeqForConditionalGeneration,
        evaluation={"length_beam_size": 1, "num_latent_samples": 1, "latent_temperature": 0},
        flops=flowseq_flops,
        length_limits=("min_length_difference", "max_length_difference"),
        has_idle_weights=True,
        defaults={"kl_warmup_steps": 10_000},
        log_parts={
            "token_loss": "token_loss",
            "length_loss": "length_loss",
            "kl_loss": "kl_loss",
            "log_determinant": "log_determinant",
        },
    ),
}


def family_of(config: PreTrainedConfig) -> Family | None:
    """Return the kind of a model by its configuration; None for a model of another package."""
    return next((kind for kind in FAMILIES.values() if kind.config_class.model_type == config.model_type), None)
