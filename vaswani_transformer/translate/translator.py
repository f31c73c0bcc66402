"""Translating many texts: batches by length under a token budget, results in the order of the texts.

B texts of a batch, S source, T target, n translations of a text, R rows: as many as targets.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..search import length_penalty
from ..tokenizer import text_encoder

LONGEST_SOURCE = 1024  # tokens of a text, where the model's positions have no end
LEAST_TOKENS = 16  # that a text counts for in a batch: very short ones would be too many beams at once
SCORED_TOKENS = 2048  # of targets whose scores are computed at once, each with a number for every vocabulary entry

Found = tuple[list[int], float | None]
Overlong = Literal["cut", "keep", "refuse"]


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a text.

    text: the translation.
    tokens: its tokens, `</s>` counted.
    score: log P(Y | X) / lp(Y) in nats, which beam search ranks by; None where it was not asked for.
    """

    text: str
    tokens: int
    score: float | None


@dataclass(frozen=True)
class Translation:
    """What became of a text.

    hypotheses: its n translations, the best first.
    source_tokens: the text's tokens, `</s>` counted, before anything was cut.
    is_cut: whether only its first tokens were translated.
    max_source_tokens: how many tokens it might have without being cut.
    """

    hypotheses: list[Hypothesis]
    source_tokens: int
    is_cut: bool
    max_source_tokens: int

    @property
    def text(self) -> str:
        """The best translation."""
        return self.hypotheses[0].text


class OverlongError(ValueError):
    """A text has more tokens than may be translated; `index` is its place among the texts, from 0."""

    def __init__(self, index: int, tokens: int, limit: int) -> None:
        super().__init__(
            f"Text {index} has {tokens} tokens, more than {limit}; shorten it, raise max_source_tokens, or give "
            'overlong="cut" or "keep".'
        )
        self.index, self.tokens, self.limit = index, tokens, limit


class Search(Protocol):
    """What finds translations. Another engine than torch need only be called like this to stand in `translate_by`."""

    num_translations: int
    """n, the translations of each text."""
    scores: bool
    """Whether they have scores."""

    def __call__(self, sources: list[list[int]]) -> list[list[Found]]:
        """For each text of a batch, given as its tokens, its n best targets: their new tokens, and their scores."""
        ...


@contextlib.contextmanager
def evaluating(model: PreTrainedModel) -> Generator[None]:
    """The model in evaluation mode for a while."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    """log P(Y | X) in nats of each target (R,), a sum over its tokens, `</s>` counted.

    Args:
        model: any encoder-decoder of Transformers, in evaluation mode.
        input_ids, attention_mask: (R, S), the sources.
        labels: (R, T), the targets with their end tokens; -100 behind them.
    """
    rows, found = max(1, SCORED_TOKENS // labels.shape[1]), []
    for part in (slice(start, start + rows) for start in range(0, labels.shape[0], rows)):
        gold = labels[part]
        logits = cast(Any, model)(input_ids=input_ids[part], attention_mask=attention_mask[part], labels=gold).logits
        logits = logits.float()  # (rows, T, V)
        chosen = logits.gather(-1, gold.clamp(min=0).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)  # (rows, T)
        found.append(chosen.masked_fill(gold == -100, 0.0).sum(1))
    return torch.cat(found)


def padded(rows: list[list[int]], value: int, device: torch.device) -> Tensor:
    """Rows of unequal lengths as one tensor, filled up on the right."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], device=device)


