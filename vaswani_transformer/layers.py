"""The feed-forward network, the residual connection around a sub-layer, and the layers of both stacks (3.1, 3.3).

B batch, S source, T target, k target rows of one source row. The norm follows the residual connection ("post-norm"),
as in the paper: every sub-layer returns LayerNorm(x + Dropout(Sublayer(x))).
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
    """Equation (2): FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, the same at each position (3.3).

    Another activation and dropout after it are options; the paper has ReLU and no dropout there.
    """

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
    """LayerNorm(x + Dropout(Sublayer(x))) (3.1, 5.4)."""

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor, sublayer_output: Tensor) -> Tensor:
        return self.norm(hidden_states + self.dropout(sublayer_output))  # (B, S, d_model)


class VaswaniTransformerEncoderLayer(GradientCheckpointingLayer):
    """Self-attention and a feed-forward network, each with its residual and norm (3.1)."""

    def __init__(self, config: VaswaniTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer_idx)
        self.self_attn_add_norm = AddAndNorm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_add_norm = AddAndNorm(config)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: object) -> Tensor:
        """Map `hidden_states` (B, S, d_model) to the layer's output of the same shape."""
        attended, _ = self.self_attn(hidden_states, attention_mask, **kwargs)
        hidden_states = self.self_attn_add_norm(hidden_states, attended)
        return self.feed_forward_add_norm(hidden_states, self.feed_forward(hidden_states))


class VaswaniTransformerDecoderLayer(GradientCheckpointingLayer):
    """Masked self-attention, cross-attention and a feed-forward network, each with its residual and norm (3.1).

    Without `encoder_hidden_states` the layer skips cross-attention. A subclass sets another `self_attention`, or
    overrides how the target attends to itself (`attend_to_target`).
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
        **kwargs: object,
    ) -> Tensor:
        """Map states (k B, T, d_model) to the same shape, attending to `encoder_hidden_states` (B, S, d_model)."""
        hidden_states = self.attend_to_target(hidden_states, attention_mask, past_key_values, **kwargs)
        if encoder_hidden_states is not None:
            memory = (encoder_hidden_states, encoder_attention_mask, past_key_values)
            attended, _ = self.cross_attn(hidden_states, *memory, **kwargs)
            hidden_states = self.cross_attn_add_norm(hidden_states, attended)
        return self.feed_forward_add_norm(hidden_states, self.feed_forward(hidden_states))

    def attend_to_target(
        self, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None, **kwargs: Any
    ) -> Tensor:
        """Apply self-attention to states (k B, T, d_model)."""
        attended, _ = self.self_attn(hidden_states, attention_mask, past_key_values, **kwargs)
        return self.self_attn_add_norm(hidden_states, attended)
