"""The encoder-decoder of the paper, and the same with its output projection and its loss (3.1, 3.4, 5.4).

B batch, S source, T target, k target rows of one source row, V vocabulary.
"""

from typing import Any, Self, Unpack, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils import TransformersKwargs, can_return_tuple

from .config import VaswaniTransformerConfig
from .embeddings import ScaledEmbedding
from .generation import PaperBeamSearch
from .loss import cross_entropy, projected_cross_entropy
from .stacks import (
    VaswaniTransformerDecoder,
    VaswaniTransformerEncoder,
    VaswaniTransformerPreTrainedModel,
)


def shift_right(labels: Tensor, config: VaswaniTransformerConfig) -> Tensor:
    """`labels` (B, T) "offset by one position" (3.1): the start token, then all but the last; -100 becomes padding.

    Raises:
        ValueError: the configuration has no start token or no padding token.
    """
    if config.target_start_token_id is None or config.pad_token_id is None:
        raise ValueError(
            f"bos_token_id ({config.bos_token_id}), decoder_start_token_id ({config.decoder_start_token_id}) and "
            f"pad_token_id ({config.pad_token_id}) leave labels without a start or without padding; set pad_token_id "
            "and one of the other two, or give decoder_input_ids."
        )
    shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=config.target_start_token_id)  # (B, T)
    return shifted.masked_fill(shifted == -100, config.pad_token_id)


