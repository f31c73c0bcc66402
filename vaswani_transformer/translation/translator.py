"""Translate many texts: batches by length under a token budget, results in the order of the texts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, cast, get_args

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..batching.steps import batches_in_order
from ..support.errors import UserError
from ..tokenizer import check_own_vocabulary, text_encoder, unknown_words
from .engine import Constraint, DecodingEngine, ScoredTokens, TransformersEngine

MIN_TEXT_TOKENS = 16  # that a text counts for in a batch, because a batch of many very short texts has too many beams

TooLong = Literal["truncate", "keep", "error"]


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a text.

    text: the translation.
    tokens: its tokens, `</s>` included.
    score: log P(Y | X) / lp(Y) in nats, by which beam search ranks; of a model that predicts all tokens at once, its
        `sequences_scores`; None without `scores`.
    """

    text: str
    tokens: int
    score: float | None


@dataclass(frozen=True)
class Translation:
    """The result of a text.

    hypotheses: its n translations, the best first.
    source_tokens: the text's tokens, `</s>` included, before truncation.
    is_truncated: whether only its first tokens were translated.
    max_source_tokens: how many tokens it may have without truncation.
    unknown_words: its words that the vocabulary lacks, whose translation is a guess.
    source: the text.
    """

    hypotheses: list[Hypothesis]
    source_tokens: int
    is_truncated: bool
    max_source_tokens: int
    unknown_words: list[str] = field(default_factory=list)
    source: str = ""

    @property
    def text(self) -> str:
        """The best translation."""
        return self.hypotheses[0].text


