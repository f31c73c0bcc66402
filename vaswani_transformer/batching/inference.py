"""Batches of texts for a model in evaluation mode, and the likelihood of targets.

R pairs of a source and a target, S source, T target, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

SCORING_TOKENS = 2048  # target tokens scored at a time
MIN_TEXT_TOKENS = 16  # smallest size of a text in a batch, to limit the number of beams


def pad_rows(rows: list[list[int]], value: int, device: torch.device) -> Tensor:
    """Return rows of unequal lengths as one tensor, padded on the right with `value`."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], device=device)


def chosen_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities (R, T), in float32, of `labels` (R, T) under `logits` (R, T, V); 0 at -100."""
    logits = logits.float()
    chosen = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)  # (R, T)
    return (chosen - logits.logsumexp(-1)).masked_fill(labels == -100, 0.0)


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
        scores.append(chosen_log_probabilities(logits, gold))
    return torch.cat(scores)


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
