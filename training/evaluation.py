"""Evaluation of a model on pairs: its translations, and the likelihood of the references.

B pairs of a batch, S source, T target, V vocabulary.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vaswani_transformer.search import length_penalty
from vaswani_transformer.support.command import UserError
from vaswani_transformer.support.files import write_atomically
from vaswani_transformer.support.loading import eval_mode, has_likelihood, is_non_autoregressive
from vaswani_transformer.translation.translator import (
    Constraint,
    Hypothesis,
    NanError,
    Translator,
    nan_errors,
    pad_rows,
)

ROWS = 8  # rows of logits whose float32 loss is computed at a time
Statistics = Callable[[Tensor, dict[str, Tensor]], dict[str, Tensor]]
"""Function from logits (B, T, V) and the batch to further statistics by name, summed over each target (B,)."""


@dataclass(frozen=True)
class TokenizedPair:
    """A pair as token ids, both sides including `</s>`, with the text of its source."""

    source: list[int]
    target: list[int]
    text: str


@dataclass(frozen=True)
class PairResult:
    """Result for one pair.

    hypothesis: the translation of the source.
    log_probability: that of the translation in nats, or None; see `Evaluator.log_probability`.
    sums: `loss` of the reference in nats, the number of its `tokens`, and further statistics.
    """

    hypothesis: Hypothesis
    log_probability: float | None
    sums: dict[str, float]


class SplitResults(NamedTuple):
    """The results of each pair of a split, and its scores by name."""

    pairs: list[PairResult]
    scores: dict[str, Any]


class Evaluator:
    """Callable that translates the sources of a batch of pairs and computes the likelihood of its references.

    Args:
        model: any encoder-decoder of Transformers that generates.
        tokenizer: its tokenizer.
        constraint: restricts the translations, or None; see `translate`.
        statistics: computes further statistics of the references, or None.
        autocast: makes the context in which the model runs.
        scores: whether to compute the log-probabilities of the translations; a sharded model has none.
        make_translator: class of the translator.
        **search: arguments of `generate()`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        constraint: Constraint | None = None,
        statistics: Statistics | None = None,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        scores: bool = False,
        make_translator: type[Translator] = Translator,
        **search: Any,
    ) -> None:
        if isinstance(model, FSDPModule):
            search["synced_gpus"] = True  # all ranks must call a layer to gather its weights
            scores = False  # their number of passes depends on the batch
        self.translator = make_translator(model, tokenizer, constraint=constraint, scores=scores, **search)
        self.model = model
        self.padding = tokenizer.pad_token_id
        self.statistics = statistics
        self.autocast = autocast

    @torch.no_grad()
    def __call__(self, pairs: list[TokenizedPair]) -> list[PairResult]:
        """Return the result of each pair of a batch."""
        with eval_mode(self.model):
            with self.autocast():
                sums = self.reference_sums(pairs)
            with self.autocast():
                hypotheses = self.translate(pairs)
        names = list(sums)
        rows = zip(*(values.tolist() for values in sums.values()), strict=True)
        return [
            PairResult(hypothesis, self.log_probability(hypothesis), dict(zip(names, row, strict=True)))
            for hypothesis, row in zip(hypotheses, rows, strict=True)
        ]

    def evaluate(self, pairs: Sequence[TokenizedPair], batches: list[list[int]]) -> list[PairResult]:
        """Return the results of all pairs on every process; `batches` has the index of each pair once."""
        # All processes take the same number of turns, so a batch may occur twice.
        state = PartialState()
        results: dict[int, PairResult] = {}
        for turn in range(0, len(batches), state.num_processes):
            rows = batches[(turn + state.process_index) % len(batches)]
            results.update(zip(rows, self([pairs[row] for row in rows]), strict=True))
        by_row = dict(gather_object(list(results.items())))
        return [by_row[row] for row in range(len(pairs))]

    def reference_sums(self, pairs: list[TokenizedPair]) -> dict[str, Tensor]:
        """Return `loss`, `tokens` and the further statistics (B,) of the references."""
        device = self.model.device
        batch = {
            "input_ids": pad_rows([pair.source for pair in pairs], self.padding, device),
            "attention_mask": pad_rows([[1] * len(pair.source) for pair in pairs], 0, device),
            "labels": pad_rows([pair.target for pair in pairs], -100, device),
        }
        labels = batch["labels"]
        if is_non_autoregressive(self.model) and has_likelihood(self.model):
            return possible_sums(self.model(**batch, skip_logits=True).sentence_losses, labels)
        logits = reference_logits(self.model, **batch)
        sums = {"loss": sentence_losses(logits, labels), "tokens": labels.ne(-100).sum(1)}
        if self.statistics is not None:
            sums.update(self.statistics(logits, batch))
        return sums

    def translate(self, pairs: list[TokenizedPair]) -> list[Hypothesis]:
        """Return the best translation of each source.

        Raises:
            UserError: the scores of a translation are NaN.
        """
        if isinstance(self.model, FSDPModule):
            self.model.unshard()  # the search uses the embeddings outside `forward`
        sources = [pair.source for pair in pairs]
        texts = [pair.text for pair in pairs]
        try:
            with nan_errors(range(len(pairs))):
                results = self.translator.translate_batch(sources, texts)
        except NanError as error:
            problem = f"the scores of the translation of {texts[error.index][:80]!r} are NaN"
            raise UserError(f"Evaluation: {problem}; use float32, and check that the weights are finite.") from error
        return [hypotheses[0] for hypotheses in results]

    def log_probability(self, hypothesis: Hypothesis) -> float | None:
        """Return log P of a translation in nats: its score, without the division by the length penalty.

        It is that of the tokens and `</s>`. A model that predicts the length m adds `length_weight` log p(m). For DAG,
        and for CTC without a search, it is that of the path.
        """
        if hypothesis.score is None:
            return None
        settings = self.translator.settings.values
        if is_non_autoregressive(self.model) and has_likelihood(self.model):
            bonus = settings.get("length_bonus", 0.0) if settings.get("num_beams", 1) > 1 else 0.0
            return hypothesis.score - bonus * (hypothesis.tokens - 1)  # which is not divided
        alpha = float(settings.get("length_penalty", 1.0))
        penalty_type = settings.get("length_penalty_type", "power")
        return hypothesis.score * float(length_penalty(max(1, hypothesis.tokens), alpha, penalty_type))


