"""The generation settings of a recipe."""

from transformers import GenerationConfig

from training.recipe import Recipe
from vaswani_transformer import VaswaniTransformerForConditionalGeneration


def decoding_config(
    model: VaswaniTransformerForConditionalGeneration, recipe: Recipe, num_beams: int | None = None
) -> GenerationConfig:
    """Return a new GenerationConfig with the recipe's search; editing one in place loses the paper's settings."""
    search = vars(recipe.decoding) | ({} if num_beams is None else {"num_beams": num_beams})
    if search["num_beams"] == 1:  # greedy decoding weighs no lengths; this overrides the model's own setting
        search["length_penalty"] = 1.0
    return GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        pad_token_id=model.config.pad_token_id,
        eos_token_id=model.config.eos_token_id,
        decoder_start_token_id=model.config.decoder_start_token_id,
        **search,
    )
