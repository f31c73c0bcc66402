"""What a training script needs beside the stock Trainer: equation (3), the paper's Adam and its batches (5.1, 5.3)."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler

FUSED_ON = ("cpu", "cuda", "mps", "xpu")


def learning_rate(step: int, d_model: int, warmup_steps: int = 4000) -> float:
    """Equation (3): d_model^-0.5 min(step^-0.5, step warmup_steps^-1.5), the steps counted from 1."""
    return d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def paper_schedule(optimizer: Optimizer, d_model: int, warmup_steps: int = 4000, scale: float = 1.0) -> LambdaLR:
    """A scheduler that gives step n of `optimizer`, whose own rate is 1, the rate of equation (3) times `scale`."""
    return LambdaLR(optimizer, lambda done: scale * learning_rate(done + 1, d_model, warmup_steps))


def paper_adam(parameters: Iterable[nn.Parameter]) -> Adam:
    """Adam with beta_1 = 0.9, beta_2 = 0.98 and epsilon = 1e-9 (5.3), at rate 1, which `paper_schedule` scales.

    Fused where torch has it for the parameters' device: on a CPU several times faster than the loop over tensors.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    is_fusable = all(parameter.is_floating_point() and parameter.device.type in FUSED_ON for parameter in parameters)
    return Adam(parameters, lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=is_fusable or None)


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Batches "by approximate sequence length" of at most so many source and so many target tokens (5.1).

    Pairs are ordered by target and then source length, cut into batches that keep to both budgets, padding counted,
    and the batches are shuffled. Every epoch deals pairs of equal lengths anew, from the seed and the epoch; the
    lengths in a batch, and so the number of batches, stay. No pair is lost or seen twice in an epoch. A batch is split
    evenly over `num_processes` ranks and `accumulation` parts of a step, so that a step is the same on any number of
    them; a part may exceed its share of the budgets by one pair. Each rank's sampler yields its own parts.

    Args:
        source_lengths, target_lengths: the tokens of each pair, end tokens counted.
        source_tokens, target_tokens: the budgets of an optimiser step, over all ranks and parts.
        num_processes, rank: how many ranks share a step, and which of them this is.
        accumulation: the parts of a rank's share that are run one after another.
        seed: of the shuffling.
        epoch: tells the epoch when an iteration begins; `set_epoch` serves as well.

    Raises:
        ValueError: a pair alone exceeds a budget, or there are fewer pairs than parts of one step.
    """

    def __init__(
        self,
        source_lengths: Sequence[int],
        target_lengths: Sequence[int],
        source_tokens: int = 25_000,
        target_tokens: int = 25_000,
        num_processes: int = 1,
        rank: int = 0,
        accumulation: int = 1,
        seed: int = 0,
        epoch: Callable[[], int] | None = None,
    ) -> None:
        self.lengths = list(zip(source_lengths, target_lengths, strict=True))
        self.budgets = (source_tokens, target_tokens)
        self.num_processes, self.rank, self.accumulation = num_processes, rank, accumulation
        self.seed = seed
        self.epoch = epoch
        self._epoch = 0
        self._refuse_misfits()
        self.bounds = self._cut()

    @property
    def parts(self) -> int:
        """Forward passes of an optimiser step, over all ranks."""
        return self.num_processes * self.accumulation

    def _refuse_misfits(self) -> None:
        if len(self.lengths) < self.parts:
            raise ValueError(
                f"{len(self.lengths)} pairs cannot be split over {self.parts} parts of a step; give more pairs, fewer "
                "processes or less accumulation."
            )
        for index, pair in enumerate(self.lengths):
            if pair[0] > self.budgets[0] or pair[1] > self.budgets[1]:
                raise ValueError(
                    f"Pair {index} has {pair[0]} source and {pair[1]} target tokens, more than a batch of "
                    f"{self.budgets[0]} and {self.budgets[1]}; leave it out or raise the budget."
                )

    def _order(self, shuffle: random.Random | None = None) -> list[int]:
        """All pairs by length; source lengths go up and down in turn, so that neighbours differ little.

        Only `shuffle` decides the order of pairs with equal lengths.
        """
        indices = list(range(len(self.lengths)))
        if shuffle is not None:
            shuffle.shuffle(indices)

        def key(index: int) -> tuple[int, int]:
            source, target = self.lengths[index]
            return target, source if target % 2 else -source

        return sorted(indices, key=key)

    def _cut(self) -> list[tuple[int, int]]:
        """Where each batch begins and ends in the order of lengths."""
        order, bounds, start = self._order(), [], 0
        while start < len(order):
            end, longest = start, (0, 0)
            while end < len(order):
                source, target = self.lengths[order[end]]
                longest = max(longest[0], source), max(longest[1], target)
                rows = end + 1 - start
                if rows > self.parts and (rows * longest[0] > self.budgets[0] or rows * longest[1] > self.budgets[1]):
                    break
                end += 1
            bounds.append((start, end))
            start = end
        if bounds[-1][1] - bounds[-1][0] < self.parts:  # too few for every part: it takes some from the one before
            (first, _), (_, last) = bounds[-2:]
            middle = last - self.parts
            bounds[-2:] = [(first, middle), (middle, last)] if middle - first >= self.parts else [(first, last)]
        return bounds

    def set_epoch(self, epoch: int) -> None:
        """Deal the pairs of epoch `epoch` in the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.bounds) * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._epoch if self.epoch is None else self.epoch()
        shuffle = random.Random(f"{self.seed} {epoch}")
        order = self._order(shuffle)
        bounds = list(self.bounds)
        shuffle.shuffle(bounds)
        for start, end in bounds:
            for part in range(self.accumulation):
                yield order[start + part * self.num_processes + self.rank : end : self.parts]

    @property
    def padding_share(self) -> float:
        """The share of cells, source and target, that an epoch fills with padding."""
        order, cells, tokens = self._order(), 0, 0
        for start, end in self.bounds:
            for part in range(self.parts):
                pairs = [self.lengths[index] for index in order[start + part : end : self.parts]]
                for side in zip(*pairs, strict=True):
                    cells += len(side) * max(side)
                    tokens += sum(side)
        return 1 - tokens / cells


__all__ = ["TokenBudgetBatchSampler", "learning_rate", "paper_adam", "paper_schedule"]
