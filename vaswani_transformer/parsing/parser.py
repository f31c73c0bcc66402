"""Parsing of sentences with a model that writes linear trees."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..support.errors import UserError
from ..translation.translator import translate
from .constraint import tree_constraint
from .linear import LINEAR_TOKEN, PLACE, ParsedSentence, delinearize
from .words import escape_brackets, split_plain, split_tokenized


def source_text(sentence: str | Sequence[str], index: int) -> str:
    """Return the words of a plain text, or the given words, separated by spaces; `index` is for errors."""
    if isinstance(sentence, str):
        return " ".join(split_plain(sentence))
    if not isinstance(sentence, Sequence) or not all(isinstance(word, str) for word in sentence):
        raise TypeError(f"Sentence {index}: got {sentence!r:.80}, expected a str or a list of words.")
    for word in sentence:
        if split_tokenized(word) != [escape_brackets(word)]:
            raise ValueError(
                f"sentences: a word is empty or contains white space; got {word!r}, expected one word. Split it, or "
                "pass the sentence as one text."
            )
    return " ".join(map(escape_brackets, sentence))


def is_parser(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the vocabulary contains places of words, as a parser's does."""
    return any(token.startswith(PLACE) and LINEAR_TOKEN.fullmatch(token) for token in tokenizer.get_vocab())


def check_parser(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    if not is_parser(tokenizer):
        raise UserError(
            f"{name}: is not a parser: its vocabulary has no tree tags. Use a model that was trained on trees "
            "(data.kind: trees), or translate with vaswani-translate."
        )


def parse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Iterable[str | Sequence[str]],
    **settings: Any,
) -> Iterator[ParsedSentence]:
    """Yield the tree of each sentence in order, by the model's generation config.

    The leaves of a tree are always the words of the sentence. `is_repaired` is True if the output was malformed.

    Args:
        model: a model trained for parsing.
        tokenizer: its tokenizer.
        sentences: plain texts, which are split by rules close to those of the Penn Treebank, or lists of words.
        **settings: arguments of `translate`, such as `batch_tokens`, and of `generate()`, such as `num_beams`.

    Raises:
        TypeError: `sentences` is a single text, or contains anything but texts and lists of words.
        ValueError: the model is not a parser, a word is empty or contains white space, or `translate` raises it.
    """
    if isinstance(sentences, str):
        raise TypeError(f"sentences is the str {sentences!r}; pass a list of sentences, for example [sentence].")
    check_parser(tokenizer, "tokenizer")
    settings.setdefault("constraint", tree_constraint(model, tokenizer))
    for translation in translate(model, tokenizer, map(source_text, sentences, itertools.count()), **settings):
        yield delinearize(translation.text, split_tokenized(translation.source))
