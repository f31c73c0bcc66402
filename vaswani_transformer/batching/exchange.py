"""Work that ranks share out: each does a part of it, and all get the results, in a thread during training.

The results pass through a store of torch.distributed, and no collective is called. A collective of a thread could come
between training's own in another order on another rank, and it never ends once another rank has stopped. A store works
between machines too, and a rank can stop waiting for a key at any moment.
"""

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from threading import Event
from typing import Any, NamedTuple, TypeVar

from torch.distributed import Store

Item = TypeVar("Item")
Result = TypeVar("Result")

MESSAGE = 2**22  # bytes; a TCPStore takes at most 8 MiB
POLL_SECONDS = 0.005


class Failure(NamedTuple):
    """The error that work on a part raised."""

    error: Exception


class Exchange:
    """The parts of work that this rank does, and the results of all ranks.

    Args:
        store: what all ranks reach, such as a `TCPStore`; None: this rank does all the work.
        name: of the keys, the same on every rank, and of no earlier exchange in this store.
        num_processes, rank: the number of ranks, and the rank of this process.
        stop: ends the work once another thread sets it.
    """

    def __init__(self, store: Store | None, name: str, num_processes: int, rank: int, stop: Event) -> None:
        self._store: Any = store  # torch's annotations lack values of bytes
        self.name, self.stop = name, stop
        self.num_processes, self.rank = (1, 0) if store is None else (num_processes, rank)
        self.calls = 0
        self.sent: list[str] = []

    def __call__(self, work: Callable[[Item], Result], parts: Sequence[Item]) -> list[Result]:
        """Return the result of each part; all ranks must call with the same parts, as often as each other.

        Raises:
            CancelledError: `stop` was set.
            Exception: `work` raised it on any rank, and so every rank raises it.
        """
        self.calls, before = self.calls + 1, len(self.sent)
        own = {number: self._do(work, number, parts) for number in range(self.rank, len(parts), self.num_processes)}
        outcomes = (own[number] if number in own else self._receive(number) for number in range(len(parts)))
        results = []
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                raise outcome.error
            results.append(outcome)
        if len(parts) >= self.num_processes:  # every rank has done a part, so it has the results of all calls before
            for key in self.sent[:before]:
                self._store.delete_key(key)
            del self.sent[:before]
        return results

    def _do(self, work: Callable[[Item], Result], number: int, parts: Sequence[Item]) -> Result | Failure:
        """Return the result of a part, which every rank gets too."""
        if self.stop.is_set():
            raise CancelledError
        try:
            outcome = work(parts[number])
        except Exception as error:
            outcome = Failure(error)
        if self.num_processes > 1:
            self._send(self._key(number), pickle.dumps(outcome))
        return outcome

    def _key(self, number: int) -> str:
        return f"{self.name}/{self.calls}/{number}"

    def _send(self, key: str, data: bytes) -> None:
        messages = {f"{key}/{start}": data[start : start + MESSAGE] for start in range(0, len(data), MESSAGE)}
        for name, message in (messages | {key: str(len(data)).encode()}).items():  # the size last
            self._store.set(name, message)
            self.sent.append(name)

    def _receive(self, number: int) -> Any:
        key = self._key(number)
        while not self._store.check([key]):
            if self.stop.wait(POLL_SECONDS):
                raise CancelledError
        starts = range(0, int(self._store.get(key)), MESSAGE)
        return pickle.loads(b"".join(self._store.get(f"{key}/{start}") for start in starts))
