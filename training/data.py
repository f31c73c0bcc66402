"""Loading, checking, tokenization and fingerprints of the pairs of a run."""

import csv
import gzip
import hashlib
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from accelerate import PartialState
from datasets import Dataset, DatasetDict, Features, Value, load_dataset
from transformers import AddedToken, PreTrainedTokenizerBase

from training.recipe import Recipe
from training.toy_task import make_splits
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.batching.tokens import ArrowRows
from vaswani_transformer.parsing.linear import linear_tokens, linearize
from vaswani_transformer.parsing.trees import ROOT, Tree, evaluation_tree, read_trees
from vaswani_transformer.support.checked_loading import load_tokenizer
from vaswani_transformer.support.errors import UserError, one_line
from vaswani_transformer.tokenizer import source_encoder

logger = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
SIDES = ("source", "target")
MOST_UNKNOWN = 0.01  # share of target tokens above which there is a warning
Counts = dict[str, dict[str, int]]
PAIRS_A_PROCESS = 50_000  # smallest number worth another process


@dataclass(frozen=True)
class Data:
    """Pairs of a run.

    Attributes:
        pairs: texts of each split, in the columns `source` and `target`.
        tokens: `input_ids` and `labels` of each split, without training pairs that are too long.
        tokenizer: tokenizer of the shared vocabulary.
        fingerprints: for each split, the number of pairs and the SHA-256 of their texts.
        unknown: for sources and targets of each split, the number of `tokens` and of `unknown` tokens.
    """

    pairs: DatasetDict
    tokens: DatasetDict
    tokenizer: PreTrainedTokenizerBase
    fingerprints: dict[str, dict[str, Any]]
    unknown: dict[str, Counts]


def load_data(recipe: Recipe, run: Path | None = None) -> Data:
    """Load the recipe's pairs as texts and tokens; a resumed `run` keeps its tokenizer."""
    with PartialState().main_process_first():  # others read its cache
        pairs = load_pairs(recipe)
        tokenizer = load_tokenizer(str(run)) if run is not None else make_tokenizer(recipe, pairs["train"])
        tokens = tokenize(recipe, pairs, tokenizer)
    fingerprints = {str(split): fingerprint(rows) for split, rows in pairs.items()}
    return Data(pairs, tokens, tokenizer, fingerprints, count_unknown(tokens, tokenizer))


# Texts


def load_pairs(recipe: Recipe, splits: Iterable[str] = SPLITS) -> DatasetDict:
    """Load splits of the recipe's pairs in the columns `source` and `target`; `data.distilled` replaces train."""
    data, wanted = recipe.data, {str(split) for split in splits}
    names = {split: getattr(data, split, split) for split in SPLITS}
    held_out = {split: name for split, name in names.items() if isinstance(name, int)}
    if data.kind == "grammar":
        loaded = {split: rows for split, rows in make_splits().items() if split in wanted}
        pairs = DatasetDict({split: to_pairs(rows, recipe, str(split)) for split, rows in loaded.items()})
    else:
        needed = (wanted | {"train"} if wanted & held_out.keys() else wanted) - held_out.keys()
        files = {split: name for split, name in names.items() if split in needed and name is not None}
        pairs = DatasetDict({split: read_split(recipe, split, str(name)) for split, name in files.items()})
    if held_out and "train" in pairs:  # hold out all splits, whichever are requested
        pairs.update(hold_out(pairs["train"], held_out, recipe.seed))
    if data.distilled is not None and "train" in wanted:
        rows = load_rows("data.distilled", "json", data_files=distilled_files(data.distilled))
        pairs["train"] = to_pairs(rows, recipe, "train")
    return DatasetDict({split: pairs[split] for split in names if split in wanted and split in pairs})


