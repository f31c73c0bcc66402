"""The encoder of a prepared model without hooks on its layers, and what it shares with the decoder's step.

B sources, H heads, S source tokens, Q queries (S, or the k beams of a source), K keys; d_k and d_v are the widths of a
head's keys and values.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from ..layers import (
    AddAndNorm,
    CausalSelfAttention,
    CrossAttention,
    FeedForward,
    InputEmbedding,
    LearnedPositions,
    ScaledEmbedding,
    SelfAttention,
    SinusoidalPositions,
    VaswaniTransformerDecoderLayer,
    VaswaniTransformerEncoderLayer,
    additive_mask,
    count_positions,
)
from ..stacks import VaswaniTransformerDecoder, VaswaniTransformerEncoder
from .linear import PreparedLinear

GROWTH = 32  # smallest growth of a cache or of position encodings, in tokens
Function = Callable[[Tensor], Tensor]

RECORDED = ("output_attentions", "output_hidden_states")
PLAIN_INPUTS = {"input_ids", "attention_mask", "return_dict", *RECORDED}


class FusedQKVAttention(CausalSelfAttention):
    """Self-attention with one product for queries, keys and values, and a copy of the weights of `attention`."""

    def __init__(self, attention: SelfAttention) -> None:
        nn.Module.__init__(self)  # the constructor of MultiHeadAttention would make three projections
        self.config = attention.config
        self.layer_idx = attention.layer_idx
        self.is_causal = attention.is_causal
        self.head_dim = attention.head_dim
        self.value_head_dim = attention.value_head_dim
        self.scaling = attention.scaling
        self.dropout = attention.dropout
        self._forward_hooks = attention._forward_hooks  # Transformers records weights with them
        self.qkv_proj = fused_linear([attention.q_proj, attention.k_proj, attention.v_proj], self.config.num_heads)
        self.o_proj = attention.o_proj

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        widths = (self.head_dim, self.head_dim, self.value_head_dim)
        by_head = self.split_heads(self.qkv_proj(hidden_states), sum(widths))
        return by_head.split(widths, dim=-1)


def fused_linear(linears: list[nn.Linear], heads: int) -> nn.Linear:
    """Return one layer with the outputs of all `linears`: those of the first head, then of the second, and so on.

    In this order a view of the product contains, for each head, all that its attention needs.
    """
    inputs = linears[0].in_features
    outputs = sum(linear.out_features for linear in linears)
    has_bias = linears[0].bias is not None
    fused = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=has_bias)
    for name, parameter in fused.named_parameters():
        parameters = [getattr(linear, name).detach() for linear in linears]
        by_head = [parameter.unflatten(0, (heads, -1)) for parameter in parameters]
        parameter.data = torch.cat(by_head, dim=1).flatten(0, 1)
    return fused


def fuse_qkv(attention: SelfAttention) -> SelfAttention:
    """Return a fused copy of a self-attention with plain projections; return any other, as of an adapter, unchanged."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    if all(type(projection) is nn.Linear for projection in projections):
        return FusedQKVAttention(attention)
    return attention


PLAIN = {
    VaswaniTransformerEncoder,
    VaswaniTransformerDecoder,
    InputEmbedding,
    SinusoidalPositions,
    LearnedPositions,
    VaswaniTransformerEncoderLayer,
    VaswaniTransformerDecoderLayer,
    FusedQKVAttention,
    CrossAttention,
    FeedForward,
    AddAndNorm,
}
"""Modules whose `forward` the fast paths replace; the one of a subclass may compute something different."""


def is_plain(stack: Any) -> bool:
    """Return whether a stack consists of unmodified modules of this package, with fused projections."""
    positions = getattr(stack.input_embedding, "positions", None)
    modules = [stack, stack.input_embedding, positions]
    for layer in stack.layers:
        modules += [layer, *layer.children()]
    return all(type(module) in PLAIN for module in modules)


def raw_forward(module: nn.Module) -> Function:
    """Return a module's `forward` as a function without hooks; a ReLU works in place."""
    if isinstance(module, PreparedLinear):
        return module.product
    if type(module) is nn.ReLU:
        return torch.relu_
    if type(module) is nn.LayerNorm:
        # Looking up an attribute of a module takes time in each call.
        shape = module.normalized_shape
        weight = module.weight
        bias = module.bias
        eps = module.eps
        return lambda hidden_states: torch.layer_norm(hidden_states, shape, weight, bias, eps)
    return module.forward


