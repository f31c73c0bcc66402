"""The model of a run: new, or initialized with trained weights, whose licenses and training pairs the run records."""

import contextlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from training.checkpoints import CHECKPOINTS
from training.data import Learned, fingerprint, load_pairs
from training.machine import uses_cpu
from training.recipe import HubData, Recipe, read_yaml, recipe_of
from training.vocabulary import starting_entries
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.model import ProjectedModel
from vaswani_transformer.support.command import UserError
from vaswani_transformer.support.files import read_json
from vaswani_transformer.support.loading import load_model, load_tokenizer

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=ProjectedModel)
RECIPE = "recipe.yaml"
DATA = "data.json"

ENCODER_SHAPE = (
    "d_model", "d_ff", "num_heads", "head_dim", "value_head_dim", "activation_function", "position_embedding",
    "attention_bias", "attention_window", "scale_embedding", "layer_norm_eps",
)  # fmt: skip
"""Fields of the configuration that must agree before encoder and embeddings are copied."""
MODEL_SHAPE = (*ENCODER_SHAPE, "encoder_layers", "decoder_layers", "tie_word_embeddings", "decoder_start_token_id")
"""Fields that must agree before all weights are copied."""
STARTS = {"start_from": "the weights", "encoder_from": "the encoder and embeddings"}
"""Fields of the group `training` that name a trained model, and what a run takes from it."""


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, is_new: bool = True) -> ProjectedModel:
    """Return the model of a run; in a new run it starts from the recipe's trained weights, if it names any."""
    # The tokenizer decides the vocabulary.
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "pad_token_id", "eos_token_id")}
    if recipe.family.recipe.needs_mask:
        ids["mask_token_id"] = tokenizer.mask_token_id
    entries = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))  # ids may have gaps

    # A resumed run gets its weights from a checkpoint.
    set_seed(recipe.seed)
    model = recipe.family.model_class(recipe.model_config(vocab_size=entries, **ids))
    for field in starts(recipe) if is_new else ():
        copy_start(model, recipe, tokenizer, field)

    # The recipe decides how the model computes and decodes.
    model.generation_config = recipe.generation_config(model.config, tokenizer)
    training = recipe.training
    attention = training.attention
    if attention == "auto":
        attention = "eager" if uses_cpu() else "sdpa"
    model.set_attn_implementation(attention)
    if training.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable()
    return model


def starts(recipe: Recipe) -> dict[str, str]:
    """Return the trained models that a run started from, by field."""
    named = {field: getattr(recipe.training, field) for field in STARTS}
    return {field: name for field, name in named.items() if name is not None}


def start_licenses(recipe: Recipe) -> dict[str, str]:
    """Return the licenses that the cards in the folders of the start models state, by field."""
    licenses = {}
    for field, name in starts(recipe).items():
        card = Path(name) / "README.md"
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        row = re.search(r"^\| License \| (.+) \|$", text, re.MULTILINE)
        license = row or re.search(r"^license: *(\S+)", text, re.MULTILINE)
        if license is not None:
            licenses[field] = license[1]
    return licenses


def copy_start(model: ProjectedModel, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, field: str) -> None:
    """Copy the weights of the trained model that a `field` of the recipe's group `training` names."""
    name = getattr(recipe.training, field)
    only_encoder = field == "encoder_from"
    trained_class = VaswaniTransformerForConditionalGeneration if only_encoder else recipe.family.model_class
    if not recipe.training.new_vocabulary:
        trained = load_trained(name, trained_class, tokenizer, f"training.{field}")
        copy_weights(model, trained, f"training.{field}", only_encoder)
        return
    entries, common = starting_entries(tokenizer, load_tokenizer(name))
    logger.info(
        "training.%s: %s of %s tokens are in the vocabulary of %s; %s others start from its tokens for their texts.",
        *(field, f"{common:,}", f"{len(tokenizer):,}", name, f"{len(entries) - common:,}"),
    )
    copy_weights(model, load_model(name, trained_class), f"training.{field}", only_encoder, entries)


