"""Encoder and decoder: stacks of N layers over embedded texts (3.1).

B batch, S source, T target, k target rows per source row.
"""

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .config import VaswaniTransformerConfig
from .layers import (
    CrossAttention,
    InputEmbedding,
    ScaledEmbedding,
    SelfAttention,
    VaswaniTransformerDecoderLayer,
    VaswaniTransformerEncoderLayer,
    count_positions,
    padding_mask,
    text_positions,
)
from .pretrained import (
    CACHE,
    VaswaniTransformerPreTrainedModel,
    check_mask,
    embed_text,
    pop_cache,
    tensor_parallel_plan,
)
from .restricted import AttentionMask, window_mask


class VaswaniTransformerEncoder(VaswaniTransformerPreTrainedModel):
    """Encoder: a stack of N identical layers over the embedded source (3.1)."""

    is_stack = True
    _tp_plan = tensor_parallel_plan("self_attn")
    _fsdp_plan = {"layers.*": "free_full_weight"}
    _can_record_outputs = {"hidden_states": VaswaniTransformerEncoderLayer, "attentions": SelfAttention}

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = ScaledEmbedding(config)
        self.input_embedding = InputEmbedding(config)
        self.layers = nn.ModuleList(
            VaswaniTransformerEncoderLayer(config, layer_idx) for layer_idx in range(config.encoder_layers)
        )
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> BaseModelOutput:
        """Encode a source; the arguments are those of `VaswaniTransformerModel`.

        Returns:
            `last_hidden_state` (B, S, d_model), and on request `hidden_states` (N + 1 tensors) and `attentions`.
        """
        inputs_embeds = embed_text(self.embed_tokens, input_ids, inputs_embeds)  # (B, S, d_model)
        if input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        rows, length = inputs_embeds.shape[:2]
        check_mask(attention_mask, rows, length, "attention_mask", queries=length)

        max_position = None
        if position_ids is None:
            position_ids = text_positions(inputs_embeds, attention_mask)  # (B or 1, S)
            max_position = length
        if self.config.attention_window is None:
            mask = padding_mask(self.config, inputs_embeds, attention_mask)
        else:
            mask = window_mask(self.config, inputs_embeds, attention_mask)

        hidden_states = self.input_embedding(inputs_embeds, position_ids, max_position)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)  # (B, S, d_model)
        return BaseModelOutput(last_hidden_state=hidden_states)


def empty_cache(config: VaswaniTransformerConfig) -> EncoderDecoderCache:
    """Return an empty decoder cache; with an `attention_window` it keeps the r newest self-attention keys."""
    target_config = config
    if config.attention_window is not None:
        target_config = config.get_text_config(decoder=True)  # a copy
        target_config.sliding_window = config.attention_window + 1  # Transformers counts the token itself
    return EncoderDecoderCache(DynamicCache(config=target_config), DynamicCache(config=config))


def check_rows(rows: int, sources: int) -> None:
    """Raise ValueError unless the number of target rows is a multiple of that of source rows."""
    if rows % sources:
        raise ValueError(
            f"decoder_input_ids: rows do not match the source; got {rows} for {sources} source rows, expected a "
            f"multiple of {sources}. Pass the same number of target rows for each source row."
        )


