"""The generation settings of a recipe."""

from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from training.recipe import Recipe


def decoding_config(model: PreTrainedModel, recipe: Recipe) -> GenerationConfig:
    """Return a new GenerationConfig with the recipe's search; editing one in place loses the paper's settings."""
    return make_config(model, {name: getattr(recipe.decoding, name) for name in recipe.kind.decoding})


def evaluation_config(model: PreTrainedModel, recipe: Recipe) -> GenerationConfig:
    """Return the same for the search of evaluations during training, which is faster."""
    return make_config(model, recipe.kind.evaluation_search(vars(recipe.decoding), vars(recipe.training)))


def make_config(model: PreTrainedModel, search: dict[str, Any]) -> GenerationConfig:
    """Return a GenerationConfig with these settings and a model's token ids."""
    if search.get("num_beams") == 1:  # greedy decoding weighs no lengths; this overrides the model's own setting
        search["length_penalty"] = 1.0
    config: Any = model.config
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        **search,
    )
