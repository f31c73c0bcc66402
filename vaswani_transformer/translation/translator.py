"""Translation of many texts, batched by length under a token budget.

B texts in a batch, S source, T target, V vocabulary, n translations per text, R = n B hypotheses.
"""

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any, Literal, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..loss import token_cross_entropy
from ..search import length_penalty
from ..settings import CallSettings, as_token_ids, default_limit
from ..support.command import UserError
from ..support.loading import eval_mode, is_non_autoregressive
from ..tokenizer import (
    WORD_START,
    check_text,
    check_vocabulary,
    is_of_this_package,
    source_encoder,
    text_encoder,
)
from .details import SCORING_TOKENS, Details, forced_pass, make_details, words_of_source

DEFAULT_MAX_SOURCE_TOKENS = 1024  # for models without a limit of positions
MIN_TEXT_TOKENS = 16  # smallest size of a text in a batch, to limit the number of beams
REPEATED_TOKENS = 12  # at the end of a target, of one n-gram: the model runs in a circle

TooLong = Literal["truncate", "keep", "error"]


Constraint = Callable[[list[str], Tensor], LogitsProcessor]
"""Function from the texts of a batch and their limits of new tokens (B,) to a logits processor."""


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a text.

    text: the translation.
    tokens: number of its tokens, including `</s>`.
    score: log P(Y | X) / lp(Y) in nats, or `sequences_scores` of a non-autoregressive model; None without `scores`.
    is_unfinished: whether it ends at its length limit without `</s>`, or in 12 or more tokens that repeat one n-gram of
        at most 4.
    details: its tokens and its word alignment with the source; None without `details_from`.
    """

    text: str
    tokens: int
    score: float | None
    is_unfinished: bool = False
    details: Details | None = None


@dataclass(frozen=True)
class Translation:
    """Result for one text.

    hypotheses: n translations, best first.
    source_tokens: number of the text's tokens before truncation, including `</s>`.
    is_truncated: whether the text was truncated.
    max_source_tokens: largest number of tokens without truncation.
    unknown_words: words of the text with a character that is not in the vocabulary.
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
        """Best translation."""
        return self.hypotheses[0].text

    @property
    def is_unfinished(self) -> bool:
        """Whether the best translation is unfinished."""
        return self.hypotheses[0].is_unfinished

    @property
    def details(self) -> Details | None:
        """Details of the best translation."""
        return self.hypotheses[0].details

    @property
    def warning(self) -> str:
        """Warning of unknown words and of an unfinished translation, or an empty string."""
        warnings = []
        if words := ", ".join(map(repr, self.unknown_words)):
            warnings.append(f"Out-of-vocabulary words (their translations are guesses): {words}.")
        if self.is_unfinished:
            warnings.append("Unfinished: the translation reached the length limit, or repeats itself.")
        return " ".join(warnings)


ENDED = object()


class Pair(NamedTuple):
    """A source and its target, or the beginning of it."""

    source: str
    target: str

    def encode(self) -> bytes:
        """Return the bytes by which a resumable file knows the pair."""
        return b"\0".join(text.encode() for text in self)


def pairs_of(sources: Iterable[str], targets: Iterable[str], name: str, target_name: str) -> Iterator[Pair]:
    """Yield pairs of `name` and `target_name`; raise UserError if one has more texts than the other."""
    for count, (source, target) in enumerate(zip_longest(sources, targets, fillvalue=ENDED)):
        if source is ENDED or target is ENDED:
            got = f"got {count}" if target is ENDED else f"got more than {count}"
            problem = f"not as many texts as in {name}; {got}"
            raise UserError(f"{target_name}: {problem}, expected one for each. Add or remove texts.")
        yield Pair(cast(str, source), cast(str, target))


