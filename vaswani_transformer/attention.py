"""Scaled dot-product attention, multi-head self-attention and cross-attention (3.2).

B batch, H heads, Q queries, K keys, k target rows of one source row. Widths: d_model, d_k a head's queries and keys,
d_v a head's values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask
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

    This is the "eager" implementation; the signature is that of all of Transformers' implementations.

    Args:
        query: (B, H, Q, d_k).
        key: (B, H, K, d_k).
        value: (B, H, K, d_v).
        attention_mask: added to the scores, broadcast to (B, H, Q, K); very negative where a query must not attend.
        scaling: 1 / sqrt(d_k).

    Returns:
        The attention output (B, Q, H, d_v) and the attention weights (B, H, Q, K).
    """
    scores = query @ key.transpose(-2, -1) * scaling  # (B, H, Q, K)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    attended = weights @ value  # (B, H, Q, d_v)
    return attended.transpose(1, 2).contiguous(), weights  # (B, Q, H, d_v)


@contextmanager
def disabled_cudnn() -> Generator[None]:
    others = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    is_one_of_several = cuda.cudnn_sdp_enabled() and any(is_enabled() for is_enabled in others)
    if is_one_of_several:
        cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if is_one_of_several:
            cuda.enable_cudnn_sdp(True)


def without_cudnn(device: torch.device) -> AbstractContextManager:
    """Return a context in which "sdpa" uses no cuDNN; uncompiled it does if torch may use nothing else.

    Torch 2.11 prefers cuDNN on Hopper and Blackwell GPUs. But cuDNN makes a plan for each new shape, which takes longer
    than a training step, and batches by tokens and decoding bring new shapes all the time.
    """
    if device.type != "cuda":
        return nullcontext()
    if torch.compiler.is_compiling():  # torch.compile knows this context, but cannot read torch's settings
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return disabled_cudnn()


