"""The share of each part of a model in the time of `generate()`."""

import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

PARTS = {
    "encoder": r"model\.encoder",
    "self-attention": r"model\.decoder\.layers\.\d+\.self_attn",
    "positional attention": r"model\.decoder\.layers\.\d+\.positional_attn",
    "cross-attention": r"model\.decoder\.layers\.\d+\.cross_attn",
    "feed-forward": r"model\.decoder\.layers\.\d+\.feed_forward",
    "latent steps": r"model\.decoder\.latent_steps\.\d+",
    "output projection": "lm_head",
}


class PartTimes:
    """Adds up the seconds of each part, without those of a part inside it, and outside of all those of `rest`."""

    def __init__(self, clock: Callable[[], float], rest: str) -> None:
        self.clock, self.parts, self.last = clock, [rest], clock()
        self.seconds = defaultdict[str, float](float)

    def count(self) -> None:
        """Count the time since the last call for the present part."""
        now = self.clock()
        self.seconds[self.parts[-1]] += now - self.last
        self.last = now

    def enter(self, part: str) -> None:
        self.count()
        self.parts.append(part)

    def leave(self) -> None:
        self.count()
        self.parts.pop()


def part_shares(
    model: nn.Module, generate: Callable[[dict[str, Tensor]], Any], sentences: list[dict[str, Tensor]], clock: Callable
) -> dict[str, float]:
    """Return the share of each part in the time of `generate`, one sentence at a time, and that of the rest."""
    times = PartTimes(clock, "rest")
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            for part, pattern in PARTS.items():
                if re.fullmatch(pattern, name):
                    hooks.enter_context(module.register_forward_pre_hook(lambda *_, part=part: times.enter(part)))
                    hooks.enter_context(module.register_forward_hook(lambda *_: times.leave()))
        for inputs in sentences:
            generate(inputs)
        times.count()
    return {part: seconds / sum(times.seconds.values()) for part, seconds in times.seconds.items()}
