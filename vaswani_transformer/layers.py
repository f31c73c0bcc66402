"""The layers of both stacks and their parts: embeddings, positions, attention, feed-forward network (3.1 to 3.5, 5.4).

B batch, H heads, Q queries, K keys, S source, T target, P positions of a table, k target rows per source row; d_k is
the width of a head's queries and keys, d_v that of its values.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .config import VaswaniTransformerConfig
from .restricted import Band

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
    """Equation (1), softmax(Q K^T / sqrt(d_k)) V, as Transformers' attention implementation "eager".

    Args:
        query: (B, H, Q, d_k).
        key: (B, H, K, d_k).
        value: (B, H, K, d_v).
        attention_mask: added to the scores, broadcast to (B, H, Q, K); very negative at masked keys.
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
    alternatives = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    is_one_of_several = cuda.cudnn_sdp_enabled() and any(is_enabled() for is_enabled in alternatives)
    if is_one_of_several:
        cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if is_one_of_several:
            cuda.enable_cudnn_sdp(True)


def without_cudnn(device: torch.device) -> AbstractContextManager:
    """Return a context that disables cuDNN in "sdpa", unless it is the only enabled backend.

    Torch 2.11 prefers cuDNN on Hopper and Blackwell GPUs, but cuDNN spends longer than a training step on a plan for
    every new shape.
    """
    if device.type != "cuda":
        return nullcontext()
    if torch.compiler.is_compiling():  # torch.compile supports this context, but not reading torch's settings
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return disabled_cudnn()


def padding_mask(
    config: VaswaniTransformerConfig, queries: Tensor, attention_mask: Tensor | None, memory: Tensor | None = None
) -> Tensor | None:
    """Return the padding mask in the attention implementation's format, which for flex attention is a `BlockMask`.

    On accelerators "sdpa" always gets a mask, since a check for padding would synchronize with the device.

    Args:
        queries: (B, Q, d_model), embeddings of the queries.
        attention_mask: (B, K), 0 at padding; None for no padding.
        memory: (B, K, d_model), embeddings of the keys; None for `queries`.
    """
    keys = queries if memory is None else memory
    is_on_accelerator = queries.device.type != "cpu" and config._attn_implementation == "sdpa"
    if is_on_accelerator and attention_mask is not None and attention_mask.shape == keys.shape[:2]:
        is_token = attention_mask.to(queries.device, torch.bool)[:, None, None]  # (B, 1, 1, K)
        return is_token.expand(-1, -1, queries.shape[1], -1)
    return cast(Tensor | None, create_bidirectional_mask(config, queries, attention_mask, memory))


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a boolean mask as the additive mask of "eager" attention: 0 where True, else the lowest number."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (3.2.2).

    One projection concatenates the matrices W_i^Q of all heads; likewise for W^K and W^V.
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
        key_width = config.num_heads * self.head_dim
        value_width = config.num_heads * self.value_head_dim
        self.q_proj = nn.Linear(config.d_model, key_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, key_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, value_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(value_width, config.d_model, bias=config.attention_bias)

    @property
    def is_flash(self) -> bool:
        """Return whether the attention implementation is a flash attention."""
        return "flash" in (self.config._attn_implementation or "")

    def split_heads(self, projected: Tensor, width: int) -> Tensor:
        return projected.unflatten(-1, (-1, width)).transpose(1, 2)  # (B, H, Q or K, width)

    def project_key_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys (B, H, K, d_k) and values (B, H, K, d_v) of `memory` (B, K, d_model)."""
        keys = self.split_heads(self.k_proj(memory), self.head_dim)
        values = self.split_heads(self.v_proj(memory), self.value_head_dim)
        return keys, values

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Compute equation (1) with the configured implementation; shapes as in `scaled_dot_product_attention`.

        Flash attention needs d_k = d_v, so the narrower heads are padded with zeros.
        """
        implementation = self.config._attn_implementation or "eager"
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, scaled_dot_product_attention)
        if self.head_dim != self.value_head_dim and self.is_flash:
            width = max(self.head_dim, self.value_head_dim)
            query, key, value = (
                nn.functional.pad(heads, (0, width - heads.shape[-1])) for heads in (query, key, value)
            )
        dropout = self.dropout if self.training else 0.0
        with without_cudnn(query.device) if implementation == "sdpa" else nullcontext():
            attended, weights = attention(
                self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        if weights is not None and weights.dim() != 4:  # flex attention returns log-sum-exps (B, H, Q)
            weights = None
        return attended[..., : self.value_head_dim], weights  # (B, Q, H, d_v), (B, H, Q, K)


class SelfAttention(MultiHeadAttention):
    """Self-attention over all positions of a text (3.2.3), or with an `attention_window` over a neighborhood (4)."""

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys (B, H, Q, d_k) and values (B, H, Q, d_v) of `hidden_states` (B, Q, d_model)."""
        queries = self.split_heads(self.q_proj(hidden_states), self.head_dim)
        keys, values = self.project_key_values(hidden_states)
        return queries, keys, values

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Compute equation (1); flash attention gets the window as a number, the others in the mask."""
        reach = self.config.attention_window
        if reach is not None and self.is_flash:
            kwargs["sliding_window"] = reach + 1  # Transformers counts the token itself
        return super().attend(query, key, value, attention_mask, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | Band | None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, Q, d_model), and the weights if the implementation returns them."""
        query, key, value = self.project(hidden_states)  # (B, H, Q, d_k), the same, (B, H, Q, d_v)
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            key, value = past_key_values.update(key, value, self.layer_idx)  # (B, H, K, d_k), (B, H, K, d_v)
        if isinstance(attention_mask, Band):
            attended, weights = attention_mask.attend(self.attend, query, key, value, **kwargs)
        else:
            attended, weights = self.attend(query, key, value, attention_mask, **kwargs)  # (B, Q, H, d_v)
        return self.o_proj(attended.flatten(-2)), weights


class CausalSelfAttention(SelfAttention):
    """Self-attention of the decoder (3.2.3); its mask, which the decoder makes, hides later positions."""

    is_causal = True


class CrossAttention(MultiHeadAttention):
    """Attention from all target positions to all source positions ("encoder-decoder attention", 3.2.3).

    A source may have k target rows, such as beams: target row i belongs to source i // k. They share keys and values,
    which are computed and cached once per source.
    """

    def source_key_values(self, memory: Tensor, past_key_values: Cache | None) -> tuple[Tensor, Tensor]:
        """Return the source's keys and values, from the cache if possible."""
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
        """Compute equation (1); for flash attention, remove the padding of the sources.

        Transformers' flash attention would apply the source's mask (B, K) to the target too.
        """
        if attention_mask is None or not self.is_flash:
            return super().attend(query, key, value, attention_mask, **kwargs)
        # The tokens of all sources, without padding between them.
        batch, _, length, _ = query.shape
        is_token = attention_mask[:, : key.shape[2]].bool()  # (B, K)
        counts = is_token.sum(-1, dtype=torch.int32)  # (B,)
        tokens = is_token.flatten().nonzero()[:, 0]  # indices into B K; the only synchronization

        def without_padding(heads: Tensor) -> Tensor:
            rows = heads.transpose(1, 2).flatten(0, 1)  # (B K, H, width)
            return rows.index_select(0, tokens).transpose(0, 1)[None]  # (1, H, tokens, width)

        # One row of all queries and one of all keys, with the boundaries of the sources.
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

        # The target rows of a source become one longer row of queries.
        beams_share_source = rows != key.shape[0]
        if beams_share_source:
            query = query.reshape(key.shape[0], -1, query.shape[-1])  # (B, k Q, H d_k)
        query = self.split_heads(query, self.head_dim)  # (B, H, k Q, d_k)
        attended, weights = self.attend(query, key, value, attention_mask, **kwargs)  # (B, k Q, H, d_v)

        # And back.
        if beams_share_source:
            attended = attended.reshape(rows, length, *attended.shape[2:])  # (k B, Q, H, d_v)
            if weights is not None:
                weights = weights.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)  # (k B, H, Q, K)
        return self.o_proj(attended.flatten(-2)), weights


