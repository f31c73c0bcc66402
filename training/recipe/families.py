"""The kinds of model that a recipe trains: the classes of each, the fields that only some have, and the work of a step.

A further kind is an entry of `FAMILIES`, with its function in `training.recipe.flops`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, get_args

from transformers import PreTrainedConfig

from training.recipe.flops import autoregressive_flops, cmlm_flops, flowseq_flops, iterative_vae_flops, nat_flops
from training.recipe.reading import leave_out
from vaswani_transformer import (
    VaswaniCmlmConfig,
    VaswaniCmlmForConditionalGeneration,
    VaswaniFlowSeqConfig,
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeConfig,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatConfig,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
)
from vaswani_transformer.support.command_line import not_one_of
from vaswani_transformer.support.errors import UserError

AUTOREGRESSIVE = "autoregressive"
TrainedModel = (
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

    config_class, model_class: its configuration and its complete model.
    decoding: the fields of a recipe's `decoding` that it has.
    training: the fields of a recipe's `training` that it has and another kind lacks.
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

    config_class: type[VaswaniTransformerConfig]
    model_class: type[Any]
    decoding: tuple[str, ...]
    training: tuple[str, ...]
    evaluation: dict[str, str | int]
    flops: Callable[..., int]
    needs_mask: bool = False
    length_limits: tuple[str, ...] = ()
    has_idle_weights: bool = False
    defaults: dict[str, int] = field(default_factory=dict)
    log_parts: dict[str, str] = field(default_factory=dict)

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

    def evaluation_search(self, decoding: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of `decoding` by which evaluations during training search, from groups of a recipe."""
        faster = {name: training[value] if isinstance(value, str) else value for name, value in self.evaluation.items()}
        return {name: decoding[name] for name in self.decoding} | faster


FAMILIES = {
    AUTOREGRESSIVE: Family(
        config_class=VaswaniTransformerConfig,
        model_class=VaswaniTransformerForConditionalGeneration,
        decoding=("num_beams", "length_penalty", "length_penalty_type", "max_source_relative_length"),
        training=("evaluation_beams",),
        evaluation={"num_beams": "evaluation_beams"},
        flops=autoregressive_flops,
    ),
    "nat": Family(
        config_class=VaswaniNatConfig,
        model_class=VaswaniNatForConditionalGeneration,
        decoding=("length_beam_size",),
        training=("glancing", "glancing_steps"),
        evaluation={"length_beam_size": 1},
        flops=nat_flops,
        length_limits=("min_length_difference", "max_length_difference"),
        log_parts={"length_loss": "length_loss", "accuracy": "glancing_accuracy"},
    ),
    "cmlm": Family(
        config_class=VaswaniCmlmConfig,
        model_class=VaswaniCmlmForConditionalGeneration,
        decoding=("num_iterations", "length_beam_size"),
        training=("evaluation_iterations", "energy_from", "energy_inputs", "energy_outputs"),
        evaluation={"num_iterations": "evaluation_iterations", "length_beam_size": 1},
        flops=cmlm_flops,
        needs_mask=True,
        length_limits=("max_target_length",),
        log_parts={"length_loss": "length_loss"},
    ),
    "iterative_vae": Family(
        config_class=VaswaniIterativeVaeConfig,
        model_class=VaswaniIterativeVaeForConditionalGeneration,
        decoding=("length_beam_size",),
        training=("kl_scale", "kl_warmup_steps"),
        evaluation={"length_beam_size": 1},
        flops=iterative_vae_flops,
        length_limits=("min_length_difference", "max_length_difference"),
        defaults={"kl_warmup_steps": 30_000},
        log_parts={
            "length_loss": "length_loss",
            "kl_loss": "kl_loss",
            "layer_losses": "layer_loss",
            "layer_kl": "layer_kl",
            "prior_weights": "prior_weight",
            "hint_weights": "hint_weight",
        },
    ),
    "flowseq": Family(
        config_class=VaswaniFlowSeqConfig,
        model_class=VaswaniFlowSeqForConditionalGeneration,
        decoding=("length_beam_size", "num_latent_samples", "latent_temperature"),
        training=("decoder_steps", "kl_scale", "kl_warmup_steps"),
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


def family_of_recipe(tree: dict[str, Any]) -> Family:
    """Return the kind of a recipe given as a nested dictionary."""
    return FAMILIES[tree["model"].get("kind", AUTOREGRESSIVE)]


def drop_null_fields(model: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model without those whose null is no value: null leaves these at their defaults."""
    hints = FAMILIES[model.get("kind") or AUTOREGRESSIVE].model_fields | {"kind": str, "paper": str}
    return {
        name: value
        for name, value in model.items()
        if value is not None or name not in hints or NoneType in get_args(hints[name])
    }


def owners(group: str, name: str) -> list[str]:
    """Return the kinds that have a field of a recipe; all of them unless some lack it."""
    fields = {
        "decoding": {key: kind.decoding for key, kind in FAMILIES.items()},
        "training": {key: kind.training for key, kind in FAMILIES.items()},
    }.get(group, {})
    return [key for key, names in fields.items() if name in names] or list(FAMILIES)


def check_family(tree: dict[str, Any]) -> None:
    """Check that a recipe, as a nested dictionary, has a kind of model, and fields of no other kind."""
    if not isinstance(model := tree.get("model") or {}, dict):
        return  # `build` raises the error
    if (kind := model.get("kind") or AUTOREGRESSIVE) not in FAMILIES:
        raise UserError(f"model.kind: {not_one_of(kind, FAMILIES)}")
    for group in ("decoding", "training"):
        fields = tree.get(group)
        given = [name for name, value in fields.items() if value is not None] if isinstance(fields, dict) else []
        foreign = [name for name in given if kind not in owners(group, name)]
        if foreign:
            having = " or ".join(owners(group, foreign[0]))
            names = [f"{group}.{name}" for name in foreign if owners(group, name) == owners(group, foreign[0])]
            raise UserError(
                f"{', '.join(names)}: a model of kind {kind} has no such field, kind {having} has; {leave_out(names)}, "
                "or set model.kind."
            )


def drop_other_families(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe, as a nested dictionary, without the fields that its kind of model lacks."""
    kind = tree["model"].get("kind", AUTOREGRESSIVE)
    kept = {
        group: {name: value for name, value in tree[group].items() if kind in owners(group, name)}
        for group in ("decoding", "training")
    }
    model = {name: value for name, value in tree["model"].items() if (name, value) != ("kind", AUTOREGRESSIVE)}
    return tree | kept | {"model": model}
