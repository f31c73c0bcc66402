"""Feed-forward network, residual connection with post-norm, and the layers of both stacks (3.1, 3.3).

B batch, S source, T target, k target rows per source row.
"""

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import CausalSelfAttention, CrossAttention, SelfAttention
from .config import VaswaniTransformerConfig
from .embeddings import Dropout


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
