"""The source by the shortest way through a prepared encoder.

B sources, S source tokens, H heads, d_k and d_v the widths of a head's keys and values.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from .beam_cache import ROOM
from .embeddings import LearnedPositions, count_positions
from .encoder import VaswaniTransformerEncoder
from .next_token import FlatLayer, attend, embedding_of

# Whether a call of `generate()` asks, which wants the encoder's output and nothing on the way to it.
GENERATES: ContextVar[bool] = ContextVar("generates", default=False)
PLAIN_INPUTS = {"input_ids", "attention_mask", "return_dict", "output_attentions", "output_hidden_states"}


class SourceStates(FlatLayer):
    """What a layer of a prepared encoder makes of all tokens of each source."""

    def __call__(self, hidden_states: Tensor, mask: Tensor, num_sources: int) -> Tensor:
        """`hidden_states` (B S, d_model), also what is returned; to scores is added `mask` (B H or 1, 1, S or 1)."""
        query, keys_and_values = self.by_head(self.project(hidden_states), num_sources)
        keys_and_values = keys_and_values.flatten(0, -3)  # (B H, S, d_k + d_v)
        keys, values = keys_and_values.split_with_sizes(self.head_widths, -1)
        attended = attend(query, keys.transpose(1, 2), values, mask, self.scaling)  # (B H, S, d_v)
        hidden_states = self.norm(hidden_states + self.combine(self.by_token(attended, num_sources)))
        return self.norm_fed(hidden_states + self.feed_forward(hidden_states))


class Encoding:
    """What `generate()` wants of a prepared encoder, by the shortest way.

    Attributes:
        positions: (P, d_model), the encodings of the first positions, as many as were needed so far.
    """

    def __init__(self, encoder: VaswaniTransformerEncoder) -> None:
        self.config = encoder.config
        self.layers = [SourceStates(cast(Any, layer)) for layer in encoder.layers]
        self.embed = embedding_of(encoder.embed_tokens)
        self.encode = encoder.input_embedding.positions
        self.positions = torch.empty(0, encoder.config.d_model)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The encoder's output (B, S, d_model) for `input_ids` (B, S); `attention_mask` (B, S) is 0 at padding."""
        sources, length = input_ids.shape
        if length > len(positions := self.positions):
            self.positions = positions = self.encode.first_positions(length + ROOM)
        rows = positions[:length]
        mask = rows.new_zeros(1, 1, 1)
        if attention_mask is not None and not bool(attention_mask.all()):
            rows = nn.functional.embedding(count_positions(attention_mask), rows)
            mask = rows.new_zeros(()).where(attention_mask.bool(), torch.finfo(torch.float32).min)  # (B, S)
            mask = mask.repeat_interleave(self.config.num_heads, dim=0)[:, None]
        hidden_states = self.embed(input_ids, rows).flatten(0, 1)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, sources)
        return hidden_states.view(sources, length, -1)

    def takes(self, inputs: dict[str, Any]) -> bool:
        """Whether a call gives sources alone, which are not longer than the positions, and asks for nothing else."""
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        flags = ("output_attentions", "output_hidden_states")
        longest = self.encode.table.num_embeddings if isinstance(self.encode, LearnedPositions) else None
        return (
            PLAIN_INPUTS.issuperset(inputs)
            and ids is not None
            and ids.numel() > 0
            and (longest is None or ids.shape[1] <= longest)
            and (mask is None or mask.shape == ids.shape)
            and inputs.get("return_dict") is not False
            and not any(inputs.get(flag) or getattr(self.config, flag) for flag in flags)
            and self.config._attn_implementation == "eager"
            and not torch.is_autocast_enabled("cpu")
        )


def in_place_of(usual: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`functools.wraps`, with a signature worked out once: `generate()` asks for several of them in each call."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(function, usual)
        cast(Any, function).__signature__ = inspect.signature(usual)
        return function

    return mark


def flatten_encoder(encoder: VaswaniTransformerEncoder) -> None:
    """Have `generate()` take the shortest way through an encoder whose projections are joined.

    Its class stays: Transformers knows by that which outputs it can record.
    """
    flat, usual = Encoding(encoder), encoder.forward

    @in_place_of(usual)
    def forward(*args: Any, **inputs: Any) -> Any:
        if args or not GENERATES.get() or not flat.takes(inputs):
            return usual(*args, **inputs)
        return BaseModelOutput(last_hidden_state=cast(Any, flat(inputs["input_ids"], inputs.get("attention_mask"))))

    cast(Any, encoder).forward = forward


__all__ = ["flatten_encoder", "in_place_of"]
