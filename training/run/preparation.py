"""What a run needs before its first step: models and pairs of others, its data as token ids, and its tokenizer."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState
from datasets import DatasetDict
from transformers import PreTrainedTokenizerBase

from training.data.distilled import Distillation, open_distilled
from training.data.pairs import load_pairs
from training.data.tokenizing import tokenize
from training.recipe.fields import Recipe
from training.recipe.machine import trains_slowly_in_bf16
from training.run.checkpoints import run_write_errors
from training.run.checks import check_model_trains, check_pairs, config_for_tokenizer
from training.run.folder import DATA_FILE, RunFolder, extend_run, initialize_run
from training.run.initial_weights import TrainedModel, check_same_energy, load_trained_models, record_models
from vaswani_transformer.support.errors import UserError
from vaswani_transformer.translation.loading import LoadOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """What a run takes from other runs: models by the recipe's field, and a teacher's pairs."""

    models: dict[str, TrainedModel]
    distillation: Distillation | None


@dataclass(frozen=True)
class Prepared:
    """A run that can train: its folder, its inputs, its pairs as text and as token ids, and its tokenizer."""

    folder: Path
    inputs: Inputs
    pairs: DatasetDict
    encoded: DatasetDict
    tokenizer: PreTrainedTokenizerBase


def load_inputs(recipe: Recipe, folder: Path) -> Inputs:
    """Return a run's inputs, after every check of the recipe that needs no data."""
    check_model_trains(recipe)
    models = load_trained_models(recipe, folder)
    distillation = None if recipe.data.distilled is None else open_distilled(recipe.data)
    if distillation is not None and not (folder / DATA_FILE).exists():  # later the fingerprints in it decide
        check_distilling_teacher(recipe, distillation, models)
    if recipe.training.precision == "bf16" and trains_slowly_in_bf16():
        logger.warning(
            "training.precision: this CPU trains faster in fp32; got bf16. Give a new run --training.precision=fp32."
        )
    return Inputs(models, distillation)


def check_distilling_teacher(recipe: Recipe, distillation: Distillation, models: dict[str, TrainedModel]) -> None:
    """Check that the teacher that a recipe names, or else the one of its encoder, wrote the distilled pairs."""
    named, teacher = recipe.data.teacher or recipe.training.encoder_from, distillation.record["teacher"]
    if named is None:
        return
    loaded = {each.name: each for each in models.values()}.get(named)
    if (LoadOptions(named).digest() if loaded is None else loaded.digest) != teacher["digest"]:
        raise UserError(
            f"data.distilled: {distillation.folder} was written by another teacher; got {teacher['name']}, expected "
            f"the present model in {named}. Distill that model, or set data.teacher to the one that wrote it."
        )


def prepare(
    recipe: Recipe,
    folder: RunFolder,
    inputs: Inputs,
    check_more: Callable[[DatasetDict, PreTrainedTokenizerBase], None] | None = None,
) -> Prepared:
    """Return a run that can train, whose folder, which is locked, has recipe, fingerprints and tokenizer.

    If the data or the tokenizer cannot be used, or `check_more` raises an error, a new run leaves nothing there.
    """
    path, models, state = folder.path, inputs.models, PartialState()
    with state.local_main_process_first():
        pairs = load_pairs(recipe.data, inputs.distillation)
    state.wait_for_everyone()  # every process checks the folder before one writes
    tokenizer, written = initialize_run(recipe, path, pairs, inputs.distillation)
    try:
        with state.local_main_process_first():
            encoded = tokenize(pairs, tokenizer, recipe.data)
        for model in models.values():
            model.check_vocabulary(tokenizer)
        check_same_energy(models, path)
        check_pairs(recipe, config_for_tokenizer(recipe, tokenizer), encoded, folder.before)
        if check_more is not None:
            check_more(encoded, tokenizer)
    except UserError:
        for file in written:
            file.unlink()
        raise
    state.wait_for_everyone()  # every process reads the recipe before one changes it
    if state.is_main_process:
        with run_write_errors(path):
            if folder.changed:
                extend_run(recipe, path)
            record_models(models, path)
    return Prepared(path, inputs, pairs, encoded, tokenizer)
