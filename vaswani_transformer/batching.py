"""Batches of pairs of similar length under a token budget, from a data set in memory or a stream (5.1)."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Literal, TypeVar, cast

from torch.utils.data import IterableDataset, Sampler, get_worker_info
from transformers.utils import logging

logger = logging.get_logger(__name__)

ENCODE_BATCH = 1000  # items of a stream

Pair = Mapping[str, Sequence[int]]
Item = TypeVar("Item")


def std(values: list[float]) -> float:
    """Return the population standard deviation."""
    mean = sum(values) / len(values)
    return (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5


def bucket_width(lengths: Sequence[tuple[int, int]], budgets: tuple[int, int]) -> float:
    """Return the width of a target length bucket, in log length, that makes batches similar in both lengths.

    K batches tile the plane of log target length and log ratio of source to target. Nearly all pairs lie within four
    standard deviations in each direction, so square tiles are 4 sqrt(sigma_target sigma_ratio / K) wide.
    """
    batches = max(sum(side) / budget for side, budget in zip(zip(*lengths, strict=True), budgets, strict=True))
    targets = [math.log(max(target, 1)) for _, target in lengths]
    ratios = [math.log(max(source, 1)) - target for (source, _), target in zip(lengths, targets, strict=True)]
    return 4 * (std(targets) * std(ratios) / max(batches, 1)) ** 0.5


def order_by_length(
    lengths: Sequence[tuple[int, int]], budgets: tuple[int, int], shuffle: random.Random | None = None
) -> list[int]:
    """Return the indices of all pairs, ordered by length bucket of the target and within a bucket by source length.

    Source lengths rise and fall in alternate buckets, so that neighbors differ little in either length. `shuffle`
    decides only the order of pairs with equal lengths.
    """
    indices = list(range(len(lengths)))
    if shuffle is not None:
        shuffle.shuffle(indices)
    step = math.log1p(bucket_width(lengths, budgets))
    longest = max(target for _, target in lengths)
    bucket_of = [int(math.log(max(target, 1)) / step) if step else target for target in range(longest + 1)]

    def key(index: int) -> tuple[int, int, int]:
        source, target = lengths[index]
        bucket = bucket_of[target]
        return bucket, source if bucket % 2 else -source, target

    return sorted(indices, key=key)


def make_steps(
    lengths: Sequence[tuple[int, int]],
    budgets: tuple[int, int],
    micro_batches: int,
    shuffle: random.Random | None = None,
) -> list[list[int]]:
    """Return the pair indices of each optimizer step: pairs of similar length, as many as both budgets allow.

    Every pair is in one step, and padding counts against the budgets. `shuffle` distributes pairs of equal lengths
    over the steps and shuffles the steps; the lengths in a step do not depend on it, so neither does the number of
    steps. A step has at least one pair per micro-batch, even if that exceeds a budget.

    Args:
        lengths: source and target tokens of each pair, at least `micro_batches` of them.
        budgets: source tokens and target tokens of a step.
        micro_batches: the minimum number of pairs in a step.
        shuffle: the random numbers of an epoch; None: in order of length.
    """
    order, bounds, start = order_by_length(lengths, budgets, shuffle), [], 0
    while start < len(order):
        end, longest = start, (0, 0)
        while end < len(order):
            source, target = lengths[order[end]]
            longest = max(longest[0], source), max(longest[1], target)
            rows = end + 1 - start
            if rows > micro_batches and (rows * longest[0] > budgets[0] or rows * longest[1] > budgets[1]):
                break
            end += 1
        bounds.append((start, end))
        start = end
    if bounds[-1][1] - bounds[-1][0] < micro_batches:  # too few: the last step takes some from the one before
        (first, _), (_, last) = bounds[-2:]
        middle = last - micro_batches
        bounds[-2:] = [(first, middle), (middle, last)] if middle - first >= micro_batches else [(first, last)]
    if shuffle is not None:
        shuffle.shuffle(bounds)
    return [order[start:end] for start, end in bounds]


def rank_micro_batches(step: list[int], num_processes: int, rank: int, accumulation: int) -> Iterator[list[int]]:
    """Yield one rank's micro-batches of a step; their sizes differ by at most 1 over all ranks."""
    micro_batches = num_processes * accumulation
    for first in range(rank, micro_batches, num_processes):
        yield step[first::micro_batches]


