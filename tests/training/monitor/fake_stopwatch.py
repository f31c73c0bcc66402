"""A stopwatch that tests advance."""

from training.monitor.stopwatch import Stopwatch


class FakeStopwatch(Stopwatch):
    """A stopwatch whose time advances only by the test."""

    def __init__(self) -> None:
        self.now = 0
        super().__init__()

    def mark(self) -> float:
        return self.now
