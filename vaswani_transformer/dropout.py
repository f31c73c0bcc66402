"""Dropout (5.4) that draws few random numbers on a CPU."""

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """Zeroes each element with probability p in training mode, and scales the others by 1 / (1 - p).

    On a CPU torch draws one random number per element, which takes up to a fifth of a training step. Here one 64-bit
    draw decides four elements, with p rounded to 1/65536. On accelerators and under compilation torch's own dropout
    runs.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0 or input.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(input)
        dropped = min(round(self.p * 2**16), 2**16 - 1)  # of 65,536
        draws = torch.empty((input.numel() + 3) // 4, dtype=torch.int64, device="cpu").random_(-(2**63), None)
        words = draws.view(torch.int16)[: input.numel()].view(input.shape)  # uniform from -32,768 to 32,767
        is_kept = torch.ge(words, dropped - 2**15, out=torch.empty_like(input))  # 0 or 1, of the input's dtype
        return input * is_kept.mul_(2**16 / (2**16 - dropped))
