"""Work that ranks share out: each does a part of it, and all get the results, in a thread during training.

The results pass through a store of torch.distributed, and no collective is called. A collective of a thread could come
between training's own in another order on another rank, and it never ends once another rank has stopped. A store works
between machines too, and a rank can stop waiting for a key at any moment. What passes is safetensors or an error's
text: no rank runs what another one sends.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from threading import Event
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save
from torch.distributed import Store

from ..support.errors import UserError

Item = TypeVar("Item")
Arrays = dict[str, NDArray[Any]]

ERROR = "error"  # the name of an array with an error's text
MESSAGE = 2**22  # bytes; a TCPStore takes at most 8 MiB
POLL_SECONDS = 0.005


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

    def __call__(self, work: Callable[[Item], Arrays], parts: Sequence[Item]) -> list[Arrays]:
        """Return the result of each part; all ranks must call with the same parts, as often as each other.

        Raises:
            CancelledError: `stop` was set.
            Exception: `work` raised it on this rank.
            UserError: `work` raised an error on another rank; it has the error's text.
        """
        self.calls, before = self.calls + 1, len(self.sent)
        own = {number: self._do(work, number, parts) for number in range(self.rank, len(parts), self.num_processes)}
        results = [own[number] if number in own else self._receive(number) for number in range(len(parts))]
        if len(parts) >= self.num_processes:  # every rank has done a part, so it has the results of all calls before
            for key in self.sent[:before]:
                self._store.delete_key(key)
            del self.sent[:before]
        return results

    def _do(self, work: Callable[[Item], Arrays], number: int, parts: Sequence[Item]) -> Arrays:
        """Return the result of a part, which every rank gets too."""
        if self.stop.is_set():
            raise CancelledError
        try:
            result = work(parts[number])
        except Exception as error:
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._send(number, {ERROR: np.frombuffer(text.encode(), np.uint8)})
            raise
        self._send(number, result)
        return result

    def _key(self, number: int) -> str:
        return f"{self.name}/{self.calls}/{number}"

    def _send(self, number: int, result: Arrays) -> None:
        if self.num_processes == 1:
            return
        key, data = self._key(number), save(result)
        messages = {f"{key}/{start}": data[start : start + MESSAGE] for start in range(0, len(data), MESSAGE)}
        for name, message in (messages | {key: str(len(data)).encode()}).items():  # the size last
            self._store.set(name, message)
            self.sent.append(name)

    def _receive(self, number: int) -> Arrays:
        key = self._key(number)
        while not self._store.check([key]):
            if self.stop.wait(POLL_SECONDS):
                raise CancelledError
        starts = range(0, int(self._store.get(key)), MESSAGE)
        result = load(b"".join(self._store.get(f"{key}/{start}") for start in starts))
        if ERROR in result:
            raise UserError(result[ERROR].tobytes().decode())
        return result
