"""Scaled dot-product attention, and multi-head attention within a text and from a target to its source (3.2).

B batch, H heads, Q queries, K keys, k target rows of one source row. Widths: d_model, d_k a head's queries and keys,
d_v a head's values.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .config import VaswaniTransformerConfig


def scaled_dot_product_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """Equation (1): softmax(Q K^T / sqrt(d_k)) V.

    The "eager" implementation, and the signature that Transformers gives every other one.

    Args:
        query: (B, H, Q, d_k).
        key: (B, H, K, d_k).
        value: (B, H, K, d_v).
        attention_mask: added to the scores, broadcast to (B, H, Q, K); very negative where a query may not look.
        scaling: 1 / sqrt(d_k).

    Returns:
        The attended values (B, Q, H, d_v) and the attention weights (B, H, Q, K).
    """
    scores = query @ key.transpose(-2, -1) * scaling  # (B, H, Q, K)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    attended = weights @ value  # (B, H, Q, d_v)
    return attended.transpose(1, 2).contiguous(), weights  # (B, Q, H, d_v)


def widen(heads: Tensor, width: int) -> Tensor:
    """Zeros behind the last dimension, which change no product with another tensor so widened."""
    return nn.functional.pad(heads, (0, width - heads.shape[-1]))


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (3.2.2).

    The h matrices W_i of a kind stand side by side in one projection, without biases as the paper writes them
    (`attention_bias` adds them). Dropout on the attention weights is an option that the paper does not use.
    """

    is_causal = False

    def __init__(self, config: VaswaniTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.value_head_dim = config.value_head_dim
        self.scaling = self.head_dim**-0.5
        self.dropout = config.attention_dropout
        keys, values = config.num_heads * self.head_dim, config.num_heads * self.value_head_dim
        self.q_proj = nn.Linear(config.d_model, keys, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, values, bias=config.attention_bias)
        self.o_proj = nn.Linear(values, config.d_model, bias=config.attention_bias)

    @property
    def is_flash(self) -> bool:
        """Whether the configuration names one of the flash attentions."""
        return "flash" in (self.config._attn_implementation or "")

    def split_heads(self, projected: Tensor, width: int) -> Tensor:
        return projected.unflatten(-1, (-1, width)).transpose(1, 2)  # (B, H, Q or K, width)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The keys (B, H, K, d_k) and values (B, H, K, d_v) of `memory` (B, K, d_model)."""
        keys = self.split_heads(self.k_proj(memory), self.head_dim)
        return keys, self.split_heads(self.v_proj(memory), self.value_head_dim)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Equation (1) by the implementation that the configuration names; shapes as there.

        Flash attention takes one width for all: the narrower heads are widened by zeros, and the surplus cut off.
        """
        implementation = self.config._attn_implementation or "eager"
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, scaled_dot_product_attention)
        if self.head_dim != self.value_head_dim and "flash" in implementation:
            width = max(self.head_dim, self.value_head_dim)
            query, key, value = widen(query, width), widen(key, width), widen(value, width)
        dropout = self.dropout if self.training else 0.0
        attended, weights = attention(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return attended[..., : self.value_head_dim], weights  # (B, Q, H, d_v)


class SelfAttention(MultiHeadAttention):
    """Every position attends to every position of its own text (3.2.3)."""

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys (B, H, Q, d_k) and values (B, H, Q, d_v) of `hidden_states` (B, Q, d_model)."""
        return self.split_heads(self.q_proj(hidden_states), self.head_dim), *self.project_memory(hidden_states)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """The attended states (B, Q, d_model) of `hidden_states`, and the attention weights where they are computed."""
        query, key, value = self.project(hidden_states)  # (B, H, Q, d_k), the same, (B, H, Q, d_v)
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            key, value = past_key_values.update(key, value, self.layer_idx)  # (B, H, K, d_k), (B, H, K, d_v)
        attended, weights = self.attend(query, key, value, attention_mask, **kwargs)  # (B, Q, H, d_v)
        return self.o_proj(attended.flatten(-2)), weights


class CausalSelfAttention(SelfAttention):
    """Self-attention of the decoder, where no position sees a later one (3.2.3)."""

    is_causal = True


def unfold_rows(weights: Tensor, rows: int, length: int) -> Tensor:
    """Attention weights (B, H, k Q, K) of k target rows a source as one row a target (k B, H, Q, K)."""
    batch, heads, _, keys = weights.shape
    by_row = weights.reshape(batch, heads, rows // batch, length, keys).transpose(1, 2)  # (B, k, H, Q, K)
    return by_row.reshape(rows, heads, length, keys)


class CrossAttention(MultiHeadAttention):
    """Every position of the target attends to every position of the source ("encoder-decoder attention", 3.2.3).

    Target rows may be a multiple k of the source rows, row i belonging to source i // k, as the beams of one source
    do: they are then further queries of the one source, whose keys and values are computed and kept once.
    """

    def cached_memory(self, memory: Tensor, past_key_values: Cache | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the source, projected once a source where there is a cache to keep them."""
        if not isinstance(past_key_values, EncoderDecoderCache):
            return self.project_memory(memory)
        cache = past_key_values.cross_attention_cache
        if past_key_values.is_updated.get(self.layer_idx):
            layer = cast(CacheLayerMixin, cache.layers[self.layer_idx])
            return cast(Tensor, layer.keys), cast(Tensor, layer.values)
        past_key_values.is_updated[self.layer_idx] = True
        return cache.update(*self.project_memory(memory), self.layer_idx)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """As in self-attention; but flash attention gets padded sources without their padding.

        Transformers would take the mask of the source (B, K) for one of the target too.
        """
        if attention_mask is None or not self.is_flash:
            return super().attend(query, key, value, attention_mask, **kwargs)
        batch, _, length, _ = query.shape
        is_token = attention_mask[:, : key.shape[2]].bool()  # (B, K)
        counts = is_token.sum(-1, dtype=torch.int32)  # (B,)

        def side_by_side(heads: Tensor) -> Tensor:
            return heads.transpose(1, 2)[is_token[:, : heads.shape[2]]].transpose(0, 1)[None]  # (1, H, tokens, width)

        attended, weights = super().attend(
            query.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None],  # (1, H, B Q, d_k)
            side_by_side(key),
            side_by_side(value),
            None,
            cu_seq_lens_q=torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device),
            cu_seq_lens_k=nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
            max_length_q=length,
            max_length_k=int(counts.max()),
            **kwargs,
        )  # (1, B Q, H, d_v)
        return attended.unflatten(1, (batch, length)).squeeze(0), weights

    def forward(
        self,
        hidden_states: Tensor,
        memory: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """What `hidden_states` (k B, Q, d_model) draw from `memory` (B, K, d_model), and the attention weights."""
        rows, length = hidden_states.shape[:2]
        key, value = self.cached_memory(memory, past_key_values)  # (B, H, K, d_k), (B, H, K, d_v)
        query = self.q_proj(hidden_states)
        if is_shared := rows != key.shape[0]:
            query = query.reshape(key.shape[0], -1, query.shape[-1])  # (B, k Q, H d_k)
        query = self.split_heads(query, self.head_dim)  # (B, H, k Q, d_k)
        attended, weights = self.attend(query, key, value, attention_mask, **kwargs)  # (B, k Q, H, d_v)
        if is_shared:
            attended = attended.reshape(rows, length, *attended.shape[2:])  # (k B, Q, H, d_v)
            weights = None if weights is None else unfold_rows(weights, rows, length)  # (k B, H, Q, K)
        return self.o_proj(attended.flatten(-2)), weights


__all__ = [
    "CausalSelfAttention",
    "CrossAttention",
    "MultiHeadAttention",
    "SelfAttention",
    "scaled_dot_product_attention",
]
