"""Decoders over all positions of the target at once: no causal mask, no cache of self-attention.

B batch, H heads, S source, T target, k target rows of one source row. A cache that a caller gives holds the source's
keys and values only, so that several passes over one source compute them once.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache
from transformers.utils.output_capturing import OutputRecorder

from .attention import CrossAttention, MultiHeadAttention, SelfAttention, padding_mask
from .config import VaswaniTransformerConfig
from .decoder import VaswaniTransformerDecoder
from .layers import AddAndNorm, VaswaniTransformerDecoderLayer
from .pretrained import tensor_parallel_plan
from .relative import RelativeSelfAttention


class PositionalAttention(MultiHeadAttention):
    """Attention whose queries and keys are the positions, and whose values are the states (Gu et al. 2018, 3.2).

    Queries and keys do not depend on the sentence: they are computed for one row. It is no `SelfAttention`, or its
    weights would be recorded among those.
    """

    def keys(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Return what the keys are projected from, (1 or B, T, d_model)."""
        return positions

    def forward(
        self, hidden_states: Tensor, positions: Tensor, attention_mask: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, T, d_model) for `hidden_states` and PE (1, T, d_model), and the weights if any."""
        rows = (hidden_states.shape[0], -1, -1, -1)
        query = self.split_heads(self.q_proj(positions), self.head_dim).expand(rows)  # (B, H, T, d_k)
        key = self.split_heads(self.k_proj(self.keys(hidden_states, positions)), self.head_dim).expand(rows)
        value = self.split_heads(self.v_proj(hidden_states), self.value_head_dim)  # (B, H, T, d_v)
        attended, weights = self.attend(query, key, value, attention_mask, **kwargs)  # (B, T, H, d_v)
        return self.o_proj(attended.flatten(-2)), weights


class ParallelDecoderLayer(VaswaniTransformerDecoderLayer):
    """The paper's decoder layer without a causal mask; a cache holds only cross-attention."""

    self_attention = SelfAttention

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map states (k B, T, d_model) to the same shape, attending to `encoder_hidden_states` (B, S, d_model)."""
        attended, _ = self.self_attn(hidden_states, attention_mask, **kwargs)
        hidden_states = self.self_attn_add_norm(hidden_states, attended)
        return self.after_self_attention(
            hidden_states, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs
        )

    def after_self_attention(
        self,
        hidden_states: Tensor,
        memory: Tensor | None,
        memory_mask: Tensor | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply cross-attention, where there is a `memory` (B, S, d_model), and the feed-forward network."""
        if memory is not None:
            attended, _ = self.cross_attn(hidden_states, memory, memory_mask, past_key_values, **kwargs)
            hidden_states = self.cross_attn_add_norm(hidden_states, attended)
        return self.feed_forward_add_norm(hidden_states, self.feed_forward(hidden_states))


class PositionalDecoderLayer(ParallelDecoderLayer):
    """Self-attention, positional attention, cross-attention, feed-forward network (Gu et al. 2018, Figure 2).

    Self-attention is relative where the configuration has a `relative_attention_clip`.
    """

    def __init__(self, config: VaswaniTransformerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        clip = getattr(config, "relative_attention_clip", None)
        if clip is not None:
            self.self_attn = RelativeSelfAttention(config, layer_idx, clip)
        self.positional_attn = PositionalAttention(config, layer_idx)
        self.positional_attn_add_norm = AddAndNorm(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map states (k B, T, d_model) to the same shape.

        Args:
            attention_mask: of positional attention, which may attend to its own position.
            positions: (1, T, d_model), PE of the target's positions.
            self_attention_mask: of self-attention.
        """
        positions, self_attention_mask = kwargs.pop("positions"), kwargs.pop("self_attention_mask")
        attended, _ = self.self_attn(hidden_states, self_attention_mask, **kwargs)
        hidden_states = self.self_attn_add_norm(hidden_states, attended)
        attended, _ = self.positional_attn(hidden_states, positions, attention_mask, **kwargs)
        hidden_states = self.positional_attn_add_norm(hidden_states, attended)
        return self.after_self_attention(
            hidden_states, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs
        )


class ParallelDecoder(VaswaniTransformerDecoder):
    """The paper's decoder without a causal mask."""

    layer_class = ParallelDecoderLayer
    _can_record_outputs = {
        "hidden_states": ParallelDecoderLayer,
        "attentions": OutputRecorder(SelfAttention, index=1),
        "cross_attentions": OutputRecorder(CrossAttention, index=1),
    }

    def self_attention_mask(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: Cache | None
    ) -> Tensor | BlockMask | None:
        """Return the mask of padding, in the form that the attention implementation takes."""
        return padding_mask(self.config, inputs_embeds, attention_mask)

    def position_encodings(self, hidden_states: Tensor) -> Tensor:
        """Return PE (1, T, d_model) of the positions of `hidden_states` (k B, T, d_model), in their dtype."""
        length = hidden_states.shape[1]
        positions = torch.arange(length, device=hidden_states.device).unsqueeze(0)  # (1, T)
        return self.input_embedding.positions(positions, length).to(hidden_states.dtype)


class PositionalDecoder(ParallelDecoder):
    """A parallel decoder with positional attention, in whose self-attention no position attends to itself."""

    layer_class = PositionalDecoderLayer
    _tp_plan = tensor_parallel_plan("self_attn", "positional_attn", "cross_attn")
    _supports_flash_attn = False
    _supports_flex_attn = False

    def run_layers(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Pass `hidden_states` (k B, T, d_model) through every layer, with the positions and the diagonal mask."""
        kwargs |= self.positional_inputs(hidden_states, cast(Tensor | None, args[0]))
        return super().run_layers(hidden_states, *args, **kwargs)

    def positional_inputs(self, hidden_states: Tensor, mask: Tensor | None) -> dict[str, Tensor | None]:
        """Return what every layer gets in addition: the positions (1, T, d_model), and self-attention's mask."""
        masks_diagonal = getattr(self.config, "mask_diagonal", True)
        self_attention_mask = self.without_diagonal(mask, hidden_states) if masks_diagonal else mask
        return {"positions": self.position_encodings(hidden_states), "self_attention_mask": self_attention_mask}

    def without_diagonal(self, mask: Tensor | None, hidden_states: Tensor) -> Tensor:
        """Return a mask (k B or 1, 1, T, T) under which no position attends to itself, of the form of `mask`.

        A target of a single token keeps its diagonal, because otherwise that token had no key. Made by hand: a mask
        function of Transformers takes a quarter of a small model's pass.
        """
        length = hidden_states.shape[1]
        other_positions = ~torch.eye(length, dtype=torch.bool, device=hidden_states.device)  # (T, T)
        if mask is None:
            is_key = torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden_states.device)
        else:
            is_key = mask if mask.dtype == torch.bool else mask == 0  # (k B, 1, T, T)
        allowed = is_key & (other_positions | (is_key.sum(-1, keepdim=True) == 1))
        if mask.dtype == torch.bool if mask is not None else self.config._attn_implementation != "eager":
            return allowed
        lowest = torch.finfo(hidden_states.dtype).min
        return torch.zeros_like(allowed, dtype=hidden_states.dtype).masked_fill(~allowed, lowest)


__all__ = [
    "ParallelDecoder",
    "ParallelDecoderLayer",
    "PositionalAttention",
    "PositionalDecoder",
    "PositionalDecoderLayer",
]
