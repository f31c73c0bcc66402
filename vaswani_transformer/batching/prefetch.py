"""Items that a thread prepares while the model trains on those before them."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.utils.data import get_worker_info

Item = TypeVar("Item")
END: Any = object()


def prefetch(items: Iterator[Item], ahead: int) -> Generator[Item]:
    """Yield the same items, of which a thread prepares the next few; its errors are raised where an item would come."""
    device: dict[str, Any] = {}
    # Without a device pinning would open a context on the first one. A worker process pins nothing and may be a fork,
    # which cannot use the device.
    if torch.accelerator.is_available() and get_worker_info() is None:
        index = torch.accelerator.current_device_index()
        device = {"initializer": torch.accelerator.set_device_index, "initargs": (index,)}

    def following() -> Item:
        return next(items, END)

    thread = ThreadPoolExecutor(1, "prefetch", **device)
    try:
        futures = deque(thread.submit(following) for _ in range(ahead))
        while (item := futures.popleft().result()) is not END:
            futures.append(thread.submit(following))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)
