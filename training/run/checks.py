"""Checks of a recipe against its data, its model and the machine, before any training."""

import dataclasses
import logging
import math

import numpy as np
import psutil
import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from training.data.tokenizing import lengths
from training.recipe.fields import Recipe
from training.recipe.machine import is_set, uses_cpu
from training.run.distributed import RunError
from vaswani_transformer import VaswaniTransformerConfig
from vaswani_transformer.batching.steps import Steps
from vaswani_transformer.body import ProjectedModel
from vaswani_transformer.support.errors import UserError, one_line

logger = logging.getLogger(__name__)
COLUMNS = ("input_ids", "labels")


def check_data_fits(recipe: Recipe, config: VaswaniTransformerConfig, encoded: DatasetDict) -> None:
    """Check that every pair fits into the model and into a batch."""
    longest = {
        (split, column): int(lengths(pairs, column).max()) for split, pairs in encoded.items() for column in COLUMNS
    }
    if recipe.data.streaming:  # a later pair may have any length that is not dropped
        longest |= {("train", column): recipe.data.max_length for column in COLUMNS}
    for column, name in zip(COLUMNS, ("source_tokens", "target_tokens"), strict=True):
        if longest["train", column] > getattr(recipe.training, name):
            raise UserError(
                f"training.{name}: a pair {'may have' if recipe.data.streaming else 'has'} "
                f"{longest['train', column]} tokens on that side, more than the "
                f"{getattr(recipe.training, name)} of a step; raise it or lower data.max_length."
            )
    micro_batches = PartialState().num_processes * accumulation(recipe, PartialState().num_processes)
    if len(encoded["train"]) < micro_batches:
        raise UserError(
            f"training.device_tokens: {len(encoded['train'])} training pairs cannot be split into {micro_batches} "
            "micro-batches of a step; raise it, or use fewer processes."
        )
    if recipe.data.streaming and recipe.data.buffer < 10 * micro_batches:
        raise UserError(
            f"data.buffer: {recipe.data.buffer} pairs are too few for {micro_batches} micro-batches of a "
            f"step; give at least {10 * micro_batches}."
        )
    if config.position_embedding != "learned":
        return
    for (split, column), length in longest.items():
        needed = length
        if split != "train" and column == "input_ids" and recipe.family.is_autoregressive:
            needed += recipe.decoding.max_source_relative_length
        if needed > config.max_position_embeddings:
            raise UserError(
                f"model.max_position_embeddings: split {split} needs {needed} positions in {column}, translations "
                f"included, and the table has {config.max_position_embeddings}; raise it, shorten the texts, or use "
                "sinusoidal positions."
            )


def check_predictable_lengths(recipe: Recipe, config: VaswaniTransformerConfig, train: Dataset) -> None:
    """Warn of training pairs whose target has a length that a non-autoregressive model never predicts."""
    if not (names := recipe.family.length_limits):
        return
    sources, targets = (lengths(train, column) for column in COLUMNS)
    limits = [getattr(config, name) for name in names]
    compared = targets if len(limits) == 1 else targets - sources
    low, high = (1, *limits) if len(limits) == 1 else limits
    outside = int(((compared < low) | (compared > high)).sum())
    if not outside:
        return
    fields = ", ".join(f"model.{name}" for name in names)
    what = "targets have" if len(limits) == 1 else "targets differ from their sources by"
    first = "first " if recipe.data.streaming else ""
    message = (
        f"{fields}: {outside:,d} of the {first}{len(train):,d} training {what} lengths that the model never predicts; "
        f"got {compared.min()} to {compared.max()} tokens, expected {low} to {high}."
    )
    if outside == len(train):
        raise UserError(f"{message} Set {fields}, or drop such pairs.")
    if PartialState().is_main_process:
        logger.warning("%s It learns their words, but the nearest length.", message)


def warn_of_long_texts(recipe: Recipe, encoded: DatasetDict) -> None:
    """Warn of validation and test pairs that are longer than training pairs may be: they are translated whole."""
    limit = recipe.data.max_length
    for split in sorted(set(encoded) - {"train"}):
        longest = np.maximum(*(lengths(encoded[split], column) for column in COLUMNS))
        if (count := int((longest > limit).sum())) and PartialState().is_main_process:
            logger.warning(
                "data.%s: %d of %d pairs are longer than data.max_length (%d), the longest has %d tokens; each "
                "evaluation translates them whole, which may take minutes.",
                *(split, count, len(longest), limit, longest.max()),
            )


