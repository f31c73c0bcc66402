"""Loading, checking, tokenization and fingerprints of the pairs of a run."""

import dataclasses
import hashlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.compute as pc
from accelerate import PartialState
from datasets import Dataset, DatasetDict, Features, Value
from numpy.typing import NDArray
from transformers import AddedToken, PreTrainedConfig, PreTrainedTokenizerBase

from training.machine import allowed_cores
from training.recipe import FileData, Recipe, bleu_tokenizer
from training.texts import SIDES, draw_key, read_files, read_split, whole_tables
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.batching.pairs import ArrowRows
from vaswani_transformer.batching.sampler import Lengths
from vaswani_transformer.parsing.linear import linear_tokens
from vaswani_transformer.support.command import UserError
from vaswani_transformer.support.files import read_json
from vaswani_transformer.support.loading import load_tokenizer
from vaswani_transformer.tokenizer import source_encoder

logger = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
MOST_UNKNOWN = 0.01  # share of target tokens above which there is a warning
Counts = dict[str, dict[str, int]]  # of `tokens` and `unknown` tokens, by side
SAMPLE = 200  # targets in which spaces are counted
UNSPACED_LETTER = re.compile("[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uff66-\uff9d]")  # Thai to Chinese
WORD_BEGINNING = re.compile(r"(?<!\w)(?<!\w['\u2019])\w")
LONGEST_WORDS = 5  # such letters a word, above which targets are not split into words
TOKEN_LETTERS = 16  # letters of a long token
EVALUATION_LENGTHS = 16  # longest text of an evaluation, in units of `data.max_length`
PAIRS_A_PROCESS = 50_000  # smallest number for which a further process pays off


class Fingerprint(TypedDict):
    """What identifies the pairs of a split: their number, and the SHA-256 of their texts."""

    pairs: int
    sha256: str


@dataclass(frozen=True)
class Data:
    """Pairs of a run.

    Attributes:
        pairs: texts of each split, in the columns `source` and `target`.
        tokens: `input_ids` and `labels` of each split, without training pairs that are too long.
        tokenizer: tokenizer of the shared vocabulary.
        fingerprints: fingerprint of each split.
        unknown: for sources and targets of each split, the number of `tokens` and of `unknown` tokens.
        variants: number of training pairs that are copies in other letters, by the name of the variant.
        seen: for validation and test, the numbers of pairs and of sources that are in the training pairs too, also in
            those of the models that the run started from, as `count_seen` returns them.
    """

    pairs: DatasetDict
    tokens: DatasetDict
    tokenizer: PreTrainedTokenizerBase
    fingerprints: dict[str, Fingerprint]
    unknown: dict[str, Counts]
    variants: dict[str, int]
    seen: dict[str, dict[str, int] | None]


class Learned(NamedTuple):
    """Training pairs of models, and whether these are all that they learned from."""

    pairs: list[Dataset]
    is_complete: bool = True


def load_data(recipe: Recipe, run: Path | None = None, before: Learned | None = None) -> Data:
    """Load the recipe's pairs as texts and tokens; a resumed `run` keeps its tokenizer.

    `before` has the training pairs of the models that the run starts from.
    """
    with PartialState().main_process_first():  # others read its cache
        read = read_pairs(recipe, SPLITS)
        if recipe.data.kind != "trees":
            logger.info("%s", "\n".join(describe_pairs("Training pairs", read["train"])))
        pairs, variants = with_copies(recipe, read)
        tokenizer = load_tokenizer(str(run)) if run is not None else make_tokenizer(recipe, pairs["train"])
        tokens = tokenize(recipe, pairs, tokenizer)
    fingerprints = {str(split): fingerprint(rows) for split, rows in pairs.items()}
    unknown = count_unknown(tokens, tokenizer)
    learned = Learned([pairs["train"], *(before.pairs if before else [])], before is None or before.is_complete)
    seen = {str(split): count_seen(rows, learned) for split, rows in pairs.items() if split != "train"}
    for split, counts in seen.items():
        if warning := describe_seen(split, len(pairs[split]), counts):
            logger.warning("%s.", warning)
    return Data(pairs, tokens, tokenizer, fingerprints, unknown, variants, seen)


# Texts


def load_pairs(recipe: Recipe, splits: Iterable[str] = SPLITS) -> DatasetDict:
    """Load splits of the recipe's pairs in the columns `source` and `target`, as `read_pairs` and `with_copies` do."""
    return with_copies(recipe, read_pairs(recipe, splits))[0]


