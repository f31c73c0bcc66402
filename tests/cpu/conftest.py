"""Layouts that a test chooses hold for that test alone."""

from collections.abc import Callable

import pytest

from vaswani_transformer.cpu import linear
from vaswani_transformer.cpu.linear import LAYOUTS, timed_layouts


@pytest.fixture
def choose_layout(no_layouts: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a layout of float32 the fastest."""

    def choose(name: str) -> None:
        timed_layouts.clear()
        monkeypatch.setattr(linear, "best_times", lambda *_: [float(each != name) for each in LAYOUTS["float32"]])

    return choose
