"""NAT's decoder: relative self-attention (Shaw et al. 2018) and attention by positions (Gu et al. 2018).

B batch, H heads, S source, T target, d_k and d_v the widths of a head, k target rows of one source row, c the largest
distance that differs from smaller ones.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .attention import MultiHeadAttention, SelfAttention, additive_mask
from .config import VaswaniTransformerConfig
from .embeddings import read_table
from .layers import AddAndNorm
from .nar_decoder import NarDecoder, NarDecoderLayer
from .pretrained import tensor_parallel_plan


class RelativeSelfAttention(SelfAttention):
    """Equations (3) and (4) of Shaw et al. 2018, with r = clip(j - i, -c, c) + c.

    score_ij = q_i . (k_j + R^K_r) / sqrt(d_k) and out_i = sum_j a_ij (v_j + R^V_r). The tables R^K (2c + 1, d_k) and
    R^V (2c + 1, d_v) are shared by the heads, and each layer has its own. No (T, T, d_k) tensor is made: q R^K^T is
    gathered at r, and the weights are summed by r before they meet R^V. This needs the weights, so it is computed here
    for every attention implementation.

    Args:
        config: the model's; its `attention_dropout` drops weights.
        layer_idx: the layer's number.
        clip: c, at least 1.
    """

    def __init__(self, config: VaswaniTransformerConfig, layer_idx: int, clip: int) -> None:
        super().__init__(config, layer_idx)
        self.clip = clip
        self.relative_keys = nn.Embedding(2 * clip + 1, self.head_dim)
        self.relative_values = nn.Embedding(2 * clip + 1, self.value_head_dim)

    def distances(self, length: int, device: torch.device) -> Tensor:
        """Return r (T, T) for a text of `length` positions."""
        positions = torch.arange(length, device=device)
        return (positions - positions[:, None]).clamp(-self.clip, self.clip) + self.clip

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, T, H, d_v) and the weights (B, H, T, T).

        Args:
            query, key: (B, H, T, d_k).
            value: (B, H, T, d_v).
            attention_mask: broadcast to (B, H, T, T), boolean (True: attends) or added to the scores.
        """
        keys, values = (
            read_table(table, 2 * self.clip + 1, query.device) for table in (self.relative_keys, self.relative_values)
        )
        distances = self.distances(query.shape[2], query.device).expand(*query.shape[:3], -1)  # (B, H, T, T)
        by_distance = query @ keys.T.to(query.dtype)  # (B, H, T, 2c + 1)
        scores = (query @ key.transpose(-2, -1) + by_distance.gather(-1, distances)) * self.scaling  # (B, H, T, T)
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        elif attention_mask is not None:
            scores = scores + attention_mask
        weights = nn.functional.dropout(scores.softmax(-1), p=self.dropout, training=self.training)
        weights = weights.to(value.dtype)
        summed = torch.zeros_like(weights[..., :1]).repeat(1, 1, 1, 2 * self.clip + 1)
        summed = summed.scatter_add(-1, distances, weights)  # (B, H, T, 2c + 1)
        attended = weights @ value + summed @ values.to(value.dtype)  # (B, H, T, d_v)
        return attended.transpose(1, 2).contiguous(), weights


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


class PositionalDecoderLayer(NarDecoderLayer):
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

    def attend_to_target(
        self, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None, **kwargs: Any
    ) -> Tensor:
        """Apply self-attention and positional attention to states (k B, T, d_model).

        Args:
            attention_mask: of positional attention, which may attend to its own position.
            positions: (1, T, d_model), PE of the target's positions.
            self_attention_mask: of self-attention.
        """
        positions, self_attention_mask = kwargs.pop("positions"), kwargs.pop("self_attention_mask")
        hidden_states = super().attend_to_target(hidden_states, self_attention_mask, past_key_values, **kwargs)
        attended, _ = self.positional_attn(hidden_states, positions, attention_mask, **kwargs)
        return self.positional_attn_add_norm(hidden_states, attended)


class PositionalDecoder(NarDecoder):
    """A non-autoregressive decoder with positional attention, in whose self-attention no position attends to itself."""

    layer_class = PositionalDecoderLayer
    _no_split_modules = ["PositionalDecoderLayer"]
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
        return additive_mask(allowed, hidden_states.dtype)
