"""The size of the models that the tests import, their random weights, and the comparison with the original."""

from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

# vocabulary, d_model, heads, d_ff, layers, padding and end token
V, D, HEADS, FF, LAYERS, PAD, END = 40, 16, 4, 24, 2, 1, 2


def randomize_weights(model: Model) -> Model:
    """Set random weights, none of them 0 or 1, norms and biases too; the tables of positions stay."""
    for name, weight in model.named_parameters():
        if "embed_positions" not in name:
            weight.data = 0.3 * torch.randn_like(weight) + name.endswith("norm.weight")
    return model.eval()


def logits_of(model: nn.Module, input_ids: Tensor, decoder_input_ids: Tensor, pad: int) -> Tensor:
    mask = input_ids.ne(pad).long()
    with torch.no_grad():
        return model(
            input_ids=input_ids, attention_mask=mask, decoder_input_ids=decoder_input_ids, use_cache=False
        ).logits


def assert_alike(ours: nn.Module, theirs: nn.Module, pad: int) -> None:
    sources, targets = torch.randint(4, V - 1, (3, 9)), torch.randint(4, V - 1, (3, 7))
    sources[1, 6:] = sources[2, 2:] = pad
    actual = logits_of(ours, sources, targets, pad)
    torch.testing.assert_close(actual, logits_of(theirs, sources, targets, pad), rtol=1e-4, atol=2e-5)
