"""Start a model from the weights of a trained one of the same kind (`training.start_from`)."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from training.recipe.fields import Recipe
from training.run.encoder import check_same_vocabulary, has_trained
from vaswani_transformer.body import ProjectedModel
from vaswani_transformer.support.checked_loading import load_config, load_model
from vaswani_transformer.support.errors import UserError

# They change no weight's shape, and a further training may have others.
FREE_FIELDS = {
    *("dropout", "attention_dropout", "activation_dropout", "latent_dropout"),
    *("word_dropout", "label_smoothing", "length_loss_weight", "kl_weights", "gumbel_temperature", "use_cache"),
}


def model_to_start_from(recipe: Recipe, folder: Path) -> str | None:
    """Return the trained model whose weights the run in a folder starts with; None if it resumes a checkpoint."""
    return None if has_trained(folder) else recipe.training.start_from


def check_start(recipe: Recipe, folder: Path) -> None:
    """Check, before the data is read, that the model to start from has the recipe's kind and shape."""
    if (name := model_to_start_from(recipe, folder)) is None:
        return
    trained = load_config(name, recipe.family.config_class.model_type, "training.start_from")
    tokens = {"mask_token_id": trained.mask_token_id} if recipe.family.needs_mask else {}
    expected = recipe.model_config(vocab_size=trained.vocab_size, **tokens)
    for field in recipe.family.model_fields:
        if field not in FREE_FIELDS and (theirs := getattr(trained, field)) != (ours := getattr(expected, field)):
            raise UserError(
                f"training.start_from: {name} has {field} {theirs}, and the recipe {ours}; set model.{field}, or name "
                "another model."
            )
    load_model(name, recipe.family.model_class)  # only to check its weights


def check_start_tokenizer(recipe: Recipe, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the vocabulary of the model to start from is the run's."""
    if (name := model_to_start_from(recipe, folder)) is not None:
        check_same_vocabulary("training.start_from", name, tokenizer)


def load_start(model: ProjectedModel, recipe: Recipe, folder: Path) -> None:
    """Copy all weights of the trained model into a new one."""
    if (name := model_to_start_from(recipe, folder)) is not None:
        model.load_state_dict(load_model(name, type(model)).state_dict())
