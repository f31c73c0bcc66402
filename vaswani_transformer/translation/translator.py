"""Translate many texts: batches by length under a token budget, results in the order of the texts.

B texts of a batch, S source, T target, V vocabulary, n translations of a text, R hypotheses: n B.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..config import as_token_ids
from ..generation import CallSettings, default_limit
from ..search import length_penalty
from ..support.errors import UserError
from ..support.modes import eval_mode, is_non_autoregressive
from ..tokenizer import check_own_vocabulary, text_encoder, unknown_words

SCORING_TOKENS = 2048  # target tokens that are scored at once, each with a number for every vocabulary entry
MIN_TEXT_TOKENS = 16  # that a text counts for in a batch, because a batch of many very short texts has too many beams
DEFAULT_MAX_SOURCE_TOKENS = 1024  # of a text, if the model's positions have no limit

TooLong = Literal["truncate", "keep", "error"]

Constraint = Callable[[list[str], Tensor], LogitsProcessor]
"""A function of the texts of a batch and of the new tokens that each target may have (B,), which makes the processor
that excludes tokens from the search."""


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a text.

    text: the translation.
    tokens: the number of its tokens, `</s>` included.
    score: log P(Y | X) / lp(Y) in nats, by which beam search ranks; for a non-autoregressive model its
        `sequences_scores`; None without `scores`.
    """

    text: str
    tokens: int
    score: float | None


@dataclass(frozen=True)
class Translation:
    """The result of a text.

    hypotheses: its n translations, the best first.
    source_tokens: the number of the text's tokens, `</s>` included, before truncation.
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
    """

    def __init__(self, index: int, tokens: int, limit: int) -> None:
        fix = 'shorten it, raise max_source_tokens where the model has positions for it, or give too_long="truncate".'
        super().__init__(f"Text {index} has {tokens} tokens, more than {limit}; {fix}")
        self.index, self.tokens, self.limit = index, tokens, limit