def unknown_words(tokenizer: Any, encoded: Any, texts: Sequence[str]) -> list[list[str]]:
    """Return the unknown words of each text, as the text has them; white space is not a word.

    These are words with an `<unk>`, or with a character that the vocabulary has only as single bytes.

    Args:
        tokenizer: the tokenizer; with one written in Python, words are separated by white space.
        encoded: its result for `texts`.
        texts: the texts.
    """
    unknown_id = tokenizer.unk_token_id
    words: list[list[str]] = []
    for row, (text, ids) in enumerate(zip(texts, encoded["input_ids"], strict=True)):
        if encoded.is_fast and not (text.isascii() and unknown_id not in ids):
            words.append(aligned_unknown_words(encoded.encodings[row], text, ids, unknown_id))
        elif unknown_id in ids:
            words.append([word for word in text.split() if unknown_id in tokenizer(word)["input_ids"]])
        else:
            words.append([])
    return words


def aligned_unknown_words(encoding: Any, text: str, ids: list[int], unknown_id: int | None) -> list[str]:
    """Return the unknown words of a text, by the characters of each token of a fast tokenizer."""
    tokens = encoding.tokens
    offsets = encoding.offsets
    # The bytes of a character all end where it ends.
    counts = Counter(end for token, (_, end) in zip(tokens, offsets, strict=True) if token != WORD_START)
    spelled = {end for end, count in counts.items() if 1 < count == len(text[end - 1 : end].encode())}
    pieces: dict[int, list[int]] = {}  # positions of each word's pieces, by word index
    for position, index in enumerate(encoding.word_ids):
        if index is not None:
            pieces.setdefault(index, []).append(position)

    words = []
    for positions in pieces.values():
        first = positions[0]
        start, _ = offsets[first]
        _, end = offsets[positions[-1]]
        word = text[start:end].strip()
        # The mark before a word is aligned with the character before it, which is not a letter.
        if tokens[first].startswith(WORD_START) and re.match(r"[^\w\s].", word, re.DOTALL):
            word = word[1:]
        is_unknown = any(ids[position] == unknown_id or offsets[position][1] in spelled for position in positions)
        if word and is_unknown:
            words.append(word)
    return words


WIDTH_OPTIONS = {"num_beams": "--beams", "length_beam_size": "--length_beam"}
"""Settings of `generate()` by which a search finds several targets, and their options in commands."""


def width_setting(model: object) -> str | None:
    """Return the one of `WIDTH_OPTIONS` that a model's search has; None if it finds a single target."""
    supported = model.family_settings if is_non_autoregressive(model) else ("num_beams",)
    return next((name for name in WIDTH_OPTIONS if name in supported), None)


