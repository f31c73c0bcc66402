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
    """Adds up the seconds inside each part of a model, without those of a part inside it."""

    def __init__(self, model: nn.Module, clock: Callable[[], float]) -> None:
        self.clock, self.seconds = clock, defaultdict[str, float](float)
        self.inner: list[float] = []
        self.starts: list[float] = []
        self.hooks = ExitStack()
        for name, module in model.named_modules():
            for part, pattern in PARTS.items():
                if re.fullmatch(pattern, name):
                    self.hooks.enter_context(module.register_forward_pre_hook(self.enter))
                    self.hooks.enter_context(module.register_forward_hook(self.exit(part)))

    def enter(self, *_: Any) -> None:
        self.inner.append(0.0)
        self.starts.append(self.clock())

    def exit(self, part: str) -> Callable[..., None]:
        def add(*_: Any) -> None:
            seconds = self.clock() - self.starts.pop()
            self.seconds[part] += seconds - self.inner.pop()
            if self.inner:
                self.inner[-1] += seconds

        return add


def part_shares(
    model: nn.Module, generate: Callable[[dict[str, Tensor]], Any], sentences: list[dict[str, Tensor]], clock: Callable
) -> dict[str, float]:
    """Return the share of each part in the time of `generate`, one sentence at a time, and that of the rest."""
    times = PartTimes(model, clock)
    with times.hooks:
        start = clock()
        for inputs in sentences:
            generate(inputs)
        total = clock() - start
    shares = {part: seconds / total for part, seconds in times.seconds.items()}
    return shares | {"rest": 1 - sum(shares.values())}
