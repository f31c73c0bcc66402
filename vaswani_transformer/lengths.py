"""Real lengths, the target's canvas, the predicted length, and the copy of the source onto the canvas.

B batch, S source, T target, k target rows of one source row, C length classes, l lengths of a length beam. n and m are
a sentence's real source and target tokens, `</s>` counted on both sides. A model that predicts all words at once needs
m before it has any word.
"""

import torch
from torch import Tensor, nn

from .loss import accumulation_dtype


def check_right_padded(mask: Tensor, name: str) -> None:
    """Raise ValueError if a row of `mask` (B, T) has a token after padding; a compiled graph cannot check it."""
    if torch.compiler.is_compiling() or mask.shape[1] < 2:
        return
    is_late = (mask[:, 1:] & ~mask[:, :-1]).any(1)  # (B,)
    if bool(is_late.any()):
        raise ValueError(
            f"{name}: a target must begin at the first position; got row {int(is_late.nonzero()[0])} with a token "
            "after padding. Pad targets on the right."
        )


def real_tokens(attention_mask: Tensor | None, memory: Tensor) -> Tensor:
    """Return which rows of `memory` (B, S, d_model) are tokens: (B, S), bool; in a source without any, all are."""
    if attention_mask is None:
        return torch.ones(memory.shape[:2], dtype=torch.bool, device=memory.device)
    if attention_mask.shape != memory.shape[:2]:
        got, expected = tuple(attention_mask.shape), tuple(memory.shape[:2])
        raise ValueError(
            f"attention_mask: lengths are counted from it; got shape {got}, expected {expected}, a number for each "
            "source token. Give the mask of these sources."
        )
    is_real = attention_mask.to(memory.device).ne(0)
    return is_real | ~is_real.any(1, keepdim=True)


def canvas(lengths: Tensor, width: int | None = None) -> Tensor:
    """Return the target's mask (k B, T), 1 at positions 0..m-1, for `lengths` (k B,); T is `width` or the longest."""
    width = int(lengths.max()) if width is None else width
    return (torch.arange(width, device=lengths.device) < lengths[:, None]).long()


def soft_copy(memory: Tensor, is_real: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Return the decoder's input (k B, T, d_model): row i of a target is real row floor(i n / m) of its source.

    Gu et al. 2018 copy embeddings so; here the encoder's output is copied. Gradient flows into `memory`.

    Args:
        memory: (B, S, d_model), the encoder's output.
        is_real: (B, S), which of its rows are tokens, with padding anywhere.
        lengths: (k B,), m of each target row; row i belongs to source i // k.
        width: T; beyond m a row repeats the source's last token.
    """
    counts = is_real.sum(1)  # (B,), n
    size = memory.shape[1]
    keys = is_real.long() * size - torch.arange(size, device=memory.device)  # (B, S), all different: ONNX sorts no ties
    order = keys.argsort(dim=1, descending=True)  # (B, S): indices of real rows, in order
    by_source = lengths.clamp(min=1).view(memory.shape[0], -1, 1)  # (B, k, 1)
    ranks = torch.arange(width, device=memory.device) * counts[:, None, None] // by_source  # (B, k, T)
    ranks = torch.minimum(ranks, counts[:, None, None] - 1).flatten(1)  # (B, k T)
    index = order.gather(1, ranks).unsqueeze(-1).expand(-1, -1, memory.shape[-1])  # (B, k T, d_model)
    return memory.gather(1, index).view(-1, width, memory.shape[-1])  # (k B, T, d_model)


def choose_positions(
    is_candidate: Tensor, counts: Tensor, generator: torch.Generator | None = None, draws: Tensor | None = None
) -> Tensor:
    """Return a random choice of `counts` (B,) of the candidates (B, T) in each row: (B, T), bool.

    `draws` (B, T), uniform on [0, 1), decide; None: they are drawn from `generator`.
    """
    if draws is None:
        draws = torch.rand(is_candidate.shape, generator=generator, device=is_candidate.device)
    ranks = draws.masked_fill(~is_candidate, 2.0).argsort(1).argsort(1)  # candidates first
    return is_candidate & (ranks < counts[:, None])


def length_cross_entropy(logits: Tensor, classes: Tensor, is_target: Tensor) -> Tensor:
    """Return the summed cross-entropy of `classes` (B,) under `logits` (B, C), in at least float32.

    `is_target` (B,) is False where a row has no target at all.
    """
    wide = logits.to(accumulation_dtype(logits.dtype))
    losses = nn.functional.cross_entropy(wide, classes, reduction="none")  # (B,)
    return (losses * is_target).sum()


class LengthDifference(nn.Module):
    """Predicts m - n from the maximum over the encoder's real rows, by one linear layer over C classes."""

    def __init__(self, d_model: int, num_classes: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, num_classes)

    def forward(self, memory: Tensor, is_real: Tensor) -> Tensor:
        """Return the logits (B, C) of the differences for `memory` (B, S, d_model)."""
        lowest = torch.finfo(memory.dtype).min
        return self.proj(memory.masked_fill(~is_real.unsqueeze(-1), lowest).amax(1))  # (B, C)
