"""All parts: correctness first, then speed."""

from tests.gpu import correctness, speed
from tests.gpu.runner import Part


def parts() -> list[Part]:
    """Return the parts in the order in which they run."""
    return [*correctness.parts(), *speed.parts()]
