"""Sentence pairs for training: read from where the recipe says, at once or as a stream, checked, and tokenised."""

import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, cast

import datasets
from accelerate import PartialState
from datasets.exceptions import DatasetsError
from transformers import PreTrainedTokenizerBase

from training.recipe import DataRecipe, RecipeError
from training.toy_task import make_splits
from vaswani_transformer.tokenizer import text_encoder

logger = logging.getLogger(__name__)

NUMBER = "number"  # of a training pair among those that were read, from 1
SPLITS = ("train", "validation", "test")
LOOK = 1000  # pairs of a stream that are looked at before training begins
JSON_TYPES = {
    type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list",
    dict: "a group",
}  # fmt: skip
STREAM_SAMPLE = 1_000_000  # pairs of a stream that a vocabulary is learnt from


def load_pairs(recipe: DataRecipe) -> datasets.DatasetDict:
    """The recipe's splits, each with the columns `source` and `target`; of streamed training pairs the first ones.

    Raises:
        RecipeError: a file or data set is missing, or a line of it is not a pair in the recipe's languages; the
            message names the file, the line and the way out.
    """
    if recipe.kind == "grammar":
        splits = columns(make_splits(), recipe)
        if recipe.test is None:
            del splits["test"]
        return splits
    if recipe.kind == "hub":
        return load_from_hub(recipe)
    splits = datasets.DatasetDict()
    for split in SPLITS:
        if (name := getattr(recipe, split)) is not None:
            sources, targets = [], []
            for source, target in islice(read_file(recipe, name), LOOK if is_streamed(recipe, split) else None):
                sources.append(source)
                targets.append(target)
            splits[split] = datasets.Dataset.from_dict({"source": sources, "target": targets})
    return refuse_empty(splits, recipe)


def is_streamed(recipe: DataRecipe, split: str) -> bool:
    return recipe.streaming and split == "train"


def columns(splits: datasets.DatasetDict, recipe: DataRecipe) -> datasets.DatasetDict:
    """Splits in the schema of Hugging Face translation data sets as `source` and `target`."""
    for name, split in splits.items():
        feature = split.features.get("translation")
        languages = tuple(getattr(feature, "languages", None) or getattr(feature, "keys", tuple)())
        if recipe.source not in languages or recipe.target not in languages:
            raise RecipeError(
                f"{recipe.path or recipe.kind}, split {name}: the columns are {', '.join(split.features)} with the "
                f"languages {', '.join(languages) or 'none'}, not a translation of {recipe.source} and "
                f"{recipe.target}; set data.source and data.target."
            )

    def pick(batch: dict[str, list[dict[str, str]]]) -> dict[str, list[str]]:
        pairs = [pair or {} for pair in batch["translation"]]
        return {
            "source": [(pair.get(recipe.source) or "").strip() for pair in pairs],
            "target": [(pair.get(recipe.target) or "").strip() for pair in pairs],
        }

    picked = datasets.DatasetDict()
    for name, split in splits.items():
        picked[name] = split.map(pick, batched=True, remove_columns=split.column_names, desc=f"Reading {name}")
    return picked


def load_from_hub(recipe: DataRecipe) -> datasets.DatasetDict:
    """A data set of the Hub, which `datasets` keeps on disk, without its unusable pairs."""
    loaded = datasets.DatasetDict()
    for split in SPLITS:
        if getattr(recipe, split) is not None:
            loaded[split] = open_hub_split(recipe, split)
            if is_streamed(recipe, split):
                loaded[split] = datasets.Dataset.from_list(list(loaded[split].take(LOOK)), loaded[split].features)
    pairs = columns(loaded, recipe)
    whole = pairs.filter(lambda pair: bool(pair["source"] and pair["target"]), desc="Looking for empty sides")
    for split, kept in whole.items():
        if missing := len(pairs[split]) - len(kept):
            if recipe.unusable == "refuse":
                raise RecipeError(
                    f"{recipe.path}, split {split}: {missing} pairs have an empty side; set data.unusable=drop to "
                    "leave them out."
                )
            logger.warning("%s, split %s: left out %d pairs with an empty side.", recipe.path, split, missing)
    return refuse_empty(whole, recipe)


def open_hub_split(recipe: DataRecipe, split: str) -> Any:
    """A split of a data set of the Hub, the training pairs of a recipe that streams them as a stream.

    Raises:
        RecipeError: there is none of that name.
    """
    name, path = getattr(recipe, split), cast(str, recipe.path)
    try:
        return datasets.load_dataset(path, recipe.subset, split=name, streaming=is_streamed(recipe, split))
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise RecipeError(
            f"data.{split}: the split {name!r} of {recipe.path} cannot be loaded "
            f"({' '.join(str(error).split())}); set data.path, data.subset and the splits, for example "
            "--data.validation='train[:1%]', or --data.test=null for none."
        ) from error


def refuse_empty(splits: datasets.DatasetDict, recipe: DataRecipe) -> datasets.DatasetDict:
    for name, split in splits.items():
        if len(split) == 0:
            raise RecipeError(f"{recipe.path}, split {name}: there is no pair in it; name another file or split.")
    return splits


