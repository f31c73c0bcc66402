"""What all models of the package share, and the two stacks of layers, each a model of its own (3.1).

B batch, S source, T target, k target rows of one source row.
"""

import copy
import os
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import CausalSelfAttention, CrossAttention, SelfAttention
from .config import VaswaniTransformerConfig
from .embeddings import InputEmbedding, ScaledEmbedding, count_positions
from .layers import VaswaniTransformerDecoderLayer, VaswaniTransformerEncoderLayer

_ATTENTION_TP_PLAN = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_FEED_FORWARD_TP_PLAN = {"layers.*.feed_forward.fc1": "colwise", "layers.*.feed_forward.fc2": "rowwise"}


# What Transformers reads of a model under these names, and the versions that are known to.
KNOWN_VERSIONS = "5.17 to 5.23"
PRIVATE_NAMES: dict[type, tuple[str, ...]] = {
    PreTrainedConfig: ("_attn_implementation", "_auto_class"),
    PreTrainedModel: (
        "_apply",
        "_auto_class",
        "_can_compile_fullgraph",
        "_can_record_outputs",
        "_fsdp_plan",
        "_init_weights",
        "_input_embed_layer",
        "_no_split_modules",
        "_skip_keys_device_placement",
        "_supports_attention_backend",
        "_supports_flash_attn",
        "_supports_flex_attn",
        "_supports_sdpa",
        "_tied_weights_keys",
        "_tp_plan",
    ),
}


def check_private_names() -> None:
    """Check that Transformers still has what models of this package set or read of it.

    Raises:
        RuntimeError: a name is gone.
    """
    owned = [(owner, name) for owner, names in PRIVATE_NAMES.items() for name in names]
    if missing := [f"{owner.__name__}.{name}" for owner, name in owned if not hasattr(owner, name)]:
        raise RuntimeError(
            f"This Transformers has no {', '.join(missing)}, by which models are initialized, split and recorded; "
            f"install Transformers {KNOWN_VERSIONS}."
        )


def layer_plan(*attentions: str) -> dict[str, str]:
    """The tensor-parallel plan of a stack: whole heads and whole inner units on each device, tokens by row."""
    plan = {f"layers.*.{name}.{part}": style for name in attentions for part, style in _ATTENTION_TP_PLAN.items()}
    return {"embed_tokens": "embedding_rowwise"} | plan | _FEED_FORWARD_TP_PLAN


