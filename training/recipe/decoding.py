"""The generation settings of a recipe."""

from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from training.recipe.fields import Recipe


def decoding_config(model: PreTrainedModel, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Return a new GenerationConfig with the recipe's search; editing one in place loses the paper's settings."""
    return make_config(
        model, recipe, {name: getattr(recipe.decoding, name) for name in recipe.family.decoding}, tokenizer
    )


def evaluation_config(model: PreTrainedModel, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Return the same for the search of evaluations during training, which is faster."""
    search = recipe.family.evaluation_search(vars(recipe.decoding), vars(recipe.training))
    return make_config(model, recipe, search, tokenizer)


def make_config(
    model: PreTrainedModel, recipe: Recipe, search: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """Return a GenerationConfig with these settings and a model's token ids."""
    if search.get("num_beams") == 1:  # greedy decoding weighs no lengths; this overrides the model's own setting
        search["length_penalty"] = 1.0
    if not recipe.family.is_autoregressive and tokenizer.unk_token_id is not None:  # a text would lack the word
        search["suppress_tokens"] = [tokenizer.unk_token_id]
    config: Any = model.config
    return config.make_generation_config(**search)
