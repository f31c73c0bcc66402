"""Checks of a recipe against its data, its model and the machine, before any training."""

import dataclasses
import math
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from training.data.tokenizing import lengths
from training.distributed import RunError, uses_cpu
from training.recipe import Recipe
from vaswani_transformer import VaswaniTransformerConfig, VaswaniTransformerForConditionalGeneration
from vaswani_transformer.batching import make_steps
from vaswani_transformer.errors import UserError, one_line

COLUMNS = ("input_ids", "labels")


def check_data_fits(recipe: Recipe, config: VaswaniTransformerConfig, encoded: DatasetDict) -> None:
    """Refuse, before any training, pairs that the model or a batch cannot hold.

    Raises:
        UserError: a training pair alone exceeds a step's tokens, or a text that is trained on, validated with or
            translated is longer than the table of learned positions.
    """
    longest = {(split, column): max(lengths(pairs, column)) for split, pairs in encoded.items() for column in COLUMNS}
    if recipe.data.streaming:  # a pair of any length that is not dropped may come
        longest |= {("train", column): recipe.data.max_length for column in COLUMNS}
    for column, name in zip(COLUMNS, ("source_tokens", "target_tokens"), strict=True):
        if longest["train", column] > getattr(recipe.training, name):
            raise UserError(
                f"training.{name}: a pair {'may have' if recipe.data.streaming else 'has'} "
                f"{longest['train', column]} tokens on that side, more than the "
                f"{getattr(recipe.training, name)} of a step; raise it or lower data.max_length."
            )
    parts = PartialState().num_processes * accumulation(recipe, PartialState().num_processes)
    if len(encoded["train"]) < parts:
        raise UserError(
            f"training.device_tokens: {len(encoded['train'])} training pairs cannot be split over {parts} passes of a "
            "step; raise it, or use fewer processes."
        )
    if recipe.data.streaming and recipe.data.buffer < 10 * parts:
        raise UserError(
            f"data.buffer: {recipe.data.buffer} pairs are too few for {parts} passes of a step; "
            f"give at least {10 * parts}."
        )
    if config.position_embedding != "learned":
        return
    for (split, column), length in longest.items():
        needed = length
        if split != "train" and column == "input_ids":
            needed += recipe.decoding.max_source_relative_length
        if needed > config.max_position_embeddings:
            raise UserError(
                f"model.max_position_embeddings: split {split} needs {needed} positions in {column}, translations "
                f"included, and the table has {config.max_position_embeddings}; raise it, shorten the texts, or use "
                "sinusoidal positions."
            )


def check_same_steps(before: dict[str, Any], recipe: Recipe, pairs: Dataset) -> None:
    """Refuse to resume with passes so small that the steps would have other pairs than those of the run so far.

    Args:
        before: the recipe, as a tree, that the run was begun with.
        recipe: the recipe to resume with.
        pairs: the training pairs.

    Raises:
        RunError: a step has fewer pairs than passes under one of the two.
    """
    training, processes = recipe.training, PartialState().num_processes
    other = dataclasses.replace(training, device_tokens=before["training"]["device_tokens"])
    parts = [
        processes * accumulation(dataclasses.replace(recipe, training=either), processes)
        for either in (other, training)
    ]
    if parts[0] == parts[1] or recipe.data.streaming:
        return
    sizes = list(zip(*(lengths(pairs, column) for column in COLUMNS), strict=True))
    before_steps, steps = (
        make_steps(sizes, (training.source_tokens, training.target_tokens), number) for number in parts
    )
    if before_steps != steps:
        raise RunError(
            f"training.device_tokens: {training.device_tokens} cut the pairs into other steps than "
            f"{other.device_tokens}, with which the run was begun, for every pass of a step needs a pair; give "
            "more."
        )


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> VaswaniTransformerConfig:
    """The recipe's model with the vocabulary and the special tokens of its tokenizer."""
    return recipe.model_config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def check_attention(recipe: Recipe) -> None:
    """Check, before the data is read, that what is to compute equation (1) trains on this machine.

    Raises:
        UserError: it does not.
    """
    name = attention(recipe)
    if uses_cpu() and name not in ("eager", "sdpa"):
        raise UserError(
            f"training.attention: {name} does not train on a CPU, eager and sdpa do; leave it out, or launch on an "
            "accelerator."
        )
    with torch.device("meta"):
        model = VaswaniTransformerForConditionalGeneration(recipe.model_config(vocab_size=recipe.tokenizer.vocab_size))
    set_attention(model, name)


def set_attention(model: VaswaniTransformerForConditionalGeneration, name: str) -> None:
    """Have a model compute equation (1) by what Transformers knows by a name.

    Raises:
        UserError: it is not installed, or not for this model.
    """
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise UserError(f"training.attention: {one_line(error)}") from error


def attention(recipe: Recipe) -> str:
    """What computes equation (1) on this machine."""
    if recipe.training.attention != "auto":
        return recipe.training.attention
    return "eager" if uses_cpu() else "sdpa"


def accumulation(recipe: Recipe, num_processes: int) -> int:
    """The forward passes that a rank's share of a step takes, so that each keeps to `device_tokens`."""
    tokens = max(recipe.training.source_tokens, recipe.training.target_tokens)
    return math.ceil(tokens / (num_processes * recipe.training.device_tokens))
