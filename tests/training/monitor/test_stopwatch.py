"""The phases of a run cover each of its moments once, and their shares sum to a hundred."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.monitor.fake_stopwatch import FakeStopwatch
from training.monitor.stopwatch import PHASES, CudaStopwatch, phase_shares, time_line


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 1000), st.booleans())))
def test_phases_cover_every_moment_exactly_once(course: list[tuple[str, int, bool]]) -> None:
    stopwatch, expected = FakeStopwatch(), dict.fromkeys(PHASES, 0)
    for phase, seconds, is_read in course:
        stopwatch.enter(phase)
        stopwatch.now += seconds
        expected[phase] += seconds
        if is_read:
            stopwatch.flush()
    stopwatch.flush()
    assert stopwatch.seconds == expected
    assert sum(stopwatch.seconds.values()) == stopwatch.now


def test_device_time_counts_on_a_gpu_and_no_step_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is 5 s late at the first event, and has finished when the host waits for it."""

    class Event:
        recorded, waited = 0, 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.recorded += 1
            self.milliseconds = 1000.0 * Event.recorded**2

        def synchronize(self) -> None:
            Event.waited += 1

        def elapsed_time(self, later: Any) -> float:
            assert Event.waited
            return later.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    stopwatch = CudaStopwatch()
    stopwatch.enter("forward")
    stopwatch.enter("backward")
    assert not Event.waited
    stopwatch.flush()
    assert stopwatch.seconds == dict.fromkeys(PHASES, 0.0) | {"preparation": 3.0, "forward": 5.0, "backward": 7.0}


@given(st.lists(st.floats(0, 1e6), min_size=len(PHASES), max_size=len(PHASES)))
def test_shares_sum_to_a_hundred_and_are_exact_up_to_rounding(times: list[float]) -> None:
    seconds = dict(zip(PHASES, times, strict=True))
    shares, total = dict(phase_shares(seconds)), sum(times)
    assert sum(shares.values()) == (100 if total else 0)
    for phase, share in shares.items():
        assert 0 <= share <= 100
        assert abs(share - 100 * seconds[phase] / (total or 1)) <= 1 + 1e-9  # both its bounds are rounded


def test_time_of_a_run_is_one_line() -> None:
    seconds = dict(zip(PHASES, (100.0, 20.0, 300.0, 500.0, 60.0, 200.0, 10.0, 10.0), strict=True))
    assert time_line(seconds) == (
        "Time: 1,200.0 s = preparation 8% + data 2% + forward 25% + backward 42% + optimizer 5% + evaluation 16% "
        "+ saving 1% + other 1%"
    )
