"""A thread that prepares batches changes none of them, and ends with its reader."""

import threading
from collections.abc import Iterator

import pytest
import torch

from vaswani_transformer.batching.prefetch import prefetch


def test_prefetched_items_keep_their_order_and_errors_come_in_their_place() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise ValueError("no sixth item")

    reader = prefetch(items(), ahead=2)
    assert [next(reader) for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="no sixth item"):
        next(reader)


def test_thread_prepares_two_items_ahead_and_ends_with_its_reader() -> None:
    prepared, ready = [], threading.Event()

    def items() -> Iterator[int]:
        for item in range(9):
            prepared.append(item)
            if item == 2:
                ready.set()
            yield item

    reader = prefetch(items(), ahead=2)
    assert next(reader) == 0
    assert ready.wait(10)
    assert prepared == [0, 1, 2]
    reader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_worker_process_asks_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes are forks by default, and a fork of a process that uses CUDA cannot initialize it again."""

    def initialize() -> int:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", initialize)
    monkeypatch.setattr("vaswani_transformer.batching.prefetch.get_worker_info", lambda: "of a worker")
    assert list(prefetch(iter(range(3)), ahead=1)) == [0, 1, 2]