class FeedForward(nn.Module):
    """Position-wise feed-forward network, equation (2): FFN(x) = max(0, x W_1 + b_1) W_2 + b_2 (3.3)."""

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = Dropout(config.activation_dropout)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)

    def forward(self, hidden_states: Tensor) -> Tensor:
        inner = self.dropout(self.activation(self.fc1(hidden_states)))  # (B, S, d_ff)
        return self.fc2(inner)  # (B, S, d_model)


class AddAndNorm(nn.Module):
    """Residual connection and post-norm: LayerNorm(x + Dropout(Sublayer(x))) (3.1, 5.4)."""

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor, sublayer_output: Tensor) -> Tensor:
        return self.norm(hidden_states + self.dropout(sublayer_output))  # (B, S, d_model)


class VaswaniTransformerEncoderLayer(GradientCheckpointingLayer):
    """Self-attention and feed-forward network, each with residual connection and norm (3.1)."""

    def __init__(self, config: VaswaniTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer_idx)
        self.self_attn_add_norm = AddAndNorm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_add_norm = AddAndNorm(config)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: object) -> Tensor:
        """Return the layer's output (B, S, d_model)."""
        attended, _ = self.self_attn(hidden_states, attention_mask, **kwargs)
        hidden_states = self.self_attn_add_norm(hidden_states, attended)
        return self.feed_forward_add_norm(hidden_states, self.feed_forward(hidden_states))


class VaswaniTransformerDecoderLayer(GradientCheckpointingLayer):
    """Masked self-attention, cross-attention and feed-forward network, each with residual connection and norm (3.1).

    Without `encoder_hidden_states` the layer skips cross-attention. Subclasses override `self_attention` or
    `attend_to_target`; one with a further sub-layer overrides `forward`.
    """

    self_attention: type[SelfAttention] = CausalSelfAttention

    def __init__(self, config: VaswaniTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.self_attention(config, layer_idx)
        self.self_attn_add_norm = AddAndNorm(config)
        self.cross_attn = CrossAttention(config, layer_idx)
        self.cross_attn_add_norm = AddAndNorm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_add_norm = AddAndNorm(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the layer's output (k B, T, d_model), given `encoder_hidden_states` (B, S, d_model)."""
        hidden_states = self.attend_to_target(hidden_states, attention_mask, past_key_values, **kwargs)
        if encoder_hidden_states is not None:
            hidden_states = self.attend_to_source(
                hidden_states, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs
            )
        return self.feed_forward_add_norm(hidden_states, self.feed_forward(hidden_states))

    def attend_to_target(
        self, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None, **kwargs: object
    ) -> Tensor:
        """Apply self-attention to states (k B, T, d_model)."""
        attended, _ = self.self_attn(hidden_states, attention_mask, past_key_values, **kwargs)
        return self.self_attn_add_norm(hidden_states, attended)

    def attend_to_source(
        self,
        hidden_states: Tensor,
        memory: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        **kwargs: object,
    ) -> Tensor:
        """Apply cross-attention from states (k B, T, d_model) to `memory` (B, S, d_model)."""
        attended, _ = self.cross_attn(hidden_states, memory, attention_mask, past_key_values, **kwargs)
        return self.cross_attn_add_norm(hidden_states, attended)
