"""Models for the pages of the paper, which print the same on every machine."""

import torch
from torch import Tensor, nn

from vaswani_transformer import VaswaniTransformerConfig, VaswaniTransformerForConditionalGeneration


class Float64Positions(nn.Module):
    """The sinusoids of section 3.5 in float64; the package's own are float32."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, positions: Tensor, max_position: int | None = None) -> Tensor:
        """Return the encodings (B or 1, S, d_model) of positions (B or 1, S)."""
        frequencies = 10000 ** -(torch.arange(0, self.d_model, 2, dtype=torch.float64) / self.d_model)
        angles = positions[..., None] * frequencies  # (B or 1, S, d_model / 2)
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)


def float64_model(config: VaswaniTransformerConfig) -> VaswaniTransformerForConditionalGeneration:
    """Return a new model whose weights, from their random numbers on, and positions are float64.

    Training magnifies differences of rounding; in float64 a short one learns the same words on every machine.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = VaswaniTransformerForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(default)
    model.set_attn_implementation("eager")
    for stack in (model.get_encoder(), model.get_decoder()):
        stack.input_embedding.positions = Float64Positions(config.d_model)
    return model