class VaswaniTransformerDecoder(VaswaniTransformerPreTrainedModel):
    """Decoder: a stack of N identical layers over the embedded target, attending to the encoder's output (3.1).

    Subclasses override `layer_class`, `self_attention_mask` or `run_layers`, but not `forward`.
    """

    layer_class: type[nn.Module] = VaswaniTransformerDecoderLayer
    is_stack = True
    _no_split_modules = ["VaswaniTransformerDecoderLayer"]
    _tp_plan = tensor_parallel_plan("self_attn", "cross_attn")
    _fsdp_plan = {"layers.*": "free_full_weight"}
    _can_record_outputs = {
        "hidden_states": VaswaniTransformerDecoderLayer,
        "attentions": SelfAttention,
        "cross_attentions": CrossAttention,
    }

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = ScaledEmbedding(config)
        self.input_embedding = InputEmbedding(config)
        self.layers = nn.ModuleList(self.layer_class(config, layer_idx) for layer_idx in range(config.decoder_layers))
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode a target, or with a cache its next tokens.

        Args:
            encoder_hidden_states: (B, S, d_model), the encoder's output; None to skip cross-attention.
            encoder_attention_mask: (B, S), 0 at padding of the source.

            The others are those of `VaswaniTransformerModel` without `decoder_`.

        Returns:
            `last_hidden_state` (k B, T, d_model), `past_key_values`, and on request `hidden_states`, `attentions`
            and `cross_attentions`.
        """
        inputs_embeds = embed_text(self.embed_tokens, input_ids, inputs_embeds, prefix="decoder_")  # (k B, T, d_model)
        past_key_values = pop_cache(past_key_values, kwargs)
        if use_cache and past_key_values is None:
            past_key_values = empty_cache(self.config)

        # Positions and masks of the new tokens.
        position_ids, max_position = self.target_positions(inputs_embeds, attention_mask, position_ids, past_key_values)
        mask = self.self_attention_mask(inputs_embeds, attention_mask, past_key_values)
        source_mask = self.source_mask(inputs_embeds, encoder_hidden_states, encoder_attention_mask)

        hidden_states = self.input_embedding(inputs_embeds, position_ids, max_position)  # (k B, T, d_model)
        hidden_states = self.run_layers(
            hidden_states, mask, encoder_hidden_states, source_mask, past_key_values, **kwargs
        )
        cache: dict[str, Any] = {CACHE: past_key_values if use_cache else None}
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states, **cache)

    def run_layers(
        self,
        hidden_states: Tensor,
        mask: AttentionMask | None,
        memory: Tensor | None,
        source_mask: AttentionMask | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> Tensor:
        """Run all layers on `hidden_states` (k B, T, d_model) with `memory` (B, S, d_model).

        Args:
            mask, source_mask: masks of self-attention and cross-attention, in the attention implementation's format.
            **kwargs: further arguments of the layers.
        """
        for index, layer in enumerate(cast(Iterable[Any], self.layers)):
            # A layer's slot in the cache is its index in the list, also after layers were removed.
            layer.self_attn.layer_idx = index
            layer.cross_attn.layer_idx = index
            hidden_states = layer(
                hidden_states,
                mask,
                memory,
                encoder_attention_mask=source_mask,
                past_key_values=past_key_values,
                **kwargs,
            )  # (k B, T, d_model)
        return hidden_states

    def self_attention_mask(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: Cache | None
    ) -> AttentionMask | None:
        """Return the causal self-attention mask in the attention implementation's format."""
        target_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        if self.config.attention_window is not None:
            return window_mask(self.config, inputs_embeds, attention_mask, target_cache, is_causal=True)
        return create_causal_mask(self.config, inputs_embeds, attention_mask, target_cache)

    def target_positions(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, int | None]:
        """Return the positions (k B or 1, T) of the new tokens, and an exclusive upper bound if known."""
        rows, length = inputs_embeds.shape[:2]

        # The masks of a static cache, whose length is a tensor, may be wider than the tokens.
        past = 0 if cache is None else cache.get_seq_length()
        is_static = not isinstance(past, int) or (cache is not None and cache.is_compileable)
        is_expanded = isinstance(attention_mask, Tensor) and attention_mask.dim() == 4  # as for a static cache
        if not (is_static or is_expanded):
            check_mask(attention_mask, rows, past + length, "decoder_attention_mask")

        # The caller's positions, else those that the mask counts, else those after the cached tokens.
        if position_ids is not None:
            return position_ids, None
        if attention_mask is not None and attention_mask.dim() == 2:
            return count_positions(attention_mask)[:, -length:], attention_mask.shape[1]
        positions = text_positions(inputs_embeds, None)  # (1, T)
        if cache is None:
            return positions, length
        max_position = past + length if isinstance(past, int) else None
        return positions + past, max_position

    def source_mask(
        self, inputs_embeds: Tensor, encoder_hidden_states: Tensor | None, attention_mask: Tensor | None
    ) -> AttentionMask | None:
        """Return the cross-attention mask for the concatenated target rows of each source."""
        if encoder_hidden_states is None:
            return None
        rows = inputs_embeds.shape[0]
        sources, length = encoder_hidden_states.shape[:2]
        queries = inputs_embeds.shape[1] * max(1, rows // sources)
        check_mask(attention_mask, sources, length, "attention_mask", queries)
        if rows != sources:
            check_rows(rows, sources)
            inputs_embeds = inputs_embeds.reshape(sources, -1, inputs_embeds.shape[-1])  # (B, k T, d_model)
        return padding_mask(self.config, inputs_embeds, attention_mask, encoder_hidden_states)
