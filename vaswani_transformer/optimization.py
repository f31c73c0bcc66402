"""What a training script needs beside the stock Trainer: equation (3), the paper's Adam and its batches (5.1, 5.3)."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Literal, TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset, Sampler, get_worker_info
from transformers.utils import logging

logger = logging.get_logger(__name__)

FUSED_ON = ("cpu", "cuda", "mps", "xpu")
ENCODED_AT_ONCE = 1000  # items of a stream

Pair = Mapping[str, Sequence[int]]
Item = TypeVar("Item")


def learning_rate(step: int, d_model: int, warmup_steps: int = 4000) -> float:
    """Equation (3): d_model^-0.5 min(step^-0.5, step warmup_steps^-1.5), the steps counted from 1."""
    return d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def paper_schedule(optimizer: Optimizer, d_model: int, warmup_steps: int = 4000, scale: float = 1.0) -> LambdaLR:
    """A scheduler that gives step n of `optimizer`, whose own rate is 1, the rate of equation (3) times `scale`."""
    return LambdaLR(optimizer, lambda done: scale * learning_rate(done + 1, d_model, warmup_steps))


def paper_adam(parameters: Iterable[nn.Parameter]) -> Adam:
    """Adam with beta_1 = 0.9, beta_2 = 0.98 and epsilon = 1e-9 (5.3), at rate 1, which `paper_schedule` scales.

    Fused where torch has it for the parameters' device: on a CPU several times faster than the loop over tensors. A
    fused step takes no split parameters beside whole ones, which tensor parallelism leaves: each kind is a group.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    is_fusable = all(parameter.is_floating_point() and parameter.device.type in FUSED_ON for parameter in parameters)
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return Adam(
        [{"params": group} for group in groups.values()], lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=is_fusable or None
    )


