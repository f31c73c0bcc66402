"""The loss of each sentence in an evaluation, and the batches of an evaluation.

B batch, T target, V vocabulary.
"""

import torch


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


def evaluation_batches(sources: list[int], targets: list[int], size: int, tokens: int) -> list[list[int]]:
    """Return the numbers of pairs in batches, the longest source first.

    A batch has at most `size` pairs, and on each side at most `tokens` positions, padding included. A longer pair is a
    separate batch.
    """
    batches: list[list[int]] = []
    longest = 0
    for pair in sorted(range(len(sources)), key=sources.__getitem__, reverse=True):
        longest = max(longest, sources[pair], targets[pair])
        if not batches or len(batches[-1]) == size or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = max(sources[pair], targets[pair])
        batches[-1].append(pair)
    return batches