def check_ranks(num_processes: int, rank: int, accumulation: int) -> None:
    """Raise ValueError where a step has no micro-batch, or none for this rank."""
    if min(num_processes, accumulation) < 1 or not 0 <= rank < num_processes:
        got = f"got {num_processes}, {rank} and {accumulation}, expected at least 1, a rank below it, and at least 1"
        raise ValueError(f"num_processes, rank, accumulation: leave this rank no batch; {got}. Correct them.")


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Batches "by approximate sequence length" under a budget of source and of target tokens (5.1).

    The sampler orders pairs by both lengths, groups them into steps under both budgets, padding counted, and shuffles
    the steps. The seed and the epoch decide which pairs of equal lengths share a step; the lengths in a step, and so
    the number of steps, are the same in every epoch. An epoch contains each pair once.

    Each step is split evenly into micro-batches over `num_processes` ranks and `accumulation` passes, so that a step is
    the same on any number of them; a micro-batch may exceed its share of the budgets by one pair. Each rank's sampler
    yields that rank's micro-batches.

    Args:
        source_lengths, target_lengths: the tokens of each pair, end tokens counted.
        source_tokens, target_tokens: the budgets of an optimizer step, over all its micro-batches.
        num_processes, rank: the number of ranks that share a step, and the rank of this process.
        accumulation: the micro-batches of a step that each rank runs one after another.
        seed: the seed of the shuffling.
        epoch: called at the start of an iteration, returns its epoch; None: the epoch given to `set_epoch`.

    Raises:
        ValueError: a single pair exceeds a budget, there are fewer pairs than micro-batches in a step, the lists differ
            in length, or no micro-batch is this rank's.
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
        check_ranks(num_processes, rank, accumulation)
        if len(source_lengths) != len(target_lengths):
            counts = f"{len(source_lengths)} and {len(target_lengths)}"
            raise ValueError(f"source_lengths, target_lengths: got {counts}, expected as many. Give each pair's two.")
        self.lengths = list(zip(source_lengths, target_lengths, strict=True))
        self.budgets = (source_tokens, target_tokens)
        self.num_processes, self.rank, self.accumulation = num_processes, rank, accumulation
        self.seed = seed
        self.epoch = epoch
        self._epoch = 0
        self._check_pairs()
        self.steps = len(self._steps())

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of an optimizer step, over all ranks."""
        return self.num_processes * self.accumulation

    def _check_pairs(self) -> None:
        if len(self.lengths) < self.micro_batches:
            raise ValueError(
                f"{len(self.lengths)} pairs cannot be split over the {self.micro_batches} micro-batches of a step; "
                "give more pairs, fewer processes or less accumulation."
            )
        for index, pair in enumerate(self.lengths):
            if pair[0] > self.budgets[0] or pair[1] > self.budgets[1]:
                raise ValueError(
                    f"Pair {index} has {pair[0]} source and {pair[1]} target tokens, more than a batch of "
                    f"{self.budgets[0]} and {self.budgets[1]}; drop it or raise the budget."
                )

    def _steps(self, shuffle: random.Random | None = None) -> list[list[int]]:
        return make_steps(self.lengths, self.budgets, self.micro_batches, shuffle)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for epoch `epoch` in the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._epoch if self.epoch is None else self.epoch()
        for step in self._steps(random.Random(f"{self.seed} {epoch}")):
            yield from rank_micro_batches(step, self.num_processes, self.rank, self.accumulation)

    @property
    def padding_share(self) -> float:
        """Return the share of an epoch's positions, of source and target, that are padding."""
        positions, tokens = 0, 0
        for step in self._steps():
            for micro_batch in rank_micro_batches(step, 1, 0, self.micro_batches):
                for side in zip(*(self.lengths[index] for index in micro_batch), strict=True):
                    positions += len(side) * max(side)
                    tokens += sum(side)
        return 1 - tokens / positions


