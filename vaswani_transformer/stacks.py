"""Encoder and decoder: stacks of N layers over embedded texts (3.1), and the checks of their inputs.

B batch, S source, T target, k target rows per source row.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions, Seq2SeqLMOutput
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
from .pretrained import VaswaniTransformerPreTrainedModel, tensor_parallel_plan
from .restricted import window_mask

CACHE = "cache" if "cache" in Seq2SeqLMOutput.__annotations__ else "past_key_values"
"""Transformers' name of the cache in calls and outputs; `cache` since version 5.24."""


INPUT_SHAPES = {
    **dict.fromkeys(("inputs", "input_ids", "decoder_input_ids"), ("texts", "tokens")),
    **dict.fromkeys(("inputs_embeds", "decoder_inputs_embeds", "encoder_outputs"), ("texts", "tokens", "d_model")),
    **dict.fromkeys(("attention_mask", "decoder_attention_mask", "labels", "target_lengths"), None),
}
"""Dimensions of the inputs of `forward` and `generate()`; None: checked where the input is used."""


def check_inputs(**inputs: object) -> None:
    """Raise ValueError for an input in `INPUT_SHAPES` that is a list, or lacks the batch dimension.

    A tuple of encoder outputs passes.
    """
    for name, value in inputs.items():
        shape = INPUT_SHAPES.get(name)
        if isinstance(value, Tensor):
            if shape is None or value.dim() == len(shape):
                continue
            got = f"shape {tuple(value.shape)}"
        elif name in INPUT_SHAPES.keys() - {"encoder_outputs"} and isinstance(value, (list, tuple)):
            got = f"a {type(value).__name__}"
        else:
            continue
        expected = "a tensor" if shape is None else f"a tensor of shape ({', '.join(shape)})"
        raise ValueError(
            f"{name}: not a batch of texts; got {got}, expected {expected}. Pass one text as a batch of 1."
        )


def check_not_empty(name: str, texts: Tensor | None) -> None:
    """Raise ValueError if `texts` (B, S, ...) has no text or no token."""
    if texts is not None and 0 in texts.shape[:2]:
        raise ValueError(
            f"{name}: empty batch or sequence; got shape {tuple(texts.shape[:2])}, expected at least one text of at "
            "least one token. Skip empty batches, and end an empty text with its end token."
        )


def check_mask(attention_mask: object, rows: int, tokens: int, name: str, queries: int | None = None) -> None:
    """Raise ValueError unless a mask has the shape (rows, tokens), or with `queries` is a valid 4D mask.

    Masks that are neither tensors nor lists pass.
    """
    check_inputs(**{name: attention_mask})
    if not isinstance(attention_mask, Tensor) or attention_mask.shape == (rows, tokens):
        return
    shape = tuple(attention_mask.shape)
    expected = f"{(rows, tokens)}, a number for each token"
    if queries is not None:
        if len(shape) == 4 and shape[0] in (1, rows) and shape[2] in (1, queries) and shape[3] == tokens:
            return
        expected += f", or {(rows, 1, 1, tokens)}"
    raise ValueError(
        f"{name}: does not fit the tokens; got shape {shape}, expected {expected}. Pass the mask of these texts."
    )


def check_rows(rows: int, sources: int) -> None:
    """Raise ValueError unless the number of target rows is a multiple of that of source rows."""
    if rows % sources:
        raise ValueError(
            f"decoder_input_ids: rows do not match the source; got {rows} for {sources} source rows, expected a "
            f"multiple of {sources}. Pass the same number of target rows for each source row."
        )


