"""Optimizer steps of pairs of similar length under a budget of source and of target tokens, by array operations (5.1).

n pairs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from accelerate import PartialState
from numpy.typing import NDArray

Budgets = tuple[int, int]
Lengths = NDArray[np.int32]


def share_of_step(num_processes: int | None, rank: int | None, accumulation: int) -> tuple[int, int]:
    """Return the number of processes that share a step and this one's rank, by default those of the launch.

    Raises:
        ValueError: a step has no micro-batch, or none for this rank.
    """
    if num_processes is None or rank is None:
        launch = PartialState(cpu=not torch.accelerator.is_available())  # which joins no launch on CPUs unless told so
        num_processes = launch.num_processes if num_processes is None else num_processes
        rank = launch.process_index if rank is None else rank
    if min(num_processes, accumulation) < 1 or not 0 <= rank < num_processes:
        got = f"got {num_processes}, {rank} and {accumulation}, expected at least 1, a rank below it, and at least 1"
        raise ValueError(f"num_processes, rank, accumulation: leave this rank no batch; {got}. Correct them.")
    return num_processes, rank


def shuffle_of(*numbers: int) -> np.random.RandomState:
    """Return the random numbers that a seed, an epoch and the like decide, the same under every version of NumPy."""
    return np.random.RandomState(list(" ".join(map(str, numbers)).encode()))


def bucket_width(sources: Lengths, targets: Lengths, budgets: Budgets) -> float:
    """Return the width of a target length bucket, in log length, that makes batches similar in both lengths.

    K batches tile the plane of log target length and log ratio of source to target. Nearly all pairs lie within four
    standard deviations in each direction, so square tiles are 4 sqrt(sigma_target sigma_ratio / K) wide. The width is
    rounded, so that it is the same on processors that add in another order.
    """
    batches = max(side.sum(dtype=np.int64) / budget for side, budget in zip((sources, targets), budgets, strict=True))
    logs = np.log(np.maximum(targets, 1))
    ratios = np.log(np.maximum(sources, 1)) - logs
    return float(f"{4 * math.sqrt(logs.std() * ratios.std() / max(batches, 1)):.6g}")


def length_keys(sources: Lengths, targets: Lengths, budgets: Budgets) -> NDArray[np.int64]:
    """Return a number for each pair that increases with the bucket of its target, then with the length of its source.

    In every other bucket it falls with the length of the source, so that neighbors differ little in either length.
    Pairs have the same number exactly if both lengths are equal.
    """
    step = math.log1p(bucket_width(sources, targets, budgets))
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
    """Return where the steps of ordered pairs begin, and the number of pairs.

    A step has as many pairs as both budgets allow, padding counted, and at least one per micro-batch, even if that
    exceeds a budget.
    """
    bounds, sides = [0], tuple(zip((sources, targets), budgets, strict=True))
    rows = np.arange(1, min(max(budgets), len(sources)) + 1)
    while (start := bounds[-1]) < len(sources):
        most = min(budget // max(int(side[start]), 1) for side, budget in sides)  # the first pair alone allows
        fits = np.ones(min(most, len(sources) - start), dtype=bool)
        for side, budget in sides:
            longest = np.maximum.accumulate(side[start : start + len(fits)])
            fits &= longest * rows[: len(fits)] <= budget
        bounds.append(min(start + max(int(fits.sum()), micro_batches), len(sources)))
    if bounds[-1] - bounds[-2] < micro_batches:  # too few: the last step takes some from the one before
        middle = bounds[-1] - micro_batches
        bounds[-2:] = [middle, bounds[-1]] if middle - bounds[-3] >= micro_batches else [bounds[-1]]
    return np.array(bounds)


def batches_in_order(order: list[int], sources: Lengths, targets: Lengths, budgets: Budgets) -> list[list[int]]:
    """Return the pairs in `order` in batches under both budgets, padding counted; a longer pair is a separate batch."""
    if not order:
        return []
    bounds = step_bounds(sources[order], targets[order], budgets, micro_batches=1).tolist()
    return [order[start:end] for start, end in pairwise(bounds)]


def count_positions(lengths: Lengths, bounds: NDArray[np.int64], micro_batches: int) -> int:
    """Return the positions of one side of all steps, padding of each micro-batch included."""
    positions = 0
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = -(-(end - start) // micro_batches)
        padded = np.zeros(rows * micro_batches, dtype=np.int64)
        padded[: end - start] = lengths[start:end]
        sizes = np.full(micro_batches, rows)
        sizes[end - start - (rows - 1) * micro_batches :] -= 1
        positions += int(padded.reshape(rows, micro_batches).max(0) @ sizes)
    return positions


@dataclass(frozen=True, eq=False)
class Steps:
    """The optimizer steps of n pairs: which lengths each has is fixed, which pairs of these lengths is shuffled.

    Attributes:
        keys: a number for each pair that orders them by length (n,).
        bounds: where the steps begin in that order, and n.
        padding_share: the share of the positions, of source and target, that are padding.
    """

    keys: NDArray[np.int64]
    bounds: NDArray[np.int64]
    padding_share: float

    @classmethod
    def of(cls, sources: Lengths, targets: Lengths, budgets: Budgets, micro_batches: int) -> "Steps":
        """Return the steps of pairs: every pair is in one step, of pairs of similar length.

        Args:
            sources, targets: the tokens of each pair (n,), at least `micro_batches` of them.
            budgets: the source tokens and target tokens of a step.
            micro_batches: the minimum number of pairs in a step.
        """
        keys = length_keys(sources, targets, budgets)
        order = np.argsort(keys, kind="stable")
        ordered = sources[order], targets[order]
        del order
        bounds = step_bounds(*ordered, budgets, micro_batches)
        positions = sum(count_positions(side, bounds, micro_batches) for side in ordered)
        tokens = sum(int(side.sum(dtype=np.int64)) for side in ordered)
        return cls(keys, bounds, 1 - tokens / max(positions, 1))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def shuffled(self, shuffle: np.random.RandomState) -> Iterator[NDArray[np.int32]]:
        """Yield the pairs of each step.

        `shuffle` distributes pairs of equal lengths over the steps and shuffles the steps.
        """
        order = np.arange(len(self.keys), dtype=np.int32)
        shuffle.shuffle(order)
        order = order[np.argsort(self.keys[order], kind="stable")]
        for step in shuffle.permutation(len(self)):
            yield order[self.bounds[step] : self.bounds[step + 1]]


def rank_micro_batches(
    step: NDArray[np.int32], num_processes: int, rank: int, accumulation: int
) -> Iterator[NDArray[np.int32]]:
    """Yield one rank's micro-batches of a step; their sizes differ by at most 1 over all ranks."""
    micro_batches = num_processes * accumulation
    for first in range(rank, micro_batches, num_processes):
        yield step[first::micro_batches]