def reference_logits(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    """Return the logits (B, T, V) of the `labels` (B, T).

    A non-autoregressive model gets only the length of each reference. Others compute no loss if they can be given
    shifted labels instead, since `sentence_losses` computes it.
    """
    source = {"input_ids": input_ids, "attention_mask": attention_mask}
    if is_non_autoregressive(model):
        return model(**source, decoder_attention_mask=labels.ne(-100).long()).logits
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        return model(**source, labels=labels, use_cache=False).logits
    return model(**source, decoder_input_ids=shift(labels=labels), use_cache=False).logits


def sentence_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed float32 loss (B,) of `labels` (B, T) under `logits` (B, T, V), a few rows at a time."""
    chunks = zip(logits.split(ROWS), labels.split(ROWS), strict=True)
    return torch.cat(
        [cross_entropy(part.float().transpose(1, 2), gold, reduction="none").sum(1) for part, gold in chunks]
    )


def possible_sums(losses: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return `loss` and `tokens` (B,) of the references, both 0 for those that a CTC or DAG model cannot produce.

    Args:
        losses: (B,), infinite for a reference that does not fit into the slots of its source.
        labels: (B, T).
    """
    is_impossible = losses == math.inf
    return {
        "loss": losses.masked_fill(is_impossible, 0),
        "tokens": labels.ne(-100).sum(1).masked_fill(is_impossible, 0),
        "impossible_targets": is_impossible.long(),
    }


def mean_sums(results: Iterable[PairResult], has_perplexity: bool) -> dict[str, float]:
    """Return the means of all sums per target token, the perplexity, and the number of impossible targets if any."""
    sums = [result.sums for result in results]
    totals = {name: sum(pair_sums[name] for pair_sums in sums) for name in sums[0]}
    tokens = max(1, totals.pop("tokens"))
    impossible = totals.pop("impossible_targets", 0)
    means = {name: total / tokens for name, total in totals.items()}
    if has_perplexity:
        means["perplexity"] = math.exp(min(means["loss"], 700))
    if impossible:
        means["impossible_targets"] = impossible
    return means


def write_translations(path: Path, results: list[PairResult], sources: list[str], references: list[str]) -> None:
    """Write source, translation, reference and log-probability of each pair as JSON Lines, completely or not at all."""
    lines = []
    for source, result, reference in zip(sources, results, references, strict=True):
        row = {
            "source": source,
            "translation": result.hypothesis.text,
            "reference": reference,
            "log_probability": result.log_probability,
        }
        lines.append(f"{json.dumps(row, ensure_ascii=False)}\n")
    write_atomically(path, "".join(lines))