@dataclass(frozen=True)
class StreamPosition:
    """The position of a `TokenBudgetBatches` in its source.

    Attributes:
        epoch: the number of finished passes over the source.
        buffer: the number of finished buffers in this epoch.
        items: the number of source items before this buffer's first pair.
        dropped: the number of pairs among them that were too long.
        steps: the number of steps that this buffer has given.
    """

    epoch: int = 0
    buffer: int = 0
    items: int = 0
    dropped: int = 0
    steps: int = 0


class TokenBudgetBatches(IterableDataset[list[Pair]]):
    """Token-budget batches of a data set that does not fit in memory, over endless epochs.

    It reads `buffer_size` pairs at a time, in the order of the source, and groups each buffer into steps as
    `TokenBudgetBatchSampler` groups a complete set. The seed, the epoch and the buffer decide the shuffling. So an
    epoch contains each pair once and ends with a complete step, and every rank yields the same number of batches. Steps
    are the same for any number of micro-batches, as long as each has a pair. It reads a tenth of the next buffer ahead,
    and the last buffer of an epoch is up to that much larger, so it is never too small to be split. It holds no more
    pairs.

    Every rank reads the complete source, in the same order, and keeps its micro-batches. A batch mixes pairs of one
    buffer only: if neighbors in the source are similar, shuffle it first, for example with `datasets`' `shuffle`. If
    the source has `set_epoch`, that is called before each pass.

    A stock Trainer takes it as `train_dataset`, with `max_steps` because it has no length, and with

        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=None, collate_fn=self.data_collator)

    and without `accelerator.prepare`, which would distribute the batches over the ranks a second time. The Trainer then
    sees a single epoch and resumes exactly by skipping the batches it had. `load_state_dict` is faster; it needs
    `ignore_data_skip`, and a `generator` for the DataLoader, which otherwise draws its seed from the training's
    random numbers.

    Args:
        source: pairs of `input_ids` and `labels`, or items that `encode` turns into pairs; read again in every epoch.
        source_tokens, target_tokens, num_processes, rank, accumulation, seed: as for the sampler.
        buffer_size: the number of pairs that are sorted together; a larger buffer means less padding.
        max_length: the maximum tokens of a source or target; None: the budgets.
        too_long: whether a longer pair raises an error or is dropped, with a count at the end of the epoch.
        encode: turns a list of at most 1,000 items into a pair each. After `load_state_dict` skipped items are read
            again, but not encoded.

    Raises:
        ValueError: the source is an iterator, the buffer is too small, or no micro-batch is this rank's; while
            iterating: a pair is too long, an epoch has too few pairs, or there are several worker processes.
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
        buffer_size: int = 100_000,
        max_length: int | None = None,
        too_long: Literal["error", "drop"] = "error",
        encode: Callable[[list[Item]], Sequence[Pair]] | None = None,
    ) -> None:
        check_ranks(num_processes, rank, accumulation)
        self.source, self.encode = source, encode
        self.budgets = (source_tokens, target_tokens)
        self.num_processes, self.rank, self.accumulation = num_processes, rank, accumulation
        self.seed, self.buffer_size = seed, buffer_size
        self.limits = tuple(min(budget, max_length or budget) for budget in self.budgets)
        self.too_long = too_long
        self._start = self._position = StreamPosition()
        self._check_source()

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of an optimizer step, over all ranks."""
        return self.num_processes * self.accumulation

    @property
    def epoch(self) -> int:
        """Return the epoch of the latest batch."""
        return self._position.epoch

    def _check_source(self) -> None:
        if isinstance(self.source, Iterator):
            raise ValueError(
                f"The source is an iterator ({type(self.source).__name__}), which ends with the first epoch; give an "
                "object that starts from the beginning in each iteration, such as a list or a data set."
            )
        if self.buffer_size < 10 * self.micro_batches:
            raise ValueError(
                f"buffer_size ({self.buffer_size}) is too small for the {self.micro_batches} micro-batches of a step; "
                f"give at least {10 * self.micro_batches}."
            )

    def state_dict(self) -> dict[str, int]:
        """Return the position in the source, in complete steps, which is the same for any number of ranks."""
        return asdict(self._position)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Start every further iteration after the step at which `state_dict` returned `state`."""
        self._start = self._position = StreamPosition(**state)

    def __iter__(self) -> Iterator[list[Pair]]:
        if (worker := get_worker_info()) is not None and worker.num_workers > 1:
            raise ValueError(
                f"{worker.num_workers} worker processes would each yield all batches; give the DataLoader "
                "num_workers=1, or 0."
            )
        position = self._start
        while True:
            yield from self._rest_of_epoch(position)
            position = StreamPosition(epoch=position.epoch + 1)

    def batches_of(self, epoch: int) -> Iterator[list[Pair]]:
        """Return the batches of one epoch, for a training loop without the Trainer."""
        return self._rest_of_epoch(StreamPosition(epoch=epoch))

    def _rest_of_epoch(self, start: StreamPosition) -> Iterator[list[Pair]]:
        for position, buffer in self._buffers(start):
            lengths = [(len(pair["input_ids"]), len(pair["labels"])) for pair in buffer]
            shuffle = random.Random(f"{self.seed} {position.epoch} {position.buffer}")
            steps = make_steps(lengths, self.budgets, self.micro_batches, shuffle)
            for number, step in enumerate(steps[position.steps :], start=position.steps):
                micro_batches = rank_micro_batches(step, self.num_processes, self.rank, self.accumulation)
                for passes, indices in enumerate(micro_batches, start=1):
                    self._position = replace(position, steps=number + (passes == self.accumulation))
                    yield [buffer[index] for index in indices]
            buffer.clear()  # before the next one is read

    def _buffers(self, start: StreamPosition) -> Iterator[tuple[StreamPosition, list[Pair]]]:
        """Yield the buffers from `start` to the end of its epoch, each with its position."""
        position = following = start
        buffer, items, dropped = [], start.items, start.dropped
        for pair in self._pairs(start):
            if self._fits(items, pair):
                if len(buffer) == self.buffer_size:
                    following = StreamPosition(position.epoch, position.buffer + 1, items, dropped)
                buffer.append(pair)
            else:
                dropped += 1
            items += 1
            if len(buffer) == self.buffer_size + self.buffer_size // 10:
                yield position, buffer[: self.buffer_size]
                position, buffer = following, buffer[self.buffer_size :]
        if len(buffer) < self.micro_batches:
            raise ValueError(
                f"{len(buffer)} pairs, without {dropped} that are too long, cannot be split over the "
                f"{self.micro_batches} micro-batches of a step; give more pairs, fewer processes or less accumulation."
            )
        if dropped and self.rank == 0:
            logger.warning(
                f"Epoch {position.epoch}: dropped {dropped} of {items} pairs, longer than {self.limits[0]} source or "
                f"{self.limits[1]} target tokens."
            )
        yield position, buffer

    def _pairs(self, start: StreamPosition) -> Iterator[Pair]:
        if (set_epoch := getattr(self.source, "set_epoch", None)) is not None:
            set_epoch(start.epoch)
        items = islice(self.source, start.items, None)
        if self.encode is None:
            yield from cast(Iterator[Pair], items)
            return
        while chunk := list(islice(items, ENCODE_BATCH)):
            pairs = self.encode(chunk)
            if len(pairs) != len(chunk):
                raise ValueError(f"encode returned {len(pairs)} pairs for {len(chunk)} items; return one for each.")
            yield from pairs

    def _fits(self, number: int, pair: Pair) -> bool:
        lengths = len(pair["input_ids"]), len(pair["labels"])
        if lengths[0] <= self.limits[0] and lengths[1] <= self.limits[1]:
            return True
        if self.too_long == "drop":
            return False
        raise ValueError(
            f"Pair {number} has {lengths[0]} source and {lengths[1]} target tokens, more than {self.limits[0]} and "
            f"{self.limits[1]}; drop such pairs with too_long='drop', or raise max_length or the budget."
        )


__all__ = ["TokenBudgetBatchSampler", "TokenBudgetBatches"]