def pad_rows(rows: list[list[int]], value: int, device: torch.device) -> Tensor:
    """Return rows of unequal lengths as one tensor, padded on the right with `value`."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], device=device)


@torch.no_grad()
def log_probabilities(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    decoder_input_ids: Tensor | None = None,
) -> Tensor:
    """Return log P(Y | X) in nats of each target (R,), a sum over its tokens, `</s>` included.

    Args:
        model: any encoder-decoder of Transformers, in evaluation mode.
        input_ids, attention_mask: (R, S), the sources.
        labels: (R, T), the targets with their end tokens; -100 after them.
        decoder_input_ids: (R, T), the decoder's input; None for the labels as the model shifts them.
    """
    rows, sums = max(1, SCORING_TOKENS // labels.shape[1]), []
    for batch in (slice(start, start + rows) for start in range(0, labels.shape[0], rows)):
        gold = labels[batch]
        read = {} if decoder_input_ids is None else {"decoder_input_ids": decoder_input_ids[batch]}
        logits = model(input_ids=input_ids[batch], attention_mask=attention_mask[batch], labels=gold, **read).logits
        logits = logits.float()  # (rows, T, V)
        scores = logits.gather(-1, gold.clamp(min=0).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)  # (rows, T)
        sums.append(scores.masked_fill(gold == -100, 0.0).sum(1))
    return torch.cat(sums)


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return texts, by index, in batches of at most `batch_tokens`, padding included, the longest first.

    A text with more tokens is a separate batch, and one of 0 tokens is in none.
    """
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda index: -lengths[index])
    batches, start = [], 0
    while start < len(order):
        size = max(1, batch_tokens // max(lengths[order[start]], MIN_TEXT_TOKENS))
        batches.append(order[start : start + size])
        start += size
    return batches


class Translator:
    """A function from texts to their translations; the arguments are those of `translate`.

    Attributes:
        search: the complete search, for records.
        max_positions: the tokens of the longest text that the model has positions for; None for no limit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_tokens: int = 2048,
        sort_lines: int = 2048,
        max_source_tokens: int | None = None,
        too_long: TooLong = "truncate",
        scores: bool = False,
        constraint: Constraint | None = None,
        **generate_kwargs: Any,
    ) -> None:
        if tokenizer.pad_token_id is None:
            raise UserError(
                "The tokenizer has no padding token; set tokenizer.pad_token, for example to its eos_token."
            )
        check_own_vocabulary(model, tokenizer)
        self.model, self.tokenizer, self.scores, self.constraint = model, tokenizer, scores, constraint
        self.batch_tokens, self.sort_lines, self.too_long = batch_tokens, sort_lines, too_long
        self.generate_kwargs = generate_kwargs | default_limit(model, **generate_kwargs)
        if scores and is_non_autoregressive(model):  # whose own scores rank its hypotheses
            self.generate_kwargs["return_dict_in_generate"] = True
        settings = self.call_settings()
        self.search, self.num_translations = settings.search(), settings.resolve("num_return_sequences", 1)
        has_table = getattr(model.config, "position_embedding", None) != "sinusoidal"
        self.max_positions = getattr(model.config, "max_position_embeddings", None) if has_table else None
        default = self.max_positions or DEFAULT_MAX_SOURCE_TOKENS
        self.max_source_tokens: int = default if max_source_tokens is None else max_source_tokens
        for name in ("max_source_tokens", "batch_tokens", "sort_lines"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} ({getattr(self, name)}) is not positive; give an integer of at least 1.")
        if too_long not in get_args(TooLong):
            raise UserError(f"too_long is {too_long!r}; choose one of {', '.join(get_args(TooLong))}.")
        if self.max_source_tokens > (self.max_positions or self.max_source_tokens):
            raise UserError(
                f"max_source_tokens ({max_source_tokens}) is more than the model's table of positions has room for; "
                f"give at most {self.max_positions}."
            )

    def call_settings(self, **more: Any) -> CallSettings:
        """Return the settings of a call of `generate()` with more of its arguments."""
        given = self.generate_kwargs | more
        return CallSettings(given.pop("generation_config", None), self.model, given)

    def __call__(
        self, texts: Iterable[str], skip: int = 0, progress: Callable[[int], object] | None = None
    ) -> Iterator[Translation]:
        """Yield the translations of all texts after the first `skip`, in batches as if none were skipped."""
        remaining, first = iter(texts), 0
        while window := list(islice(remaining, self.sort_lines)):
            if first + len(window) > skip:
                yield from self.translate_window(window, first, max(0, skip - first), progress or (lambda _: None))
            first += len(window)

    def translate_window(
        self, texts: list[str], first: int, skip: int, progress: Callable[[int], object]
    ) -> list[Translation]:
        """Return the translations of a window, which begins with text number `first`, from its text `skip` on."""
        sources, lengths, unknown = self.encode(texts, first)
        empty = Hypothesis("", 0, 0.0 if self.scores else None)
        hypotheses = [[empty] * self.num_translations for _ in texts]
        progress(sum(not source for source in sources[skip:]))
        for batch in batches_by_length(list(map(len, sources)), self.batch_tokens):
            if wanted := sum(index >= skip for index in batch):
                results = self.translate_batch([sources[index] for index in batch], [texts[index] for index in batch])
                for index, result in zip(batch, results, strict=True):
                    hypotheses[index] = result
                progress(wanted)
        limit = self.max_source_tokens
        truncated = [self.too_long == "truncate" and length > limit for length in lengths]
        return [
            Translation(hypotheses[index], lengths[index], truncated[index], limit, unknown[index], texts[index])
            for index in range(skip, len(texts))
        ]

    def encode(self, texts: list[str], first: int) -> tuple[list[list[int]], list[int], list[list[str]]]:
        """Return the tokens of each text, at most those that may be translated, its length and its unknown words.

        A text of white space has no tokens.
        """
        encoder = text_encoder(self.tokenizer)
        encoded = encoder(texts, return_attention_mask=False, verbose=False)
        sources = [row if text.strip() else [] for row, text in zip(encoded["input_ids"], texts, strict=True)]
        lengths, unknown = list(map(len, sources)), unknown_words(self.tokenizer, encoded, texts)
        limit = self.max_positions if self.too_long == "keep" else self.max_source_tokens
        for index, length in enumerate(lengths):
            if limit is not None and length > limit:
                if self.too_long != "truncate":
                    raise TooLongError(first + index, length, limit)
                sources[index] = encoder(texts[index], truncation=True, max_length=limit, verbose=False)["input_ids"]
        return sources, lengths, unknown

    @torch.no_grad()
    def translate_batch(self, sources: list[list[int]], texts: list[str]) -> list[list[Hypothesis]]:
        """Return the n best hypotheses for the tokens of each text of a batch."""
        tokens = pad_rows(sources, self.tokenizer.pad_token_id, self.model.device)  # (B, S)
        mask = pad_rows([[1] * len(source) for source in sources], 0, self.model.device)  # (B, S)
        settings = dict(self.generate_kwargs)
        if self.constraint is not None:
            limits = self.call_settings(attention_mask=mask).target_limits()  # (B,)
            settings["logits_processor"] = [*(settings.get("logits_processor") or ()), self.constraint(texts, limits)]
        with eval_mode(self.model):
            output = self.generate(input_ids=tokens, attention_mask=mask, **settings)
            sequences = output if isinstance(output, Tensor) else output.sequences  # (R, T + 1)
            lengths = self.target_lengths(sequences[:, 1:])  # (R,), without the start
            scores: list[float | None] = [None] * len(sequences)
            if self.scores and is_non_autoregressive(self.model):
                scores = output.sequences_scores.tolist()
            elif self.scores:
                scores = self.score(tokens, mask, sequences, lengths).tolist()
        counts = lengths.tolist()
        ids = [row[:count] for row, count in zip(sequences[:, 1:].tolist(), counts, strict=True)]
        decoded = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        hypotheses, n = list(map(Hypothesis, decoded, counts, scores)), len(ids) // len(sources)
        return [hypotheses[start : start + n] for start in range(0, len(hypotheses), n)]

    def generate(self, **inputs: Any) -> Any:
        """Return the output of the model's `generate()` for a batch; a subclass may observe the search here."""
        return cast(Any, self.model).generate(**inputs)

    def target_lengths(self, targets: Tensor) -> Tensor:
        """Return the tokens of each target (R, T) up to its end token or, without one, up to its padding (R,)."""
        settings = self.call_settings()
        positions = torch.arange(1, targets.shape[1] + 1, device=targets.device)
        ends = torch.tensor(as_token_ids(settings.resolve("eos_token_id")), dtype=torch.long, device=targets.device)
        is_end = torch.isin(targets, ends)
        to_padding = (positions * targets.ne(settings.resolve("pad_token_id", self.tokenizer.pad_token_id))).amax(1)
        return torch.where(is_end.any(1), is_end.long().argmax(1) + 1, to_padding)

    def score(self, tokens: Tensor, mask: Tensor, sequences: Tensor, lengths: Tensor) -> Tensor:
        """Return log P(Y | X) / lp(Y) of each target (R,), which `sequences` (R, T + 1) hold after the start token."""
        settings, targets, n = self.call_settings(), sequences[:, 1:], len(sequences) // len(tokens)
        is_padding = torch.arange(targets.shape[1], device=targets.device) >= lengths[:, None]
        sources = (rows.repeat_interleave(n, dim=0) for rows in (tokens, mask))
        sums = log_probabilities(self.model, *sources, targets.masked_fill(is_padding, -100), sequences[:, :-1])
        alpha = float(settings.resolve("length_penalty", 1.0))  # torch raises no integer to a negative one
        return sums / length_penalty(lengths.clamp(min=1), alpha, settings.resolve("length_penalty_type", "power"))


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
        scores: whether translations have scores, which takes one more pass over each, except for a non-autoregressive
            model.
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
    translator = Translator(
        model,
        tokenizer,
        batch_tokens=batch_tokens,
        sort_lines=sort_lines,
        max_source_tokens=max_source_tokens,
        too_long=too_long,
        scores=scores,
        constraint=constraint,
        **generate_kwargs,
    )
    return translator(texts, skip, progress)
