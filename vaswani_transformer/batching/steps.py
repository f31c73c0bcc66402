"""Grouping of n pairs into optimizer steps of similar length under token budgets (5.1)."""

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Budgets = tuple[int, int]
Lengths = NDArray[np.int32]


def length_keys(sources: Lengths, targets: Lengths, budgets: Budgets) -> NDArray[np.int64]:
    """Return a sort key for each pair: by target bucket, then by source length in alternating direction.

    Two pairs have the same key if and only if both lengths are equal. Buckets are intervals of log target length.
    K batches tile the plane of log target length and log length ratio. Since nearly all pairs lie within a range of
    four standard deviations in each direction, square tiles are 4 sqrt(sigma_target sigma_ratio / K) wide.
    """
    batches = max(side.sum(dtype=np.int64) / budget for side, budget in zip((sources, targets), budgets, strict=True))
    logs = np.log(np.maximum(targets, 1))
    ratios = np.log(np.maximum(sources, 1)) - logs
    width = float(f"{4 * math.sqrt(logs.std() * ratios.std() / max(batches, 1)):.6g}")  # the same on all processors
    step = math.log1p(width)
    longest_source, longest_target = int(sources.max()), int(targets.max())
    numbers = [int(math.log(max(length, 1)) / step) if step else length for length in range(longest_target + 1)]
    keys = np.array(numbers, dtype=np.int64)[targets]
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
    bounds = [0]
    sides = ((sources, budgets[0]), (targets, budgets[1]))
    rows = np.arange(1, min(max(budgets), len(sources)) + 1)
    while (start := bounds[-1]) < len(sources):
        most = min(budget // max(int(side[start]), 1) for side, budget in sides)  # bound from the first pair
        fits = np.ones(min(most, len(sources) - start), dtype=bool)
        for side, budget in sides:
            longest = np.maximum.accumulate(side[start : start + len(fits)])
            fits &= longest * rows[: len(fits)] <= budget
        size = max(int(fits.sum()), micro_batches)
        bounds.append(min(start + size, len(sources)))

    # The last step may have too few pairs: it takes some from the step before, or becomes a part of it.
    if bounds[-1] - bounds[-2] < micro_batches:
        middle = bounds[-1] - micro_batches
        bounds[-2:] = [middle, bounds[-1]] if middle - bounds[-3] >= micro_batches else [bounds[-1]]
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
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = -(-(end - start) // micro_batches)
        padded = np.zeros(rows * micro_batches, dtype=np.int64)
        padded[: end - start] = lengths[start:end]
        sizes = np.full(micro_batches, rows)
        sizes[end - start - (rows - 1) * micro_batches :] -= 1
        positions += int(padded.reshape(rows, micro_batches).max(0) @ sizes)
    return positions