def open_text(path: Path) -> TextIO:
    """A text file, compressed where its name says so; only a line feed ends a line, and a byte order mark is no text.

    Raises:
        RecipeError: there is no such file.
    """
    if not path.is_file():
        raise RecipeError(f"{path}: there is no such file; set data.path to the folder that holds it, or name it.")
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8-sig", newline="\n"))
    return path.open(encoding="utf-8-sig", newline="\n")


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers from 1, without their ends.

    Raises:
        RecipeError: the file is missing, is not UTF-8 text, or is cut off within its compression.
    """
    number = 0
    try:
        with open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                yield number, line.rstrip("\n")
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecipeError(
            f"{path}, after line {number}: not readable ({error}); it must be UTF-8 text, plain or in a whole .gz file."
        ) from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); make it readable, or name another.") from error


def is_usable(recipe: DataRecipe, where: str, source: str, target: str) -> bool:
    """Whether both sides of a pair hold text.

    Raises:
        RecipeError: one does not, and the recipe does not drop such pairs.
    """
    if source and target:
        return True
    if recipe.unusable == "refuse":
        side = recipe.target if source else recipe.source
        raise RecipeError(f"{where}: the side {side!r} is empty; mend the line or set data.unusable=drop.")
    return False


def warn_of_unusable(where: object, count: int) -> None:
    if count and PartialState().is_main_process:
        logger.warning("%s: left out %d pairs with an empty side.", where, count)


def json_pair(recipe: DataRecipe, where: str, row: Any) -> tuple[str, str]:
    """The source and the target of a line of JSON.

    Raises:
        RecipeError: it holds no texts in the recipe's languages.
    """
    pair = row.get("translation") if isinstance(row, dict) else None
    if not isinstance(pair, dict):
        schema = f'{{"translation": {{"{recipe.source}": "...", "{recipe.target}": "..."}}}}'
        if isinstance(row, dict) and "translation" in row:
            found = f"'translation' is {JSON_TYPES[type(pair)]}, no group of languages"
        else:
            found = (
                f"no column 'translation' (found: {', '.join(row) if isinstance(row, dict) else JSON_TYPES[type(row)]})"
            )
        raise RecipeError(f"{where}: {found}; each line must be {schema}.")
    for language in (recipe.source, recipe.target):
        if language not in pair:
            raise RecipeError(
                f"{where}: no text in the language {language!r} (found: {', '.join(pair)}); set data.source and "
                "data.target to languages of the file."
            )
        if not isinstance(text := pair[language], str):
            raise RecipeError(f"{where}: the side {language!r} is {JSON_TYPES[type(text)]}, no text; correct the line.")
        check_unicode(text, f"{where}: the side {language!r}")
    return pair[recipe.source], pair[recipe.target]


def check_unicode(text: str, where: str) -> None:
    """Check that a text can be written as UTF-8, as JSON's `\\ud800` without its other half cannot.

    Raises:
        RecipeError: it cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise RecipeError(
            f"{where} holds {code} at character {error.start + 1}, half of a surrogate pair; correct the line."
        ) from error