def padding_mask(
    config: VaswaniTransformerConfig, queries: Tensor, attention_mask: Tensor | None, memory: Tensor | None = None
) -> Tensor | BlockMask | None:
    """Return the mask of attention to all tokens of a text, in the form that the attention implementation takes.

    Transformers omits the mask of "sdpa" if no token is padding. To find that out the host would wait for an
    accelerator, in each stack of a training step and at each decoded token. So on accelerators the mask is always made.

    Args:
        queries: (B, Q, d_model), the embeddings that attend.
        attention_mask: (B, K), 0 where a token is padding; None: every token counts.
        memory: (B, K, d_model), what they attend to; None: the queries themselves.
    """
    keys = queries if memory is None else memory
    is_on_accelerator = queries.device.type != "cpu" and config._attn_implementation == "sdpa"
    if is_on_accelerator and attention_mask is not None and attention_mask.shape == keys.shape[:2]:
        is_token = attention_mask.to(queries.device, torch.bool)[:, None, None]  # (B, 1, 1, K)
        return is_token.expand(-1, -1, queries.shape[1], -1)
    return create_bidirectional_mask(config, queries, attention_mask, memory)


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what "eager" attention adds to scores: 0 where a boolean mask allows attention, else the lowest number."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (3.2.2).

    One projection holds the h matrices W_i^Q side by side, and so for W^K and W^V. They have no biases, as in the
    paper; `attention_bias` adds them. Dropout on the attention weights is an option that the paper does not use.
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
        return "flash" in (self.config._attn_implementation or "")

    def split_heads(self, projected: Tensor, width: int) -> Tensor:
        return projected.unflatten(-1, (-1, width)).transpose(1, 2)  # (B, H, Q or K, width)

    def project_key_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys (B, H, K, d_k) and values (B, H, K, d_v) of `memory` (B, K, d_model)."""
        keys = self.split_heads(self.k_proj(memory), self.head_dim)
        return keys, self.split_heads(self.v_proj(memory), self.value_head_dim)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Compute equation (1) with the configured implementation; shapes as in `scaled_dot_product_attention`.

        Flash attention needs d_k = d_v: zeros pad the narrower heads, which changes no product, and are cut off again.
        """
        implementation = self.config._attn_implementation or "eager"
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, scaled_dot_product_attention)
        if self.head_dim != self.value_head_dim and "flash" in implementation:
            width = max(self.head_dim, self.value_head_dim)
            query, key, value = (
                nn.functional.pad(heads, (0, width - heads.shape[-1])) for heads in (query, key, value)
            )
        dropout = self.dropout if self.training else 0.0
        with without_cudnn(query.device) if implementation == "sdpa" else nullcontext():
            attended, weights = attention(
                self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        has_weights = weights is not None and weights.dim() == 4  # flex attention returns logarithms of sums (B, H, Q)
        return attended[..., : self.value_head_dim], weights if has_weights else None  # (B, Q, H, d_v)


class BlockwiseMask(ABC):
    """A mask that computes attention block by block."""

    @abstractmethod
    def attend(
        self, attend: Callable, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> tuple[Tensor, None]:
        """Return the output (B, Q, H, d_v) by `attend`, equation (1) of a block; there are no weights."""


class SelfAttention(MultiHeadAttention):
    """Self-attention: every position attends to every position of the same text (3.2.3).

    With an `attention_window` it attends to its neighborhood (section 4), as the mask says.
    """

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys (B, H, Q, d_k) and values (B, H, Q, d_v) of `hidden_states` (B, Q, d_model)."""
        return self.split_heads(self.q_proj(hidden_states), self.head_dim), *self.project_key_values(hidden_states)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Compute equation (1); the mask has the window, which flash attention gets as a number."""
        reach = self.config.attention_window
        if reach is not None and self.is_flash:
            kwargs["sliding_window"] = reach + 1  # Transformers counts the token itself
        return super().attend(query, key, value, attention_mask, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | BlockwiseMask | None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, Q, d_model) for `hidden_states`, and the weights where the implementation has them."""
        query, key, value = self.project(hidden_states)  # (B, H, Q, d_k), the same, (B, H, Q, d_v)
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            key, value = past_key_values.update(key, value, self.layer_idx)  # (B, H, K, d_k), (B, H, K, d_v)
        if isinstance(attention_mask, BlockwiseMask):
            attended, weights = attention_mask.attend(self.attend, query, key, value, **kwargs)
        else:
            attended, weights = self.attend(query, key, value, attention_mask, **kwargs)  # (B, Q, H, d_v)
        return self.o_proj(attended.flatten(-2)), weights


class CausalSelfAttention(SelfAttention):
    """Self-attention of the decoder, where no position attends to a later one (3.2.3)."""

    is_causal = True


def split_weights_by_beam(weights: Tensor, rows: int, length: int) -> Tensor:
    """Reshape attention weights (B, H, k Q, K) of k targets per source to (k B, H, Q, K)."""
    batch, heads, _, keys = weights.shape
    by_row = weights.reshape(batch, heads, rows // batch, length, keys).transpose(1, 2)  # (B, k, H, Q, K)
    return by_row.reshape(rows, heads, length, keys)


class CrossAttention(MultiHeadAttention):
    """Every position of the target attends to every position of the source ("encoder-decoder attention", 3.2.3).

    There may be k target rows per source row, such as the beams of one source; row i belongs to source i // k. All of
    them query the same keys and values, which are computed and cached once per source.
    """

    def source_key_values(self, memory: Tensor, past_key_values: Cache | None) -> tuple[Tensor, Tensor]:
        """Return the source's keys and values, from the cache once they are in it."""
        if not isinstance(past_key_values, EncoderDecoderCache):
            return self.project_key_values(memory)
        cache = past_key_values.cross_attention_cache
        if past_key_values.is_updated.get(self.layer_idx):
            layer = cast(CacheLayerMixin, cache.layers[self.layer_idx])
            return cast(Tensor, layer.keys), cast(Tensor, layer.values)
        past_key_values.is_updated[self.layer_idx] = True
        return cache.update(*self.project_key_values(memory), self.layer_idx)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Compute equation (1); flash attention gets padded sources without their padding.

        Transformers' flash attention would apply the source's mask (B, K) to the target too.
        """
        if attention_mask is None or not self.is_flash:
            return super().attend(query, key, value, attention_mask, **kwargs)
        batch, _, length, _ = query.shape
        is_token = attention_mask[:, : key.shape[2]].bool()  # (B, K)
        counts = is_token.sum(-1, dtype=torch.int32)  # (B,)
        tokens = is_token.flatten().nonzero()[:, 0]  # their number is all that the host waits for

        def without_padding(heads: Tensor) -> Tensor:
            rows = heads.transpose(1, 2).flatten(0, 1)  # (B K, H, width)
            return rows.index_select(0, tokens).transpose(0, 1)[None]  # (1, H, tokens, width)

        attended, weights = super().attend(
            query.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None],  # (1, H, B Q, d_k)
            without_padding(key),
            without_padding(value),
            None,
            cu_seq_lens_q=torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device),
            cu_seq_lens_k=nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
            max_length_q=length,
            max_length_k=key.shape[2],
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
        """Attend from `hidden_states` (k B, Q, d_model) to `memory` (B, K, d_model); return output and weights."""
        rows, length = hidden_states.shape[:2]
        key, value = self.source_key_values(memory, past_key_values)  # (B, H, K, d_k), (B, H, K, d_v)
        query = self.q_proj(hidden_states)
        if beams_share_source := rows != key.shape[0]:
            query = query.reshape(key.shape[0], -1, query.shape[-1])  # (B, k Q, H d_k)
        query = self.split_heads(query, self.head_dim)  # (B, H, k Q, d_k)
        attended, weights = self.attend(query, key, value, attention_mask, **kwargs)  # (B, k Q, H, d_v)
        if beams_share_source:
            attended = attended.reshape(rows, length, *attended.shape[2:])  # (k B, Q, H, d_v)
            weights = None if weights is None else split_weights_by_beam(weights, rows, length)  # (k B, H, Q, K)
        return self.o_proj(attended.flatten(-2)), weights