def load_trained(name: str, model_class: type[Model], tokenizer: PreTrainedTokenizerBase, field: str) -> Model:
    """Load the trained model that a recipe's `field` names.

    Raises:
        UserError: its vocabulary differs from the run's by more than an added `<mask>`.
    """
    trained = load_model(name, model_class)
    expected = dict(load_tokenizer(name).get_vocab())
    vocabulary = tokenizer.get_vocab()
    if tokenizer.mask_token in vocabulary:
        expected[tokenizer.mask_token] = vocabulary[tokenizer.mask_token]
    if vocabulary != expected:
        raise UserError(
            f"{field}: the vocabulary of {name} differs from the run's; set --tokenizer.path={name}, or "
            "--training.new_vocabulary=true for the run's own, and choose a different --output_dir."
        )
    return trained


def copy_weights(
    model: PreTrainedModel,
    trained: PreTrainedModel,
    field: str,
    only_encoder: bool = False,
    entries: dict[int, list[int]] | None = None,
) -> None:
    """Copy the weights of a trained model of the same shape, or only those of its encoder and embeddings.

    The embeddings of common tokens are copied; an added `<mask>` keeps its random embedding. `entries` has the ids in
    another vocabulary whose mean each token gets; the others keep their random embeddings. A deeper encoder keeps its
    random layers above those of the trained one.

    Raises:
        UserError: the models differ in a field of the configuration that decides the shape, or in their weights.
    """
    shape = ENCODER_SHAPE if only_encoder else MODEL_SHAPE
    differing = [name for name in shape if getattr(trained.config, name) != getattr(model.config, name)]
    if differing:
        values = "; ".join(f"{name} {getattr(trained.config, name)}" for name in differing)
        raise UserError(f"{field}: {trained.name_or_path} has {values}; set model.{', model.'.join(differing)}.")

    fix = "write the fields of its config.json that differ into the recipe's group model."
    trained_state = trained.state_dict()
    further = range(trained.config.encoder_layers, model.config.encoder_layers)
    further_layers = tuple(f"model.encoder.layers.{index}." for index in further)
    for name, weight in model.state_dict().items():
        is_of_encoder = name.startswith(("model.encoder.", "model.shared."))
        if (only_encoder and not is_of_encoder) or name.startswith(further_layers):
            continue
        if name not in trained_state:
            raise UserError(f"{field}: {trained.name_or_path} does not have the weight {name}; {fix}")
        trained_weight = trained_state[name]

        # In tables of tokens, which may differ by `<mask>`, and of positions a row means the same in both models.
        has_row_per_token = weight.shape[:1] == (model.config.vocab_size,)
        trained_has_row_per_token = trained_weight.shape[:1] == (trained.config.vocab_size,)
        is_of_tokens = has_row_per_token and trained_has_row_per_token
        if is_of_tokens and entries is not None:
            for index, ids in entries.items():
                weight[index] = trained_weight[ids].mean(0)
        elif is_of_tokens or name.endswith("positions.table.weight"):
            rows = min(len(weight), len(trained_weight))
            weight[:rows] = trained_weight[:rows]
        elif weight.shape == trained_weight.shape:
            weight.copy_(trained_weight)
        else:
            got = tuple(trained_weight.shape)
            raise UserError(f"{field}: {name} has shape {got}, expected {tuple(weight.shape)}; {fix}")


# The pairs that a model was trained on


def run_of(model: str) -> Path:
    """Return the folder with the recipe of a model: its own, or the run's if the model is a checkpoint."""
    folder = Path(model).absolute()
    return folder.parents[1] if folder.parent.name == CHECKPOINTS else folder


def learned_pairs(models: Iterable[str], downloaded: Recipe | None = None) -> Learned:
    """Return the training pairs of runs in folders, and of the runs that these started from.

    Pairs are not known if they are missing, differ from the run's data.json, or would be downloaded and are not those
    of the recipe `downloaded`. Those of a model without a recipe are not known either.
    """
    runs = [run_of(model) for model in models]
    known = []
    for run in runs:  # to which the loop adds
        with contextlib.suppress(UserError):
            recipe = recipe_of(read_yaml(run / RECIPE))
            runs += [start for start in map(run_of, starts(recipe).values()) if start not in runs]
            if isinstance(recipe.data, HubData) and (downloaded is None or recipe.data != downloaded.data):
                continue
            pairs = load_pairs(recipe, ["train"])["train"]
            record = read_json(run / DATA, "restore it.") if (run / DATA).exists() else {}
            if record.get("train") in (None, fingerprint(pairs)):
                known.append(pairs)
    return Learned(known, len(known) == len(runs))