class TooLongError(UserError):
    """A text has more tokens than may be translated.

    index: its number among the texts, from 0.
    tokens, limit: how many it has, and how many it may have.
    can_keep: whether the model has positions for the text.
    """

    def __init__(self, index: int, tokens: int, limit: int, can_keep: bool) -> None:
        fix = 'raise max_source_tokens, or give too_long="truncate" or "keep".'
        fix = fix if can_keep else 'or give too_long="truncate": the model has positions for no more.'
        super().__init__(f"Text {index} has {tokens} tokens, more than {limit}; shorten it, {fix}")
        self.index, self.tokens, self.limit, self.can_keep = index, tokens, limit, can_keep

    def in_command(self, name: str) -> UserError:
        """Return the same error with the options of a command, for a text of the input `name`."""
        fix = "or give --too_long=truncate, --too_long=keep or another --max_source_tokens."
        fix = fix if self.can_keep else "or give --too_long=truncate: the model has positions for no more."
        line = f"{name}, line {self.index + 1}"
        return UserError(f"{line}: {self.tokens} tokens, more than {self.limit}; shorten it, {fix}")


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return texts, by index, in batches of at most `batch_tokens`, padding included, the longest first.

    A text with more tokens is a separate batch, and one of 0 tokens is in none.
    """
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda index: -lengths[index])
    counted = np.maximum(np.array(lengths, dtype=np.int32), MIN_TEXT_TOKENS)
    return batches_in_order(order, counted, counted, (batch_tokens, batch_tokens))


@dataclass
class Translator:
    """An iterator over translations by any engine; `translate` describes the other fields.

    max_positions: the tokens of the longest text that the model has positions for; None for no such limit.
    constraint: of a `TransformersEngine`; None for a free search.
    """

    engine: DecodingEngine
    tokenizer: PreTrainedTokenizerBase
    max_source_tokens: int
    batch_tokens: int = 2048
    sort_lines: int = 2048
    too_long: TooLong = "truncate"
    max_positions: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for name in ("max_source_tokens", "batch_tokens", "sort_lines"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} ({getattr(self, name)}) is not positive; give an integer of at least 1.")
        if self.too_long not in get_args(TooLong):
            raise UserError(f"too_long is {self.too_long!r}; choose one of {', '.join(get_args(TooLong))}.")
        if self.max_positions is not None and self.max_source_tokens > self.max_positions:
            raise UserError(
                f"max_source_tokens ({self.max_source_tokens}) is more than the model's table of positions has room "
                f"for; give at most {self.max_positions}."
            )

    def can_keep(self, length: int) -> bool:
        """Return whether the model has positions for a text of `length` tokens."""
        return self.max_positions is None or length <= self.max_positions

    def __call__(
        self, texts: Iterable[str], skip: int = 0, progress: Callable[[int], object] | None = None
    ) -> Iterator[Translation]:
        """Yield the translations of all texts after the first `skip`, in batches as if none were skipped."""
        remaining, first = iter(texts), 0
        while window := list(islice(remaining, self.sort_lines)):
            if first + len(window) > skip:
                yield from self._translate(window, first, max(0, skip - first), progress or (lambda _: None))
            first += len(window)

    def _translate(
        self, texts: list[str], first: int, skip: int, progress: Callable[[int], object]
    ) -> list[Translation]:
        """Return the translations of a window, which begins with text number `first`, from its text `skip` on."""
        sources, lengths, unknown = self._encode(texts, first)
        empty = [Hypothesis("", 0, 0.0 if self.engine.scores else None)] * self.engine.num_translations
        hypotheses = {index: empty for index in range(len(texts)) if index not in sources}
        progress(sum(index >= skip for index in hypotheses))
        for batch in batches_by_length([len(sources.get(index, ())) for index in range(len(texts))], self.batch_tokens):
            if wanted := [index for index in batch if index >= skip]:
                targets = self._search([sources[index] for index in batch], [texts[index] for index in batch])
                hypotheses |= zip(batch, map(self._decode, targets), strict=True)
                progress(len(wanted))
        limit = self.max_source_tokens
        truncated = [self.too_long == "truncate" and length > limit for length in lengths]
        return [
            Translation(hypotheses[index], lengths[index], truncated[index], limit, unknown[index], texts[index])
            for index in range(skip, len(texts))
        ]

    def _search(self, sources: list[list[int]], texts: list[str]) -> list[list[ScoredTokens]]:
        """Return the engine's hypotheses for the tokens of texts, under the constraint of these if there is one."""
        if self.constraint is None:
            return self.engine(sources)
        return cast(TransformersEngine, self.engine)(sources, partial(self.constraint, texts))

    def _encode(self, texts: list[str], first: int) -> tuple[dict[int, list[int]], list[int], list[list[str]]]:
        """Return the source tokens of the texts that are not empty, and the length and unknown words of each text."""
        encode = partial(text_encoder(self.tokenizer), return_attention_mask=False, verbose=False)
        encoded = encode(texts)
        tokens, unknown = encoded["input_ids"], unknown_words(self.tokenizer, encoded, texts)
        lengths = [len(row) if text.strip() else 0 for row, text in zip(tokens, texts, strict=True)]
        limit = self.max_positions if self.too_long == "keep" else self.max_source_tokens
        for index, length in enumerate(lengths):
            if limit is not None and length > limit:
                if self.too_long != "truncate":
                    raise TooLongError(first + index, length, limit, self.can_keep(length))
                tokens[index] = encode(texts[index], truncation=True, max_length=limit)["input_ids"]
        return {index: tokens[index] for index, length in enumerate(lengths) if length}, lengths, unknown

    def _decode(self, targets: list[ScoredTokens]) -> list[Hypothesis]:
        texts = self.tokenizer.batch_decode([tokens for tokens, _ in targets], skip_special_tokens=True)
        return [Hypothesis(text, len(ids), score) for text, (ids, score) in zip(texts, targets, strict=True)]


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    batch_tokens: int = 2048,
    sort_lines: int = 2048,
    max_source_tokens: int | None = None,
    too_long: TooLong = "truncate",
    scores: bool = False,
    skip: int = 0,
    progress: Callable[[int], object] | None = None,
    constraint: Constraint | None = None,
    **generate_kwargs: Any,
) -> Iterator[Translation]:
    """Yield the translations of many texts, in order, by the model's own generation config.

    It reads a window of texts at a time, so `texts` may be endless, and batches those of a window by length. A text
    with no characters but white space has the empty translation.

    Args:
        model: any encoder-decoder of Transformers that generates.
        tokenizer: its tokenizer, with a padding token.
        texts: the texts to translate.
        batch_tokens: source tokens of a batch, padding included; a text counts for at least 16, and one that is longer
            than the budget is a separate batch.
        sort_lines: the number of texts that are sorted together, a window; translation starts when it is full.
        max_source_tokens: the tokens that a text may have, `</s>` included; None for those of a table of positions, or
            1,024.
        too_long: what happens to a longer text: "truncate" translates its first tokens and sets `is_truncated`; "keep"
            translates all of it; "error" raises `TooLongError` before its window is translated, and so does "keep"
            for a text that is longer than a table of positions.
        scores: whether translations have scores, which takes one more pass over each; not of a model that predicts all
            tokens at once.
        skip: how many texts at the beginning are skipped. The batches of the others stay the same.
        progress: called with the number of newly translated texts.
        constraint: makes the logits processor of a batch from its texts and its limits of new tokens.
        **generate_kwargs: arguments of `generate()`, such as `num_beams=1` or `num_return_sequences=4`, which override
            the model's generation config. Where neither limits a target of a model of this package, it has at most 50
            tokens more than its source, as in the paper.

    Raises:
        TypeError: `texts` is a single text, whose characters would be the texts.
        ValueError: the tokenizer has no padding token or does not fit a model of this package, or a setting is out of
            range, here or in `generate()`.
        TooLongError: a text is too long for `too_long="error"`, or for the model's learned positions.
    """
    if isinstance(texts, str):
        raise TypeError(f"texts is the str {texts!r}; give a list of texts, for example [text].")
    lines = (batch_tokens, sort_lines, max_source_tokens, too_long)
    return make_translator(model, tokenizer, *lines, scores, constraint, **generate_kwargs)(texts, skip, progress)


def make_translator(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_tokens: int,
    sort_lines: int,
    max_source_tokens: int | None,
    too_long: TooLong,
    scores: bool,
    constraint: Constraint | None,
    **generate_kwargs: Any,
) -> Translator:
    """Return the translator of `translate`, which has the same arguments."""
    if tokenizer.pad_token_id is None:
        raise UserError("The tokenizer has no padding token; set tokenizer.pad_token, for example to its eos_token.")
    check_own_vocabulary(model, tokenizer)
    engine = TransformersEngine(model, tokenizer.pad_token_id, scores, **generate_kwargs)
    limit = engine.max_source_tokens() if max_source_tokens is None else max_source_tokens
    return Translator(engine, tokenizer, limit, batch_tokens, sort_lines, too_long, engine.max_positions(), constraint)
