"""Log-probabilities of given targets, by a model's own likelihood.

B pairs in a batch, S source, T target.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..lengths import LengthHead
from ..loss import token_cross_entropy
from ..support.command import UserError
from ..support.loading import eval_mode, has_likelihood, is_non_autoregressive
from ..tokenizer import check_text, text_encoder
from .translator import (
    NanError,
    Pair,
    TooLong,
    Translator,
    batches_by_length,
    pad_rows,
    pairs_of,
    token_log_probabilities,
)

ESTIMATE_SAMPLES = 8  # of FlowSeq's latents


@dataclass(frozen=True)
class TargetScore:
    """Log-probabilities of the target of a pair, in nats.

    log_probability: that of all tokens, and of the length where the model predicts one; -inf for a target that a
        CTC or DAG model cannot produce.
    tokens: tokens of the target, including `</s>`.
    token_log_probabilities: those of the tokens; None for CTC and DAG, which sum over paths.
    length_log_probability: that of the target's length; None if the model predicts none.
    estimated_log_probability: FlowSeq's estimate of `log_probability` over all latents, by importance sampling; None
        for other models. FlowSeq's other fields are those of its most likely latents.
    source_tokens, is_truncated, max_source_tokens, unknown_words: as in `Translation`.
    """

    log_probability: float
    tokens: list[str]
    token_log_probabilities: list[float] | None
    length_log_probability: float | None
    estimated_log_probability: float | None
    source_tokens: int
    is_truncated: bool
    max_source_tokens: int
    unknown_words: list[str]


class BatchScores(NamedTuple):
    """Fields of `TargetScore` as tensors, None where a model has none."""

    sums: Tensor  # (B,)
    tokens: Tensor | None = None  # (B, T)
    lengths: Tensor | None = None  # (B,)
    estimates: Tensor | None = None  # (B,)


def decoder_inputs(model: Any, labels: Tensor, padding: int) -> Tensor:
    """Return the labels (B, T) shifted right, as in the model's training."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None:
        return shift(labels=labels)
    words = labels.masked_fill(labels == -100, padding)[:, :-1]
    return pad(words, (1, 0), value=model.config.decoder_start_token_id)


def length_head_scores(model: LengthHead, tokens: Tensor, mask: Tensor, labels: Tensor) -> BatchScores:
    """Return the scores of a model that predicts a length, from one parallel pass at the length of each target."""
    encoded = model.encode(tokens, mask)
    logits = model(encoder_outputs=encoded, attention_mask=mask, labels=labels, skip_logits=False).logits
    of_tokens = -token_cross_entropy(logits, labels)  # (B, T)
    source = model.read_source(encoded[0], mask)
    counts = labels.ne(-100).sum(1)
    classes = source.length_classes(counts)[:, None]
    of_lengths = source.length_logits.float().log_softmax(-1).gather(1, classes).squeeze(1)  # (B,)

    estimates = None
    if estimate := getattr(model, "estimate_log_probs", None):
        with torch.random.fork_rng():
            torch.manual_seed(0)  # the same estimate in a resumed file
            estimates = estimate(source, labels.clamp(min=0), counts, ESTIMATE_SAMPLES) + of_lengths
    return BatchScores(of_tokens.sum(1) + of_lengths, of_tokens, of_lengths, estimates)