def read_pairs(recipe: Recipe, splits: Iterable[str]) -> DatasetDict:
    """Read splits of the recipe's pairs in the columns `source` and `target`; `data.distilled` replaces train.

    If the corpora of the training pairs have weights, a column `times` has them.
    """
    data = recipe.data
    wanted = {str(split) for split in splits}
    names = {split: getattr(data, split) for split in SPLITS}

    # A number instead of a name is held out of the training pairs.
    held_out = {split: size for split, size in names.items() if isinstance(size, int)}
    needed = wanted - held_out.keys()
    if wanted & held_out.keys():
        needed.add("train")
    pairs = DatasetDict()
    for split, name in names.items():
        if split in needed and name is not None:
            pairs[split] = read_train(data) if split == "train" else read_split(data, split, str(name))
    if held_out and "train" in pairs:  # hold out all splits, whichever are requested
        pairs.update(hold_out(pairs["train"], held_out, split_seed(recipe), data.max_length))

    if data.distilled is not None and "train" in wanted:
        pairs["train"] = read_files(data, "data.distilled", "json", distilled_files(data.distilled))
    loaded = DatasetDict({split: pairs[split] for split in names if split in wanted and split in pairs})
    log_unspaced(recipe, loaded)
    return loaded


def read_train(data: FileData) -> Dataset:
    """Read all corpora of the training pairs, without the pairs of the kinds in `data.drop`."""
    corpora = [read_split(data, "train", name) for name in data.corpora]
    if data.weights is not None:
        weighted = zip(corpora, data.weights, strict=True)
        corpora = [rows.add_column("times", np.full(len(rows), weight)) for rows, weight in weighted]
    train = datasets.concatenate_datasets(corpora) if len(corpora) > 1 else corpora[0]
    if data.drop:
        train, counts = without(train, data.drop)
        logger.info("Dropped: %s.", ", ".join(f"{name} {count:,}" for name, count in counts.items()))
        if not len(train):
            raise UserError(f"data.drop: leaves no training pair; got {', '.join(data.drop)}. Drop fewer kinds.")
    return train


def split_seed(recipe: Recipe) -> int:
    return recipe.seed if recipe.data.split_seed is None else recipe.data.split_seed


def title(text: str) -> str:
    """Return a text with a capital at the beginning of each word; other letters stay, as in McDonald's."""
    return WORD_BEGINNING.sub(lambda match: match[0].upper(), text)


VARIANTS: dict[str, Callable[[str], str]] = {"upper": str.upper, "title": title, "lower": str.lower}


def with_copies(recipe: Recipe, pairs: DatasetDict) -> tuple[DatasetDict, dict[str, int]]:
    """Repeat training pairs by `data.weights`, and append the copies of `data.variants`.

    Returns:
        all splits, and the number of each variant.
    """
    copied = DatasetDict(pairs)
    for split, rows in pairs.items():
        if "times" in rows.column_names:
            repeated = np.arange(len(rows))
            if split == "train":
                repeated = np.repeat(repeated, rows["times"][:])
            copied[split] = rows.remove_columns("times").select(repeated)
    counts: dict[str, int] = {}
    if "train" in copied:
        copied["train"], counts = with_variants(recipe, copied["train"])
    return copied, counts


def with_variants(recipe: Recipe, train: Dataset) -> tuple[Dataset, dict[str, int]]:
    """Append the copies of `data.variants` to training pairs; return the number of each variant too.

    The hash of seed, variant and pair decides which are copied. A pair that is written so already is not copied.
    """
    copies = []
    counts = {}
    for name, share in dataclasses.asdict(recipe.data.variants).items():
        if share:
            settings = {"name": name, "share": share, "seed": split_seed(recipe)}
            copies.append(train.map(drawn_variants, batched=True, fn_kwargs=settings, desc="Copying"))
            counts[name] = len(copies[-1])
    if not copies:
        return train, counts
    described = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    logger.info("Copies of training pairs in other letters: %s of %s.", described, f"{len(train):,}")
    return datasets.concatenate_datasets([train, *copies]), counts


def drawn_variants(batch: dict[str, list[str]], name: str, share: float, seed: int) -> dict[str, list[str]]:
    """Return copies in other letters of about a `share` of the pairs of a batch."""
    copies: dict[str, list[str]] = {side: [] for side in SIDES}
    for source, target in zip(batch["source"], batch["target"], strict=True):
        copy = {"source": VARIANTS[name](source), "target": VARIANTS[name](target)}
        is_drawn = draw_key(f"{seed} {name} {source}\0{target}") < share * 2**64
        if is_drawn and copy != {"source": source, "target": target}:
            for side in SIDES:
                copies[side].append(copy[side])
    return copies


