"""Scaled token embeddings, positional encodings and dropout (3.4, 3.5, 5.4).

B batch, S tokens of a text, P positions of a table.
"""

from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .config import VaswaniTransformerConfig

Module = TypeVar("Module", bound=nn.Module)


class Dropout(nn.Dropout):
    """Dropout (5.4), faster on CPUs than torch's: a 64-bit random number decides four elements.

    There p is rounded to 1/65536.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0 or input.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(input)
        dropped = min(round(self.p * 2**16), 2**16 - 1)  # of 65,536
        draws = torch.empty((input.numel() + 3) // 4, dtype=torch.int64, device="cpu").random_(-(2**63), None)
        words = draws.view(torch.int16)[: input.numel()].view(input.shape)  # uniform from -32,768 to 32,767
        is_kept = torch.ge(words, dropped - 2**15, out=torch.empty_like(input))  # 0 or 1, of the input's dtype
        return input * is_kept.mul_(2**16 / (2**16 - dropped))


class ScaledEmbedding(nn.Embedding):
    """Learned embeddings multiplied by sqrt(d_model) (3.4)."""

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config.vocab_size, config.d_model)
        # PEFT reads this attribute to scale its adapters.
        self.embed_scale = config.embedding_scale

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale  # (B, S, d_model)


def is_unwrapped(module: nn.Module, *classes: type[Module]) -> TypeGuard[Module]:
    """Return whether a module is exactly of one of `classes`, without adapter, hooks or tensor parallelism."""
    has_hooks = hasattr(module, "_hf_hook") or bool(module._forward_hooks or module._forward_pre_hooks)
    return type(module) in classes and not isinstance(module.weight, DTensor) and not has_hooks


def read_table(embedding: nn.Module, rows: int, device: torch.device, scale: float = 1.0) -> Tensor:
    """Return an embedding's table (rows, width) without `scale`; calls `forward` if the module is wrapped."""
    if is_unwrapped(embedding, nn.Embedding, ScaledEmbedding) and getattr(embedding, "embed_scale", 1.0) == scale:
        return embedding.weight
    return embedding(torch.arange(rows, device=device)) / scale


def count_positions(attention_mask: Tensor) -> Tensor:
    """Return the position of each token, counting unmasked tokens only.

    Args:
        attention_mask: (B, S), nonzero at tokens.

    Returns:
        (B, S) integers from 0; a masked token gets the position of the token before it, or 0.
    """
    return (attention_mask.ne(0).cumsum(-1) - 1).clamp(min=0)


def text_positions(embeddings: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the positions (B or 1, S) of `embeddings` (B, S, d_model), counting unmasked tokens if there is a mask."""
    if attention_mask is not None and attention_mask.dim() == 2:
        return count_positions(attention_mask)
    return torch.arange(embeddings.shape[1], device=embeddings.device).unsqueeze(0)  # (1, S)


def sinusoids(positions: Tensor, d_model: int) -> Tensor:
    """Return PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) = cos(same) (3.5), in float32.

    Args:
        positions: integers of any shape.

    Returns:
        Encodings (*positions.shape, d_model), with sine and cosine of a frequency adjacent.
    """
    exponents = torch.arange(0, d_model, 2, dtype=torch.float32, device=positions.device) / d_model
    angles = positions.to(torch.float32).unsqueeze(-1) * 10000.0**-exponents  # (..., d_model / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (..., d_model)


class SinusoidalPositions(nn.Module):
    """Sinusoidal positions (3.5) of any length, computed on the fly."""

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__()
        self.d_model = config.d_model

    def forward(self, positions: Tensor, max_position: int | None = None) -> Tensor:
        """Return the encodings (B or 1, S, d_model) of `positions` (B or 1, S), all below `max_position` if given."""
        if max_position is None or positions.shape[0] == 1:
            return sinusoids(positions, self.d_model)  # (B or 1, S, d_model)
        rows = sinusoids(torch.arange(max_position, device=positions.device), self.d_model)  # (P, d_model)
        return nn.functional.embedding(positions, rows)  # (B, S, d_model)

    def first_positions(self, count: int) -> Tensor:
        """Return the encodings (count, d_model) of the first positions on the CPU."""
        return sinusoids(torch.arange(count, device="cpu"), self.d_model)


class LearnedPositions(nn.Module):
    """Table of `max_position_embeddings` learned positions (Table 3, row E)."""

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__()
        self.size = config.max_position_embeddings
        self.table = nn.Embedding(self.size, config.d_model)

    def forward(self, positions: Tensor, max_position: int | None = None) -> Tensor:
        """Return the encodings (B or 1, S, d_model) of `positions` (B or 1, S)."""
        is_known_to_fit = max_position is not None and max_position <= self.size
        # Reading the largest position synchronizes with an accelerator, and would break a compiled graph.
        if positions.numel() and not (is_known_to_fit or torch.compiler.is_compiling()):
            length = int(positions.max()) + 1
            if length > self.size:
                raise ValueError(
                    f"A text of {length} tokens is longer than the table of {self.size} learned positions; shorten "
                    'it, or train with a larger max_position_embeddings or with position_embedding="sinusoidal".'
                )
        return self.table(positions)  # (B or 1, S, d_model)

    def first_positions(self, count: int) -> Tensor:
        """Return the encodings (count, d_model) of the first positions, at most those of the table."""
        return self.table.weight[:count]


class InputEmbedding(nn.Module):
    """Dropout of "the sums of the embeddings and the positional encodings" (5.4)."""

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__()
        is_learned = config.position_embedding == "learned"
        self.positions = LearnedPositions(config) if is_learned else SinusoidalPositions(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, inputs_embeds: Tensor, positions: Tensor, max_position: int | None = None) -> Tensor:
        """Add the encodings of positions (B or 1, S) to scaled embeddings (B, S, d_model), and apply dropout."""
        embedded = inputs_embeds + self.positions(positions, max_position)  # (B, S, d_model); float32 with sinusoids
        return self.dropout(embedded.to(inputs_embeds.dtype))
