"""Grouping of n pairs into optimizer steps of similar length under token budgets, and its batch sampler (5.1)."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from accelerate import PartialState
from numpy.typing import NDArray
from torch.utils.data import Sampler

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
    buckets = list(range(longest_target + 1))
    if step:
        buckets = [int(math.log(max(length, 1)) / step) for length in buckets]
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


def check_ranks(num_processes: int, rank: int, accumulation: int) -> None:
    if min(num_processes, accumulation) < 1 or not 0 <= rank < num_processes:
        raise ValueError(
            f"invalid num_processes, rank or accumulation; got {num_processes}, {rank} and {accumulation}, "
            "expected num_processes >= 1, 0 <= rank < num_processes, accumulation >= 1."
        )


def check_pairs(sources: Lengths, targets: Lengths, budgets: Budgets, micro_batches: int) -> None:
    """Check that there is a pair for each micro-batch of a step, and that each pair fits into the budgets."""
    if len(sources) != len(targets):
        counts = f"{len(sources)} and {len(targets)}"
        raise ValueError(f"source_lengths, target_lengths: must have the same length; got {counts}.")
    if len(sources) < micro_batches:
        raise ValueError(
            f"{len(sources)} pairs cannot be split over the {micro_batches} micro-batches of a step; "
            "use more pairs, fewer processes or less accumulation."
        )
    source_tokens, target_tokens = budgets
    is_too_long: NDArray[np.bool_] = (sources > source_tokens) | (targets > target_tokens)
    if is_too_long.any():
        index = is_too_long.argmax()
        raise ValueError(
            f"Pair {index} has {sources[index]} source and {targets[index]} target tokens, more than a batch of "
            f"{source_tokens} and {target_tokens}; drop it or raise the budget."
        )


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Batches "by approximate sequence length" under budgets of source and target tokens (5.1).

    Pairs are sorted by both lengths and grouped into optimizer steps under both budgets, including padding. Every epoch
    contains each pair once. The seed and the epoch determine the order of the steps, and which pairs of equal lengths
    share a step. The number of steps and their lengths are the same in every epoch.

    Each step is split evenly into micro-batches over `num_processes` ranks and `accumulation` passes, so steps do not
    depend on the number of ranks. A micro-batch may exceed its share of the budgets by one pair. The sampler yields the
    micro-batches of its rank.

    Args:
        source_lengths, target_lengths: number of tokens of each pair, including end tokens; int32 arrays are not
            copied.
        source_tokens, target_tokens: budgets of an optimizer step, over all its micro-batches.
        num_processes, rank: number of ranks that share a step, and the rank of this process; None for those of
            Accelerate's `PartialState`. Do not pass the loader to `accelerator.prepare`, which would distribute the
            batches a second time.
        accumulation: number of micro-batches per step and rank.
        seed: seed of the shuffling.
        epoch: function that returns the epoch at the start of an iteration; None for the epoch of `set_epoch`.

    Attributes:
        padding_share: share of padding among all source and target positions of an epoch.

    Raises:
        ValueError: a single pair exceeds a budget, there are fewer pairs than micro-batches in a step, the numbers of
            lengths differ, or the number of ranks, the rank or the accumulation is out of range.
    """

    def __init__(
        self,
        source_lengths: Sequence[int] | Lengths,
        target_lengths: Sequence[int] | Lengths,
        source_tokens: int = 25_000,
        target_tokens: int = 25_000,
        num_processes: int | None = None,
        rank: int | None = None,
        accumulation: int = 1,
        seed: int = 0,
        epoch: Callable[[], int] | None = None,
    ) -> None:
        if num_processes is None or rank is None:
            launch = PartialState(cpu=not torch.accelerator.is_available())  # needs `cpu` to join a launch on CPUs
            num_processes = launch.num_processes if num_processes is None else num_processes
            rank = launch.process_index if rank is None else rank
        check_ranks(num_processes, rank, accumulation)
        self.num_processes = num_processes
        self.rank = rank
        self.accumulation = accumulation
        self.seed = seed
        self.epoch = epoch
        self._epoch = 0
        self.micro_batches = num_processes * accumulation

        budgets = (source_tokens, target_tokens)
        sources = np.asarray(source_lengths, dtype=np.int32)
        targets = np.asarray(target_lengths, dtype=np.int32)
        check_pairs(sources, targets, budgets, self.micro_batches)

        # Steps are sections of the pairs in the order of their keys; an epoch shuffles only equal keys.
        self.keys = length_keys(sources, targets, budgets)
        order = np.argsort(self.keys, kind="stable")
        sources = sources[order]
        targets = targets[order]
        self.bounds = step_bounds(sources, targets, budgets, self.micro_batches)

        # The order of the steps does not change the padding.
        positions = 0
        tokens = 0
        for lengths in (sources, targets):
            positions += count_positions(lengths, self.bounds, self.micro_batches)
            tokens += int(lengths.sum(dtype=np.int64))
        self.padding_share = 1 - tokens / max(positions, 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return (len(self.bounds) - 1) * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._epoch if self.epoch is None else self.epoch()
        # RandomState has the same results in every version of NumPy
        shuffle = np.random.RandomState(list(f"{self.seed} {epoch}".encode()))
        order = np.arange(len(self.keys), dtype=np.int32)
        shuffle.shuffle(order)
        order = order[np.argsort(self.keys[order], kind="stable")]  # pairs of equal lengths remain shuffled
        for number in shuffle.permutation(len(self.bounds) - 1):
            step = order[self.bounds[number] : self.bounds[number + 1]]
            for first in range(self.rank, self.micro_batches, self.num_processes):
                yield step[first :: self.micro_batches].tolist()
