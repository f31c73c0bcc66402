"""The layers equal torch.nn's post-norm layers with the same weights."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tests.attention import additive
from tests.batches import FLOAT32
from tests.models import tiny_config
from vaswani_transformer.attention import MultiHeadAttention
from vaswani_transformer.layers import (
    AddAndNorm,
    FeedForward,
    VaswaniTransformerDecoderLayer,
    VaswaniTransformerEncoderLayer,
)

TORCH: dict[str, Any] = {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "layer_norm_eps": 1e-6, "batch_first": True}


def random_weights(module: nn.Module) -> None:
    """Set every parameter, norms and biases too, to random values."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)


def copy_attention(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> None:
    theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
    theirs.out_proj.weight.copy_(ours.o_proj.weight)
    theirs.in_proj_bias.zero_()
    theirs.out_proj.bias.zero_()


@torch.no_grad()
def torch_layer(ours: VaswaniTransformerEncoderLayer | VaswaniTransformerDecoderLayer) -> Any:
    """Return torch's layer of the same stack with the same weights."""
    norms = [ours.self_attn_add_norm.norm, ours.feed_forward_add_norm.norm]
    theirs: Any
    if isinstance(ours, VaswaniTransformerDecoderLayer):
        theirs = nn.TransformerDecoderLayer(**TORCH, norm_first=False)
        copy_attention(theirs.multihead_attn, ours.cross_attn)
        norms.insert(1, ours.cross_attn_add_norm.norm)
    else:
        theirs = nn.TransformerEncoderLayer(**TORCH, norm_first=False)
    copy_attention(theirs.self_attn, ours.self_attn)
    theirs.linear1.load_state_dict(ours.feed_forward.fc1.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.fc2.state_dict())
    for number, norm in enumerate(norms, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())
    return theirs.eval()


def padding_mask(lengths: list[int]) -> Tensor:
    """Return (B, longest), true after the end of each text: torch's key_padding_mask."""
    return torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


lengths = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@settings(max_examples=20)
@given(lengths)
def test_encoder_layer_equals_torch(lengths: list[int]) -> None:
    ours = VaswaniTransformerEncoderLayer(tiny_config(attn_implementation="eager"), 0).eval()
    random_weights(ours)
    theirs = torch_layer(ours)
    states, hidden = torch.randn(len(lengths), max(lengths), 32), padding_mask(lengths)
    output = ours(states, additive(~hidden)[:, None, None])
    expected = theirs(states, src_key_padding_mask=hidden)
    torch.testing.assert_close(output[~hidden], expected[~hidden], **FLOAT32)


@settings(max_examples=20)
@given(st.data())
def test_decoder_layer_equals_torch(data: st.DataObject) -> None:
    sources = data.draw(lengths)
    targets = data.draw(st.lists(st.integers(1, 6), min_size=len(sources), max_size=len(sources)))
    ours = VaswaniTransformerDecoderLayer(tiny_config(attn_implementation="eager"), 0).eval()
    random_weights(ours)
    theirs = torch_layer(ours)
    memory, hidden_source = torch.randn(len(sources), max(sources), 32), padding_mask(sources)
    states, hidden_target = torch.randn(len(targets), max(targets), 32), padding_mask(targets)
    later = torch.ones(max(targets), max(targets), dtype=torch.bool).triu(1)
    output = ours(
        states,
        additive(~(later | hidden_target[:, None]))[:, None],
        encoder_hidden_states=memory,
        encoder_attention_mask=additive(~hidden_source)[:, None, None],
    )
    expected = theirs(
        states, memory, tgt_mask=later, tgt_key_padding_mask=hidden_target, memory_key_padding_mask=hidden_source
    )
    torch.testing.assert_close(output[~hidden_target], expected[~hidden_target], **FLOAT32)


def test_feed_forward_network_is_equation_2() -> None:
    feed_forward = FeedForward(tiny_config()).eval()
    random_weights(feed_forward)
    states = torch.randn(2, 3, 32)
    fc1, fc2 = feed_forward.fc1, feed_forward.fc2
    inner = torch.maximum(torch.zeros(()), states @ fc1.weight.T + fc1.bias)
    torch.testing.assert_close(feed_forward(states), inner @ fc2.weight.T + fc2.bias)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activation_is_the_config_s(activation: str) -> None:
    feed_forward = FeedForward(tiny_config(activation_function=activation)).eval()
    states = torch.randn(2, 3, 32)
    expected = feed_forward.fc2(ACT2FN[activation](feed_forward.fc1(states)))
    assert torch.equal(feed_forward(states), expected)


def test_dropout_applies_to_the_sublayer_before_the_residual() -> None:
    """If dropout drops the complete sublayer, the norm of the residual remains (5.4)."""
    add_and_norm = AddAndNorm(tiny_config(dropout=0.5)).train()
    residual, output = torch.randn(1, 32), torch.full((1, 32), 1e6)
    normalized = add_and_norm(residual, output)
    dropped = add_and_norm.norm(residual + torch.where(normalized > 0, 2e6, 0.0))
    torch.testing.assert_close(normalized, dropped)


def test_norm_comes_last() -> None:
    """By hand: x + Sublayer(x) = (3, 1) + (1, -1) = (4, 0) has mean 2 and std 2, so its norm is (1, -1)."""
    config = tiny_config(d_model=2, num_heads=1)
    output = AddAndNorm(config).eval()(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, -1.0]]))
    torch.testing.assert_close(output, torch.tensor([[1.0, -1.0]]))


def test_dropout_drops_nothing_of_the_residual() -> None:
    residual, add_and_norm = torch.randn(5, 32), AddAndNorm(tiny_config(dropout=0.5)).train()
    assert torch.equal(add_and_norm(residual, torch.zeros(5, 32)), add_and_norm.norm(residual))
