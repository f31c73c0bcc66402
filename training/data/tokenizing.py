"""Sentence pairs as token ids."""

import hashlib
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from training.data.cache import map_tokens
from training.recipe.fields import DataRecipe
from vaswani_transformer.batching.tokens import ArrowRows
from vaswani_transformer.support.errors import UserError
from vaswani_transformer.tokenizer import text_encoder

logger = logging.getLogger(__name__)
NUMBER = "number"  # column of a training pair's number, from 1
TEXTS = ["source", "reference"]  # columns of an evaluation's texts
SIDES = {"source": "input_ids", "target": "labels"}
MOST_UNKNOWN = 0.01  # of the target tokens, without a warning
SAMPLE = 100_000  # targets, in which the commonest unknown words are looked for

Counts = dict[str, dict[str, int]]
"""The `tokens` of each side, and how many of them are `unknown`."""


def set_up_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, *needed: str) -> None:
    """Let a model's tokenizer read special tokens in a text as text, as in training; it must have the tokens needed."""
    for token in needed:
        if getattr(tokenizer, f"{token}_token_id") is None:
            raise UserError(f"{name}: its tokenizer has no {token} token; set {token}_token and save it again.")
    if not tokenizer.is_fast:
        tokenizer.split_special_tokens = True


def token_ids(
    tokenizer: PreTrainedTokenizerBase, sources: list[str], targets: list[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of sources and of targets; `</s>` in a text stays text, and an added tag is one token."""
    encoded = text_encoder(tokenizer)(
        sources, text_target=targets, split_special_tokens=True, return_attention_mask=False
    )
    return encoded["input_ids"], encoded["labels"]


def target_ids(tokenizer: PreTrainedTokenizerBase, targets: list[str]) -> list[list[int]]:
    """Return the token ids of targets, as `token_ids` does."""
    encoder = text_encoder(tokenizer)
    return encoder(text_target=targets, split_special_tokens=True, return_attention_mask=False)["input_ids"]


def make_encode_fn(
    tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe
) -> Callable[[list[tuple[str, str]]], list[dict[str, list[int]]]]:
    """Return a function that makes `input_ids` and `labels` from streamed pairs."""

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
    """Return the splits as `input_ids` and `labels`; of all but training pairs the texts too, `source` and `reference`.

    Training pairs that are too long are dropped; the others have their `number`, by which a message names them.
    """

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        sources, targets = token_ids(tokenizer, batch["source"], batch.get("target") or batch["reference"])
        return {"input_ids": sources, "labels": targets}

    key, encoded = tokenizer_key(tokenizer), datasets.DatasetDict()
    for split, pairs in splits.items():
        if split == "train":
            encoded[split] = drop_too_long(map_tokens(pairs, encode, ["source", "target"], key), recipe)
        else:
            encoded[split] = map_tokens(pairs.rename_column("target", "reference"), encode, [], key)
    return encoded


def count_unknown(pairs: Dataset, tokenizer: PreTrainedTokenizerBase) -> Counts:
    """Return the number of tokens of the sources and of the targets, and how many of them are `<unk>`."""
    counts: Counts = {side: {"tokens": 0, "unknown": 0} for side in SIDES}
    for table in pairs.with_format("arrow").iter(100_000):
        for side, column in SIDES.items():
            ids = cast(Any, table)[column].combine_chunks().flatten().to_numpy()
            counts[side]["tokens"] += len(ids)
            counts[side]["unknown"] += int((ids == tokenizer.unk_token_id).sum())
    return counts


def unknown_share(counts: Counts, side: str) -> float:
    return counts[side]["unknown"] / max(1, counts[side]["tokens"])


def describe_unknown(splits: dict[str, Counts]) -> str:
    """Return the share of unknown tokens in each side of each split."""
    shares = {name: [f"{unknown_share(counts, side):.2%}" for side in SIDES] for name, counts in splits.items()}
    return "; ".join(f"{name} {source} of source, {target} of target" for name, (source, target) in shares.items())


def unknown_words(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, count: int = 5) -> list[str]:
    """Return the commonest words of texts that have an unknown token."""
    words = Counter(word for text in texts for word in text.split())
    encoded = zip(words, target_ids(tokenizer, list(words)), strict=True)
    unknown = {word for word, ids in encoded if tokenizer.unk_token_id in ids}
    return [word for word, _ in words.most_common() if word in unknown][:count]


def report_unknown(splits: dict[str, Counts], pairs: datasets.DatasetDict, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log the unknown tokens of each split, and warn of the first split with too many of them in its targets."""
    if tokenizer.unk_token_id is None:
        return
    logger.info("Unknown tokens: %s.", describe_unknown(splits))
    for name, counts in splits.items():
        if (share := unknown_share(counts, "target")) > MOST_UNKNOWN:
            texts = pairs[name].select(range(0, len(pairs[name]), 1 + len(pairs[name]) // SAMPLE))["target"]
            logger.warning(
                "tokenizer: cannot spell the targets of %s; got %.1f%% unknown tokens (%s), expected at most %.0f%%. "
                "The commonest such words are %s. Train a tokenizer on these texts, or name another by tokenizer.path.",
                *(name, 100 * share, tokenizer.unk_token, 100 * MOST_UNKNOWN),
                ", ".join(map(repr, unknown_words(texts, tokenizer))) or "unknown only in their context",
            )
            return


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    digest = hashlib.sha256()
    tokenizer("")  # without padding and limits, which a file has from the last call
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def drop_too_long(train: Dataset, recipe: DataRecipe) -> Dataset:
    """Return the training pairs that are not too long, with their `number` among all."""
    longest = np.maximum(lengths(train, "input_ids"), lengths(train, "labels"))
    kept = np.flatnonzero(longest <= recipe.max_length)
    name = Hasher.hash((train._fingerprint, NUMBER))  # the hashing of `add_column` would swallow Ctrl-C
    numbered = train.add_column(NUMBER, np.arange(1, len(train) + 1, dtype=np.int32), new_fingerprint=name)
    if len(kept) == len(train):
        return numbered
    everything = f"{'the first ' if recipe.streaming else ''}{len(train)} training pairs"
    if not len(kept):
        raise UserError(
            f"data.max_length: all {everything} are longer than {recipe.max_length} tokens, `</s>` counted, the "
            f"shortest has {longest.min()}; raise it."
        )
    pairs = f"{len(train) - len(kept)} of {everything}"
    if recipe.too_long == "error":
        raise UserError(
            f"data.max_length: {pairs} are longer than {recipe.max_length} tokens; raise it or set data.too_long=drop."
        )
    logger.warning("Dropped %s, longer than %d tokens.", pairs, recipe.max_length)
    return numbered.select(kept)


def lengths(dataset: Dataset, column: str) -> NDArray[np.int32]:
    return ArrowRows.of(dataset, column).lengths
