"""Ranks that share out work get the same results, or the same error, and never wait for one that has stopped."""

from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore, Store, TCPStore

from vaswani_transformer.batching import exchange as exchange_module
from vaswani_transformer.batching.exchange import Arrays, Exchange
from vaswani_transformer.support.errors import UserError


def array_of(number: int) -> Arrays:
    return {"number": np.array([number])}


def number_of(arrays: Arrays) -> int:
    return int(arrays["number"][0])


def together(store: Store, num_processes: int, act: Callable[[Exchange], Any]) -> list[Any]:
    """Return what each rank's `act` returns, or raises, all at the same time."""
    ranks = [Exchange(store, "name", num_processes, rank, Event()) for rank in range(num_processes)]
    with ThreadPoolExecutor(num_processes) as threads:
        futures = [threads.submit(act, rank) for rank in ranks]
        return [future.exception(10) or future.result() for future in futures]


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_each_part_is_done_once_and_every_rank_gets_all_results(num_processes: int) -> None:
    done, store = [], HashStore()

    def double(part: int) -> Arrays:
        done.append(part)
        return array_of(2 * part)

    def act(exchange: Exchange) -> list[list[int]]:
        return [list(map(number_of, exchange(double, range(first, first + 5)))) for first in (0, 10, 20)]

    expected = [[2 * part for part in range(first, first + 5)] for first in (0, 10, 20)]
    assert together(store, num_processes, act) == [expected] * num_processes
    assert sorted(done) == [*range(5), *range(10, 15), *range(20, 25)]
    assert store.num_keys() <= 10  # of the last call


def test_result_stays_until_every_rank_has_it() -> None:
    """Rank 0 alone does the part of the second call, and ends it before rank 1 has the results of the first."""
    store = HashStore()
    first, second = (Exchange(store, "name", 2, rank, Event()) for rank in range(2))
    second.calls = 1
    second._do(array_of, 1, [1, 2])  # sends its part before it waits for the other
    for rank in (first, second):
        rank.calls = 0
        results = [rank(array_of, parts) for parts in ([1, 2], [3])]
        assert [list(map(number_of, result)) for result in results] == [[1, 2], [3]]


def test_error_on_one_rank_is_raised_on_all() -> None:
    def work(part: int) -> Arrays:
        if part == 3:
            raise ValueError(f"part {part}")
        return array_of(part)

    other, own = together(HashStore(), 2, lambda exchange: exchange(work, range(6)))
    assert (type(own), str(own)) == (ValueError, "part 3")
    assert (type(other), str(other)) == (UserError, "ValueError: part 3")


def test_rank_that_is_stopped_no_longer_waits_for_another() -> None:
    stop = Event()
    waiting = Exchange(HashStore(), "name", 2, 0, stop)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(waiting, array_of, [1, 2])
        with pytest.raises(TimeoutError):
            future.result(0.05)
        stop.set()
        assert isinstance(future.exception(10), CancelledError)


def test_result_larger_than_a_message_passes_through_a_tcp_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "MESSAGE", 100)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    rows = np.arange(2000, dtype=np.int32).reshape(2, 1000)
    for results in together(store, 2, lambda exchange: exchange(lambda part: {"row": rows[part]}, [0, 1])):
        np.testing.assert_array_equal([result["row"] for result in results], rows)
