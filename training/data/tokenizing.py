"""Sentence pairs as token ids."""

import logging
from collections.abc import Callable
from typing import Any, cast

import datasets
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from training.recipe import DataRecipe
from vaswani_transformer.errors import UserError
from vaswani_transformer.tokenizer import text_encoder

logger = logging.getLogger(__name__)
NUMBER = "number"  # column of a training pair's number, from 1


def token_ids(
    tokenizer: PreTrainedTokenizerBase, sources: list[str], targets: list[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of sources and of targets; `</s>` in a text stays text, and an added tag is one token."""
    encoded = text_encoder(tokenizer)(
        sources, text_target=targets, split_special_tokens=True, return_attention_mask=False
    )
    return encoded["input_ids"], encoded["labels"]


def make_encode_fn(
    tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe
) -> Callable[[list[tuple[str, str]]], list[dict[str, list[int]]]]:
    """Return a function that makes `input_ids` and `labels` from streamed pairs.

    Raises:
        UserError: when called, a pair is too long and the recipe says `too_long: error`.
    """

    def encode(pairs: list[tuple[str, str]]) -> list[dict[str, list[int]]]:
        sources, targets = (list(side) for side in zip(*pairs, strict=True))
        encoded = list(zip(*token_ids(tokenizer, sources, targets), strict=True))
        for (source, _), sides in zip(pairs, encoded, strict=True):
            if recipe.too_long == "error" and (longest := max(map(len, sides))) > recipe.max_length:
                raise UserError(
                    f"data.max_length: a training pair ({source[:40]!r}...) has {longest} tokens on a side, more than "
                    f"{recipe.max_length}; raise it or set data.too_long=drop."
                )
        return [{"input_ids": source, "labels": target} for source, target in encoded]

    return encode


def tokenize(
    splits: datasets.DatasetDict, tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe
) -> datasets.DatasetDict:
    """Return the splits as `input_ids`, `labels` and `reference`, the target's text.

    Training pairs that are too long are dropped; the others have their `number` too, by which a message names them.

    Raises:
        UserError: a training pair is too long and the recipe says `too_long: error`, or all are.
    """

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        sources, targets = token_ids(tokenizer, batch["source"], batch["target"])
        return {"input_ids": sources, "labels": targets, "reference": batch["target"]}

    encoded = splits.map(encode, batched=True, remove_columns=["source", "target"], desc="Tokenizing")

    def fits(pair: dict[str, list[int]]) -> bool:
        return max(len(pair["input_ids"]), len(pair["labels"])) <= recipe.max_length

    numbers = list(range(1, len(encoded["train"]) + 1))
    everything = encoded["train"].add_column(NUMBER, cast(Any, numbers))
    encoded["train"] = everything.filter(fits, desc="Dropping pairs that are too long")
    if dropped := len(everything) - len(encoded["train"]):
        pairs = f"{dropped} of {'the first ' if recipe.streaming else ''}{len(everything)} training pairs"
        if not len(encoded["train"]):
            shortest = min(
                max(map(len, sides)) for sides in zip(everything["input_ids"], everything["labels"], strict=True)
            )
            raise UserError(
                f"data.max_length: all {'the first ' if recipe.streaming else ''}{len(everything)} training pairs are "
                f"longer than {recipe.max_length} tokens, "
                f"`</s>` counted, the shortest has {shortest}; raise it."
            )
        if recipe.too_long == "error":
            raise UserError(
                f"data.max_length: {pairs} are longer than {recipe.max_length} tokens; raise it or set "
                "data.too_long=drop."
            )
        logger.warning("Dropped %s, longer than %d tokens.", pairs, recipe.max_length)
    return encoded


def lengths(dataset: Dataset, column: str) -> list[int]:
    """Return the number of tokens in each row of a column."""
    table = dataset.select_columns([column]).with_format("arrow")[:]
    return cast(Any, pc).list_value_length(table.column(column)).to_pylist()
