"""Batches of a stream of pairs under a token budget (5.1)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Literal, TypeVar, cast

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from transformers.utils import logging

from .steps import Steps, check_ranks, rank_micro_batches, shuffle_of

logger = logging.get_logger(__name__)

ENCODE_BATCH = 1000  # items of a stream

Pair = Mapping[str, Sequence[int]]
Item = TypeVar("Item")


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
            lengths = (np.array([len(pair[side]) for pair in buffer], np.int32) for side in ("input_ids", "labels"))
            steps = Steps.of(*lengths, self.budgets, self.micro_batches)
            shuffle = shuffle_of(self.seed, position.epoch, position.buffer)
            for number, step in enumerate(steps.shuffled(shuffle, position.steps), start=position.steps):
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