def log_unspaced(recipe: Recipe, pairs: DatasetDict) -> None:
    """Log that BLEU will count whole clauses as words, if its targets have hardly any spaces."""
    tokenize = bleu_tokenizer(recipe.score.tokenize, recipe.data.languages[1])
    scored = [split for split in SPLITS[1:] if split in pairs]
    if recipe.score.tokenize != "auto" or tokenize != "13a" or recipe.data.kind == "trees" or not scored:
        return
    texts = pairs[scored[0]].select_columns("target")[:SAMPLE]["target"]
    letters = sum(len(UNSPACED_LETTER.findall(text)) for text in texts)
    if letters > LONGEST_WORDS * sum(len(text.split()) for text in texts):
        logger.warning(
            "score.tokenize: BLEU splits targets at spaces (%s), of which the %s set has hardly any. Set "
            "data.target_language to their language, or score.tokenize to char.",
            *(tokenize, scored[0]),
        )


def distilled_files(name: str) -> list[Path]:
    """Return all files of a folder of training.distill, or one file."""
    if not os.path.isdir(name):
        return [Path(name)]
    files = sorted(Path(name).glob("*.jsonl"))
    others = [file.name for file in files if not re.fullmatch(r"\d+-of-\d+", file.stem)]
    if others:
        problem = f"contains other files than those of training.distill; got {others[0]}"
        raise UserError(f"data.distilled: {name} {problem}. Name one file, or its folder.")
    shares = int(files[0].stem.rpartition("-of-")[2]) if files else 1
    finished = 0
    for file in files:
        record = Path(f"{file}.record")
        if record.exists() and read_json(record, "repeat training.distill.").get("is_finished") is True:
            finished += 1
    if not finished == shares == len(files):
        problem = f"has {finished} of {shares} finished files"
        raise UserError(f"data.distilled: {name} {problem}; repeat training.distill.")
    return files


def hold_out(train: Dataset, sizes: dict[str, int], seed: int, max_length: int) -> dict[str, Dataset]:
    """Draw splits of `sizes` pairs from the training pairs by `seed`, and return them with the rest as train.

    The test set has the smallest hashes of source and seed, and the validation set the largest, so that pairs that are
    added later only replace some of them. Only pairs whose sentences occur in no other pair are drawn, and none that
    must have more than `max_length` tokens.
    """
    keys = {side: np.empty(len(train), dtype=np.uint64) for side in SIDES}
    can_draw = np.ones(len(train), dtype=bool)
    start = 0
    for table in train.with_format("arrow").iter(10_000):
        rows = slice(start, start + len(table))
        start = rows.stop
        for side in SIDES:
            texts = in_nfc(table[side]).to_pylist()
            keys[side][rows] = [draw_key(f"{seed} {text}") for text in texts]

            # Without a vocabulary, count at least a token a word, and at most TOKEN_LETTERS letters a token.
            can_draw[rows] &= [max(len(text.split()), len(text) / TOKEN_LETTERS) + 1 <= max_length for text in texts]
    for values in keys.values():
        order = np.argsort(values)
        equal = np.flatnonzero(np.diff(values[order]) == 0)
        can_draw[order[equal]] = can_draw[order[equal + 1]] = False
    eligible = np.flatnonzero(can_draw)
    needed = sum(sizes.values())
    if needed > len(eligible) or needed == len(train):
        raise UserError(
            f"data.validation, data.test: hold out {needed:,} of {len(train):,} pairs, of which {len(eligible):,} have "
            "sentences that no other pair has and are within data.max_length; hold out fewer."
        )

    order = eligible[np.argsort(keys["source"][eligible])]
    ends = {"validation": order[::-1], "test": order}
    drawn = {split: np.sort(ends[split][:size]) for split, size in sizes.items()}
    is_left = np.ones(len(train), dtype=bool)
    is_left[np.concatenate([*drawn.values()])] = False
    return {split: train.select(rows) for split, rows in (drawn | {"train": np.flatnonzero(is_left)}).items()}


def fingerprint(pairs: Dataset) -> Fingerprint:
    """Return the fingerprint of pairs; the digest is that of their texts, each followed by a zero byte."""
    digest = hashlib.sha256()
    for batch in pairs.select_columns(list(SIDES)).iter(1000):
        texts = zip(batch["source"], batch["target"], strict=True)
        digest.update("".join(f"{source}\0{target}\0" for source, target in texts).encode())
    return {"pairs": len(pairs), "sha256": digest.hexdigest()}


