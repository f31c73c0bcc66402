"""Batch sampler under a token budget (5.1)."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from .steps import Lengths, Steps, rank_micro_batches, share_of_step, shuffle_of


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

    Raises:
        ValueError: a single pair exceeds a budget, there are fewer pairs than micro-batches in a step, the numbers of
            lengths differ, or this rank has no micro-batch.
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
        self.num_processes, self.rank = share_of_step(num_processes, rank, accumulation)
        sources, targets = (np.asarray(side, dtype=np.int32) for side in (source_lengths, target_lengths))
        if len(sources) != len(targets):
            counts = f"{len(sources)} and {len(targets)}"
            raise ValueError(f"source_lengths, target_lengths: got {counts}, expected as many. Give each pair's two.")
        self.budgets = (source_tokens, target_tokens)
        self.accumulation = accumulation
        self.seed = seed
        self.epoch = epoch
        self._epoch = 0
        self._check_pairs(sources, targets)
        self.steps = Steps.of(sources, targets, self.budgets, self.num_processes * accumulation)

    def _check_pairs(self, sources: Lengths, targets: Lengths) -> None:
        micro_batches = self.num_processes * self.accumulation
        if len(sources) < micro_batches:
            raise ValueError(
                f"{len(sources)} pairs cannot be split over the {micro_batches} micro-batches of a step; "
                "give more pairs, fewer processes or less accumulation."
            )
        too_long: NDArray[np.bool_] = (sources > self.budgets[0]) | (targets > self.budgets[1])
        if too_long.any():
            index = too_long.argmax()
            raise ValueError(
                f"Pair {index} has {sources[index]} source and {targets[index]} target tokens, more than a batch of "
                f"{self.budgets[0]} and {self.budgets[1]}; drop it or raise the budget."
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.steps) * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._epoch if self.epoch is None else self.epoch()
        for step in self.steps.shuffled(shuffle_of(self.seed, epoch)):
            for micro_batch in rank_micro_batches(step, self.num_processes, self.rank, self.accumulation):
                yield micro_batch.tolist()

    @property
    def padding_share(self) -> float:
        """Return the share of padding among all source and target positions of an epoch."""
        return self.steps.padding_share
