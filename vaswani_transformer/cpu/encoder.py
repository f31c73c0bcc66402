"""Fast path of a prepared model's encoder.

B sources, S source tokens, H heads; d_k and d_v are the widths of a head's keys and values.
"""

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from ..attention import additive_mask
from ..embeddings import LearnedPositions, count_positions
from ..layers import VaswaniTransformerEncoderLayer
from ..stacks import VaswaniTransformerEncoder
from .layers import GROWTH, UnwrappedLayer, attend, embed_fn

RECORDED = ("output_attentions", "output_hidden_states")
PLAIN_INPUTS = {"input_ids", "attention_mask", "return_dict", *RECORDED}


class EncoderLayerPass(UnwrappedLayer):
    """Encoder layer over all tokens of each source."""

    def __call__(self, hidden_states: Tensor, mask: Tensor, num_sources: int) -> Tensor:
        """Return the next `hidden_states` (B S, d_model); `mask` (B H or 1, 1, S or 1) is added to the scores."""
        query, key_values = self.split_heads(self.project(hidden_states), num_sources)
        keys, values = key_values.flatten(0, -3).split_with_sizes(self.head_widths, -1)  # (B H, S, d_k), (B H, S, d_v)
        attended = attend(query, keys.transpose(1, 2), values, mask, self.scaling)  # (B H, S, d_v)
        hidden_states = self.norm(self.o_proj(self.merge_heads(attended, num_sources)).add_(hidden_states))
        inner = self.activation(self.fc1(hidden_states))
        return self.ffn_norm(self.fc2(inner).add_(hidden_states))


class PreparedEncoder:
    """Wrapper of the encoder with a fast path for sources of valid length, without intermediate outputs.

    The fast path calls no hooks on the layers. Other attributes are those of the encoder.

    Attributes:
        encodings: (P, d_model), encodings of the first positions, extended on demand.
    """

    def __init__(self, encoder: VaswaniTransformerEncoder) -> None:
        self.encoder, self.positions = encoder, encoder.input_embedding.positions
        self.fast_layers = [EncoderLayerPass(cast(VaswaniTransformerEncoderLayer, layer)) for layer in encoder.layers]
        self.embed = embed_fn(encoder.embed_tokens)
        self.encodings = torch.empty(0, encoder.config.d_model)

    def fast_pass(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the encoder's output (B, S, d_model) for `input_ids` (B, S); `attention_mask` is 0 at padding."""
        sources, length = input_ids.shape
        if length > len(encodings := self.encodings):
            self.encodings = encodings = self.positions.first_positions(length + GROWTH)
        rows = encodings[:length]
        mask = rows.new_zeros(1, 1, 1)
        if attention_mask is not None and not bool(attention_mask.all()):
            rows = nn.functional.embedding(count_positions(attention_mask), rows)
            mask = additive_mask(attention_mask.bool(), torch.float32)  # (B, S)
            mask = mask.repeat_interleave(self.encoder.config.num_heads, dim=0)[:, None]
        hidden_states = self.embed(input_ids, rows).flatten(0, 1)
        for layer in self.fast_layers:
            hidden_states = layer(hidden_states, mask, sources)
        return hidden_states.view(sources, length, -1)

    @functools.wraps(VaswaniTransformerEncoder.forward)
    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Return the encoder's output."""
        ids, mask, config = inputs.get("input_ids"), inputs.get("attention_mask"), self.encoder.config
        table = self.positions.table.num_embeddings if isinstance(self.positions, LearnedPositions) else None
        is_plain = (
            not args
            and PLAIN_INPUTS.issuperset(inputs)
            and ids is not None
            and ids.numel() > 0
            and (table is None or ids.shape[1] <= table)
            and (mask is None or mask.shape == ids.shape)
            and inputs.get("return_dict") is not False
            and not any(inputs.get(flag) or getattr(config, flag) for flag in RECORDED)
            and config._attn_implementation == "eager"
            and config.attention_window is None
            and not torch.is_autocast_enabled("cpu")
        )
        if not is_plain:
            return self.encoder(*args, **inputs)
        return BaseModelOutput(last_hidden_state=self.fast_pass(ids, mask))

    __call__ = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)
