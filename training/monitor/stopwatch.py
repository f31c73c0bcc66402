"""How long each phase of a run takes, by the host's clock or the device's."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

PHASES = ("preparation", "data", "forward", "backward", "optimiser", "evaluation", "saving", "other")
STEPPING = ("data", "forward", "backward", "optimiser", "other")


class Stopwatch:
    """How long each phase of a run took. Every moment is in one phase alone, so that the parts sum to the whole.

    Attributes:
        seconds: of each phase up to the last `flush`.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phases = [PHASES[0]]
        self.marks: list[Any] = [self.mark()]

    def mark(self) -> Any:
        """This moment."""
        return time.perf_counter()

    def between(self, first: Any, second: Any) -> float:
        """Seconds from one moment to another."""
        return second - first

    def enter(self, phase: str) -> None:
        """The phase changes at this moment."""
        self.phases.append(phase)
        self.marks.append(self.mark())

    def flush(self) -> None:
        """Bring `seconds` up to this moment."""
        self.enter(self.phases[-1])
        for phase, (first, second) in zip(self.phases, itertools.pairwise(self.marks), strict=False):
            self.seconds[phase] += self.between(first, second)
        del self.phases[:-1], self.marks[:-1]


class CudaStopwatch(Stopwatch):
    """The same on the device's own clock, since the host runs ahead of it and would wait in whatever phase comes last.

    Moments are events between the kernels, read when they are settled, so that no step waits for them. "data" is then
    the time in which the device stood idle for want of a batch.
    """

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        second.synchronize()
        return first.elapsed_time(second) / 1000


def phase_shares(seconds: dict[str, float]) -> Iterator[tuple[str, int]]:
    """Each phase's share in whole per cent, which sum to 100: what is rounded are the bounds between the phases."""
    total, bounds = sum(seconds.values()) or 1.0, itertools.accumulate(seconds.values(), initial=0.0)
    percents = [round(100 * bound / total) for bound in bounds]
    return zip(seconds, (end - start for start, end in itertools.pairwise(percents)), strict=True)


def time_line(seconds: dict[str, float]) -> str:
    """Where the time of a run went, in a line."""
    parts = " + ".join(f"{phase} {share}%" for phase, share in phase_shares(seconds))
    return f"Time: {sum(seconds.values()):,.1f} s = {parts}"