def in_nfc(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return texts in the normal form NFC, in which the tokenizer reads them."""
    return pc.call_function("utf8_normalize", [texts], pc.Utf8NormalizeOptions("NFC"))


def count_seen(pairs: Dataset, learned: Learned) -> dict[str, int] | None:
    """Count the `pairs` of a split that are training pairs too, and those whose `sources` are training sources.

    `not_known` is added if not all training pairs are known, so there may be more; None if none are.
    """
    if not learned.pairs:
        return None
    texts = [in_nfc(pa.array(pairs[side][:], pa.string())).to_pylist() for side in SIDES]
    rows = list(zip(*texts, strict=True))
    among_sources = pc.SetLookupOptions(pa.array({source for source, _ in rows}, pa.string()))
    seen: set[tuple[str, str]] = set()
    for table in itertools.chain(*map(whole_tables, learned.pairs)):
        table = pa.table({side: in_nfc(table[side]) for side in SIDES})
        matches = table.filter(pc.call_function("is_in", [table["source"]], among_sources))
        seen.update(zip(matches["source"].to_pylist(), matches["target"].to_pylist(), strict=True))
    seen_sources = {source for source, _ in seen}
    counts = {
        "pairs": sum(row in seen for row in rows),
        "sources": sum(source in seen_sources for source, _ in rows),
    }
    return counts if learned.is_complete else {**counts, "not_known": True}


def describe_seen(split: str, size: int, seen: dict[str, int] | None) -> str:
    """Return a warning of a split's pairs, or sources, that are or may be in the training data; "" without any."""
    overlaps = []
    if seen and seen["sources"]:
        pairs, sources = (f"{seen[name]:,}" for name in ("pairs", "sources"))
        overlaps.append(f"the training data contain {pairs} of its {size:,} pairs, and {sources} of its sources")
    if seen is None or seen.get("not_known"):
        overlaps.append("it is not known whether missing or changed training data contain its pairs")
    return f"{split} set: {'; '.join(overlaps)}, so its scores may be too high" if overlaps else ""


# What is often wrong with pairs

PATTERNS = {  # of a source or target, in the order of the report
    "markup": "</?[A-Za-z][^<>]*>",
    "entities": "&(#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]{2,8});",
    "placeholders": r"(?i)^(#?n/?a|null|nan|tbd|-+|\?+)$",
    "capitals": r"^(\P{Ll}*\p{Lu}){4}\P{Ll}*$",  # four or more, and no small letter
}
DESCRIPTIONS = {
    "markup": "markup such as <b>",
    "entities": "HTML entities such as &amp;",
    "placeholders": "placeholders such as n/a",
    "capitals": "capitals only",
    "copies": "target equal to the source",
    "duplicates": "repetitions of an earlier pair",
    "ratios": "length ratio more than 3 times the usual one, or less than a third",
}
RATIO = 3.0  # of the number of characters in target and source, relative to the median
SMOOTHING = 10  # characters added to both, so that short texts have no odd ratio
SHOWN = 60  # characters of an example
Rows = NDArray[np.intp]


def find_rows(pairs: Dataset) -> dict[str, Rows]:
    """Return the rows of each kind of `DESCRIPTIONS`, in ascending order."""
    masks: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in (*PATTERNS, "copies")}
    keys = [np.empty(0, dtype=np.uint64)]
    ratios = [np.empty(0)]
    for table in whole_tables(pairs):
        texts = [in_nfc(table[side]) for side in SIDES]
        for name, pattern in PATTERNS.items():
            options = pc.MatchSubstringOptions(pattern)
            matches = [pc.call_function("match_substring_regex", [side], options).to_numpy() for side in texts]
            masks[name].append(np.logical_or(*matches))
        masks["copies"].append(pc.call_function("equal", texts).to_numpy())
        source_keys, target_keys = map(text_keys, texts)
        keys.append(source_keys * np.uint64(3) + target_keys)  # modulo 2^64
        sources, targets = (pc.call_function("utf8_length", [side]).to_numpy() + SMOOTHING for side in texts)
        ratios.append(np.log(targets / sources))

    found = {name: np.flatnonzero(np.concatenate([[], *parts])) for name, parts in masks.items()}
    found["duplicates"] = repetitions(np.concatenate(keys))
    logs = np.concatenate(ratios)
    found["ratios"] = np.empty(0, np.intp)
    if len(logs):
        found["ratios"] = np.flatnonzero(abs(logs - np.median(logs)) > np.log(RATIO))
    return found


