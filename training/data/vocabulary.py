"""The shared vocabulary of a run: trained on its pairs, or loaded and checked."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import datasets
from datasets import DatasetDict
from transformers import AddedToken, PreTrainedTokenizerBase

from training.data.distilled import Distillation
from training.data.stream import PairStream
from training.recipe.fields import Recipe
from training.tasks import make_task
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.support.checked_loading import load_tokenizer
from vaswani_transformer.support.errors import UserError
from vaswani_transformer.tokenizer import ALL_WORDS_KEY

SIDES = ("source", "target")
STREAM_SAMPLE = 1_000_000  # pairs of a stream from which a vocabulary is trained


def sample_texts(
    pairs: datasets.Dataset | PairStream, count: int | None, sides: tuple[str, ...] = SIDES
) -> Iterator[str]:
    """Yield both sides, or one, of `count` pairs: evenly spaced over a set, or the first of a stream.

    None stands for all pairs of a set and the first million of a stream.
    """
    if isinstance(pairs, PairStream):
        for pair in islice(pairs, count or STREAM_SAMPLE):
            yield from (text for side, text in zip(SIDES, pair, strict=True) if side in sides)
        return
    if count is not None and count < len(pairs):
        pairs = pairs.select([number * len(pairs) // count for number in range(count)])
    for batch in pairs.iter(1000):
        for side in sides:
            yield from batch[side]


def train_tokenizer(
    recipe: Recipe, train: datasets.Dataset | PairStream, sides: tuple[str, ...], tokens: set[str]
) -> PreTrainedTokenizerBase:
    """Return a tokenizer trained on sides of the training pairs, to which `tokens` are added, each as one token."""
    texts, size = sample_texts(train, recipe.tokenizer.sample, sides), recipe.tokenizer.vocab_size
    try:
        tokenizer = VaswaniTransformerTokenizer.train_from_iterator(
            texts, size - len(tokens), recipe.tokenizer.algorithm
        )
    except UserError:  # a bad line of the pairs
        raise
    except ValueError as error:
        labels = f"{len(tokens)} of {size} entries are the targets' labels, and " if tokens else ""
        raise UserError(f"tokenizer.vocab_size: {labels}{error}") from error
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in sorted(tokens)])
    return tokenizer


def load_complete_tokenizer(path: str, recipe: Recipe, tokens: set[str]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder, or of the Hub, that has the tokens that training needs, and the given ones."""
    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise UserError(f"tokenizer.path: there is no folder {path}; name one with a tokenizer.json, or a Hub name.")
    try:
        tokenizer = load_tokenizer(path)
    except UserError as error:
        raise UserError(f"tokenizer.path: {error}") from error
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else recipe.model.get("decoder_start_token_id")
    for name, value in (("pad", tokenizer.pad_token_id), ("eos", tokenizer.eos_token_id), ("bos", start)):
        if value is None:
            raise UserError(
                f"tokenizer.path: {path} has no {name} token; give it one (for bos, model.decoder_start_token_id does "
                "as well), or train a tokenizer."
            )
    if tokenizer("a")["input_ids"][-1:] != [tokenizer.eos_token_id]:
        raise UserError(
            f"tokenizer.path: {path} does not end a text with {tokenizer.eos_token!r}, so a model never learns to "
            "stop; give it a post-processor that does, or train a tokenizer."
        )
    if missing := sorted(tokens - tokenizer.get_added_vocab().keys()):
        raise UserError(
            f"tokenizer.path: {path} lacks {len(missing)} labels of the trees, such as {missing[0]!r}; add them as "
            "tokens, or train a tokenizer."
        )
    tokenizer.init_kwargs.pop(ALL_WORDS_KEY, None)  # this model learns from other texts, which may have more words
    return tokenizer


def make_tokenizer(
    recipe: Recipe, pairs: DatasetDict, distillation: Distillation | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the recipe names, or one trained on the training pairs, which may be distilled.

    For a kind of model that needs it, `<mask>` is added after all other tokens, whose ids stay.
    """
    task, path = make_task(recipe), recipe.tokenizer.path
    train = PairStream(recipe.data, recipe.seed, distillation) if recipe.data.streaming else pairs["train"]
    tokens = set() if task.shares_vocabulary else task.single_tokens(sample_texts(train, None, ("target",)))
    if path is None:
        tokenizer = train_tokenizer(recipe, train, SIDES if task.shares_vocabulary else ("source",), tokens)
    else:
        tokenizer = load_complete_tokenizer(path, recipe, tokens)
    if tokenizer.padding_side != "right":
        raise UserError(
            f"tokenizer.path: {path} pads on the {tokenizer.padding_side}, and the targets of model.kind {recipe.kind} "
            "must begin at the first position; set its padding_side to 'right' and save it again."
        )
    if recipe.family.needs_mask and tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
    return tokenizer
