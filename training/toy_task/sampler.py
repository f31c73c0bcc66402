"""Random choices that are the same for the same seed on every machine and in every Python version."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Sampler:
    """Random choices by `random.Random.random`, the only method whose numbers Python promises never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]