def text_keys(texts: pa.ChunkedArray) -> NDArray[np.uint64]:
    """Return a hash of each text."""
    hash_array: Any = pandas.util.hash_array
    return hash_array(texts.to_numpy(), categorize=False)


def repetitions(keys: NDArray[np.uint64]) -> Rows:
    """Return the rows whose key an earlier row has too."""
    _, first = np.unique(keys, return_index=True)
    is_first = np.zeros(len(keys), dtype=bool)
    is_first[first] = True
    return np.flatnonzero(~is_first)


def describe_pairs(name: str, pairs: Dataset) -> Iterator[str]:
    """Yield lines with the number and lengths of pairs, and for each kind that occurs its number and an example."""
    if not len(pairs):
        return
    lengths = []
    for side in SIDES:
        parts = [pc.call_function("utf8_length", [table[side]]).to_numpy() for table in whole_tables(pairs)]
        characters = np.concatenate(parts)
        lengths.append(f"{side} {np.median(characters):,.0f} (median) to {characters.max():,} characters")
    yield f"{name}: {len(pairs):,} pairs, {', '.join(lengths)}"
    found = find_rows(pairs)
    for kind, description in DESCRIPTIONS.items():
        if len(found[kind]):
            number = "1 pair" if len(found[kind]) == 1 else f"{len(found[kind]):,} pairs"
            pair = pairs[int(found[kind][0])]
            shown = " -> ".join(quoted(pair[side]) for side in SIDES)
            yield f"  {kind}: {number} ({description}), first {shown}"


def quoted(text: str) -> str:
    """Return the beginning of a text in quotation marks, with its line breaks and control characters escaped."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def without(pairs: Dataset, kinds: Iterable[str]) -> tuple[Dataset, dict[str, int]]:
    """Return the pairs that are of none of these kinds, and the number of each kind."""
    found = find_rows(pairs)
    is_kept = np.ones(len(pairs), dtype=bool)
    for kind in kinds:
        is_kept[found[kind]] = False
    return pairs.select(np.flatnonzero(is_kept)), {kind: len(found[kind]) for kind in kinds}


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

    For parsing it is learned from the sentences, and each label of the trees is an added token, as are those of
    `tokenizer.special_tokens`. For a CMLM `<mask>` is added after all other tokens.
    """
    settings = recipe.tokenizer
    added = set(settings.special_tokens)
    if recipe.data.kind == "trees":
        added |= linear_tokens(sample_texts(train, None, ("target",)))
    if settings.path is None:
        tokenizer = learn_tokenizer(recipe, train, added)
    else:
        tokenizer = load_tokenizer(settings.path)
        if missing := sorted(added - tokenizer.get_added_vocab().keys()):
            what = "labels of the trees" if recipe.data.kind == "trees" else "tokens of tokenizer.special_tokens"
            raise UserError(
                f"tokenizer.path: {settings.path} does not contain all {what}, such as {missing[0]!r}. Leave it out to "
                "learn a vocabulary."
            )

    # What training needs of any tokenizer.
    if recipe.family.recipe.needs_mask and tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
    ends_texts = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    if tokenizer.pad_token_id is None or tokenizer.padding_side != "right" or not ends_texts:
        needed = "needs <pad>, padding on the right, and its end token after each text"
        raise UserError(f"tokenizer.path: {settings.path} {needed}; change it and save it again.")
    return tokenizer


def learn_tokenizer(recipe: Recipe, train: Dataset, added: set[str]) -> PreTrainedTokenizerBase:
    """Return a tokenizer learned from the training pairs, or for parsing from their sentences, with `added` tokens."""
    settings = recipe.tokenizer
    sides = ("source",) if recipe.data.kind == "trees" else SIDES
    texts = sample_texts(train, settings.sample, sides)
    size = settings.vocab_size - len(added)
    try:
        tokenizer = VaswaniTransformerTokenizer.train_from_iterator(texts, size, settings.algorithm)
    except ValueError as error:
        raise UserError(f"tokenizer.vocab_size: {error}") from error
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in sorted(added)])
    return tokenizer


