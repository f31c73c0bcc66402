"""Start a model from the weights of a trained one of the same kind (`training.start_from`)."""

from pathlib import Path
from typing import cast

from transformers import AutoConfig, PreTrainedTokenizerBase

from training.encoder import check_same_vocabulary, has_trained
from training.recipe import Recipe
from vaswani_transformer.body import ProjectedModel
from vaswani_transformer.checked_loading import check_model_name, load_errors, load_model
from vaswani_transformer.errors import UserError

# They change no weight's shape, and a further training may have others.
FREE_FIELDS = {
    *("dropout", "attention_dropout", "activation_dropout", "latent_dropout"),
    *("label_smoothing", "length_loss_weight", "kl_weights", "gumbel_temperature", "use_cache"),
}


def is_needed(recipe: Recipe, folder: Path) -> bool:
    """Return whether the run in a folder starts from a trained model; one that resumes a checkpoint needs none."""
    return recipe.training.start_from is not None and not has_trained(folder)


def check_start(recipe: Recipe, folder: Path) -> None:
    """Check, before the data is read, that the model to start from has the recipe's kind and shape.

    Raises:
        UserError: it cannot be loaded, is of another kind, or differs in a field of the configuration.
    """
    if not is_needed(recipe, folder):
        return
    name = cast(str, recipe.training.start_from)
    check_model_name(name)
    with load_errors(name):
        trained = AutoConfig.from_pretrained(name)
    if trained.model_type != (own_type := recipe.kind.config_class.model_type):
        raise UserError(
            f"training.start_from: {name} holds a model of type {trained.model_type}, expected {own_type}; name a "
            "model of the recipe's kind, or set model.kind."
        )
    tokens = {"mask_token_id": trained.mask_token_id} if recipe.kind.needs_mask else {}
    own = recipe.model_config(vocab_size=trained.vocab_size, **tokens)
    for field in recipe.kind.model_fields:
        if field not in FREE_FIELDS and (theirs := getattr(trained, field)) != (ours := getattr(own, field)):
            raise UserError(
                f"training.start_from: {name} has {field} {theirs}, and the recipe {ours}; set model.{field}, or name "
                "another model."
            )


def check_start_tokenizer(recipe: Recipe, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the vocabulary of the model to start from is the run's.

    Raises:
        UserError: it is another one.
    """
    if is_needed(recipe, folder):
        check_same_vocabulary("training.start_from", cast(str, recipe.training.start_from), tokenizer)


def load_start(model: ProjectedModel, recipe: Recipe, folder: Path) -> None:
    """Copy all weights of the trained model into a new one.

    Raises:
        UserError: they cannot be loaded.
    """
    if is_needed(recipe, folder):
        trained = load_model(cast(str, recipe.training.start_from), type(model))
        model.load_state_dict(trained.state_dict())
