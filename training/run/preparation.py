"""What a run has before its first step: models and pairs of others, its pairs as token ids, its tokenizer and files."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import DatasetDict
from transformers import PreTrainedTokenizerBase

from training.data.distilled import Distillation, open_distilled
from training.data.pairs import load_pairs
from training.data.sources import prepared_name
from training.data.tokenizing import Counts, count_unknown, report_unknown, tokenize
from training.data.vocabulary import make_tokenizer
from training.recipe.fields import Recipe, to_dict
from training.recipe.machine import trains_slowly_in_bf16
from training.report.results import RESULTS, RESULTS_FIX, fingerprints
from training.run.checkpoints import LOCK, RECIPE, STATE, has_ended, last_checkpoint, run_write_errors
from training.run.checks import check_model_trains, check_pairs, config_for_tokenizer
from training.run.distributed import RunError
from training.run.folder import RunFolder
from training.run.initial_weights import TrainedModel, check_same_energy, load_trained_models, record_models
from vaswani_transformer.support.checked_loading import load_tokenizer
from vaswani_transformer.support.errors import UserError
from vaswani_transformer.support.files import PARTIAL, read_json, staged_files, write_atomically
from vaswani_transformer.translation.loading import LoadOptions

logger = logging.getLogger(__name__)
DATA_FILE = "data.json"  # fingerprints of the data at the start of the run
TOKENIZER = "tokenizer_config.json"  # the file that every tokenizer has, the last one of a new run


@dataclass(frozen=True)
class Inputs:
    """What a run takes from others: models by the recipe's field, a teacher's pairs, and a public set's name."""

    models: dict[str, TrainedModel]
    distillation: Distillation | None
    source: str | None


@dataclass(frozen=True)
class Prepared:
    """A run that can train: its folder, its inputs, its pairs as text and as token ids, and its tokenizer.

    tokens: of each split, the number of its tokens, and how many of them are unknown.
    """

    folder: Path
    inputs: Inputs
    pairs: DatasetDict
    encoded: DatasetDict
    tokenizer: PreTrainedTokenizerBase
    tokens: dict[str, Counts]


def load_inputs(recipe: Recipe, folder: Path) -> Inputs:
    """Return a run's inputs, after every check of the recipe that needs no data."""
    check_model_trains(recipe)
    models = load_trained_models(recipe, folder)
    distillation = None if recipe.data.distilled is None else open_distilled(recipe.data)
    if distillation is not None and not (folder / DATA_FILE).exists():  # later the fingerprints in it decide
        check_distilling_teacher(recipe, distillation, models)
    if recipe.training.precision == "bf16" and trains_slowly_in_bf16():
        logger.warning(
            "training.precision: this machine trains faster in fp32; got bf16. Give a new run "
            "--training.precision=fp32."
        )
    if (written := recipe.training.max_checkpoints) < (recipe.training.average_last or 0):
        logger.warning(
            "training.average_last: the run writes too few checkpoints; got %d in %d steps, expected at least %d. The "
            "mean will be over all, the first ones included; lower it, or training.checkpoint_steps.",
            *(written, recipe.training.steps, recipe.training.average_last),
        )
    return Inputs(models, distillation, prepared_name(recipe.data.path))


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


def write_recipe(recipe: Recipe, folder: Path) -> None:
    write_atomically(folder / RECIPE, yaml.safe_dump(to_dict(recipe), allow_unicode=True, sort_keys=False))


def extend_run(recipe: Recipe, folder: Path) -> None:
    """Give a run the recipe's limits.

    If the run had finished, its model, tokenizer and results are first copied to `finished-STEPS`.
    """
    if (results := folder / RESULTS).exists():
        kept = folder / f"finished-{read_json(results, RESULTS_FIX, steps=int)['steps']}"
        if not kept.exists():
            partial = kept.with_name(f"{kept.name}{PARTIAL}")
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
            with run_write_errors(kept):
                partial.mkdir()
                for path in [path for path in folder.iterdir() if path.is_file() and path.name != LOCK]:
                    shutil.copy2(path, partial)
                partial.rename(kept)
        results.unlink()
    (folder / STATE).unlink(missing_ok=True)
    write_recipe(recipe, folder)


def check_same_data(folder: Path, present: dict[str, dict[str, Any]]) -> None:
    """Check that the run in a folder, if there is one, started with data of the present fingerprints."""
    if not ((folder / DATA_FILE).exists() and (folder / TOKENIZER).exists()):
        return
    for split, before in read_fingerprints(folder, **dict.fromkeys(present, dict)).items():
        if present.get(split, before) != before:
            raise RunError(
                f"data.{split}: these are not the pairs that the run in {folder} was begun with "
                f"({before.get('pairs')} then, {present[split]['pairs']} now, of other text); restore them, or give "
                "another --output_dir."
            )


def read_fingerprints(folder: Path, **splits: type) -> dict[str, dict[str, Any]]:
    fix = "restore it, or if the data is the same, remove it, and the same command writes it again."
    return read_json(folder / DATA_FILE, fix, **splits)


def write_new_run(
    recipe: Recipe, folder: Path, tokenizer: PreTrainedTokenizerBase, data: dict[str, dict[str, Any]]
) -> list[Path]:
    """Write the recipe, the fingerprints of the data and the tokenizer into a run's folder, and return the files."""
    with run_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, folder)
        write_atomically(folder / DATA_FILE, json.dumps(data, indent=2))
        with staged_files(folder, last=TOKENIZER) as staging:
            tokenizer.save_pretrained(staging)
            names = [path.name for path in staging.iterdir()]
    return [folder / name for name in (RECIPE, DATA_FILE, *names)]


def initialize_run(
    recipe: Recipe, folder: Path, pairs: DatasetDict, distillation: Distillation | None
) -> tuple[PreTrainedTokenizerBase, list[Path]]:
    """Return the tokenizer of a run, and the files that this process wrote for a new one.

    A new run gets its recipe, the data's fingerprints and its tokenizer; files that exist stay as they are.
    """
    is_main, written = PartialState().is_main_process, []
    present = fingerprints(recipe.data, pairs, distillation) if is_main else {}
    check_same_data(folder, *broadcast_object_list([present]))
    if is_main and not (folder / TOKENIZER).exists():
        written = write_new_run(recipe, folder, make_tokenizer(recipe, pairs, distillation), present)
    elif is_main and not (folder / DATA_FILE).exists():
        with run_write_errors(folder):
            write_atomically(folder / DATA_FILE, json.dumps(present, indent=2))
    PartialState().wait_for_everyone()
    if not (folder / TOKENIZER).exists():
        raise UserError(
            f"{folder}: this machine does not see what the first process wrote there; name a folder on a disk that all "
            "machines of the launch share."
        )
    return load_tokenizer(str(folder)), written


def count_processes_before(recipe: Recipe, folder: Path) -> int | None:
    """Return the number of processes that wrote the checkpoint from which a run trains further; None without one."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is None or has_ended(checkpoint, recipe.training):
        return None
    return len(list(checkpoint.glob("rng_state*.pth")))  # one of each process


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
        tokens = {str(split): count_unknown(ids, tokenizer) for split, ids in encoded.items()}
        if state.is_main_process:
            report_unknown(tokens, pairs, tokenizer)
        for model in models.values():
            model.fit_vocabulary(tokenizer)
        check_same_energy(models, path)
        processes = count_processes_before(recipe, path)
        check_pairs(recipe, config_for_tokenizer(recipe, tokenizer), encoded, folder.before, processes)
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
    return Prepared(path, inputs, pairs, encoded, tokenizer, tokens)