def distilled_files(name: str) -> list[str]:
    """Return all files of a folder of training.distill, or one file."""
    if not os.path.isdir(name):
        return [name]
    files = sorted(str(path) for path in Path(name).glob("*.jsonl"))
    shares = int(files[0].rpartition("-of-")[2].removesuffix(".jsonl")) if files else 1
    records = [record for file in files if (record := Path(f"{file}.record")).exists()]
    finished = sum(json.loads(record.read_bytes())["is_finished"] for record in records)
    if not finished == shares == len(files):
        problem = f"has {finished} of {shares} finished files"
        raise UserError(f"data.distilled: {name} {problem}; repeat training.distill.")
    return files


def read_split(recipe: Recipe, split: str, name: str) -> Dataset:
    """Read the pairs of a split from files or the Hub."""
    data, where = recipe.data, f"data.{split}"
    folder = Path(data.path)
    if data.kind == "hub":
        return to_pairs(load_rows(where, data.path, data.subset, split=name), recipe, split)
    if data.kind == "trees":
        codes = Features({data.source: Value("string"), data.target: Value("string")})
        rows = [dict(zip(codes, pair, strict=True)) for pair in tree_pairs(folder, name)]
        return to_pairs(Dataset.from_list(rows, codes), recipe, split)
    if data.kind == "text":
        paths = [folder / name.replace("{language}", language) for language in (data.source, data.target)]
        sides = [load_rows(where, "text", data_files=[str(path)], encoding="utf-8-sig") for path in paths]
        if len(sides[0]) != len(sides[1]):
            raise UserError(
                f"{where}: {paths[0]} has {len(sides[0]):,} lines, and {paths[1]} {len(sides[1]):,}; pair the files "
                "line by line."
            )
        codes = (data.source, data.target)
        columns = [side.rename_column("text", language) for side, language in zip(sides, codes, strict=True)]
        return to_pairs(datasets.concatenate_datasets(columns, axis=1), recipe, split)
    settings: dict[str, Any] = {"keep_default_na": False} if data.kind == "csv" else {}  # a sentence may be "NA"
    if ".tsv" in Path(name).suffixes:  # quotation marks are text
        settings |= {"sep": "\t", "quoting": csv.QUOTE_NONE}
    return to_pairs(load_rows(where, data.kind, data_files=[str(folder / name)], **settings), recipe, split)


def load_rows(where: str, kind: str, subset: str | None = None, split: str = "train", **settings: Any) -> Dataset:
    """Load rows with `datasets`, which caches them, from files of a kind or from a data set of the Hub."""
    try:
        return load_dataset(kind, subset, split=split, **settings)
    except Exception as error:  # each format has its own classes
        files = settings.get("data_files")
        what = f"{files[0]} cannot be read as {kind}" if files else f"{kind} cannot be loaded"
        reason = one_line(error.__cause__ or error)
        raise UserError(f"{where}: {what} ({reason}); see data.path and data.kind.") from error


def to_pairs(rows: Dataset, recipe: Recipe, split: str) -> Dataset:
    """Convert a column per language, or a column `translation`, to the columns `source` and `target`.

    Drop pairs with an empty source or target, or stop with an error, as `data.empty` says.
    """
    names = {"source": recipe.data.source, "target": recipe.data.target}
    if "translation" in rows.column_names and "translation" not in names.values():  # a field of each language
        rows = rows.select_columns("translation").flatten()
        rows = rows.rename_columns({name: name.removeprefix("translation.") for name in rows.column_names})
    if missing := [name for name in names.values() if name not in rows.column_names]:
        columns = ", ".join(rows.column_names)
        raise UserError(f"data.{split}: has no {missing[0]!r}; it has {columns}. Set data.source and data.target.")

    def pick(batch: dict[str, list[Any]]) -> dict[str, list[str]]:
        return {
            side: ["" if text is None else str(text).strip() for text in batch[name]] for side, name in names.items()
        }

    texts = Features(dict.fromkeys(SIDES, Value("string")))
    processes = processes_for(rows)
    pairs = rows.map(pick, batched=True, remove_columns=rows.column_names, features=texts, num_proc=processes)
    kept = pairs.filter(
        lambda batch: [bool(one and other) for one, other in zip(batch["source"], batch["target"], strict=True)],
        batched=True,
        num_proc=processes,
    )
    if empty := len(pairs) - len(kept):
        if recipe.data.empty == "error":
            first = next(number for number, pair in enumerate(pairs, start=1) if not all(pair.values()))
            raise UserError(
                f"data.{split}: pairs with an empty text: {empty:,}, the first is pair {first:,}; correct them or set "
                "data.empty=drop."
            )
        logger.warning("data.%s: dropped pairs with an empty text: %s.", split, f"{empty:,}")
    if not len(kept):
        raise UserError(f"data.{split}: it has no pairs; name another file or split.")
    return kept if empty else pairs