def tokenize(recipe: Recipe, pairs: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Return `input_ids` and `labels` of every split, in training only of at most `data.max_length` tokens.

    Special tokens in a text are encoded as characters.
    """
    encoder = source_encoder(tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = encoder(
            batch["source"], text_target=batch["target"], split_special_tokens=True, return_attention_mask=False
        )
        return {"input_ids": encoded["input_ids"], "labels": encoded["labels"]}

    ids = Features({name: datasets.List(Value("int32")) for name in ("input_ids", "labels")})
    tokens = DatasetDict()
    for split, rows in pairs.items():
        tokens[split] = rows.map(
            encode,
            batched=True,
            remove_columns=list(SIDES),
            features=ids,
            desc="Tokenizing",
            num_proc=processes_for(rows),
        )

    # Training pairs within the limit.
    train = tokens["train"]
    limit = recipe.data.max_length
    kept = np.flatnonzero(longer_sides(train) <= limit)
    if len(kept) < len(train):
        problem = f"{len(train) - len(kept):,} of {len(train):,} training pairs are longer than {limit} tokens"
        if recipe.data.too_long == "error" or not len(kept):
            fix = "raise it or set data.too_long=drop" if len(kept) else "raise it"
            raise UserError(f"data.max_length: {problem}; {fix}.")
        logger.warning("Dropped: %s.", problem)
        tokens["train"] = train.select(kept)

    # Lengths and targets that the model supports.
    config = recipe.model_config(vocab_size=2**31)  # of any vocabulary
    for split, rows in tokens.items():
        check_lengths(str(split), longer_sides(rows), recipe, config)
    return with_possible_targets(recipe, tokens)


def longer_sides(rows: Dataset) -> Lengths:
    """Return the number of tokens of each pair's source or target, whichever is longer."""
    return np.maximum(ArrowRows(rows, "input_ids").lengths, ArrowRows(rows, "labels").lengths)


def with_possible_targets(recipe: Recipe, tokens: DatasetDict) -> DatasetDict:
    """Return the splits, in training only with targets that the model can produce; log how many it cannot."""
    if recipe.family.recipe.fits is None:
        return tokens
    for split, rows in tokens.items():
        fits = recipe.family.recipe.fits(recipe, rows)
        if fits.all():
            continue
        count = f"{len(rows) - fits.sum():,} of {len(rows):,} pairs"
        if split != "train":
            logger.warning("No loss: in %s, %s have targets that the model cannot produce.", split, count)
            continue
        if not fits.any():
            raise UserError(f"model: {recipe.kind} cannot produce any target of the training pairs; change its fields.")
        logger.warning("Dropped: in training, %s have targets that the model cannot produce.", count)
        tokens["train"] = rows.select(np.flatnonzero(fits))
    return tokens


def check_lengths(split: str, lengths: Sequence[int] | Lengths, recipe: Recipe, config: PreTrainedConfig) -> None:
    """Check that a model can process pairs of these lengths, and that an evaluation of them ends in time."""
    limit = EVALUATION_LENGTHS * recipe.data.max_length
    reason = f"{EVALUATION_LENGTHS} times data.max_length"
    fix = "raise data.max_length"
    if getattr(config, "position_embedding", None) == "learned" and config.max_position_embeddings < limit:
        limit = config.max_position_embeddings
        reason = "the learned positions"
        fix = "set data.max_length to that" if split == "train" else "raise model.max_position_embeddings"
    if too_long := np.count_nonzero(np.asarray(lengths) > limit):
        raise UserError(
            f"data.{split}: pairs with more than {limit:,} tokens, {reason}: {too_long:,}, the longest has "
            f"{np.max(lengths):,}; shorten or remove them, or {fix}."
        )


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
    if tokenizer.unk_token_id is not None:
        log_unknown(counts)
    return counts


def log_unknown(counts: dict[str, Counts]) -> None:
    """Log the shares of unknown tokens; warn of a large share in targets, which the model would learn to write."""
    for split, sides in counts.items():
        source, target = (sides[side]["unknown"] / max(1, sides[side]["tokens"]) for side in SIDES)
        shares = f"Unknown tokens of {split}: {source:.2%} of source, {target:.2%} of target"
        if target > MOST_UNKNOWN:
            logger.warning("%s; train a tokenizer on these texts, or choose a different tokenizer.path.", shares)
        else:
            logger.info("%s.", shares)


def processes_for(rows: Dataset) -> int | None:
    """Return the number of processes to start for `rows`; None for no further process."""
    count = len(rows) // PAIRS_A_PROCESS
    if count > 1:
        count = min(count, allowed_cores())
    return count if count > 1 else None