class ModelSearch:
    """`model.generate()`, on the model's own device and in evaluation mode.

    Args:
        model: any encoder-decoder of Transformers that generates.
        pad_token_id: what fills up the sources of a batch; the attention mask hides it.
        scores: whether to compute scores, for one more pass over each translation.
        **generate_kwargs: arguments of `generate()`, which win over the model's generation config.
    """

    def __init__(self, model: PreTrainedModel, pad_token_id: int, scores: bool = False, **generate_kwargs: Any) -> None:
        self.model, self.pad_token_id, self.scores = model, pad_token_id, scores
        self.generate_kwargs = generate_kwargs
        self.num_translations = self.setting("num_return_sequences", 1)

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting as `generate()` will find it: the call's, or else the model's."""
        configs = (self.generate_kwargs.get("generation_config"), self.model.generation_config)
        values = (self.generate_kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), default)

    @torch.no_grad()
    def __call__(self, sources: list[list[int]]) -> list[list[Found]]:
        tokens = padded(sources, self.pad_token_id, self.model.device)  # (B, S)
        mask = padded([[1] * len(source) for source in sources], 0, self.model.device)  # (B, S)
        with evaluating(self.model):
            found = cast(Any, self.model).generate(input_ids=tokens, attention_mask=mask, **self.generate_kwargs)
            targets = (found if isinstance(found, Tensor) else found.sequences)[:, 1:]  # (n B, T), without the start
            lengths = self.lengths(targets)
            scores = self.rate(tokens, mask, targets, lengths).tolist() if self.scores else [None] * len(targets)
        ids = [row[:length] for row, length in zip(targets.tolist(), lengths.tolist(), strict=True)]
        every, count = list(zip(ids, scores, strict=True)), len(ids) // len(sources)
        return [every[start : start + count] for start in range(0, len(every), count)]

    def lengths(self, targets: Tensor) -> Tensor:
        """The tokens of each target (R, T) to its end token, or, where none ends it, to its padding (R,)."""
        places = torch.arange(1, targets.shape[1] + 1, device=targets.device)
        ends = torch.as_tensor(self.setting("eos_token_id", -1), device=targets.device)
        is_end = torch.isin(targets, ends)
        to_padding = (places * targets.ne(self.setting("pad_token_id", self.pad_token_id))).amax(1)
        return torch.where(is_end.any(1), is_end.long().argmax(1) + 1, to_padding)

    def rate(self, tokens: Tensor, mask: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """log P(Y | X) / lp(Y) of each target (R,)."""
        count = targets.shape[0] // tokens.shape[0]
        is_over = torch.arange(targets.shape[1], device=targets.device) >= lengths[:, None]
        rows = (part.repeat_interleave(count, dim=0) for part in (tokens, mask))
        sums, lengths = log_probabilities(self.model, *rows, targets.masked_fill(is_over, -100)), lengths.clamp(min=1)
        alpha = self.setting("length_penalty", 1.0)
        return sums / length_penalty(lengths, alpha, self.setting("length_penalty_type", "power"))

    def longest_source(self) -> int:
        """The tokens of a text that the model has positions for, with room for its translation; 1,024 without end."""
        config = self.model.config
        table = getattr(config, "max_position_embeddings", None)
        if table is None or getattr(config, "position_embedding", None) == "sinusoidal":
            return LONGEST_SOURCE
        own_limits = [self.generate_kwargs.get(name) for name in ("max_new_tokens", "max_length")]
        relative = 0 if any(own_limits) else self.setting("max_source_relative_length", 0)
        return max(1, table - relative)


def batches_by_length(lengths: dict[int, int], batch_tokens: int) -> list[list[int]]:
    """Texts in batches of at most so many tokens, padding counted, the longest first; a longer one is alone.

    Args:
        lengths: the tokens of each text that is to be in a batch.
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(lengths, key=lambda index: (-lengths[index], index)):
        if room == 0:
            batches.append([])
            room = max(1, batch_tokens // max(lengths[index], LEAST_TOKENS))
        batches[-1].append(index)
        room -= 1
    return batches


@dataclass
class Translator:
    """Texts in, translations out, by whatever `search` finds them with; `translate` explains the other fields."""

    search: Search
    tokenizer: PreTrainedTokenizerBase
    max_source_tokens: int
    batch_tokens: int = 2048
    window: int = 2048
    overlong: Overlong = "cut"

    def __post_init__(self) -> None:
        for name in ("max_source_tokens", "batch_tokens", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) is not positive; give a whole number of at least 1.")
        if self.overlong not in get_args(Overlong):
            raise ValueError(f"overlong is {self.overlong!r}; choose one of {', '.join(get_args(Overlong))}.")

    def __call__(
        self, texts: Iterable[str], skip: int = 0, progress: Callable[[int], object] | None = None
    ) -> Iterator[Translation]:
        """The translations of all texts but the first `skip`, in batches as if there were nothing to skip."""
        remaining, first = iter(texts), 0
        while part := list(islice(remaining, self.window)):
            if first + len(part) > skip:
                yield from self._translate(part, first, max(0, skip - first), progress or (lambda _: None))
            first += len(part)

    def _translate(
        self, texts: list[str], first: int, skip: int, progress: Callable[[int], object]
    ) -> list[Translation]:
        """The translations of a window's texts from number `skip` on; `first` is its first text's number in all."""
        sources, lengths = self._encode(texts, first)
        empty = [Hypothesis("", 0, 0.0 if self.search.scores else None)] * self.search.num_translations
        found = {index: empty for index in range(len(texts)) if index not in sources}
        progress(sum(index >= skip for index in found))
        for batch in batches_by_length({index: len(tokens) for index, tokens in sources.items()}, self.batch_tokens):
            if batch_is_due := [index for index in batch if index >= skip]:
                targets = self.search([sources[index] for index in batch])
                found |= zip(batch, map(self._decode, targets), strict=True)
                progress(len(batch_is_due))
        limit = self.max_source_tokens
        is_cut = [self.overlong == "cut" and length > limit for length in lengths]
        return [Translation(found[index], lengths[index], is_cut[index], limit) for index in range(skip, len(texts))]

    def _encode(self, texts: list[str], first: int) -> tuple[dict[int, list[int]], list[int]]:
        """The tokens of the texts that are not empty, as they are translated, and the length of each text."""
        encode = partial(cast(Any, text_encoder(self.tokenizer)), return_attention_mask=False, verbose=False)
        tokens = encode(texts)["input_ids"]
        lengths = [len(row) if text.strip() else 0 for row, text in zip(tokens, texts, strict=True)]
        for index, length in enumerate(lengths):
            if length > self.max_source_tokens and self.overlong != "keep":
                if self.overlong == "refuse":
                    raise OverlongError(first + index, length, self.max_source_tokens)
                tokens[index] = encode(texts[index], truncation=True, max_length=self.max_source_tokens)["input_ids"]
        return {index: tokens[index] for index, length in enumerate(lengths) if length}, lengths

    def _decode(self, targets: list[Found]) -> list[Hypothesis]:
        texts = self.tokenizer.batch_decode([tokens for tokens, _ in targets], skip_special_tokens=True)
        return [Hypothesis(text, len(ids), score) for text, (ids, score) in zip(texts, targets, strict=True)]


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    batch_tokens: int = 2048,
    window: int = 2048,
    max_source_tokens: int | None = None,
    overlong: Overlong = "cut",
    scores: bool = False,
    skip: int = 0,
    progress: Callable[[int], object] | None = None,
    **generate_kwargs: Any,
) -> Iterator[Translation]:
    """The translations of many texts, in their order, by the model's own generation config.

    Texts are taken a window at a time, so that they may be endless, and those of a window are batched by length. A
    text of white space alone has the empty translation.

    Args:
        model: any encoder-decoder of Transformers that generates.
        tokenizer: its tokenizer, with a token to pad with.
        texts: what to translate.
        batch_tokens: the source tokens of a batch, padding counted; a text counts for 16 at least, and one that is
            longer than this is alone.
        window: how many texts are sorted at once; each is translated when the last of its window is there.
        max_source_tokens: the tokens that a text may have, `</s>` counted; None for as many as a table of positions
            holds, with room for the translation, or 1,024.
        overlong: what becomes of a longer one: "cut" after its first tokens, which `is_cut` then says; "keep" as it
            is; "refuse" with `OverlongError`, before anything of its window is translated.
        scores: whether translations have their score, for one more pass over each.
        skip: how many texts at the beginning are left out. The batches of the others are what they would be without.
        progress: called with a number of texts whenever so many more are translated.
        **generate_kwargs: arguments of `generate()`, such as `num_beams=1` or `num_return_sequences=4`, which win over
            the model's generation config.

    Raises:
        TypeError: a single text is given, whose characters would be the texts.
        ValueError: the tokenizer has no padding token, a setting is out of range, or `generate()` refuses one.
    """
    if isinstance(texts, str):
        raise TypeError(f"texts is the str {texts!r}; give a list of texts, for example [text].")
    if tokenizer.pad_token_id is None:
        raise ValueError("The tokenizer has no padding token; set tokenizer.pad_token, for example to its eos_token.")
    search = ModelSearch(model, cast(int, tokenizer.pad_token_id), scores, **generate_kwargs)
    limit = search.longest_source() if max_source_tokens is None else max_source_tokens
    return Translator(search, tokenizer, limit, batch_tokens, window, overlong)(texts, skip, progress)


__all__ = ["Hypothesis", "OverlongError", "Search", "Translation", "Translator", "log_probabilities", "translate"]