def hold_out(train: Dataset, sizes: dict[str, int], seed: int) -> dict[str, Dataset]:
    """Draw splits of `sizes` pairs from the training pairs by `seed`, and return them with the rest as train.

    Only pairs whose sentences occur in no other pair are drawn.
    """
    texts: Any = train.to_pandas()
    unique = np.flatnonzero(~(texts["source"].duplicated(keep=False) | texts["target"].duplicated(keep=False)))
    if (needed := sum(sizes.values())) > len(unique) or needed == len(train):
        raise UserError(
            f"data.validation, data.test: hold out {needed:,} of {len(train):,} pairs, of which {len(unique):,} have "
            "sentences that no other pair has; give fewer."
        )
    drawn = np.random.RandomState(seed).permutation(unique)
    splits, first = {}, 0
    for split, size in sizes.items():
        splits[split] = train.select(np.sort(drawn[first : first + size]))
        first += size
    return splits | {"train": train.select(np.setdiff1d(np.arange(len(train)), drawn[:needed]))}


def tree_pairs(folder: Path, names: str) -> Iterator[tuple[str, str]]:
    """Yield the sentences of bracketed files with their normalized linear trees."""
    for pattern in [names] if (folder / names).exists() else names.split():
        root = Path(pattern).anchor  # "/" of an absolute pattern
        paths = sorted((Path(root) if root else folder).glob(pattern.removeprefix(root)))
        if not paths:
            raise UserError(f"{folder}: no file matches {pattern!r}; set data.path to the folder of the trees.")
        for path in paths:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                lines = enumerate(io.TextIOWrapper(file, encoding="utf-8-sig"), start=1)
                for _, tree in read_trees(((number, line.rstrip("\n")) for number, line in lines), str(path)):
                    cleaned = evaluation_tree(tree) or Tree(ROOT, ())
                    yield " ".join(cleaned.words), linearize(cleaned)


def fingerprint(pairs: Dataset) -> dict[str, Any]:
    """Return the number of pairs and the SHA-256 of their texts, each followed by a zero byte."""
    digest = hashlib.sha256()
    for batch in pairs.select_columns(list(SIDES)).iter(1000):
        texts = zip(batch["source"], batch["target"], strict=True)
        digest.update("".join(f"{source}\0{target}\0" for source, target in texts).encode())
    return {"pairs": len(pairs), "sha256": digest.hexdigest()}


# Vocabulary and tokens


