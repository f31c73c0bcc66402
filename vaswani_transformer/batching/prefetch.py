"""Batches that a thread prepares while the model trains on those before them."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

Item = TypeVar("Item")
AHEAD = 2  # batches
END: Any = object()


def prefetch(items: Iterator[Item]) -> Generator[Item]:
    """Yield the same items, of which a thread prepares the next two; its errors are raised where an item would come."""
    device: dict[str, Any] = {}
    if torch.accelerator.is_available():  # else pinning would open a context on the first device
        index = torch.accelerator.current_device_index()
        device = {"initializer": torch.accelerator.set_device_index, "initargs": (index,)}

    def following() -> Item:
        return next(items, END)

    thread = ThreadPoolExecutor(1, "prefetch", **device)
    try:
        ahead = deque(thread.submit(following) for _ in range(AHEAD))
        while (item := ahead.popleft().result()) is not END:
            ahead.append(thread.submit(following))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)


class PrefetchingLoader(DataLoader):
    """A DataLoader whose batches are collated, and pinned, in a thread."""

    def __iter__(self) -> Any:
        return prefetch(super().__iter__())