class VaswaniTransformerModel(VaswaniTransformerPreTrainedModel):
    """Encoder and decoder over one embedding matrix (3.1, 3.4), without the output projection."""

    _input_embed_layer = "shared"
    _tp_plan = {"shared": "embedding_rowwise"}
    _tied_weights_keys = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config)
        self.shared = ScaledEmbedding(config)
        self.encoder = VaswaniTransformerEncoder(config)
        self.decoder = VaswaniTransformerDecoder(config)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Source and target share their embeddings also where `tie_word_embeddings` frees the output projection."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Put `value`, best another `ScaledEmbedding`, in place of the shared one, and its weight into both stacks."""
        self.shared = cast(ScaledEmbedding, value)
        for stack in (self.encoder, self.decoder):
            stack.embed_tokens.weight = self.shared.weight
            stack.embed_tokens.num_embeddings = self.shared.num_embeddings

    def refuse_idle_adapter(self) -> None:
        """No token passes through `shared`; of adapters on it PEFT ties trainable tokens alone to the stacks."""
        if isinstance(self.shared, nn.Embedding):
            return
        if not all(hasattr(module, "token_adapter") for module in (self.shared, self.encoder.embed_tokens)):
            raise ValueError(
                f"`shared` is wrapped in a {type(self.shared).__name__}, which would learn nothing: both stacks embed "
                'with modules of their own. Give PEFT modules_to_save=["embed_tokens"] without ensure_weight_tying '
                "or, where the output projection is tied, trainable_token_indices."
            )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode a source and decode a target over it.

        Args:
            input_ids: (B, S) source token ids.
            attention_mask: (B, S), 0 where a source token is padding, on either side; None: every token counts.
            decoder_input_ids: (k B, T) target token ids, shifted right; row i belongs to source i // k.
            decoder_attention_mask: (k B, cached + T), 0 where a target token is padding; None: every token counts.
            encoder_outputs: what the encoder returned for the source, in place of running it again.
            past_key_values: keys and values of the earlier target tokens and of the source.
            inputs_embeds: (B, S, d_model), scaled embeddings in place of `input_ids`.
            decoder_inputs_embeds: (k B, T, d_model), scaled embeddings in place of `decoder_input_ids`.
            decoder_position_ids: (k B, T); None: counted over unmasked tokens.
            position_ids: (B, S) positions of the source; None: counted over unmasked tokens.
            use_cache: whether to return a cache; None: as the configuration says.

        Returns:
            `last_hidden_state` (k B, T, d_model), `encoder_last_hidden_state` (B, S, d_model), `past_key_values`, and
            on request hidden states and attentions of both stacks.

        Raises:
            ValueError: as the stacks raise it; an adapter on `shared`.
        """
        self.refuse_idle_adapter()
        position_ids = kwargs.pop("position_ids", None)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            names = ("last_hidden_state", "hidden_states", "attentions")
            given: dict[str, Any] = dict(zip(names, encoder_outputs, strict=False))
            encoder_outputs = BaseModelOutput(**given)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


def is_plain(projection: nn.Module) -> bool:
    """Whether a projection is its weight and no more: no adapter, no hook, not split by tensor parallelism."""
    has_hooks = hasattr(projection, "_hf_hook") or bool(projection._forward_hooks or projection._forward_pre_hooks)
    return type(projection) is nn.Linear and not isinstance(projection.weight, DTensor) and not has_hooks


class VaswaniTransformerForConditionalGeneration(VaswaniTransformerPreTrainedModel, PaperBeamSearch, GenerationMixin):
    """The whole model of the paper: encoder, decoder and the projection to the vocabulary (Figure 1)."""

    _own_auto_class = "AutoModelForSeq2SeqLM"
    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config)
        self.model = VaswaniTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def with_code(self) -> Self:
        """The same whose code is also found by AutoModel, which loads the body alone."""
        published, body = super().with_code(), type(self.model)
        if body.__module__ == type(self).__module__:  # else a subclass of somebody's own, saved without this file
            published.config.auto_map["AutoModel"] = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
        return published

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """`labels` (B, T) shifted right, as a data collator wants it; see `shift_right`."""
        return shift_right(labels, self.config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Logits of a target's next tokens, or the loss of a target.

        Args:
            labels: (B, T) target token ids with their end token, not shifted; -100 where there is nothing to learn.
                Without `decoder_input_ids` they make them.
            logits_to_keep: the last so many target positions to compute logits of, or their indices; 0 for all.
            skip_logits: whether to leave `logits` out where there are labels; None: in training mode.
            num_items_in_batch: the number of target tokens by which the summed loss is divided; None: those of
                `labels`.

            The others are those of `VaswaniTransformerModel`.

        Returns:
            `loss`, where there are labels: the mean in nats a target token, label-smoothed in training mode, plain
            in evaluation mode, so that its exponential is the paper's perplexity; 0 for labels without a token.
            `logits` (k B, T, V), None where they are skipped. The rest as `VaswaniTransformerModel` returns it.

        Raises:
            ValueError: as the stacks raise it; labels without a start token to shift them by.
        """
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        if labels is not None:
            use_cache = False if use_cache is None else use_cache
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = shift_right(labels, self.config)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_position_ids=decoder_position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        loss, logits = self.loss_and_logits(
            outputs.last_hidden_state, labels, logits_to_keep, skip_logits, num_items_in_batch
        )
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def loss_and_logits(
        self,
        hidden_states: Tensor,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        skip_logits: bool | None,
        num_items_in_batch: Tensor | int | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What `forward` returns first, from the decoder's output (k B, T, d_model)."""
        skip_logits = labels is not None and (self.training if skip_logits is None else skip_logits)
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        logits = None
        if not skip_logits:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states if keeps_all else hidden_states[:, kept])  # (k B, T, V)
        if labels is None:
            return None, logits
        smoothing = self.config.label_smoothing if self.training else 0.0
        if logits is not None and keeps_all:
            return cross_entropy(logits, labels, smoothing, num_items_in_batch), logits
        if not is_plain(self.lm_head):
            return cross_entropy(self.lm_head(hidden_states), labels, smoothing, num_items_in_batch), logits
        loss = projected_cross_entropy(hidden_states, self.lm_head.weight, labels, smoothing, num_items_in_batch)
        return loss, logits


__all__ = ["VaswaniTransformerForConditionalGeneration", "VaswaniTransformerModel"]
