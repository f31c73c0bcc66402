"""The time of each phase of a run, by the host's clock or the device's."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

PHASES = ("preparation", "data", "forward", "backward", "optimizer", "evaluation", "saving", "other")
STEPPING = ("data", "forward", "backward", "optimizer", "other")


class Stopwatch:
    """The time of each phase of a run. Every moment belongs to one phase, so the phases sum to the total.

    Attributes:
        seconds: of each phase up to the last `flush`.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phases = [PHASES[0]]
        self.marks: list[Any] = [self.mark()]

    def mark(self) -> Any:
        return time.perf_counter()

    def between(self, first: Any, second: Any) -> float:
        return second - first

    def enter(self, phase: str) -> None:
        self.phases.append(phase)
        self.marks.append(self.mark())

    def flush(self) -> None:
        """Bring `seconds` up to the present moment."""
        self.enter(self.phases[-1])
        for phase, (first, second) in zip(self.phases, itertools.pairwise(self.marks), strict=False):
            self.seconds[phase] += self.between(first, second)
        del self.phases[:-1], self.marks[:-1]


class CudaStopwatch(Stopwatch):
    """The same by the device's clock, since the host runs ahead and would count its waiting in the last phase.

    Moments are events between the kernels. `flush` reads them, so no step waits for them. "data" is then the time in
    which the device waits for a batch.
    """

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        second.synchronize()
        return first.elapsed_time(second) / 1000


def phase_shares(seconds: dict[str, float]) -> Iterator[tuple[str, int]]:
    """Return each phase's share in integer percent; they sum to 100, because the bounds between phases are rounded."""
    total, bounds = sum(seconds.values()) or 1.0, itertools.accumulate(seconds.values(), initial=0.0)
    percents = [round(100 * bound / total) for bound in bounds]
    return zip(seconds, (end - start for start, end in itertools.pairwise(percents)), strict=True)


def time_line(seconds: dict[str, float]) -> str:
    parts = " + ".join(f"{phase} {share}%" for phase, share in phase_shares(seconds))
    return f"Time: {sum(seconds.values()):,.1f} s = {parts}"