def spread(values: list[float]) -> float:
    """The standard deviation."""
    mean = sum(values) / len(values)
    return (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5


def class_width(lengths: Sequence[tuple[int, int]], budgets: tuple[int, int]) -> float:
    """How far target lengths in one class may lie apart, as a share, for batches alike in both lengths.

    K batches share out the plane of log target lengths and log ratios of source to target, nearly all pairs of which
    lie in four standard deviations each way: as squares the batches are 4 sqrt(sigma_target sigma_ratio / K) wide.
    """
    batches = max(sum(side) / budget for side, budget in zip(zip(*lengths, strict=True), budgets, strict=True))
    targets = [math.log(max(target, 1)) for _, target in lengths]
    ratios = [math.log(max(source, 1)) - target for (source, _), target in zip(lengths, targets, strict=True)]
    return 4 * (spread(targets) * spread(ratios) / max(batches, 1)) ** 0.5


def order_by_length(
    lengths: Sequence[tuple[int, int]], budgets: tuple[int, int], shuffle: random.Random | None = None
) -> list[int]:
    """The numbers of all pairs by classes of target length, each by source length, up and down in turn.

    Neighbours differ little in either length then. Only `shuffle` decides the order of pairs with equal lengths.
    """
    numbers = list(range(len(lengths)))
    if shuffle is not None:
        shuffle.shuffle(numbers)
    step = math.log1p(class_width(lengths, budgets))
    longest = max(target for _, target in lengths)
    class_of = [int(math.log(max(target, 1)) / step) if step else target for target in range(longest + 1)]

    def key(number: int) -> tuple[int, int, int]:
        source, target = lengths[number]
        place = class_of[target]
        return place, source if place % 2 else -source, target

    return sorted(numbers, key=key)


def cut_into_steps(
    lengths: Sequence[tuple[int, int]], budgets: tuple[int, int], parts: int, shuffle: random.Random | None = None
) -> list[list[int]]:
    """The numbers of the pairs of each step: neighbours in length, as many as keep to both budgets, padding counted.

    Every pair is in one step. `shuffle` deals pairs of equal lengths among the steps and shuffles these; the lengths
    in a step, and so their number, do not depend on it. A step has a pair for every part, if need be beyond a budget.

    Args:
        lengths: source and target tokens of each pair, at least `parts` of them.
        budgets: of source and of target tokens.
        parts: the least pairs of a step.
    """
    order, bounds, start = order_by_length(lengths, budgets, shuffle), [], 0
    while start < len(order):
        end, longest = start, (0, 0)
        while end < len(order):
            source, target = lengths[order[end]]
            longest = max(longest[0], source), max(longest[1], target)
            rows = end + 1 - start
            if rows > parts and (rows * longest[0] > budgets[0] or rows * longest[1] > budgets[1]):
                break
            end += 1
        bounds.append((start, end))
        start = end
    if bounds[-1][1] - bounds[-1][0] < parts:  # too few for every part: it takes some from the one before
        (first, _), (_, last) = bounds[-2:]
        middle = last - parts
        bounds[-2:] = [(first, middle), (middle, last)] if middle - first >= parts else [(first, last)]
    if shuffle is not None:
        shuffle.shuffle(bounds)
    return [order[start:end] for start, end in bounds]


def own_parts(step: list[int], num_processes: int, rank: int, accumulation: int) -> Iterator[list[int]]:
    """What one rank runs of a step, part after part; all ranks' parts are the step, and differ by a pair at most."""
    parts = num_processes * accumulation
    for first in range(rank, parts, num_processes):
        yield step[first::parts]


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Batches "by approximate sequence length" of at most so many source and so many target tokens (5.1).

    Pairs are ordered by both lengths, cut into batches that keep to both budgets, padding counted, and the batches are
    shuffled. Every epoch deals pairs of equal lengths anew, from the seed and the epoch; the
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
        self.steps = len(self._steps())

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

    def _steps(self, shuffle: random.Random | None = None) -> list[list[int]]:
        return cut_into_steps(self.lengths, self.budgets, self.parts, shuffle)

    def set_epoch(self, epoch: int) -> None:
        """Deal the pairs of epoch `epoch` in the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._epoch if self.epoch is None else self.epoch()
        for step in self._steps(random.Random(f"{self.seed} {epoch}")):
            yield from own_parts(step, self.num_processes, self.rank, self.accumulation)

    @property
    def padding_share(self) -> float:
        """The share of cells, source and target, that an epoch fills with padding."""
        cells, tokens = 0, 0
        for step in self._steps():
            for part in own_parts(step, 1, 0, self.parts):
                for side in zip(*(self.lengths[index] for index in part), strict=True):
                    cells += len(side) * max(side)
                    tokens += sum(side)
        return 1 - tokens / cells


@dataclass(frozen=True)
class Place:
    """Where in its source a `TokenBudgetBatches` is.

    epoch: the passes over the source before this one.
    pool: the pools of this epoch before this one.
    items: the items of the source before this pool's first pair.
    dropped: the overlong pairs among them.
    steps: the steps that this pool has given.
    """

    epoch: int = 0
    pool: int = 0
    items: int = 0
    dropped: int = 0
    steps: int = 0


class TokenBudgetBatches(IterableDataset[list[Pair]]):
    """The same batches of a data set that does not fit in memory, from one epoch to the next without end.

    `pool_size` pairs at a time, in the order of the source, are dealt into steps as `TokenBudgetBatchSampler` deals a
    whole set, and the steps are shuffled from the seed, the epoch and the pool. So no pair is lost or seen twice in an
    epoch, every rank yields the same number of batches, an epoch ends with a whole step, and steps are the same on any
    number of ranks and parts, where each has a pair for every part. The next tenth of a pool is read ahead, and the
    last pool of an epoch is up to that much larger, so that it is never too small to be split; no more pairs are held.

    Every rank reads the whole source, in the same order, and keeps its own parts. Pairs meet others of their pool
    alone: where neighbours in the source are alike, shuffle it upstream, for example with `datasets`' `shuffle`; a
    source that has `set_epoch` is told each epoch before it is read.

    A stock Trainer takes it as `train_dataset`, with `max_steps`, since it has no length, and with

        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=None, collate_fn=self.data_collator)

    and nothing prepared by Accelerate, which would share the batches out among the ranks once more. The Trainer then
    sees a single epoch and resumes exactly by skipping what it had. `load_state_dict` is the faster way, which needs
    `ignore_data_skip`, and a `generator` for the DataLoader, since its seed is otherwise drawn from training's.

    Args:
        source: pairs of `input_ids` and `labels`, or what `encode` makes such of; read from its start in every epoch.
        source_tokens, target_tokens, num_processes, rank, accumulation, seed: as for the sampler.
        pool_size: pairs that are sorted together: the more, the less padding.
        max_length: the tokens that a side of a pair may have; None for as many as a step.
        overlong: whether a longer pair is refused, or dropped with a count at the end of the epoch.
        encode: makes one pair of each item of a list, a thousand at most; what `load_state_dict` leaves out is read
            again, but not encoded.

    Raises:
        ValueError: the source is an iterator, or the pool is too small; while iterating, a pair is overlong, an epoch
            has fewer pairs than parts of one step, or there are several worker processes.
    """

    def __init__(
        self,
        source: Iterable[Item],
        source_tokens: int = 25_000,
        target_tokens: int = 25_000,
        num_processes: int = 1,
        rank: int = 0,
        accumulation: int = 1,
        seed: int = 0,
        pool_size: int = 100_000,
        max_length: int | None = None,
        overlong: Literal["refuse", "drop"] = "refuse",
        encode: Callable[[list[Item]], Sequence[Pair]] | None = None,
    ) -> None:
        self.source, self.encode = source, encode
        self.budgets = (source_tokens, target_tokens)
        self.num_processes, self.rank, self.accumulation = num_processes, rank, accumulation
        self.seed, self.pool_size = seed, pool_size
        self.limits = tuple(min(budget, max_length or budget) for budget in self.budgets)
        self.overlong = overlong
        self._start = self._place = Place()
        self._refuse_misfits()

    @property
    def parts(self) -> int:
        """Forward passes of an optimiser step, over all ranks."""
        return self.num_processes * self.accumulation

    @property
    def epoch(self) -> int:
        """The epoch of the latest batch."""
        return self._place.epoch

    def _refuse_misfits(self) -> None:
        if isinstance(self.source, Iterator):
            raise ValueError(
                f"The source is an iterator ({type(self.source).__name__}), which ends with the first epoch; give an "
                "object that begins anew whenever it is iterated over."
            )
        if self.pool_size < 10 * self.parts:
            raise ValueError(
                f"A pool of {self.pool_size} pairs is too small for {self.parts} parts of a step; give at least "
                f"{10 * self.parts}."
            )

    def state_dict(self) -> dict[str, int]:
        """Where the iteration is, in whole steps; the same on every rank, and on any number of them."""
        return asdict(self._place)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin every further iteration behind the step at which `state_dict` gave `state`."""
        self._start = self._place = Place(**state)

    def __iter__(self) -> Iterator[list[Pair]]:
        if (worker := get_worker_info()) is not None and worker.num_workers > 1:
            raise ValueError(
                f"{worker.num_workers} worker processes would each yield all batches; give the DataLoader "
                "num_workers=1, or 0."
            )
        place = self._start
        while True:
            yield from self._rest_of_epoch(place)
            place = Place(epoch=place.epoch + 1)

    def batches_of(self, epoch: int) -> Iterator[list[Pair]]:
        """The batches of one epoch alone, for a training loop of one's own."""
        return self._rest_of_epoch(Place(epoch=epoch))

    def _rest_of_epoch(self, start: Place) -> Iterator[list[Pair]]:
        for place, pool in self._pools(start):
            lengths = [(len(pair["input_ids"]), len(pair["labels"])) for pair in pool]
            shuffle = random.Random(f"{self.seed} {place.epoch} {place.pool}")
            steps = cut_into_steps(lengths, self.budgets, self.parts, shuffle)
            for number, step in enumerate(steps[place.steps :], start=place.steps):
                own = own_parts(step, self.num_processes, self.rank, self.accumulation)
                for part, numbers in enumerate(own, start=1):
                    self._place = replace(place, steps=number + (part == self.accumulation))
                    yield [pool[number] for number in numbers]
            pool.clear()  # before the next one is read

    def _pools(self, start: Place) -> Iterator[tuple[Place, list[Pair]]]:
        """The pools from `start` to the end of its epoch, each with its place."""
        place = following = start
        pool, items, dropped = [], start.items, start.dropped
        for pair in self._pairs(start):
            if self._fits(items, pair):
                if len(pool) == self.pool_size:
                    following = Place(place.epoch, place.pool + 1, items, dropped)
                pool.append(pair)
            else:
                dropped += 1
            items += 1
            if len(pool) == self.pool_size + self.pool_size // 10:
                yield place, pool[: self.pool_size]
                place, pool = following, pool[self.pool_size :]
        if len(pool) < self.parts:
            raise ValueError(
                f"{len(pool)} pairs, {dropped} overlong ones left out, cannot be split over {self.parts} parts of a "
                "step; give more pairs, fewer processes or less accumulation."
            )
        if dropped and self.rank == 0:
            logger.warning(
                f"Epoch {place.epoch}: left out {dropped} of {items} pairs, longer than {self.limits[0]} source or "
                f"{self.limits[1]} target tokens."
            )
        yield place, pool

    def _pairs(self, start: Place) -> Iterator[Pair]:
        if (set_epoch := getattr(self.source, "set_epoch", None)) is not None:
            set_epoch(start.epoch)
        items = islice(self.source, start.items, None)
        if self.encode is None:
            yield from cast(Iterator[Pair], items)
            return
        while chunk := list(islice(items, ENCODED_AT_ONCE)):
            pairs = self.encode(chunk)
            if len(pairs) != len(chunk):
                raise ValueError(f"encode made {len(pairs)} pairs of {len(chunk)} items; it must make one of each.")
            yield from pairs

    def _fits(self, number: int, pair: Pair) -> bool:
        lengths = len(pair["input_ids"]), len(pair["labels"])
        if lengths[0] <= self.limits[0] and lengths[1] <= self.limits[1]:
            return True
        if self.overlong == "drop":
            return False
        raise ValueError(
            f"Pair {number} has {lengths[0]} source and {lengths[1]} target tokens, more than {self.limits[0]} and "
            f"{self.limits[1]}; leave such pairs out with overlong='drop', or raise max_length or the budget."
        )


__all__ = ["TokenBudgetBatchSampler", "TokenBudgetBatches", "learning_rate", "paper_adam", "paper_schedule"]
