"""Grouping of n pairs into optimizer steps of similar length under token budgets (5.1)."""

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Budgets = tuple[int, int]
"""Largest numbers of source and target tokens of a step."""
Lengths = NDArray[np.int32]
"""(n,), tokens of each pair's source or target."""


def length_keys(sources: Lengths, targets: Lengths, budgets: Budgets) -> NDArray[np.int64]:
    """Return a sort key for each pair: by target bucket, then by source length in alternating direction.

    Two pairs have the same key if and only if both lengths are equal. Buckets are intervals of log target length.
    K batches tile the plane of log target length and log length ratio. Since nearly all pairs lie within a range of
    four standard deviations in each direction, square tiles are 4 sqrt(sigma_target sigma_ratio / K) wide.
    """
    source_budget, target_budget = budgets
    batches = max(sources.sum(dtype=np.int64) / source_budget, targets.sum(dtype=np.int64) / target_budget)
    logs = np.log(np.maximum(targets, 1))
    ratios = np.log(np.maximum(sources, 1)) - logs
    width = 4 * math.sqrt(logs.std() * ratios.std() / max(batches, 1))
    width = float(f"{width:.6g}")  # the same on all processors

    # Bucket of each target length; without variance each length is a bucket.
    step = math.log1p(width)
    longest_source = int(sources.max())
    longest_target = int(targets.max())
    buckets = [int(math.log(max(length, 1)) / step) if step else length for length in range(longest_target + 1)]
    keys = np.array(buckets, dtype=np.int64)[targets]

    # One number for (bucket, source, target), in place, since there may be many pairs. The direction alternates, so
    # that neighbors on both sides of a bucket's end have similar sources.
    by_source = np.where(keys % 2, sources, longest_source - sources)
    keys *= longest_source + 1
    keys += by_source
    keys *= longest_target + 1
    keys += targets
    return keys


def step_bounds(sources: Lengths, targets: Lengths, budgets: Budgets, micro_batches: int) -> NDArray[np.int64]:
    """Return the start of each step among sorted pairs, followed by the number of pairs.

    A step is as large as both budgets allow, including padding, with at least one pair per micro-batch.
    """
    num_pairs = len(sources)
    source_budget, target_budget = budgets
    bounds = [0]
    sizes = np.arange(1, min(max(budgets), num_pairs) + 1)
    while (start := bounds[-1]) < num_pairs:
        # No step is larger than one whose pairs are all as long as the first.
        most_by_source = source_budget // max(int(sources[start]), 1)
        most_by_target = target_budget // max(int(targets[start]), 1)
        most = min(most_by_source, most_by_target, num_pairs - start)

        # The first k pairs fit if k times their longest source and target do. Both grow with k.
        longest_sources = np.maximum.accumulate(sources[start : start + most])
        longest_targets = np.maximum.accumulate(targets[start : start + most])
        fits = longest_sources * sizes[:most] <= source_budget
        fits &= longest_targets * sizes[:most] <= target_budget
        size = max(int(fits.sum()), micro_batches)
        bounds.append(min(start + size, num_pairs))

    # If the last step has too few pairs, it gets some from the step before, or becomes a part of it.
    if num_pairs - bounds[-2] < micro_batches:
        start = num_pairs - micro_batches
        if start - bounds[-3] >= micro_batches:
            bounds[-2] = start
        else:
            del bounds[-2]
    return np.array(bounds)


def batches_in_order(order: list[int], sources: Lengths, targets: Lengths, budgets: Budgets) -> list[list[int]]:
    """Split `order` into batches under both budgets, including padding; a longer pair is a separate batch."""
    if not order:
        return []
    bounds = step_bounds(sources[order], targets[order], budgets, micro_batches=1).tolist()
    return [order[start:end] for start, end in pairwise(bounds)]


def count_positions(lengths: Lengths, bounds: NDArray[np.int64], micro_batches: int) -> int:
    """Return the number of positions of one side over all micro-batches, including padding."""
    positions = 0
    for start, end in pairwise(bounds.tolist()):
        # Micro-batch m has the pairs m, m + micro_batches and so on: a column, whose last row may be empty.
        num_pairs = end - start
        rows = -(-num_pairs // micro_batches)
        table = np.zeros(rows * micro_batches, dtype=np.int64)
        table[:num_pairs] = lengths[start:end]
        longest = table.reshape(rows, micro_batches).max(0)
        sizes = np.full(micro_batches, rows)
        sizes[num_pairs - (rows - 1) * micro_batches :] -= 1
        positions += int(longest @ sizes)
    return positions