def read_json(recipe: DataRecipe, folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """The pairs of a JSON Lines file, `{"translation": {"en": "...", "de": "..."}}` a line."""
    path, unusable = folder / name, 0
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecipeError(f"{where}: not JSON ({error.msg} at column {error.colno}); mend the line.") from error
        except RecursionError as error:
            raise RecipeError(f"{where}: not JSON that can be read (nested too deeply); mend the line.") from error
        source, target = (text.strip() for text in json_pair(recipe, where, row))
        if is_usable(recipe, where, source, target):
            yield source, target
        else:
            unusable += 1
    warn_of_unusable(path, unusable)


def read_text(recipe: DataRecipe, folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """The pairs of two text files, line n of one to line n of the other; `name` holds `{language}`."""
    if "{language}" not in name:
        raise RecipeError(
            f"{name}: the name of parallel text files needs {{language}} in it, as in train.{{language}}."
        )
    source_path, target_path = (folder / name.replace("{language}", code) for code in (recipe.source, recipe.target))
    sources, targets, unusable = numbered_lines(source_path), numbered_lines(target_path), 0
    for number, source in sources:
        other = next(targets, None)
        if other is None:
            raise RecipeError(
                f"{target_path}: ends before line {number} of {source_path}; pair the files line by line."
            )
        pair = source.strip(), other[1].strip()
        if is_usable(recipe, f"{source_path}, line {number}", *pair):
            yield pair
        else:
            unusable += 1
    if (other := next(targets, None)) is not None:
        raise RecipeError(f"{source_path}: ends before line {other[0]} of {target_path}; pair the files line by line.")
    warn_of_unusable(source_path, unusable)


def read_file(recipe: DataRecipe, name: str) -> Iterator[tuple[str, str]]:
    """The pairs of a split in files of the recipe's kind."""
    read = read_json if recipe.kind == "json" else read_text
    return read(recipe, Path(recipe.path or ""), name)


def read_rows(recipe: DataRecipe, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The pairs of a stream in the schema of Hugging Face translation data sets."""
    where, unusable = f"{recipe.path}, split {recipe.train}", 0
    for number, row in enumerate(rows, start=1):
        pair = row["translation"] or {}
        source, target = ((pair.get(code) or "").strip() for code in (recipe.source, recipe.target))
        if is_usable(recipe, f"{where}, pair {number}", source, target):
            yield source, target
        else:
            unusable += 1
    warn_of_unusable(where, unusable)


class PairStream:
    """The training pairs as text, read anew in every iteration and never held together.

    Files are read in their order. A data set of the Hub is shuffled as `datasets` shuffles streams, with a buffer of
    `recipe.pool` pairs: its shards are read in another order in every epoch, as `set_epoch` says.

    Raises:
        RecipeError: while iterating, of a line as when all are read at once.
    """

    def __init__(self, recipe: DataRecipe, seed: int) -> None:
        self.recipe = recipe
        self.rows = None
        if recipe.kind == "hub":
            self.rows = open_hub_split(recipe, "train").shuffle(seed=seed, buffer_size=recipe.pool)

    def set_epoch(self, epoch: int) -> None:
        if self.rows is not None:
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        if self.rows is not None:
            return read_rows(self.recipe, self.rows)
        return read_file(self.recipe, self.recipe.train)


def sample_texts(pairs: datasets.Dataset | PairStream, count: int | None) -> Iterator[str]:
    """Both sides of `count` pairs, evenly spaced over a set or the first of a stream.

    Args:
        count: None for all pairs of a set and the first million of a stream.
    """
    if isinstance(pairs, PairStream):
        for pair in islice(pairs, count or STREAM_SAMPLE):
            yield from pair
        return
    if count is not None and count < len(pairs):
        pairs = pairs.select([number * len(pairs) // count for number in range(count)])
    for batch in pairs.iter(1000):
        for side in ("source", "target"):
            yield from cast(Any, batch)[side]


def token_ids(
    tokenizer: PreTrainedTokenizerBase, sources: list[str], targets: list[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of sources and of targets; a text that spells `</s>` stays text, and an added tag is its token."""
    encoded = text_encoder(tokenizer)(
        sources, text_target=targets, split_special_tokens=True, return_attention_mask=False
    )
    return cast(Any, encoded["input_ids"]), cast(Any, encoded["labels"])


def encoder(
    tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe
) -> Callable[[list[tuple[str, str]]], list[dict[str, list[int]]]]:
    """What makes `input_ids` and `labels` of streamed pairs.

    Raises:
        RecipeError: when called, a pair is overlong and the recipe refuses such.
    """

    def encode(pairs: list[tuple[str, str]]) -> list[dict[str, list[int]]]:
        sources, targets = (list(side) for side in zip(*pairs, strict=True))
        encoded = list(zip(*token_ids(tokenizer, sources, targets), strict=True))
        for (source, _), sides in zip(pairs, encoded, strict=True):
            if recipe.overlong == "refuse" and (longest := max(map(len, sides))) > recipe.max_length:
                raise RecipeError(
                    f"data.max_length: a training pair ({source[:40]!r}...) has {longest} tokens on a side, more than "
                    f"{recipe.max_length}; raise it or set data.overlong=drop."
                )
        return [{"input_ids": source, "labels": target} for source, target in encoded]

    return encode


def tokenize(
    splits: datasets.DatasetDict, tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe
) -> datasets.DatasetDict:
    """The splits as `input_ids`, `labels` and `reference`, the target's text; no overlong pair is left in training.

    Training pairs have their `number` too, by which a message names them.

    Raises:
        RecipeError: a training pair is overlong and the recipe refuses such, or all are.
    """

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        sources, targets = token_ids(tokenizer, batch["source"], batch["target"])
        return {"input_ids": sources, "labels": targets, "reference": batch["target"]}

    encoded = splits.map(encode, batched=True, remove_columns=["source", "target"], desc="Tokenising")

    def fits(pair: dict[str, list[int]]) -> bool:
        return max(len(pair["input_ids"]), len(pair["labels"])) <= recipe.max_length

    numbers = list(range(1, len(encoded["train"]) + 1))
    everything = encoded["train"].add_column(NUMBER, cast(Any, numbers))
    encoded["train"] = everything.filter(fits, desc="Looking for overlong pairs")
    if overlong := len(everything) - len(encoded["train"]):
        pairs = f"{overlong} of {'the first ' if recipe.streaming else ''}{len(everything)} training pairs"
        if not len(encoded["train"]):
            shortest = min(
                max(map(len, sides)) for sides in zip(everything["input_ids"], everything["labels"], strict=True)
            )
            raise RecipeError(
                f"data.max_length: all {'the first ' if recipe.streaming else ''}{len(everything)} training pairs are "
                f"longer than {recipe.max_length} tokens, "
                f"`</s>` counted, the shortest has {shortest}; raise it."
            )
        if recipe.overlong == "refuse":
            raise RecipeError(
                f"data.max_length: {pairs} are longer than {recipe.max_length} tokens; raise it or set "
                "data.overlong=drop."
            )
        logger.warning("Left out %s, longer than %d tokens.", pairs, recipe.max_length)
    return encoded
