"""The generation settings of a recipe."""

from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from training.recipe.fields import Recipe


def decoding_config(
    model: PreTrainedModel, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, in_training: bool = False
) -> GenerationConfig:
    """Return a new GenerationConfig with the recipe's search, or with the faster one of evaluations in training.

    Editing the model's own in place would lose the paper's settings.
    """
    search = recipe.evaluation_search if in_training else recipe.search
    if search.get("num_beams") == 1:  # greedy decoding weighs no lengths; this overrides the model's own setting
        search["length_penalty"] = 1.0
    if not recipe.family.is_autoregressive and tokenizer.unk_token_id is not None:  # a text would lack the word
        search["suppress_tokens"] = [tokenizer.unk_token_id]
    config: Any = model.config
    return config.make_generation_config(**search)
