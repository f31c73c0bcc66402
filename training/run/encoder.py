"""Start a model from the encoder and the embeddings of a teacher (`training.encoder_from`).

A teacher with fewer encoder layers gives the first ones.
"""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from training.recipe.fields import Recipe
from training.run.checkpoints import last_checkpoint
from training.run.folder import TRAINED_STATE
from vaswani_transformer import VaswaniTransformerConfig, VaswaniTransformerForConditionalGeneration
from vaswani_transformer.body import ProjectedModel
from vaswani_transformer.support.checked_loading import load_config, load_model, load_tokenizer
from vaswani_transformer.support.errors import UserError

SHAPE = (
    *("d_model", "d_ff", "num_heads", "head_dim", "value_head_dim", "activation_function"),
    *("position_embedding", "max_position_embeddings", "attention_bias", "scale_embedding"),
    *("attention_window", "layer_norm_eps"),
)


def has_trained(folder: Path) -> bool:
    """Return whether the run in a folder has weights to resume."""
    return last_checkpoint(folder) is not None or (folder / TRAINED_STATE).exists()


def teacher_to_start_from(recipe: Recipe, folder: Path) -> str | None:
    """Return the teacher whose encoder the run in a folder starts with; None if it resumes a checkpoint."""
    return None if has_trained(folder) else recipe.training.encoder_from


def check_encoder(recipe: Recipe, folder: Path) -> None:
    """Check, before the data is read, that the teacher is autoregressive and its encoder's layers fit the model's."""
    if (name := teacher_to_start_from(recipe, folder)) is None:
        return
    teacher = load_config(name, VaswaniTransformerConfig.model_type, "training.encoder_from")
    expected = recipe.model_config(vocab_size=teacher.vocab_size)
    if teacher.encoder_layers > expected.encoder_layers:
        raise UserError(
            f"training.encoder_from: {name} has {teacher.encoder_layers} encoder layers, and the recipe only "
            f"{expected.encoder_layers}; set model.encoder_layers, or name another teacher."
        )
    for field in SHAPE:
        is_unused = field == "max_position_embeddings" and expected.position_embedding != "learned"
        if not is_unused and (theirs := getattr(teacher, field)) != (ours := getattr(expected, field)):
            raise UserError(
                f"training.encoder_from: {name} has {field} {theirs}, and the recipe {ours}; set model.{field}, or "
                "name another teacher."
            )
    load_model(name, VaswaniTransformerForConditionalGeneration)  # only to check its weights


def check_encoder_tokenizer(recipe: Recipe, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the teacher's vocabulary is the run's."""
    if (name := teacher_to_start_from(recipe, folder)) is not None:
        check_same_vocabulary("training.encoder_from", name, tokenizer)


def check_same_vocabulary(field: str, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that every token of a model has the same id in the run's vocabulary, and no other token is there."""
    theirs, ours = load_tokenizer(name).get_vocab(), tokenizer.get_vocab()
    if ours != theirs | ({} if (mask := tokenizer.mask_token) is None else {str(mask): ours[str(mask)]}):
        raise UserError(
            f"{field}: the vocabulary of {name}, {len(theirs)} entries, is not the run's, {len(ours)} "
            f"entries; give --tokenizer.path={name} and another --output_dir."
        )


def load_encoder(model: ProjectedModel, recipe: Recipe, folder: Path) -> None:
    """Copy the teacher's encoder and embeddings into a new model; an added `<mask>` keeps its random embedding."""
    if (name := teacher_to_start_from(recipe, folder)) is None:
        return
    taught = load_model(name, VaswaniTransformerForConditionalGeneration).model
    weights = {name: weight for name, weight in taught.encoder.state_dict().items() if "embed_tokens" not in name}
    model.model.encoder.load_state_dict(weights, strict=False)
    with torch.no_grad():
        model.model.shared.weight[: len(taught.shared.weight)] = taught.shared.weight
