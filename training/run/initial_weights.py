"""The trained models that a run begins with or learns from: each loaded once, checked, and recorded by its digest.

`training.encoder_from` gives a model its encoder and embeddings; a teacher with fewer encoder layers gives the first
ones. `training.start_from` gives it all weights, and `training.energy_from` names ENGINE's teacher.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from training.recipe.families import AUTOREGRESSIVE, FAMILIES
from training.recipe.fields import Recipe
from training.run.checkpoints import has_trained
from training.run.distributed import RunError
from vaswani_transformer.body import ProjectedModel
from vaswani_transformer.support.checked_loading import load_config, load_model, load_tokenizer
from vaswani_transformer.support.errors import UserError
from vaswani_transformer.support.files import read_json, write_atomically
from vaswani_transformer.translation.loading import LoadOptions

MODELS_FILE = "models.json"
FIELDS = ("encoder_from", "start_from", "energy_from")
ENCODER_FIELDS = (
    *("d_model", "d_ff", "num_heads", "head_dim", "value_head_dim", "activation_function"),
    *("position_embedding", "max_position_embeddings", "attention_bias", "scale_embedding"),
    *("attention_window", "layer_norm_eps"),
)
# They change no weight's shape, and a further training may have others.
FREE_FIELDS = {
    *("dropout", "attention_dropout", "activation_dropout", "latent_dropout"),
    *("word_dropout", "label_smoothing", "length_loss_weight", "kl_weights", "gumbel_temperature", "use_cache"),
    *("latent_sample", "hint"),
}


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, and the field of the recipe that names its folder, or its name on the Hub."""

    field: str
    name: str
    model: ProjectedModel

    @cached_property
    def digest(self) -> str:
        return LoadOptions(self.name).digest()

    def fit_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Drop the model's entries beyond its tokenizer, whose tokens and ids must be the run's, but for `<mask>`."""
        theirs, ours = load_tokenizer(self.name).get_vocab(), tokenizer.get_vocab()
        if ours != theirs | ({} if (mask := tokenizer.mask_token) is None else {str(mask): ours[str(mask)]}):
            raise UserError(
                f"{self.field}: the vocabulary of {self.name}, {len(theirs)} entries, is not the run's, {len(ours)} "
                f"entries; give --tokenizer.path={self.name} and another --output_dir."
            )
        if (entries := max(len(theirs), 1 + max(theirs.values()))) < self.model.config.vocab_size:
            self.model.resize_token_embeddings(entries)


def load_trained_models(recipe: Recipe, folder: Path) -> dict[str, TrainedModel]:
    """Return the models that a recipe names, by its field; a run with a checkpoint needs ENGINE's teacher only."""
    models = {}
    for field in FIELDS[2:] if has_trained(folder) else FIELDS:
        if (name := getattr(recipe.training, field)) is not None:
            family = recipe.family if field == "start_from" else FAMILIES[AUTOREGRESSIVE]
            config = load_config(name, family.config_class.model_type, f"training.{field}")
            if field != "energy_from":
                check_shape(recipe, field, name, config)
            models[field] = TrainedModel(f"training.{field}", name, load_model(name, family.model_class))
    return models


def check_shape(recipe: Recipe, field: str, name: str, config: PreTrainedConfig) -> None:
    """Check that the weights that a run takes from a model with this configuration fit the recipe's model."""
    what, names = "model", [each for each in recipe.family.model_fields if each not in FREE_FIELDS]
    ids = {"mask_token_id": config.mask_token_id} if field == "start_from" and recipe.family.needs_mask else {}
    expected = recipe.model_config(vocab_size=config.vocab_size, **ids)
    if field == "encoder_from":
        is_learned = expected.position_embedding == "learned"
        what, names = "teacher", [each for each in ENCODER_FIELDS if is_learned or each != "max_position_embeddings"]
        if config.encoder_layers > expected.encoder_layers:
            raise UserError(
                f"training.{field}: {name} has {config.encoder_layers} encoder layers, and the recipe only "
                f"{expected.encoder_layers}; set model.encoder_layers, or name another teacher."
            )
    if differing := [each for each in names if getattr(config, each) != getattr(expected, each)]:
        differences = (
            f"{each} {getattr(config, each)}, and the recipe {getattr(expected, each)}" for each in differing
        )
        raise UserError(
            f"training.{field}: {name} has {'; '.join(differences)}; set model.{', model.'.join(differing)}, or name "
            f"another {what}."
        )


def copy_weights(models: dict[str, TrainedModel], model: ProjectedModel) -> None:
    """Give a new model its initial weights, and forget those; an added `<mask>` keeps its random embedding."""
    if (start := models.pop("start_from", None)) is not None:
        model.load_state_dict(start.model.state_dict())
    if (teacher := models.pop("encoder_from", None)) is not None:
        taught = teacher.model.model
        weights = {name: weight for name, weight in taught.encoder.state_dict().items() if "embed_tokens" not in name}
        model.model.encoder.load_state_dict(weights, strict=False)
        with torch.no_grad():
            model.model.shared.weight[: len(taught.shared.weight)] = taught.shared.weight


def recorded_models(folder: Path) -> dict[str, str]:
    """Return the digests that the run in a folder has recorded, by the recipe's field; nothing where it names none."""
    path = folder / MODELS_FILE
    return read_json(path, "restore it, or give another --output_dir.") if path.exists() else {}


def record_models(models: dict[str, TrainedModel], folder: Path) -> None:
    """Write the digests of a run's models, as long as it has no checkpoint made from others."""
    if has_trained(folder):
        return
    digests = {each.field: each.digest for each in models.values()}
    if digests != recorded_models(folder):
        write_atomically(folder / MODELS_FILE, json.dumps(digests, indent=2))


def check_same_energy(models: dict[str, TrainedModel], folder: Path) -> None:
    """Check that a run with a checkpoint resumes under the teacher whose energy it began with."""
    teacher = models.get("energy_from")
    if teacher is None or not has_trained(folder) or (before := recorded_models(folder).get(teacher.field)) is None:
        return
    if teacher.digest != before:
        raise RunError(
            f"{teacher.field}: {teacher.name} is not the teacher that the run in {folder} was begun with; got digest "
            f"{teacher.digest[:12]}, expected {before[:12]}. Restore it, or give another --output_dir."
        )