class ForcedPrefixes(LogitsProcessor):
    """Logits processor that begins each target with given tokens.

    Args:
        prefixes: (B, P), their ids, -1 after the last of each.
    """

    def __init__(self, prefixes: Tensor) -> None:
        self.prefixes = prefixes

    def keep(self, sources: Tensor) -> None:
        """Drop all other targets; `sources` are indices into the current ones."""
        self.prefixes = self.prefixes[sources]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` (R, V), which for a token of a prefix are -inf at all others."""
        position = input_ids.shape[1] - 1  # after the start token
        if position >= self.prefixes.shape[1]:
            return scores
        rows_per_source = len(scores) // len(self.prefixes)
        wanted = self.prefixes[:, position].repeat_interleave(rows_per_source)[:, None]  # (R, 1)
        chosen = scores.gather(1, wanted.clamp(min=0))
        chosen = chosen.masked_fill(chosen == -torch.inf, 0.0)  # a different processor excludes it
        forced = torch.full_like(scores, -torch.inf).scatter_(1, wanted.clamp(min=0), chosen)
        return torch.where(wanted < 0, scores, forced)


def pad_rows(rows: list[list[int]], value: int, device: torch.device) -> Tensor:
    """Return rows of unequal lengths as one tensor, padded on the right with `value`."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], device=device)


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return batches of text indices with at most `batch_tokens` tokens each, including padding, longest first.

    A text with more tokens is a separate batch. Texts of 0 tokens are omitted.
    """
    order = [index for index, length in enumerate(lengths) if length]
    order.sort(key=lambda index: -lengths[index])
    batches = []
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        size = max(1, batch_tokens // max(longest, MIN_TEXT_TOKENS))
        batches.append(order[start : start + size])
        start += size
    return batches


class EncodedTexts(NamedTuple):
    """The texts of a window."""

    sources: list[list[int]]  # token ids, truncated where necessary
    lengths: list[int]  # number of tokens before truncation
    truncated: set[int]  # indices of truncated texts
    unknown: list[list[str]]  # unknown words


class TooLongError(UserError):
    """Raised for a text with too many tokens.

    index: index of the text.
    tokens, limit: its number of tokens, and the largest valid number.
    """

    def __init__(self, index: int, tokens: int, limit: int) -> None:
        super().__init__(
            f'Text {index} has {tokens} tokens, more than {limit}; shorten it, or set too_long="truncate".'
        )
        self.index = index
        self.tokens = tokens
        self.limit = limit


class NanError(UserError):
    """Raised for a text whose translation has NaN scores; `index` is the text's index."""

    def __init__(self, index: int) -> None:
        super().__init__(
            f"Text {index}: the scores of its translation are NaN, so it is meaningless; use float32, and check that "
            "the model's weights are finite."
        )
        self.index = index


class NanSourcesError(Exception):
    """Raised in a search for sources whose scores are NaN; `rows` are their indices in the batch."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(rows)
        self.rows = rows


def raise_nan_sources(rows: list[int]) -> NoReturn:
    raise NanSourcesError(rows)


@contextlib.contextmanager
def nan_errors(indices: Sequence[int]) -> Generator[None]:
    """Raise NanError for the first text of a batch whose search meets NaN; `indices` are those of its texts."""
    try:
        yield
    except NanSourcesError as error:
        raise NanError(min(indices[row] for row in error.rows)) from None


@torch.no_grad()
def token_log_probabilities(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    decoder_input_ids: Tensor | None = None,
) -> Tensor:
    """Return log P (R, T) in nats of each token of the targets, including `</s>`, and 0 at padding.

    Args:
        model: any encoder-decoder of Transformers, in evaluation mode.
        input_ids, attention_mask: (R, S), the sources.
        labels: (R, T), the targets including the end tokens, padded with -100.
        decoder_input_ids: (R, T), the decoder's input; None for the labels shifted by the model.
    """
    rows = max(1, SCORING_TOKENS // labels.shape[1])
    scores = []
    for start in range(0, labels.shape[0], rows):
        batch = slice(start, start + rows)
        gold = labels[batch]
        inputs = {"input_ids": input_ids[batch], "attention_mask": attention_mask[batch], "labels": gold}
        if decoder_input_ids is not None:
            inputs["decoder_input_ids"] = decoder_input_ids[batch]
        logits = model(**inputs).logits  # (rows, T, V)
        scores.append(-token_cross_entropy(logits, gold))
    return torch.cat(scores)


class Translator:
    """Callable that translates texts; arguments as in `translate`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_tokens: int = 2048,
        window: int = 2048,
        max_source_tokens: int | None = None,
        too_long: TooLong = "truncate",
        scores: bool = False,
        constraint: Constraint | None = None,
        details_from: PreTrainedModel | None = None,
        alignment_layer: int | None = None,
        **generate_kwargs: Any,
    ) -> None:
        if tokenizer.pad_token_id is None:
            fix = "set tokenizer.pad_token, for example to its eos_token."
            raise UserError(f"tokenizer: its padding token is missing; {fix}")
        if is_of_this_package(model):
            check_vocabulary(model, tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self.window = window
        self.too_long = too_long
        self.scores = scores
        self.constraint = constraint
        self.details_from = details_from
        self.alignment_layer = alignment_layer

        # `CallSettings` tells what a call of `generate()` will use, for scores and limits.
        self.generate_kwargs = {**generate_kwargs, **default_limit(model, **generate_kwargs)}
        if scores and is_non_autoregressive(model):  # they have their own scores
            self.generate_kwargs["return_dict_in_generate"] = True
        self.settings = CallSettings(generate_kwargs.get("generation_config"), model, self.generate_kwargs)

        # A table of learned positions limits the sources; other models get a default.
        has_table = getattr(model.config, "position_embedding", None) != "sinusoidal"
        self.max_positions = getattr(model.config, "max_position_embeddings", None) if has_table else None
        default = self.max_positions or DEFAULT_MAX_SOURCE_TOKENS
        wanted = default if max_source_tokens is None else max_source_tokens
        self.max_source_tokens = min(wanted, self.max_positions or wanted)
        if min(self.max_source_tokens, batch_tokens, window) < 1:
            raise UserError("max_source_tokens, batch_tokens and window must be at least 1.")

    @property
    def most_hypotheses(self) -> float:
        """Largest number of translations of a text that the search finds; infinite if it samples."""
        search = self.settings.values
        if search.get("do_sample") and not is_non_autoregressive(self.model):
            return math.inf
        name = width_setting(self.model)
        if name is None:
            return 1
        return search.get(name, 1) * search.get("num_latent_samples", 1)

    def __call__(
        self, texts: Iterable[str | Pair], skip: int = 0, progress: Callable[[int], object] | None = None
    ) -> Iterator[Translation]:
        """Yield the translations of all texts after the first `skip`; skipping does not change the batches.

        The target of a `Pair` is the prefix of its translation.
        """
        remaining = iter(texts)
        first = 0
        while lines := list(islice(remaining, self.window)):
            if first + len(lines) > skip:
                yield from self.translate_window(lines, first, max(0, skip - first), progress)
            first += len(lines)

    def translate_window(
        self,
        texts_or_pairs: Sequence[str | Pair],
        first: int,
        skip: int = 0,
        progress: Callable[[int], object] | None = None,
    ) -> list[Translation]:
        """Return the translations of the texts after the first `skip`; `first` is the index of the window's first."""
        texts = [text.source if isinstance(text, Pair) else text for text in texts_or_pairs]
        prefixes = self.encode_prefixes(texts_or_pairs, first)
        report = progress or (lambda _: None)

        # All texts are encoded, even skipped ones, because the batches depend on the lengths of all.
        sources, lengths, truncated, unknown = self.encode_window(texts, first)

        # Texts without a word keep the empty translation.
        empty = Hypothesis(
            "", 0, 0.0 if self.scores else None, details=Details([], [], []) if self.details_from else None
        )
        hypotheses = [[empty] * self.settings.values.get("num_return_sequences", 1) for _ in texts]
        report(sum(not source for source in sources[skip:]))

        # A batch that only skipped texts are in is omitted; any other is translated as a whole.
        for batch in batches_by_length([len(source) for source in sources], self.batch_tokens):
            wanted = sum(index >= skip for index in batch)
            if not wanted:
                continue
            with nan_errors([first + index for index in batch]):
                begun = [prefixes[index] for index in batch]
                results = self.translate_batch(
                    [sources[index] for index in batch],
                    [texts[index] for index in batch],
                    *([begun] if any(begun) else []),
                )
            for index, result in zip(batch, results, strict=True):
                hypotheses[index] = result
            report(wanted)

        return [
            Translation(
                hypotheses[index],
                source_tokens=lengths[index],
                is_truncated=index in truncated,
                max_source_tokens=self.max_source_tokens,
                unknown_words=unknown[index],
                source=texts[index],
            )
            for index in range(skip, len(texts))
        ]

    def encode_window(self, texts: list[str], first: int, keeps_empty: bool = False) -> EncodedTexts:
        """Return the token ids of texts; those of a text without a word are empty unless `keeps_empty`."""
        for index, text in enumerate(texts, start=first):
            check_text(text, f"Text {index}")
        encoder = source_encoder(self.tokenizer)
        encoded = encoder(texts, return_attention_mask=False, verbose=False)
        unknown = unknown_words(self.tokenizer, encoded, texts)
        rows = zip(encoded["input_ids"], texts, strict=True)
        sources = [row if keeps_empty or text.strip() else [] for row, text in rows]
        lengths = [len(source) for source in sources]
        truncated = self.too_long_texts(lengths, first)
        for index in truncated:
            shortened = encoder(texts[index], truncation=True, max_length=self.max_source_tokens, verbose=False)
            sources[index] = shortened["input_ids"]
        return EncodedTexts(sources, lengths, truncated, unknown)

    def encode_prefixes(self, texts: Sequence[str | Pair], first: int) -> list[list[int]]:
        """Return the token ids of each text's prefix, without `</s>`; none for a text without a prefix."""
        prefixes = [text.target if isinstance(text, Pair) else "" for text in texts]
        if not any(prefixes):
            return [[] for _ in texts]
        for index, prefix in enumerate(prefixes, start=first):
            check_text(prefix, f"Prefix {index}")
        encoder = text_encoder(self.tokenizer)
        encoded = encoder(text_target=prefixes, add_special_tokens=False, return_attention_mask=False, verbose=False)
        begin = as_token_ids(self.settings.values.get("forced_bos_token_id"))  # such as the language of mBART
        return [[*begin, *ids] if ids else [] for ids in encoded["input_ids"]]

    def check_autoregressive(self, name: str) -> None:
        """Raise UserError, with the `name` of an option, unless the model predicts a word after the other."""
        if is_non_autoregressive(self.model):
            got = f"got a {type(self.model).__name__}, which predicts all words at once"
            raise UserError(f"{name}: not supported by the model; {got}, expected an autoregressive one. Leave it out.")

    def check_prefixes(self, name: str) -> None:
        """Raise UserError, with the `name` of prefixes, if the model or search cannot continue one."""
        self.check_autoregressive(name)
        search = self.settings.values
        if search.get("do_sample") and search.get("num_beams", 1) > 1:
            problem = f"not supported by beams that sample; got num_beams={search['num_beams']} with do_sample"
            raise UserError(f"{name}: {problem}, expected one of the two. Leave do_sample out, or set num_beams to 1.")

    def too_long_texts(self, lengths: Sequence[int], first: int) -> set[int]:
        """Return the indices of the texts in a window to truncate; raise TooLongError for one that must not be."""
        limit = self.max_positions if self.too_long == "keep" else self.max_source_tokens
        if limit is None:
            return set()
        too_long = [index for index, length in enumerate(lengths) if length > limit]
        if too_long and self.too_long != "truncate":
            raise TooLongError(first + too_long[0], lengths[too_long[0]], limit)
        return set(too_long)

    @torch.no_grad()
    def translate_batch(
        self, sources: list[list[int]], texts: list[str], prefixes: list[list[int]] | None = None
    ) -> list[list[Hypothesis]]:
        """Return the n best hypotheses for each text of a batch; they begin with the tokens of `prefixes`."""
        tokens = pad_rows(sources, self.tokenizer.pad_token_id, self.model.device)  # (B, S)
        mask = pad_rows([[1] * len(source) for source in sources], 0, self.model.device)  # (B, S)
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask, **self.generate_kwargs}
        if getattr(self.model, "takes_nan_handler", False):  # a model of this package
            inputs["nan_handler"] = raise_nan_sources
        if self.constraint is not None:
            limits = CallSettings(inputs.get("generation_config"), self.model, inputs).target_limits()  # (B,)
            inputs["logits_processor"] = [*(inputs.get("logits_processor") or ()), self.constraint(texts, limits)]
        if prefixes is not None:
            forced = ForcedPrefixes(pad_rows(prefixes, -1, self.model.device))
            inputs["logits_processor"] = [*(inputs.get("logits_processor") or ()), forced]

        with eval_mode(self.model):
            output = self.generate(**inputs)
            sequences = output if isinstance(output, Tensor) else output.sequences  # (R, T + 1)
            targets = sequences[:, 1:].tolist()  # without the start
            lengths = self.target_lengths(targets)
            scores: list[float | None] = [None] * len(sequences)
            if self.scores and is_non_autoregressive(self.model):
                scores = output.sequences_scores.tolist()
            elif self.scores:
                scores = self.score(tokens, mask, sequences, lengths).tolist()

        ids = [target[:length] for target, length in zip(targets, lengths, strict=True)]
        decoded = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        unfinished = [self.is_unfinished(target) for target in ids]
        details: list[Details | None] = [None] * len(ids)
        if self.details_from is not None:
            pairs = self.pairs_to_score(tokens, mask, sequences, lengths)
            details = [*self.make_details(self.details_from, sources, texts, pairs, ids)]
        columns = (decoded, lengths, scores, unfinished, details)
        hypotheses = [Hypothesis(*values) for values in zip(*columns, strict=True)]
        n = len(hypotheses) // len(sources)
        return [hypotheses[start : start + n] for start in range(0, len(hypotheses), n)]

    def generate(self, **inputs: Any) -> Any:
        """Return the output of the model's `generate()` for a batch; subclasses may record the search."""
        return cast(Any, self.model).generate(**inputs)

    def target_lengths(self, targets: list[list[int]]) -> list[int]:
        """Return the length of each target, up to its first end token, or else up to its padding."""
        settings = self.settings.values
        pad = settings.get("pad_token_id", self.tokenizer.pad_token_id)
        end_tokens = as_token_ids(settings.get("eos_token_id"))
        lengths = []
        for target in targets:
            length = len(target)
            while length and target[length - 1] == pad:
                length -= 1
            ends = [target.index(token) + 1 for token in end_tokens if token in target]
            lengths.append(min(ends, default=length))
        return lengths

    def is_unfinished(self, target: list[int]) -> bool:
        """Return whether a target, up to its end token, is unfinished as in `Hypothesis`."""
        end_tokens = as_token_ids(self.settings.values.get("eos_token_id"))
        words = target[:-1] if target and target[-1] in end_tokens else target
        if len(words) == len(target) and end_tokens and not is_non_autoregressive(self.model):
            return True
        tail = words[-REPEATED_TOKENS:]
        periods = (3, 4)  # a period of 1 or 2 is one of 4 too
        return len(tail) == REPEATED_TOKENS and any(tail[n:] == tail[:-n] for n in periods)

    def pairs_to_score(
        self, tokens: Tensor, mask: Tensor, sequences: Tensor, lengths: list[int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return sources and mask (R, S), and labels and decoder inputs (R, T), of the targets in `sequences`."""
        targets = sequences[:, 1:]
        counts = torch.tensor(lengths, device=targets.device)  # (R,)
        is_padding = torch.arange(targets.shape[1], device=targets.device) >= counts[:, None]
        n = len(sequences) // len(tokens)
        sources = tokens.repeat_interleave(n, dim=0), mask.repeat_interleave(n, dim=0)
        return *sources, targets.masked_fill(is_padding, -100), sequences[:, :-1]

    def make_details(
        self,
        model: PreTrainedModel,
        sources: list[list[int]],
        texts: list[str],
        pairs: tuple[Tensor, Tensor, Tensor, Tensor],
        targets: list[list[int]],
    ) -> Iterator[Details]:
        """Yield the details of each target of a batch, from a forced pass of a model over `pairs_to_score`."""
        words = [words_of_source(self.tokenizer, text, source) for text, source in zip(texts, sources, strict=True)]
        scores, weights = (values.cpu() for values in forced_pass(model, *pairs, self.alignment_layer))
        n = len(targets) // len(sources)
        for index, target in enumerate(targets):
            yield make_details(self.tokenizer, words[index // n], target, scores[index], weights[index])

    def score(self, tokens: Tensor, mask: Tensor, sequences: Tensor, lengths: list[int]) -> Tensor:
        """Return log P(Y | X) / lp(Y) (R,) of the targets in `sequences` (R, T + 1), after the start token."""
        settings = self.settings.values
        pairs = self.pairs_to_score(tokens, mask, sequences, lengths)
        sums = token_log_probabilities(self.model, *pairs).sum(1)
        counts = torch.tensor(lengths, device=sums.device)  # (R,)
        alpha = float(settings.get("length_penalty", 1.0))  # torch needs a float for negative powers
        return sums / length_penalty(counts.clamp(min=1), alpha, settings.get("length_penalty_type", "power"))


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    batch_tokens: int = 2048,
    window: int = 2048,
    max_source_tokens: int | None = None,
    too_long: TooLong = "truncate",
    scores: bool = False,
    skip: int = 0,
    progress: Callable[[int], object] | None = None,
    constraint: Constraint | None = None,
    prefixes: Iterable[str] | None = None,
    details_from: PreTrainedModel | None = None,
    alignment_layer: int | None = None,
    **generate_kwargs: Any,
) -> Iterator[Translation]:
    """Yield the translations of many texts in order, by the model's generation config.

    Texts are read in windows, so `texts` may be infinite, and batched by length within a window. A text of only white
    space has an empty translation.

    Args:
        model: any encoder-decoder of Transformers that generates.
        tokenizer: its tokenizer, with a padding token.
        texts: the texts to translate.
        batch_tokens: source tokens per batch, including padding. A text counts as at least 16 tokens, and a text with
            more than `batch_tokens` is a separate batch.
        window: number of texts that are read and sorted by length at a time.
        max_source_tokens: largest number of tokens of a text, including `</s>`; at most the model's number of
            positions, and None for that number, or 1,024.
        too_long: treatment of longer texts: "truncate" translates the first tokens and sets `is_truncated`; "keep"
            translates the complete text; "error" raises `TooLongError` before its window is translated. With "keep" a
            text that exceeds the model's positions also raises `TooLongError`.
        scores: whether to compute scores, which needs one more pass over each translation, except with a
            non-autoregressive model.
        skip: number of initial texts to skip, without changing the batches of the others.
        progress: called with the number of newly translated texts.
        constraint: returns the logits processor of a batch, given its texts and limits of new tokens.
        prefixes: beginning of each text's translation, which the model continues; an empty one leaves it free. Scores
            and limits count its tokens, and a text of only white space ignores it.
        details_from: model whose additional pass over each translation makes its `details`, usually `model` itself, or
            the original of a prepared one; None for no details.
        alignment_layer: the decoder layer whose cross-attention aligns words, counted from 1; None for the last.
        **generate_kwargs: arguments of `generate()`, such as `num_beams=1` or `num_return_sequences=4`, which override
            the model's generation config. Without a length limit, targets of this package's models have at most 50
            tokens more than their sources, as in the paper.

    Raises:
        TypeError: `texts` is a single text, or contains anything but texts.
        ValueError: the tokenizer has no padding token or does not fit a model of this package, a setting is out of
            range, here or in `generate()`, the prefixes are too few or too many, or prefixes or details are for a
            non-autoregressive model.
        TooLongError: a text is too long for `too_long="error"`, or for the model's learned positions.
    """
    if isinstance(texts, str):
        raise TypeError(f"texts is the str {texts!r}; pass a list of texts, for example [text].")
    translator = Translator(
        model,
        tokenizer,
        batch_tokens=batch_tokens,
        window=window,
        max_source_tokens=max_source_tokens,
        too_long=too_long,
        scores=scores,
        constraint=constraint,
        details_from=details_from,
        alignment_layer=alignment_layer,
        **generate_kwargs,
    )
    if details_from is not None:
        translator.check_autoregressive("details_from")
    if prefixes is None:
        return translator(texts, skip, progress)
    if isinstance(prefixes, str):
        raise TypeError(f"prefixes is the str {prefixes!r}; pass a list with one for each text, for example [prefix].")
    translator.check_prefixes("prefixes")
    return translator(pairs_of(texts, prefixes, "texts", "prefixes"), skip, progress)
