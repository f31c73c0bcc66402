"""The loss of each sentence in an evaluation, and the batches of an evaluation.

B batch, T target, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vaswani_transformer.batching.steps import Lengths, batches_in_order


def sentence_losses(logits: torch.Tensor, labels: torch.Tensor, rows: int = 8) -> torch.Tensor:
    """Return the summed loss (B,) of targets `labels` (B, T), -100 for none, under `logits` (B, T, V).

    It is computed in float32 for `rows` rows at a time, because all rows together would need several copies of the
    logits.
    """
    chunks = zip(logits.split(rows), labels.split(rows), strict=True)
    losses = [
        torch.nn.functional.cross_entropy(chunk.float().transpose(1, 2), targets, reduction="none").sum(1)
        for chunk, targets in chunks
    ]
    return torch.cat(losses)


def evaluation_batches(
    sources: Sequence[int] | Lengths, targets: Sequence[int] | Lengths, size: int, tokens: int
) -> list[list[int]]:
    """Return the numbers of pairs in batches, the longest source first.

    A batch has at most `size` pairs, and on each side at most `tokens` positions, padding included. A longer pair is a
    separate batch.
    """
    order, longest = np.argsort(np.negative(sources), kind="stable").tolist(), np.maximum(sources, targets)
    return batches_in_order(order, longest, np.ones_like(longest), (tokens, size))
