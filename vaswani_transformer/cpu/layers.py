"""Shared code of the prepared encoder and decoder: fused projections, and modules as plain functions.

B sources, T tokens of a source or its k beams, H heads, K keys; d_k and d_v are the widths of a head's keys and values.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import CausalSelfAttention, CrossAttention, SelfAttention
from ..embeddings import ScaledEmbedding
from ..layers import AddAndNorm, FeedForward, VaswaniTransformerDecoderLayer, VaswaniTransformerEncoderLayer
from .linear import PreparedLinear

Function = Callable[[Tensor], Tensor]
QKV = ("q_proj", "k_proj", "v_proj")
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
            head_weights = [
                getattr(linear, name).detach().unflatten(0, (self.config.num_heads, -1)) for linear in linears
            ]
            parameter.data = torch.cat(head_weights, dim=1).flatten(0, 1)
        self.o_proj = attention.o_proj

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        widths = (self.head_dim, self.head_dim, self.value_head_dim)
        return self.split_heads(self.qkv_proj(hidden_states), sum(widths)).split(widths, dim=-1)


def replace(model: nn.Module, module_type: type, make: Callable[[Any], nn.Module]) -> None:
    """Replace each module of exactly this type with the result of `make`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is module_type:
                setattr(module, name, make(child))


def fuse_qkv(model: nn.Module) -> None:
    """Replace each self-attention that has three linear projections with a fused one."""

    def fuse(attention: SelfAttention) -> SelfAttention:
        is_linear = all(type(getattr(attention, name)) is nn.Linear for name in QKV)
        return FusedQKVAttention(attention) if is_linear else attention

    for attention_type in (SelfAttention, CausalSelfAttention):
        replace(model, attention_type, fuse)


PLAIN_LAYERS = (VaswaniTransformerEncoderLayer, VaswaniTransformerDecoderLayer)
PLAIN_SUBLAYERS = (FusedQKVAttention, CrossAttention, FeedForward, AddAndNorm)


def has_plain_layers(stack: Any) -> bool:
    """Return whether all layers are unmodified layers of this package with fused projections."""
    sublayers = [sublayer for layer in stack.layers for sublayer in layer.children()]
    return {*map(type, stack.layers)} <= {*PLAIN_LAYERS} and {*map(type, sublayers)} <= {*PLAIN_SUBLAYERS}


def raw_forward(module: nn.Module) -> Function:
    """Return a module's `forward` as a function without hooks; a ReLU works in place."""
    if type(module) is nn.LayerNorm:
        shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
        return lambda hidden_states: torch.layer_norm(hidden_states, shape, weight, bias, eps)
    if type(module) is nn.ReLU:
        return torch.relu_
    return module.raw_forward() if isinstance(module, PreparedLinear) else module.forward


def compose(*modules: nn.Module) -> Function:
    """Return the composition of modules as a function."""
    functions = [raw_forward(module) for module in modules if type(module) is not nn.Identity]
    return functools.reduce(lambda first, second: lambda hidden_states: second(first(hidden_states)), functions)


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
        attention, inner = layer.self_attn, layer.feed_forward
        self.heads, self.scaling = attention.config.num_heads, attention.scaling
        self.head_widths = attention.head_dim, attention.value_head_dim
        self.project, self.o_proj = map(raw_forward, (attention.get_submodule("qkv_proj"), attention.o_proj))
        self.feed_forward = compose(inner.fc1, inner.activation, inner.dropout, inner.fc2)
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
