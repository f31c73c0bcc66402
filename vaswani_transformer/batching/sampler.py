"""Batch sampler under a token budget (5.1)."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from accelerate import PartialState
from numpy.typing import NDArray
from torch.utils.data import Sampler

from .steps import Budgets, Lengths, count_positions, length_keys, step_bounds


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
        positions = sum(count_positions(lengths, self.bounds, self.micro_batches) for lengths in (sources, targets))
        tokens = int(sources.sum(dtype=np.int64)) + int(targets.sum(dtype=np.int64))
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
