"""Random batches of the small models, and the comparison of their results.

B batch, S source, T target.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]  # tensors, for `model(**batch)`; Any, since `model` has parameters of other types too

# Two orders of summing the same float32 numbers: a few units in the last place at each of about ten operations on
# values near 1 (eps is 1.2e-7), with ten times the margin.
FLOAT32: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
END = 2
MASK = 3


def random_tokens(*shape: int, vocab_size: int = 99) -> Tensor:
    """Return ordinary tokens: no start, no padding, no end."""
    return torch.randint(4, vocab_size, shape)


def random_batch(batch: int = 3, source: int = 7, target: int = 5) -> Batch:
    """Return sources (B, S) and target tokens (B, T), without padding."""
    return {"input_ids": random_tokens(batch, source), "decoder_input_ids": random_tokens(batch, target)}


def padded_batch(lengths: list[int], side: str = "right", pad: int = 1) -> tuple[Tensor, Tensor]:
    """Return random texts of these lengths as (B, longest), padded with `pad` on one side, and their mask."""
    width = max(lengths)
    tokens = torch.full((len(lengths), width), pad)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        columns = slice(0, length) if side == "right" else slice(width - length, width)
        tokens[row, columns] = random_tokens(length)
        mask[row, columns] = 1
    return tokens, mask


def source_batch(lengths: list[int], side: str = "right", **arguments: Any) -> Batch:
    """Return random sources of these lengths, padded on one side, their mask, and further arguments of the call."""
    tokens, mask = padded_batch(lengths, side)
    return {"input_ids": tokens, "attention_mask": mask, **arguments}


def masked_batch(sources: list[int], targets: list[int]) -> dict[str, Tensor]:
    """Return random sources and targets of these lengths, padded on the right, with both masks."""
    tokens, mask = padded_batch(targets)
    return source_batch(sources, decoder_input_ids=tokens, decoder_attention_mask=mask)


def targets(*lengths: int) -> Tensor:
    """Return labels (B, T) of these lengths, each with its end, padded on the right by -100."""
    labels = torch.full((len(lengths), max(lengths)), -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = torch.cat([random_tokens(length - 1), torch.tensor([END])])
    return labels


def labels_of(*rows: Sequence[int]) -> Tensor:
    """Return labels (B, T) of the words of each row, with its end."""
    width = max(map(len, rows)) + 1
    return torch.tensor([[*row, END, *[-100] * (width - 1 - len(row))] for row in rows])


def assert_equal_at_tokens(logits: Tensor, expected: Tensor, mask: Tensor) -> None:
    """Assert that two tensors (B, T, ...) are close where a mask (B, T) has tokens."""
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **FLOAT32)


def assert_dropped(dropped: Tensor, complete: Tensor, rate: float) -> None:
    """Assert that dropout with a rate leaves `dropped` of `complete`, both of thousands of numbers that are not 0."""
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], complete[kept] / (1 - rate), **FLOAT32)
    deviation = (rate * (1 - rate) / kept.numel()) ** 0.5
    assert abs(1 - float(kept.float().mean()) - rate) < 5 * deviation
