"""Self-attention with the relative distance between two positions (Shaw et al. 2018).

B batch, H heads, T target, d_k and d_v the widths of a head, c the largest distance that differs from smaller ones.
"""

import torch
from torch import Tensor, nn

from .attention import SelfAttention
from .config import VaswaniTransformerConfig
from .embeddings import read_table


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


__all__ = ["RelativeSelfAttention"]
