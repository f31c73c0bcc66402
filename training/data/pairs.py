"""The sentence pairs that a recipe names, split by split, from files, the Hub or the shipped task."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from training.data.cache import cached_pairs
from training.data.distilled import Distillation, check_sources, open_distilled
from training.data.files import SPLITS, LocatedPair, files_of, pair_of, read_file, with_both_sides
from training.recipe.fields import DataRecipe
from training.toy_task.splits import make_splits
from vaswani_transformer.support.errors import UserError, one_line

logger = logging.getLogger(__name__)
PREVIEW_PAIRS = 1000  # pairs of a stream that are checked before training


def load_pairs(recipe: DataRecipe, distillation: Distillation | None = None) -> datasets.DatasetDict:
    """Return the recipe's splits with the columns `source` and `target`; of a stream only the first pairs.

    If `data.distilled` is set, the training pairs have a teacher's translations as targets: those of `distillation` if
    it is open already.
    """
    if recipe.distilled is None or recipe.train is None:
        return load_real_pairs(recipe)
    distillation = distillation or open_distilled(recipe)
    splits = load_real_pairs(recipe)
    sources = sources_in_order(recipe) if recipe.streaming else iterate_column(splits["train"], "source")
    check_sources(distillation, sources, recipe.streaming)
    splits["train"] = to_dataset(
        distillation.pairs,
        [path for number in range(distillation.num_parts) for path in distillation.paths(number)],
        [distillation.identity, recipe.source, recipe.target],
        PREVIEW_PAIRS if recipe.streaming else None,
    )
    return splits


def iterate_column(pairs: datasets.Dataset, column: str) -> Iterator[str]:
    """Yield the texts of a column, a thousand in memory at a time."""
    for batch in pairs.select_columns([column]).iter(1000):
        yield from batch[column]


def to_dataset(
    read: Callable[[], Iterator[tuple[str, str]]], files: list[Path], key: Any, count: int | None
) -> datasets.Dataset:
    """Return the first `count` pairs, or all: those of large files from the cache."""
    if count is None and (cached := cached_pairs(read, files, key)) is not None:
        return cached
    sources, targets = [], []
    for source, target in islice(read(), count):
        sources.append(source)
        targets.append(target)
    return datasets.Dataset.from_dict({"source": sources, "target": targets})


def load_real_pairs(recipe: DataRecipe) -> datasets.DatasetDict:
    """Return the same, with the targets of the data set in every split."""
    if recipe.kind == "grammar":
        splits = to_source_target(make_splits(), recipe)
        if recipe.test is None:
            del splits["test"]
        return splits
    if recipe.kind == "hub":
        return load_from_hub(recipe)
    splits = datasets.DatasetDict()
    for split in SPLITS:
        if (name := getattr(recipe, split)) is not None:
            count = PREVIEW_PAIRS if is_streamed(recipe, split) else None
            key = [recipe.kind, recipe.source, recipe.target, recipe.empty]
            splits[split] = to_dataset(partial(read_file, recipe, name), files_of(recipe, name), key, count)
    return check_not_empty(splits, recipe)


def is_streamed(recipe: DataRecipe, split: str) -> bool:
    return recipe.streaming and split == "train"


def to_source_target(splits: datasets.DatasetDict, recipe: DataRecipe) -> datasets.DatasetDict:
    """Return two columns of splits, or two languages of their column `translation`, as `source` and `target`."""
    for name, split in splits.items():
        group = split.features.get("translation")
        types: dict[str, Any] = group if isinstance(group, dict) else dict(split.features)
        if isinstance(group, datasets.Translation):
            types = dict.fromkeys(group.languages, datasets.Value("string"))
        if not {recipe.source, recipe.target} <= types.keys():
            raise UserError(
                f"{recipe.path or recipe.kind}, split {name}: has the sides {', '.join(types)}, expected "
                f"{recipe.source} and {recipe.target}; set data.source and data.target."
            )
        for side in (recipe.source, recipe.target):
            if (dtype := getattr(types[side], "dtype", "other than text")) not in ("string", "large_string", "null"):
                raise UserError(
                    f"{recipe.path}, split {name}: the side {side!r} has values of type {dtype}, expected texts; set "
                    "data.source and data.target."
                )

    def pick(batch: dict[str, list[Any]]) -> dict[str, list[str]]:
        pairs = [pair_of(dict(zip(batch, values, strict=True))) for values in zip(*batch.values(), strict=True)]
        return {
            "source": [(pair.get(recipe.source) or "").strip() for pair in pairs],
            "target": [(pair.get(recipe.target) or "").strip() for pair in pairs],
        }

    picked = datasets.DatasetDict()
    for name, split in splits.items():
        picked[name] = split.map(pick, batched=True, remove_columns=split.column_names, desc=f"Reading {name}")
    return picked


def load_from_hub(recipe: DataRecipe) -> datasets.DatasetDict:
    """Return a data set of the Hub, which `datasets` keeps on disk, without pairs that have an empty side."""
    loaded = datasets.DatasetDict()
    for split in SPLITS:
        if getattr(recipe, split) is not None:
            loaded[split] = open_hub_split(recipe, split)
            if is_streamed(recipe, split):
                rows = read_hub(recipe, loaded[split].take(PREVIEW_PAIRS))
                loaded[split] = datasets.Dataset.from_list(list(rows), loaded[split].features)
    pairs = to_source_target(loaded, recipe)
    complete = pairs.filter(
        lambda pair: bool(pair["source"] and pair["target"]), desc="Dropping pairs with an empty side"
    )
    for split, kept in complete.items():
        if missing := len(pairs[split]) - len(kept):
            if recipe.empty == "error":
                raise UserError(
                    f"{recipe.path}, split {split}: {missing} pairs have an empty side; set data.empty=drop to "
                    "drop them."
                )
            logger.warning("%s, split %s: dropped %d pairs with an empty side.", recipe.path, split, missing)
    return check_not_empty(complete, recipe)


def open_hub_split(recipe: DataRecipe, split: str) -> Any:
    """Open a split of a data set of the Hub; streamed training pairs as a stream, whose rows `read_hub` reads."""
    fix = (
        "set data.path, data.subset and the splits, for example --data.validation='train[:1%]', or --data.test=null "
        "for none"
    )
    with hub_errors(recipe, split, fix):
        name, is_stream = getattr(recipe, split), is_streamed(recipe, split)
        return datasets.load_dataset(recipe.path or "", recipe.subset, split=name, streaming=is_stream)


def read_hub(recipe: DataRecipe, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a stream, whose files are read and downloaded meanwhile."""
    with hub_errors(recipe, "train", "correct it, or if the network failed give the same command again"):
        yield from rows


