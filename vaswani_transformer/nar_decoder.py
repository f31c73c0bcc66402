"""Decoders over all positions of the target at once: no causal mask, no cache of self-attention.

B batch, H heads, S source, T target, k target rows of one source row. A cache that a caller gives holds the source's
keys and values only, so that several passes over one source compute them once.
"""

from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache

from .attention import SelfAttention, padding_mask
from .decoder import VaswaniTransformerDecoder
from .embeddings import text_positions
from .layers import VaswaniTransformerDecoderLayer


class NarDecoderLayer(VaswaniTransformerDecoderLayer):
    """The paper's decoder layer without a causal mask; a cache holds only cross-attention."""

    self_attention = SelfAttention

    def attend_to_target(
        self, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None, **kwargs: Any
    ) -> Tensor:
        """Apply self-attention to states (k B, T, d_model), without the cache."""
        return super().attend_to_target(hidden_states, attention_mask, None, **kwargs)


class NarDecoder(VaswaniTransformerDecoder):
    """The paper's decoder without a causal mask."""

    layer_class = NarDecoderLayer
    _no_split_modules = ["NarDecoderLayer"]

    def self_attention_mask(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: Cache | None
    ) -> Tensor | BlockMask | None:
        """Return the mask of padding, in the form that the attention implementation takes."""
        return padding_mask(self.config, inputs_embeds, attention_mask)

    def position_encodings(self, hidden_states: Tensor) -> Tensor:
        """Return PE (1, T, d_model) of the positions of `hidden_states` (k B, T, d_model), in their dtype."""
        length = hidden_states.shape[1]
        positions = text_positions(hidden_states, None)  # (1, T)
        return self.input_embedding.positions(positions, length).to(hidden_states.dtype)