def embed_text(
    embed_tokens: nn.Module, input_ids: Tensor | None, inputs_embeds: Tensor | None, prefix: str = ""
) -> Tensor:
    """Return the scaled embeddings (B, S, d_model) of `input_ids` (B, S), or `inputs_embeds` if given."""
    if (input_ids is None) == (inputs_embeds is None):
        got = "neither" if input_ids is None else "both"
        raise ValueError(f"Pass exactly one of {prefix}input_ids and {prefix}inputs_embeds; got {got}.")
    check_inputs(**{f"{prefix}input_ids": input_ids, f"{prefix}inputs_embeds": inputs_embeds})
    if inputs_embeds is not None:
        check_not_empty(f"{prefix}inputs_embeds", inputs_embeds)
        return inputs_embeds
    check_not_empty(f"{prefix}input_ids", input_ids)
    return embed_tokens(input_ids)


def as_encoder_output(outputs: Mapping[str, Any] | Sequence[Any] | Tensor) -> BaseModelOutput:
    """Convert encoder outputs, which may be a tuple, a dictionary or the last state alone, to a `BaseModelOutput`."""
    if isinstance(outputs, BaseModelOutput):
        check_not_empty("encoder_outputs", outputs.last_hidden_state)
        return outputs
    if isinstance(outputs, Tensor):
        outputs = (outputs,)

    # The fields by name, from a dictionary or in the order of a tuple.
    names = ("last_hidden_state", "hidden_states", "attentions")
    values: dict[str, Any]
    if isinstance(outputs, Mapping):
        values = {name: outputs.get(name) for name in names}
        got = f"keys {sorted(outputs)}"
    else:
        values = dict(zip(names, outputs, strict=False))
        got = f"a {type(outputs).__name__} of {len(outputs)}"

    states = values.get("last_hidden_state")
    if not isinstance(states, Tensor):
        raise ValueError(
            f"encoder_outputs: last_hidden_state is missing; got {got}, expected the output of the model's encoder. "
            "Pass what get_encoder() returns."
        )
    check_inputs(encoder_outputs=states)
    check_not_empty("encoder_outputs", states)
    return BaseModelOutput(**cast(Any, values))


def pop_cache(past_key_values: Cache | None, kwargs: dict[str, Any]) -> Cache | None:
    """Remove the cache from `kwargs` and return it, under either of Transformers' names.

    A nonempty `cache` takes precedence over `past_key_values`, since PEFT's prefix tuning passes its prefix under the
    second name at every step of `generate()`.
    """
    cache = kwargs.pop("cache", None)
    is_empty = cache is None or (past_key_values is not None and cache.get_seq_length() == 0)
    return past_key_values if is_empty else cache


def empty_cache(config: VaswaniTransformerConfig) -> EncoderDecoderCache:
    """Return an empty decoder cache; with an `attention_window` it keeps the r newest self-attention keys."""
    target_config = config
    if config.attention_window is not None:
        target_config = config.get_text_config(decoder=True)  # a copy
        target_config.sliding_window = config.attention_window + 1  # Transformers counts the token itself
    return EncoderDecoderCache(DynamicCache(config=target_config), DynamicCache(config=config))


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
        mask: Tensor | None,
        memory: Tensor | None,
        source_mask: Tensor | None,
        past_key_values: Cache | None,
        *,
        further: tuple[Tensor, ...] = (),
        **kwargs: Any,
    ) -> Tensor:
        """Run all layers on `hidden_states` (k B, T, d_model) with `memory` (B, S, d_model).

        Args:
            mask, source_mask: masks of self-attention and cross-attention, in the attention implementation's format.
            further: positional arguments of the layers after the memory; reentrant gradient checkpointing gives a
                gradient to positional arguments only.
            **kwargs: other arguments of the layers.
        """
        for index, layer in enumerate(cast(Iterable[Any], self.layers)):
            # A layer's slot in the cache is its index in the list, also after layers were removed.
            layer.self_attn.layer_idx = index
            layer.cross_attn.layer_idx = index
            hidden_states = layer(
                hidden_states,
                mask,
                memory,
                *further,
                encoder_attention_mask=source_mask,
                past_key_values=past_key_values,
                **kwargs,
            )  # (k B, T, d_model)
        return hidden_states

    def self_attention_mask(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: Cache | None
    ) -> Tensor | None:
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
    ) -> Tensor | None:
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