def embed_fn(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that adds position encodings to the embeddings of token ids."""
    if type(module) is ScaledEmbedding:
        scale = module.embed_scale
        return lambda ids, positions: torch.add(positions, torch.embedding(module.weight, ids), alpha=scale)
    return lambda ids, positions: module.forward(ids) + positions


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Return equation (1) (B H, Q, d_v) of queries (B H, Q, d_k), keys (B H, d_k, K) and values (B H, K, d_v)."""
    scores = torch.baddbmm(mask, query, keys, alpha=scaling)
    return torch.softmax(scores, dim=-1).bmm(values)


class UnwrappedLayer:
    """Common modules of encoder and decoder layers, as functions."""

    def __init__(self, layer: VaswaniTransformerEncoderLayer | VaswaniTransformerDecoderLayer) -> None:
        attention = layer.self_attn
        self.heads = attention.config.num_heads
        self.head_widths = (attention.head_dim, attention.value_head_dim)
        self.scaling = attention.scaling
        self.project = raw_forward(attention.get_submodule("qkv_proj"))
        self.o_proj = raw_forward(attention.o_proj)
        self.fc1 = raw_forward(layer.feed_forward.fc1)
        self.activation = raw_forward(layer.feed_forward.activation)
        self.fc2 = raw_forward(layer.feed_forward.fc2)
        self.norm = raw_forward(layer.self_attn_add_norm.norm)
        self.ffn_norm = raw_forward(layer.feed_forward_add_norm.norm)

    def split_heads(self, projected: Tensor, num_sources: int) -> tuple[Tensor, Tensor]:
        """Return queries (B H, Q, d_k), and concatenated keys and values (B, H, Q, d_k + d_v), of rows (B Q, ...).

        A row contains for each head its query, key and value, next to each other. The results are views of it, since
        a step is too short for copies; `projected` itself must not be a view. With one source they lack B.
        """
        row_width = projected.shape[1]
        head_width = row_width // self.heads
        key_width, value_width = self.head_widths
        tokens = projected.shape[0] // num_sources

        if num_sources == 1:
            strides = (head_width, row_width, 1)
            query = projected.as_strided((self.heads, tokens, key_width), strides)
            key_values = projected.as_strided((self.heads, tokens, key_width + value_width), strides, key_width)
            return query, key_values
        heads = (num_sources, self.heads, tokens)
        strides = (tokens * row_width, head_width, row_width, 1)
        query = projected.as_strided((*heads, key_width), strides).flatten(0, 1)
        key_values = projected.as_strided((*heads, key_width + value_width), strides, key_width)
        return query, key_values

    def merge_heads(self, attended: Tensor, num_sources: int) -> Tensor:
        """Concatenate the outputs of the heads (B H, Q, d_v) for each token: (B Q, H d_v)."""
        if num_sources == 1:
            return attended.transpose(0, 1).reshape(attended.shape[1], -1)
        by_source = attended.view(num_sources, self.heads, -1, attended.shape[2])  # (B, H, Q, d_v)
        return by_source.transpose(1, 2).reshape(num_sources * attended.shape[1], -1)


class EncoderLayerPass(UnwrappedLayer):
    """Encoder layer over all tokens of each source."""

    def __call__(self, hidden_states: Tensor, mask: Tensor, num_sources: int) -> Tensor:
        """Return the next `hidden_states` (B S, d_model); `mask` (B H or 1, 1, S or 1) is added to the scores."""
        query, key_values = self.split_heads(self.project(hidden_states), num_sources)
        by_head = key_values.flatten(0, -3)
        keys, values = by_head.split_with_sizes(self.head_widths, -1)  # (B H, S, d_k), (B H, S, d_v)
        attended = attend(query, keys.transpose(1, 2), values, mask, self.scaling)  # (B H, S, d_v)
        output = self.o_proj(self.merge_heads(attended, num_sources))
        hidden_states = self.norm(output.add_(hidden_states))
        inner = self.activation(self.fc1(hidden_states))
        return self.ffn_norm(self.fc2(inner).add_(hidden_states))


class PreparedEncoder:
    """Wrapper of the encoder with a fast path for sources of valid length, without intermediate outputs.

    The fast path calls no hooks on the layers. Other attributes are those of the encoder.

    Attributes:
        encodings: (P, d_model), encodings of the first positions, extended on demand.
    """

    def __init__(self, encoder: VaswaniTransformerEncoder) -> None:
        layers = cast(Iterable[VaswaniTransformerEncoderLayer], encoder.layers)
        self.encoder = encoder
        self.positions = encoder.input_embedding.positions
        self.fast_layers = [EncoderLayerPass(layer) for layer in layers]
        self.embed = embed_fn(encoder.embed_tokens)
        self.encodings = torch.empty(0, encoder.config.d_model)

    def fast_pass(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the encoder's output (B, S, d_model) for `input_ids` (B, S); `attention_mask` is 0 at padding."""
        sources, length = input_ids.shape
        encodings = self.encodings  # read once, since a different thread may replace it
        if length > len(encodings):
            encodings = self.positions.first_positions(length + GROWTH)
            self.encodings = encodings
        positions = encodings[:length]
        mask = positions.new_zeros(1, 1, 1)
        if attention_mask is not None and not bool(attention_mask.all()):
            positions = nn.functional.embedding(count_positions(attention_mask), positions)
            mask = additive_mask(attention_mask.bool(), torch.float32)  # (B, S)
            mask = mask.repeat_interleave(self.encoder.config.num_heads, dim=0)[:, None]
        hidden_states = self.embed(input_ids, positions).flatten(0, 1)
        for layer in self.fast_layers:
            hidden_states = layer(hidden_states, mask, sources)
        return hidden_states.view(sources, length, -1)

    @functools.wraps(VaswaniTransformerEncoder.forward)
    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Return the encoder's output."""
        config = self.encoder.config
        ids = inputs.get("input_ids")
        mask = inputs.get("attention_mask")
        longest = self.positions.table.num_embeddings if isinstance(self.positions, LearnedPositions) else None
        is_fast = (
            not args
            and PLAIN_INPUTS.issuperset(inputs)
            and ids is not None
            and ids.numel() > 0
            and (longest is None or ids.shape[1] <= longest)
            and (mask is None or mask.shape == ids.shape)
            and inputs.get("return_dict") is not False
            and not any(inputs.get(flag) or getattr(config, flag) for flag in RECORDED)
            and config._attn_implementation == "eager"
            and config.attention_window is None
            and not torch.is_autocast_enabled("cpu")
        )
        if not is_fast:
            return self.encoder(*args, **inputs)
        return BaseModelOutput(last_hidden_state=self.fast_pass(ids, mask))

    __call__ = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)
