"""Batches of a data set in memory, or on a disk, under a token budget (5.1)."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from .steps import Lengths, Steps, rank_micro_batches, share_of_step, shuffle_of


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Batches "by approximate sequence length" under a budget of source and of target tokens (5.1).

    The sampler orders pairs by both lengths, groups them into steps under both budgets, padding counted, and shuffles
    the steps. The seed and the epoch decide which pairs of equal lengths share a step; the lengths in a step, and so
    the number of steps, are the same in every epoch. An epoch contains each pair once.

    Each step is split evenly into micro-batches over `num_processes` ranks and `accumulation` passes, so that a step is
    the same on any number of them, as long as each micro-batch has a pair; a micro-batch may exceed its share of the
    budgets by one pair. Each rank's sampler yields that rank's micro-batches.

    Args:
        source_lengths, target_lengths: the tokens of each pair, end tokens counted; arrays of int32 are not copied.
        source_tokens, target_tokens: the budgets of an optimizer step, over all its micro-batches.
        num_processes, rank: the number of ranks that share a step, and the rank of this process; None: those of the
            launch, from Accelerate's `PartialState`. Do not give the loader to `accelerator.prepare`, which would
            distribute the batches a second time.
        accumulation: the micro-batches of a step that each rank runs one after another.
        seed: the seed of the shuffling.
        epoch: called at the start of an iteration, returns its epoch; None: the epoch given to `set_epoch`.

    Raises:
        ValueError: a single pair exceeds a budget, there are fewer pairs than micro-batches in a step, the lists differ
            in length, or no micro-batch is this rank's.
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
        """Shuffle for epoch `epoch` in the next iteration."""
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
        """Return the share of an epoch's positions, of source and target, that are padding."""
        return self.steps.padding_share