class VaswaniTransformerPreTrainedModel(PreTrainedModel):
    """Initialisation, and what Transformers is to know of every model of the package."""

    config_class = VaswaniTransformerConfig
    config: VaswaniTransformerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _own_auto_class = "AutoModel"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VaswaniTransformerEncoderLayer", "VaswaniTransformerDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: VaswaniTransformerConfig, *args: Any, **kwargs: Any) -> None:
        check_private_names()
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """tensor2tensor's initialisation; the paper gives none.

        Projections Glorot-uniform, embeddings and learned positions normal with standard deviation d_model^-0.5,
        biases 0, norms 1 and 0.
        """
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | None = None) -> None:
        """Have `save_pretrained` add the package's code, so that `auto_class` loads it with trust_remote_code=True.

        None: the Auto class that the model is registered with. The configuration is registered along with it.
        """
        super().register_for_auto_class(auto_class or cls._own_auto_class)
        cast(type[VaswaniTransformerConfig], cls.config_class).register_for_auto_class()

    def with_code(self) -> Self:
        """This model, over the same weights, whose `save_pretrained` adds the package's code and `auto_map`.

        A shallow copy that counts as registered for its Auto class; this model, its class and its configuration stay
        as they are, whatever becomes of the copy.
        """
        published, config = cast(Any, copy.copy(self)), cast(Any, copy.copy(self.config))
        published.config, config.auto_map = config, {}
        published._auto_class, config._auto_class = self._own_auto_class, "AutoConfig"
        published.is_remote_code = lambda: True  # a method of the class otherwise, which is not registered
        return published

    def push_to_hub(self, repo_id: str, **settings: Any) -> str:
        """Publish the model with the code that loads it, in one commit; the settings are those of every model."""
        return super(VaswaniTransformerPreTrainedModel, self.with_code()).push_to_hub(repo_id, **settings)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As every model: without the code, unless `register_for_auto_class()` or `push_to_hub=True` asks for it.

        With the code goes a whole model's pipeline. A folder without the code does not name it either, whatever folder
        the model came from.
        """
        if kwargs.get("push_to_hub") and not self.is_remote_code():
            return self.with_code().save_pretrained(save_directory, *args, **kwargs)
        self.config.__dict__.pop("custom_pipelines", None)
        if not self.is_remote_code():
            self.config.__dict__.pop("auto_map", None)
        elif self.can_generate():
            from .pipeline import PUBLISHED_PIPELINES  # here alone; it also has the Hub's loader copy the file

            self.config.custom_pipelines = PUBLISHED_PIPELINES
        return super().save_pretrained(save_directory, *args, **kwargs)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """A small batch for tracing: two sources of five tokens and two targets."""
        tokens = torch.arange(10, device=self.device).view(2, 5) % self.config.vocab_size
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "decoder_input_ids": tokens}


def one_input(input_ids: Tensor | None, inputs_embeds: Tensor | None, prefix: str = "") -> None:
    """Refuse a call with no input or with two."""
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither was" if input_ids is None else "both were"
        raise ValueError(f"Give exactly one of {prefix}input_ids and {prefix}inputs_embeds; {given} given.")


class VaswaniTransformerEncoder(VaswaniTransformerPreTrainedModel):
    """A stack of N identical layers over the embedded source (3.1)."""

    _tp_plan = layer_plan("self_attn")
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
        """Encode a source.

        Args:
            input_ids: (B, S) token ids.
            attention_mask: (B, S), 0 where a token is padding, on either side; None: every token counts.
            position_ids: (B, S); None: counted over unmasked tokens.
            inputs_embeds: (B, S, d_model), scaled embeddings in place of `input_ids`.

        Returns:
            `last_hidden_state` (B, S, d_model), and on request `hidden_states` (N + 1 of them) and `attentions`.

        Raises:
            ValueError: neither or both of `input_ids` and `inputs_embeds`; a source longer than learned positions.
        """
        one_input(input_ids, inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)  # (B, S, d_model)
        length = inputs_embeds.shape[1]
        bound = length if position_ids is None else None
        if position_ids is None and attention_mask is not None and attention_mask.dim() == 2:
            position_ids = count_positions(attention_mask)  # (B, S)
        elif position_ids is None:
            position_ids = torch.arange(length, device=inputs_embeds.device).unsqueeze(0)  # (1, S)
        mask = create_bidirectional_mask(self.config, inputs_embeds, attention_mask)
        hidden_states = self.input_embedding(inputs_embeds, position_ids, bound)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)  # (B, S, d_model)
        return BaseModelOutput(last_hidden_state=hidden_states)


class VaswaniTransformerDecoder(VaswaniTransformerPreTrainedModel):
    """A stack of N identical layers over the embedded target, which looks back at the encoder's output (3.1)."""

    _tp_plan = layer_plan("self_attn", "cross_attn")
    _fsdp_plan = {"layers.*": "free_full_weight"}
    _can_record_outputs = {
        "hidden_states": VaswaniTransformerDecoderLayer,
        "attentions": OutputRecorder(CausalSelfAttention, index=1),
        "cross_attentions": OutputRecorder(CrossAttention, index=1),
    }

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = ScaledEmbedding(config)
        self.input_embedding = InputEmbedding(config)
        self.layers = nn.ModuleList(
            VaswaniTransformerDecoderLayer(config, layer_idx) for layer_idx in range(config.decoder_layers)
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
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode a target, or with a cache its next tokens.

        Args:
            input_ids: (k B, T) token ids, a target shifted right; with a cache those that it does not hold yet.
            attention_mask: (k B, cached + T), 0 where a target token is padding; None: every token counts.
            position_ids: (k B, T); None: counted over unmasked tokens.
            encoder_hidden_states: (B, S, d_model), the encoder's output; None leaves cross-attention out. Row i of
                the target belongs to source i // k.
            encoder_attention_mask: (B, S), 0 where a source token is padding.
            past_key_values: keys and values of the earlier tokens and of the source, which the call extends.
            inputs_embeds: (k B, T, d_model), scaled embeddings in place of `input_ids`.
            use_cache: whether to return a cache; None: as the configuration says.

        Returns:
            `last_hidden_state` (k B, T, d_model), `past_key_values`, and on request `hidden_states`, `attentions`
            and `cross_attentions`.

        Raises:
            ValueError: neither or both of `input_ids` and `inputs_embeds`; a target longer than learned positions;
                target rows that are no multiple of the source rows.
        """
        one_input(input_ids, inputs_embeds, prefix="decoder_")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)  # (k B, T, d_model)
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        position_ids, bound = self.target_positions(inputs_embeds, attention_mask, position_ids, past_key_values)
        is_pair = isinstance(past_key_values, EncoderDecoderCache)
        target_cache = past_key_values.self_attention_cache if is_pair else past_key_values
        mask = create_causal_mask(self.config, inputs_embeds, attention_mask, target_cache)
        source_mask = self.source_mask(inputs_embeds, encoder_hidden_states, encoder_attention_mask)
        hidden_states = self.input_embedding(inputs_embeds, position_ids, bound)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                mask,
                encoder_hidden_states,
                encoder_attention_mask=source_mask,
                past_key_values=past_key_values,
                **kwargs,
            )  # (k B, T, d_model)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values if use_cache else None
        )

    def target_positions(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, int | None]:
        """The positions (k B or 1, T) of the tokens at hand, and a bound on them where one is known."""
        if position_ids is not None:
            return position_ids, None
        length = inputs_embeds.shape[1]
        if attention_mask is not None and attention_mask.dim() == 2:
            return count_positions(attention_mask)[:, -length:], attention_mask.shape[1]
        positions = torch.arange(length, device=inputs_embeds.device).unsqueeze(0)  # (1, T)
        return (positions, length) if cache is None else (positions + cache.get_seq_length(), None)

    def source_mask(
        self, inputs_embeds: Tensor, encoder_hidden_states: Tensor | None, attention_mask: Tensor | None
    ) -> Tensor | BlockMask | None:
        """The mask of cross-attention, whose queries are all target rows of a source side by side."""
        if encoder_hidden_states is None:
            return None
        rows, sources = inputs_embeds.shape[0], encoder_hidden_states.shape[0]
        if rows != sources:
            if rows % sources:
                raise ValueError(
                    f"The target has {rows} rows and the source {sources}; give each source row the same number of "
                    "target rows, or one row each."
                )
            inputs_embeds = inputs_embeds.reshape(sources, -1, inputs_embeds.shape[-1])  # (B, k T, d_model)
        return create_bidirectional_mask(self.config, inputs_embeds, attention_mask, encoder_hidden_states)


__all__ = [
    "VaswaniTransformerDecoder",
    "VaswaniTransformerEncoder",
    "VaswaniTransformerPreTrainedModel",
]
