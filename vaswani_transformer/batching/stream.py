"""Batches of a stream of pairs under a token budget (5.1)."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, pairwise
from threading import Event
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.distributed import Store
from torch.utils.data import IterableDataset, get_worker_info
from transformers.utils import logging

from .exchange import Arrays, Exchange
from .prefetch import prefetch
from .steps import Steps, rank_micro_batches, share_of_step, shuffle_of
from .tokens import Ragged, Rows

logger = logging.get_logger(__name__)

ENCODE_BATCH = 1000  # items of a stream, at most
SIDES = ("input_ids", "labels")

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


class ReadPairs(NamedTuple):
    """Pairs that have been read and are not too long.

    sides: their sources and their targets.
    items: the number of each pair's item in the source.
    """

    sides: tuple[Ragged, Ragged]
    items: NDArray[np.int64]

    def select(self, pairs: NDArray[np.integer] | slice) -> "ReadPairs":
        sources, targets = (side.rows().take(pairs) for side in self.sides)
        return ReadPairs((sources, targets), self.items[pairs])

    def __add__(self, other: Any) -> "ReadPairs":
        sources, targets = (Ragged.join(sides) for sides in zip(self.sides, other.sides, strict=True))
        return ReadPairs((sources, targets), np.concatenate([self.items, other.items]))


class Buffer(NamedTuple):
    """Pairs that are sorted together.

    position: of the first of its steps that is left.
    sides: the token ids, by name.
    steps: the pairs of each step that is left.
    source_state: of the source, once it had been read up to the end of this buffer; None where it has none.
    """

    position: StreamPosition
    sides: dict[str, Rows]
    steps: list[NDArray[np.int32]]
    source_state: dict[str, Any] | None


class TokenBudgetBatches(IterableDataset[dict[str, Ragged]]):
    """Token-budget batches of a data set that does not fit in memory, over endless epochs.

    It reads `buffer_size` pairs at a time, in the order of the source, and groups each buffer into steps as
    `TokenBudgetBatchSampler` groups a complete set. The seed, the epoch and the buffer decide the shuffling. So an
    epoch contains each pair once and ends with a complete step, and every rank yields the same number of batches. Steps
    are the same for any number of micro-batches, as long as each has a pair. It reads a tenth of the next buffer ahead,
    and the last buffer of an epoch is up to that much larger, so it is never too small to be split. A thread prepares
    one buffer while the batches of another are in use; no further pairs are in memory.

    Every rank reads the complete source, in the same order, and keeps its micro-batches. With a `store` each rank
    encodes only its share of the items and gets the tokens of the others. A batch mixes pairs of one buffer only: if
    neighbors in the source are similar, shuffle it first, for example with `datasets`' `shuffle`. If the source has
    `set_epoch`, that is called before each pass.

    A stock Trainer takes it as `train_dataset`, with a `PairCollator` as `data_collator`, with `max_steps` because it
    has no length, and with

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
        store: what all ranks reach, such as a `torch.distributed.TCPStore`, which nothing else has keys `stream/...`
            in; None: every rank encodes every item.

    Raises:
        ValueError: the source is an iterator, the buffer is too small, no token is allowed, or no micro-batch is this
            rank's; while iterating: a pair is too long, an epoch has too few pairs, or there are several worker
            processes.
    """

    def __init__(
        self,
        source: Iterable[Item],
        source_tokens: int = 25_000,
        target_tokens: int = 25_000,
        num_processes: int | None = None,
        rank: int | None = None,
        accumulation: int = 1,
        seed: int = 0,
        buffer_size: int = 100_000,
        max_length: int | None = None,
        too_long: Literal["error", "drop"] = "error",
        encode: Callable[[list[Item]], Sequence[Pair]] | None = None,
        store: Store | None = None,
    ) -> None:
        self.num_processes, self.rank = share_of_step(num_processes, rank, accumulation)
        self.source, self.encode, self.store = source, encode, store
        self.budgets = (source_tokens, target_tokens)
        self.accumulation = accumulation
        self.micro_batches = self.num_processes * accumulation  # of an optimizer step, over all ranks
        self.seed, self.buffer_size = seed, buffer_size
        self.limits = tuple(budget if max_length is None else min(budget, max_length) for budget in self.budgets)
        self.too_long = too_long
        self._start = self._position = StreamPosition()
        self._source_state: dict[str, Any] | None = None
        self._iterations = 0
        self._stops: set[Event] = set()
        self._check_source()

    @property
    def epoch(self) -> int:
        """Return the epoch of the latest batch."""
        return self._position.epoch

    @property
    def source_state(self) -> dict[str, Any] | None:
        """Return the source's `state_dict()` of when the latest batch's buffer had been read; None if it has none."""
        return self._state_of_source() if self._source_state is None else self._source_state

    def _state_of_source(self) -> dict[str, Any] | None:
        state_dict = getattr(self.source, "state_dict", None)
        return None if state_dict is None else state_dict()

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
        if min(self.limits) < 1:
            raise ValueError(
                f"source_tokens, target_tokens, max_length: let a side have at most {self.limits[0]} and "
                f"{self.limits[1]} tokens, so no pair is left; give at least 1."
            )

    def state_dict(self) -> dict[str, int]:
        """Return the position in the source, in complete steps, which is the same for any number of ranks."""
        return asdict(self._position)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Start every further iteration after the step at which `state_dict` returned `state`."""
        self._start = self._position = StreamPosition(**state)

    def close(self) -> None:
        """End the threads that prepare buffers, of iterations that were left without being closed."""
        for stop in self._stops:
            stop.set()

    def __iter__(self) -> Generator[dict[str, Ragged]]:
        if (worker := get_worker_info()) is not None and worker.num_workers > 1:
            raise ValueError(
                f"{worker.num_workers} worker processes would each yield all batches; give the DataLoader "
                "num_workers=1, or 0."
            )
        return self._batches(self._buffers)

    def batches_of(self, epoch: int) -> Generator[dict[str, Ragged]]:
        """Return the batches of one epoch, for a training loop without the Trainer."""
        return self._batches(partial(self._buffers_of_epoch, StreamPosition(epoch=epoch)))

    def _batches(self, buffers: Callable[[Exchange], Iterator[Buffer]]) -> Generator[dict[str, Ragged]]:
        """Yield this rank's batches, and note the position of each, while a thread prepares the next buffer."""
        self._iterations, stop = self._iterations + 1, Event()
        self._stops.add(stop)
        exchange = Exchange(self.store, f"stream/{self._iterations}", self.num_processes, self.rank, stop)
        prepared = prefetch(buffers(exchange), ahead=1)
        try:
            for position, sides, steps, self._source_state in prepared:
                for number, step in enumerate(steps, start=position.steps):
                    micro_batches = rank_micro_batches(step, self.num_processes, self.rank, self.accumulation)
                    for passes, pairs in enumerate(micro_batches, start=1):
                        self._position = replace(position, steps=number + (passes == self.accumulation))
                        yield {name: side.take(pairs) for name, side in sides.items()}
        finally:
            stop.set()  # before the end of the thread is waited for
            prepared.close()
            self._stops.discard(stop)

    def _buffers(self, exchange: Exchange) -> Iterator[Buffer]:
        start = self._start
        while True:
            yield from self._buffers_of_epoch(start, exchange)
            start = StreamPosition(epoch=start.epoch + 1)

    def _buffers_of_epoch(self, start: StreamPosition, exchange: Exchange) -> Iterator[Buffer]:
        """Yield the buffers from `start` to the end of its epoch."""
        if (set_epoch := getattr(self.source, "set_epoch", None)) is not None:
            set_epoch(start.epoch)
        items, read, position = islice(self.source, start.items, None), start.items, start
        none, full = Ragged.of([]), self.buffer_size + self.buffer_size // 10
        pairs = ReadPairs((none, none), np.zeros(0, np.int64))
        is_last = False
        while not is_last:
            while len(pairs.items) < full and (chunk := list(islice(items, full - len(pairs.items)))):
                pairs += self._without_too_long(self._encoded(chunk, exchange), read)
                read += len(chunk)
            is_last = len(pairs.items) < full
            end = len(pairs.items) if is_last else self.buffer_size
            if is_last:
                self._check_last(position, len(pairs.items), read)
            yield self._buffer(position, pairs.select(slice(end)))
            if not is_last:
                kept, first = position.items - position.dropped + end, int(pairs.items[end])
                position = StreamPosition(position.epoch, position.buffer + 1, first, first - kept)
                pairs = pairs.select(slice(end, None))

    def _encoded(self, items: list[Any], exchange: Exchange) -> tuple[Ragged, Ragged]:
        """Return the tokens of items, of which this rank encodes its share."""
        ranks = exchange.num_processes
        count = min(len(items), ranks * -(-len(items) // (ENCODE_BATCH * ranks)))  # none is empty
        bounds = [number * len(items) // count for number in range(count + 1)]
        parts = exchange(self._encode_part, [items[start:end] for start, end in pairwise(bounds)])
        sources, targets = (
            Ragged.join(Ragged(part[f"{name} tokens"], part[f"{name} lengths"]) for part in parts) for name in SIDES
        )
        return sources, targets

    def _encode_part(self, items: list[Any]) -> Arrays:
        pairs = items if self.encode is None else self.encode(items)
        if len(pairs) != len(items):
            raise ValueError(f"encode returned {len(pairs)} pairs for {len(items)} items; return one for each.")
        sides = {name: Ragged.of([pair[name] for pair in pairs]) for name in SIDES}
        tokens = {f"{name} tokens": side.tokens for name, side in sides.items()}
        return tokens | {f"{name} lengths": side.lengths for name, side in sides.items()}

    def _without_too_long(self, sides: tuple[Ragged, Ragged], first: int) -> ReadPairs:
        """Return the pairs that are not too long; `first` is the number of the first one's item."""
        lengths = [side.lengths for side in sides]
        fits = (lengths[0] <= self.limits[0]) & (lengths[1] <= self.limits[1])
        pairs = ReadPairs(sides, np.arange(first, first + len(fits)))
        if fits.all():
            return pairs
        if self.too_long == "drop":
            return pairs.select(np.flatnonzero(fits))
        number = int(fits.argmin())
        raise ValueError(
            f"Pair {first + number} has {lengths[0][number]} source and {lengths[1][number]} target tokens, more than "
            f"{self.limits[0]} and {self.limits[1]}; drop such pairs with too_long='drop', or raise max_length or the "
            "budget."
        )

    def _check_last(self, position: StreamPosition, count: int, items: int) -> None:
        """Check that the last buffer of an epoch, of `count` pairs, can be split, and warn of what was dropped."""
        dropped = items - (position.items - position.dropped + count)
        if count < self.micro_batches:
            raise ValueError(
                f"{count} pairs, without {dropped} that are too long, cannot be split over the "
                f"{self.micro_batches} micro-batches of a step; give more pairs, fewer processes or less accumulation."
            )
        if dropped and self.rank == 0:
            logger.warning(
                f"Epoch {position.epoch}: dropped {dropped} of {items} pairs, longer than {self.limits[0]} source or "
                f"{self.limits[1]} target tokens."
            )

    def _buffer(self, position: StreamPosition, pairs: ReadPairs) -> Buffer:
        """Return pairs with the steps that are left of them."""
        lengths = (side.lengths for side in pairs.sides)
        steps = Steps.of(*lengths, self.budgets, self.micro_batches)
        shuffled = steps.shuffled(shuffle_of(self.seed, position.epoch, position.buffer), position.steps)
        sides = dict(zip(SIDES, (side.rows() for side in pairs.sides), strict=True))
        return Buffer(position, sides, list(shuffled), self._state_of_source())
