"""Shared code of the prepared encoder and decoder: fused projections, and modules as plain functions.

B sources, T tokens of a source or its k beams, H heads, K keys; d_k and d_v are the widths of a head's keys and values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import CausalSelfAttention, CrossAttention, SelfAttention
from ..embeddings import ScaledEmbedding
from ..layers import AddAndNorm, FeedForward, VaswaniTransformerDecoderLayer, VaswaniTransformerEncoderLayer
from ..stacks import VaswaniTransformerDecoder, VaswaniTransformerEncoder
from .linear import PreparedLinear

Function = Callable[[Tensor], Tensor]
GROWTH = 32  # smallest growth of a cache or of position encodings, in tokens


class FusedQKVAttention(CausalSelfAttention):
    """Self-attention with one product for queries, keys and values, and a copy of the weights of `attention`."""

    def __init__(self, attention: SelfAttention) -> None:
        nn.Module.__init__(self)
        self.config, self.layer_idx, self.is_causal = attention.config, attention.layer_idx, attention.is_causal
        self.head_dim, self.value_head_dim = attention.head_dim, attention.value_head_dim
        self.scaling, self.dropout = attention.scaling, attention.dropout
        self._forward_hooks = attention._forward_hooks  # Transformers records weights with them
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        outputs = sum(linear.out_features for linear in linears)
        self.qkv_proj = nn.utils.skip_init(nn.Linear, linears[0].in_features, outputs, bias=linears[0].bias is not None)
        for name, parameter in self.qkv_proj.named_parameters():
            weights = [getattr(linear, name).detach() for linear in linears]
            by_head = [weight.unflatten(0, (self.config.num_heads, -1)) for weight in weights]
            parameter.data = torch.cat(by_head, dim=1).flatten(0, 1)
        self.o_proj = attention.o_proj

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        widths = (self.head_dim, self.head_dim, self.value_head_dim)
        return self.split_heads(self.qkv_proj(hidden_states), sum(widths)).split(widths, dim=-1)


def fuse_qkv(attention: SelfAttention) -> SelfAttention:
    """Return a fused copy of a self-attention with three linear projections; return any other unchanged."""
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    return FusedQKVAttention(attention) if all(type(linear) is nn.Linear for linear in linears) else attention


PLAIN_STACKS = (VaswaniTransformerEncoder, VaswaniTransformerDecoder)
PLAIN_LAYERS = (VaswaniTransformerEncoderLayer, VaswaniTransformerDecoderLayer)
PLAIN_SUBLAYERS = (FusedQKVAttention, CrossAttention, FeedForward, AddAndNorm)


def is_plain(stack: Any) -> bool:
    """Return whether a stack and its layers are unmodified ones of this package with fused projections."""
    sublayers = [sublayer for layer in stack.layers for sublayer in layer.children()]
    levels = ([stack], PLAIN_STACKS), (stack.layers, PLAIN_LAYERS), (sublayers, PLAIN_SUBLAYERS)
    return all(type(module) in types for modules, types in levels for module in modules)


def raw_forward(module: nn.Module) -> Function:
    """Return a module's `forward` as a function without hooks; a ReLU works in place."""
    if type(module) is nn.LayerNorm:
        shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
        return lambda hidden_states: torch.layer_norm(hidden_states, shape, weight, bias, eps)
    if type(module) is nn.ReLU:
        return torch.relu_
    return module.product if isinstance(module, PreparedLinear) else module.forward


def embed_fn(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that adds position encodings to the embeddings of token ids."""
    if type(module) is ScaledEmbedding:
        scale = module.embed_scale
        return lambda ids, positions: torch.add(positions, torch.embedding(module.weight, ids), alpha=scale)
    return lambda ids, positions: module.forward(ids) + positions


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Return equation (1) (B H, T, d_v) of queries (B H, T, d_k), keys (B H, d_k, K) and values (B H, K, d_v)."""
    return torch.softmax(torch.baddbmm(mask, query, keys, alpha=scaling), dim=-1).bmm(values)


class UnwrappedLayer:
    """Common modules of encoder and decoder layers, as functions."""

    def __init__(self, layer: VaswaniTransformerEncoderLayer | VaswaniTransformerDecoderLayer) -> None:
        attention, feed_forward = layer.self_attn, layer.feed_forward
        self.heads, self.scaling = attention.config.num_heads, attention.scaling
        self.head_widths = attention.head_dim, attention.value_head_dim
        self.project, self.o_proj = map(raw_forward, (attention.get_submodule("qkv_proj"), attention.o_proj))
        inner = (feed_forward.fc1, feed_forward.activation, feed_forward.fc2)
        self.fc1, self.activation, self.fc2 = map(raw_forward, inner)
        self.norm = raw_forward(layer.self_attn_add_norm.norm)
        self.ffn_norm = raw_forward(layer.feed_forward_add_norm.norm)

    def split_heads(self, projected: Tensor, num_sources: int) -> tuple[Tensor, Tensor]:
        """Return queries (B H, T, d_k), and concatenated keys and values (B, H, T, d_k + d_v), of rows (B T, ...).

        `projected` must not be a view. The results have no dimension B if that is 1.
        """
        tokens, row = projected.shape[0] // num_sources, projected.shape[1]
        sizes, strides = ((), ()) if num_sources == 1 else ((num_sources,), (tokens * row,))
        width, (key_width, value_width) = row // self.heads, self.head_widths
        query = projected.as_strided((*sizes, self.heads, tokens, key_width), (*strides, width, row, 1))
        sizes, strides = (*sizes, self.heads, tokens, key_width + value_width), (*strides, width, row, 1)
        return query if num_sources == 1 else query.flatten(0, 1), projected.as_strided(sizes, strides, key_width)

    def merge_heads(self, attended: Tensor, num_sources: int) -> Tensor:
        """Concatenate the outputs of the heads (B H, T, d_v) for each token: (B T, H d_v)."""
        if num_sources == 1:
            return attended.transpose(0, 1).reshape(attended.shape[1], -1)
        by_source = attended.view(num_sources, self.heads, -1, attended.shape[2])  # (B, H, T, d_v)
        return by_source.transpose(1, 2).reshape(num_sources * attended.shape[1], -1)
