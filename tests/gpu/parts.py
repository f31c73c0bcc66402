"""All parts: correctness first, then speed, and last those that compile, since each of them takes minutes."""

from tests.gpu import correctness, decoding, speed
from tests.gpu.runner import Part


def parts() -> list[Part]:
    """Return the parts in the order in which they run."""
    made = [*correctness.parts(), *speed.parts(), *decoding.parts()]
    return sorted(made, key=lambda part: part.compiles)
