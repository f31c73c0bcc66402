"""Dropout (5.4) whose masks take a CPU few draws."""

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """Zeroes each number with probability p while training, and multiplies the others by 1 / (1 - p).

    torch draws a number for every element, one after another, which takes a CPU up to a fifth of a training step.
    Here a draw of 64 bits decides on four elements, with p rounded to 1/65536. On accelerators and under compilation
    it is torch's own.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0 or input.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(input)
        dropped = min(round(self.p * 2**16), 2**16 - 1)  # of 65,536
        draws = torch.empty((input.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        words = draws.view(torch.int16)[: input.numel()].view(input.shape)  # uniform from -32,768 to 32,767
        is_kept = torch.ge(words, dropped - 2**15, out=torch.empty_like(input))  # 0 or 1, of the input's dtype
        return input * is_kept.mul_(2**16 / (2**16 - dropped))


__all__ = ["Dropout"]