@contextlib.contextmanager
def hub_errors(recipe: DataRecipe, split: str, fix: str) -> Generator[None]:
    """Turn an error of a data set of the Hub, its files or the network into a UserError, which ends in `fix`."""
    try:
        yield
    except Exception as error:  # each library for files or the network has its classes
        name = getattr(recipe, split)
        raise UserError(
            f"data.{split}: the split {name!r} of {recipe.path} cannot be loaded ({one_line(error)}); {fix}."
        ) from error


def read_rows(recipe: DataRecipe, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Return the pairs of a stream of the Hub."""
    name = f"{recipe.path}, split {recipe.train}"

    def located() -> Iterator[LocatedPair]:
        for number, row in enumerate(read_hub(recipe, rows), start=1):
            pair = pair_of(row)
            source, target = ((pair.get(code) or "").strip() for code in (recipe.source, recipe.target))
            yield f"{name}, pair {number}", source, target

    return with_both_sides(recipe, located(), name)


def sources_in_order(recipe: DataRecipe) -> Iterator[str]:
    """Yield the real training sources in their order; those of files and streams are never all in memory."""
    if recipe.kind not in ("grammar", "hub"):
        return (source for source, _ in read_file(recipe, recipe.train))
    without_others: dict[str, Any] = {"validation": None, "test": None}
    pairs = load_real_pairs(dataclasses.replace(recipe, **without_others))["train"]
    if recipe.streaming:
        return (source for source, _ in read_rows(recipe, open_hub_split(recipe, "train")))
    return iterate_column(pairs, "source")


def check_not_empty(splits: datasets.DatasetDict, recipe: DataRecipe) -> datasets.DatasetDict:
    for name, split in splits.items():
        if len(split) == 0:
            raise UserError(f"{recipe.path}, split {name}: it has no pairs; name another file or split.")
    return splits