class TargetScorer:
    """Computes the scores of pairs; arguments as in `score_targets`."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> None:
        if is_non_autoregressive(model) and not (has_likelihood(model) or isinstance(model, LengthHead)):
            problem = f"has no likelihood of a target; got a {type(model).__name__}"
            raise UserError(f"model: {problem}, expected one that predicts words and their number. Use another model.")
        self.translator = Translator(model, tokenizer, **settings)
        self.model = model
        self.settings = self.translator.settings

    def encode_targets(self, targets: list[str]) -> list[list[int]]:
        """Return the token ids of targets."""
        encoder = text_encoder(self.translator.tokenizer)
        return encoder(text_target=targets, return_attention_mask=False, verbose=False)["input_ids"]

    def is_too_long(self, target: list[int]) -> bool:
        """Return whether the model has too few learned positions for a target's token ids."""
        limit = self.translator.max_positions
        return limit is not None and len(target) > limit and not is_non_autoregressive(self.model)

    def without_long(self, targets: Sequence[str]) -> list[str]:
        """Return targets, with an empty one for each that the model has too few learned positions for."""
        if self.translator.max_positions is None:
            return list(targets)
        encoded = self.encode_targets(list(targets))
        return ["" if self.is_too_long(tokens) else text for text, tokens in zip(targets, encoded, strict=True)]

    def score_window(
        self, pairs: Sequence[Pair], first: int = 0, progress: Callable[[int], object] | None = None
    ) -> list[TargetScore]:
        """Return the scores of `pairs`; `first` is the index of the window's first pair."""
        encoded = self.translator.encode_window([pair.source for pair in pairs], first, keeps_empty=True)
        for index, pair in enumerate(pairs, start=first):
            check_text(pair.target, f"Target {index}")
        targets = self.encode_targets([pair.target for pair in pairs])
        for number, target in enumerate(targets, start=first + 1):
            if self.is_too_long(target):
                problem = f"too long for the model's learned positions; got {len(target)} tokens"
                limit = self.translator.max_positions
                raise UserError(f"Target {number} (the first is 1): {problem}, expected at most {limit}. Shorten it.")

        scores: list[Any] = [None] * len(pairs)
        lengths = [max(map(len, pair)) for pair in zip(encoded.sources, targets, strict=True)]
        for batch in batches_by_length(lengths, self.translator.batch_tokens):
            sources_of_batch = [encoded.sources[index] for index in batch]
            targets_of_batch = [targets[index] for index in batch]
            rows = self.score_batch(sources_of_batch, targets_of_batch)
            for index, row in zip(batch, rows, strict=True):
                scores[index] = row
                if row[0] != row[0]:
                    raise NanError(first + index)
            if progress is not None:
                progress(len(batch))
        names = [cast(list[str], self.translator.tokenizer.convert_ids_to_tokens(target)) for target in targets]
        limit = self.translator.max_source_tokens
        return [
            TargetScore(
                total,
                names[index],
                None if of_tokens is None else of_tokens[: len(names[index])],
                *others,
                source_tokens=encoded.lengths[index],
                is_truncated=index in encoded.truncated,
                max_source_tokens=limit,
                unknown_words=encoded.unknown[index],
            )
            for index, (total, of_tokens, *others) in enumerate(scores)
        ]

    @torch.no_grad()
    def score_batch(self, sources: list[list[int]], targets: list[list[int]]) -> Iterable[tuple[Any, ...]]:
        """Return the fields of `BatchScores` of each pair of a batch, as numbers and lists."""
        model: Any = self.model
        padding = self.translator.tokenizer.pad_token_id
        tokens = pad_rows(sources, padding, model.device)  # (B, S)
        mask = pad_rows([[1] * len(source) for source in sources], 0, model.device)  # (B, S)
        labels = pad_rows(targets, -100, model.device)  # (B, T)
        with eval_mode(model):
            if isinstance(model, LengthHead):
                scores = length_head_scores(model, tokens, mask, labels)
            elif is_non_autoregressive(model):
                output: Any = model(input_ids=tokens, attention_mask=mask, labels=labels, skip_logits=True)
                scores = BatchScores(-output.sentence_losses)
            else:
                inputs = decoder_inputs(model, labels, padding)
                of_tokens = token_log_probabilities(model, tokens, mask, labels, inputs)
                scores = BatchScores(of_tokens.sum(1), of_tokens)
        missing = [None] * len(labels)
        columns = [missing if field is None else field.tolist() for field in scores]
        return zip(*columns, strict=True)


def score_targets(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Iterable[str],
    targets: Iterable[str],
    *,
    batch_tokens: int = 2048,
    window: int = 2048,
    max_source_tokens: int | None = None,
    too_long: TooLong = "truncate",
    progress: Callable[[int], object] | None = None,
) -> Iterator[TargetScore]:
    """Yield the log-probabilities of given targets in order, by the model's own likelihood.

    They are the negative losses in evaluation mode: a length counts without `length_loss_weight`, and a model that
    predicts all words in parallel scores them in parallel too. An empty target is `</s>` alone.

    Args:
        model: any encoder-decoder of Transformers, of every family of this package.
        tokenizer: its tokenizer, with a padding token.
        sources: the texts.
        targets: the target of each text.
        batch_tokens: tokens per batch of the longer of source and target, including padding.
        window, max_source_tokens, too_long: as in `translate`.
        progress: called with the number of newly scored pairs.

    Raises:
        TypeError: `sources` or `targets` is a single text, or contains anything but texts.
        ValueError: their numbers differ, the tokenizer has no padding token or does not fit, the model has no
            likelihood, or a target is longer than the model's learned positions.
        TooLongError: as in `translate`.
    """
    for name, texts in (("sources", sources), ("targets", targets)):
        if isinstance(texts, str):
            raise TypeError(f"{name} is the str {texts!r}; pass a list of texts, for example [text].")
    limits: Any = {"max_source_tokens": max_source_tokens, "too_long": too_long}
    scorer = TargetScorer(model, tokenizer, batch_tokens=batch_tokens, window=window, **limits)
    return score_pairs(scorer, pairs_of(sources, targets, "sources", "targets"), window, progress)


def score_pairs(
    scorer: TargetScorer, pairs: Iterator[Pair], size: int, progress: Callable[[int], object] | None
) -> Iterator[TargetScore]:
    """Yield the scores of pairs, `size` of which are read at a time."""
    first = 0
    while window := list(islice(pairs, size)):
        yield from scorer.score_window(window, first, progress)
        first += len(window)