def sample_texts(pairs: Dataset, count: int | None, sides: tuple[str, ...] = SIDES) -> Iterator[str]:
    """Yield the texts of `count` evenly spaced pairs; None for all."""
    if count is not None and count < len(pairs):
        pairs = pairs.select([number * len(pairs) // count for number in range(count)])
    for batch in pairs.iter(1000):
        for side in sides:
            yield from batch[side]


def make_tokenizer(recipe: Recipe, train: Dataset) -> PreTrainedTokenizerBase:
    """Load the recipe's tokenizer, or learn one from the training pairs.

    For parsing it is learned from the sentences, and each label of the trees is an added token. For a CMLM `<mask>` is
    added after all other tokens.
    """
    settings, is_parser = recipe.tokenizer, recipe.data.kind == "trees"
    labels = linear_tokens(sample_texts(train, None, ("target",))) if is_parser else set()
    if settings.path is not None:
        tokenizer = load_tokenizer(settings.path)
        if missing := sorted(labels - tokenizer.get_added_vocab().keys()):
            raise UserError(f"tokenizer.path: {settings.path} lacks labels of the trees, such as {missing[0]!r}.")
        tokenizer.init_kwargs.pop("holds_all_words", None)  # these texts may have other words
    else:
        texts = sample_texts(train, settings.sample, ("source",) if is_parser else SIDES)
        size = settings.vocab_size - len(labels)
        try:
            tokenizer = VaswaniTransformerTokenizer.train_from_iterator(texts, size, settings.algorithm)
        except ValueError as error:
            raise UserError(f"tokenizer.vocab_size: {error}") from error
        tokenizer.add_tokens([AddedToken(label, normalized=False) for label in sorted(labels)])
    if recipe.family.needs_mask and tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
    ends_texts = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    if tokenizer.pad_token_id is None or tokenizer.padding_side != "right" or not ends_texts:
        needed = "needs <pad>, padding on the right, and its end token after each text"
        raise UserError(f"tokenizer.path: {settings.path} {needed}; change it and save it again.")
    return tokenizer


def tokenize(recipe: Recipe, pairs: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Return `input_ids` and `labels` of every split, in training only of at most `data.max_length` tokens.

    Special tokens in a text are encoded as characters.
    """
    encoder = source_encoder(tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        encoded = encoder(
            batch["source"], text_target=batch["target"], split_special_tokens=True, return_attention_mask=False
        )
        return {"input_ids": encoded["input_ids"], "labels": encoded["labels"]}

    ids = Features({name: datasets.List(Value("int32")) for name in ("input_ids", "labels")})
    settings: dict[str, Any] = {"batched": True, "remove_columns": list(SIDES), "features": ids, "desc": "Tokenizing"}
    tokens = DatasetDict(
        {split: rows.map(encode, **settings, num_proc=processes_for(rows)) for split, rows in pairs.items()}
    )
    train, limit = tokens["train"], recipe.data.max_length
    longest = np.maximum(ArrowRows(train, "input_ids").lengths, ArrowRows(train, "labels").lengths)
    kept = np.flatnonzero(longest <= limit)
    if len(kept) < len(train):
        problem = f"{len(train) - len(kept):,} of {len(train):,} training pairs are longer than {limit} tokens"
        if recipe.data.too_long == "error" or not len(kept):
            raise UserError(f"data.max_length: {problem}; raise it or set data.too_long=drop.")
        logger.warning("Dropped: %s.", problem)
        tokens["train"] = train.select(kept)
    return tokens


def count_unknown(tokens: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> dict[str, Counts]:
    """Count the source and target tokens of each split, and those that are `<unk>`; log the shares."""
    unknown = -1 if tokenizer.unk_token_id is None else tokenizer.unk_token_id
    counts = {str(split): {side: {"tokens": 0, "unknown": 0} for side in SIDES} for split in tokens}
    for split, rows in tokens.items():
        for table in rows.with_format("arrow").iter(100_000):
            for side, column in zip(SIDES, ("input_ids", "labels"), strict=True):
                ids = table[column].combine_chunks().flatten().to_numpy()
                counts[str(split)][side]["tokens"] += len(ids)
                counts[str(split)][side]["unknown"] += int((ids == unknown).sum())
    if tokenizer.unk_token_id is not None and PartialState().is_main_process:
        for split, of in counts.items():
            source, target = (of[side]["unknown"] / max(1, of[side]["tokens"]) for side in SIDES)
            shares = f"Unknown tokens of {split}: {source:.2%} of source, {target:.2%} of target"
            if target > MOST_UNKNOWN:
                logger.warning("%s; train a tokenizer on these texts, or name another by tokenizer.path.", shares)
            else:
                logger.info("%s.", shares)
    return counts


def processes_for(rows: Dataset) -> int | None:
    """Return the number of processes to start for `rows`; None for no further process."""
    count = min(os.cpu_count() or 1, len(rows) // PAIRS_A_PROCESS)
    return count if count > 1 else None