def check_same_steps(before: Recipe, recipe: Recipe, pairs: Dataset, processes_before: int | None = None) -> None:
    """Check that a step of the resumed run has the same pairs as before; very small micro-batches can change them.

    `processes_before` wrote its last checkpoint, None for as many as now; another number causes a warning only.
    """
    training, processes = recipe.training, PartialState().num_processes
    other = dataclasses.replace(training, device_tokens=before.training.device_tokens)
    launches = ((other, processes_before or processes), (training, processes))
    micro_batches = [
        count * accumulation(dataclasses.replace(recipe, training=either), count) for either, count in launches
    ]
    if micro_batches[0] == micro_batches[1] or recipe.data.streaming:
        return
    sizes, budgets = [lengths(pairs, column) for column in COLUMNS], (training.source_tokens, training.target_tokens)
    before_steps, steps = (Steps.of(*sizes, budgets, number).bounds for number in micro_batches)
    if np.array_equal(before_steps, steps):
        return
    if processes_before not in (None, processes):  # nobody may have as many any more
        if PartialState().is_main_process:
            logger.warning(
                "processes: %d split the pairs into other steps than the %d before, since every micro-batch needs a "
                "pair; so the run learns some pairs of this epoch twice and others not at all.",
                *(processes, processes_before),
            )
        return
    raise RunError(
        f"training.device_tokens: {training.device_tokens} splits the pairs into other steps than the "
        f"{other.device_tokens} that the run started with, since every micro-batch needs a pair; give more."
    )


def check_pairs(
    recipe: Recipe,
    config: VaswaniTransformerConfig,
    encoded: DatasetDict,
    before: Recipe,
    processes_before: int | None = None,
) -> None:
    """Check that pairs fit a run's model, its batches and what it has trained so far, by the recipe `before`."""
    check_data_fits(recipe, config, encoded)
    check_predictable_lengths(recipe, config, encoded["train"])
    warn_of_long_texts(recipe, encoded)
    check_same_steps(before, recipe, encoded["train"], processes_before)


def config_for_tokenizer(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> VaswaniTransformerConfig:
    """Return the recipe's model configuration with its tokenizer's vocabulary size and special tokens."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "pad_token_id", "eos_token_id")}
    if recipe.family.needs_mask:
        if tokenizer.mask_token_id is None:
            raise UserError(
                "tokenizer: has no <mask>, expected one for model.kind cmlm; add it by "
                'tokenizer.add_special_tokens({"mask_token": "<mask>"}) and save the tokenizer again.'
            )
        ids["mask_token_id"] = tokenizer.mask_token_id
    entries = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))  # a vocabulary may leave ids out
    return recipe.model_config(vocab_size=entries, **ids)


def check_model_trains(recipe: Recipe) -> None:
    """Check, before the data is read, that the recipe's model can train on this machine and decode by the recipe."""
    name = attention(recipe)
    if uses_cpu() and name not in ("eager", "sdpa"):
        raise UserError(
            f"training.attention: {name} does not train on a CPU, eager and sdpa do; omit it, or launch on an "
            "accelerator."
        )
    if name.startswith("flash_attention") and recipe.training.precision == "fp32":
        raise UserError(
            f"training.precision: {name} has no kernels for fp32; got fp32, expected bf16. Give "
            "--training.precision=bf16 or --training.attention=sdpa."
        )
    if recipe.kind == "flowseq" and is_set("ACCELERATE_USE_FSDP"):
        raise UserError(
            "model.kind: the flow of flowseq starts from data, which needs complete weights; got FSDP2. Launch with a "
            "file of training/accelerate that does not shard."
        )
    ids, vocab_size = {}, recipe.tokenizer.vocab_size
    if recipe.family.needs_mask:
        ids, vocab_size = {"mask_token_id": vocab_size}, vocab_size + 1
    with torch.device("meta"):
        model = recipe.family.model_class(recipe.model_config(vocab_size=vocab_size, **ids))
    needed, memory = 4 * sum(weight.numel() for weight in model.parameters()), psutil.virtual_memory().total
    if needed > memory:  # every process makes the weights in float32 before they go to an accelerator
        raise UserError(
            f"model: its weights do not fit into memory; got {memory / 2**30:,.0f} GiB, expected more than "
            f"{needed / 2**30:,.0f}. Lower model.d_model, model.d_ff, the layers or tokenizer.vocab_size."
        )
    set_attention(model, name)
    if not recipe.family.is_autoregressive and (size := recipe.decoding.length_beam_size) > model.num_length_classes:
        raise UserError(
            f"decoding.length_beam_size: got {size}, and the model has {model.num_length_classes} length classes; "
            "give at most as many."
        )


def set_attention(model: ProjectedModel, name: str) -> None:
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise UserError(f"training.attention: {one_line(error)}") from error


def attention(recipe: Recipe) -> str:
    if recipe.training.attention != "auto":
        return recipe.training.attention
    return "eager" if uses_cpu() else "sdpa"


def accumulation(recipe: Recipe, num_processes: int) -> int:
    """Return the micro-batches of a rank in a step, so that each has at most `device_tokens` tokens."""
    tokens = max(recipe.training.source_tokens, recipe.training.target_tokens)
    return math.ceil(tokens / (num_processes * recipe.training.device_tokens))
