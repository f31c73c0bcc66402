"""The paper's model (Figure 1), and the base classes `EncoderDecoder` and `ProjectedModel` of every model family.

    source                 target, shifted right
      |                            |
    embedding + positions  embedding + positions       InputEmbedding
      |                            |
    N encoder layers ----> N decoder layers            VaswaniTransformerEncoder, VaswaniTransformerDecoder
                                   |
                           output projection           ProjectedModel; its loss is in `loss`

B batch, S source, T target, k target rows per source row, V vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import TransformersKwargs, can_return_tuple

from .config import VaswaniTransformerConfig
from .generation import PaperBeamSearch
from .layers import ScaledEmbedding, is_unwrapped
from .loss import (
    cross_entropy,
    projected_cross_entropy,
    summed_cross_entropy,
    token_cross_entropy,
    without_padding,
)
from .pretrained import VaswaniTransformerPreTrainedModel
from .stacks import CACHE, VaswaniTransformerDecoder, VaswaniTransformerEncoder, as_encoder_output, pop_cache


class EncoderDecoder(VaswaniTransformerPreTrainedModel):
    """Encoder and decoder with a shared embedding matrix (3.1, 3.4), without the output projection.

    Subclasses with a different decoder set `decoder_class`.
    """

    decoder_class: ClassVar[type[VaswaniTransformerDecoder]] = VaswaniTransformerDecoder
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
        self.decoder = self.decoder_class(config)
        self.post_init()

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
            attention_mask: (B, S), 0 at padding, which may be on either side; None for no padding.
            decoder_input_ids: (k B, T) target token ids, shifted right; with a cache only new ones. Row i belongs to
                source i // k.
            decoder_attention_mask: (k B, cached + T), 0 at padding; None for no padding.
            encoder_outputs: output of the encoder; None to run it.
            past_key_values: cached keys and values of earlier target tokens and of the source, which the call extends;
                `cache` is an alias, the name in Transformers since 5.24.
            inputs_embeds: (B, S, d_model), scaled embeddings instead of `input_ids`.
            decoder_inputs_embeds: (k B, T, d_model), scaled embeddings instead of `decoder_input_ids`.
            decoder_position_ids: (k B, T) target positions; None to count unmasked tokens.
            position_ids: (B, S) source positions; None to count unmasked tokens.
            use_cache: whether to return a cache; None for the configuration's default.

        Returns:
            `last_hidden_state` (k B, T, d_model), `encoder_last_hidden_state` (B, S, d_model), `past_key_values`, and
            on request hidden states and attentions of both stacks.

        Raises:
            ValueError: the inputs of encoder or decoder are inconsistent, or an adapter is on `shared` or cannot be
                loaded by PEFT.
        """
        past_key_values = pop_cache(past_key_values, cast(dict[str, Any], kwargs))

        # The encoder, unless this is a later step of a search.
        position_ids = kwargs.pop("position_ids", None)
        encoder_outputs = self.encode(
            input_ids,
            attention_mask,
            encoder_outputs,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **cast(dict[str, Any], kwargs),
        )

        # The decoder over the encoder's output.
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            **{CACHE: getattr(decoder_outputs, CACHE)},
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Run the encoder, unless `encoder_outputs` are given; arguments as in `forward`."""
        if encoder_outputs is None:
            self.check_adapters()
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **inputs
            )
        return as_encoder_output(encoder_outputs)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Tie source and target embeddings even with `tie_word_embeddings=False`."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Use a different module for source and target embeddings, or tie both stacks to the resized `shared`."""
        is_different = value is not self.shared
        self.shared = cast(ScaledEmbedding, value)
        for stack in (self.encoder, self.decoder):
            if is_different:
                stack.embed_tokens = self.shared
            stack.embed_tokens.weight = self.shared.weight
            stack.embed_tokens.num_embeddings = self.shared.num_embeddings

    def check_adapters(self) -> None:
        """Raise ValueError for an adapter on `shared`, which would learn nothing, or one that PEFT cannot load.

        PEFT tells a model nothing of its adapters, so this is called where a source comes in.
        """
        norm: Any = self.encoder.layers[0].self_attn_add_norm
        is_nested = hasattr(norm, "modules_to_save") and any(name == "norm" for name, _ in norm.named_children())
        if is_nested:
            raise ValueError(
                "modules_to_save: PEFT cannot load a wrapped module inside a wrapped module; got a name that matches "
                '"add_norm" and "add_norm.norm", expected one that matches a single module. Use ["add_norm.norm"].'
            )
        # PEFT ties trainable tokens of `shared` to those of the stacks, so they learn.
        tables = (self.shared, self.encoder.embed_tokens)
        trains_tokens = all(hasattr(table, "token_adapter") for table in tables)
        if not isinstance(self.shared, nn.Embedding) and not trains_tokens:
            raise ValueError(
                f"`shared` is wrapped in a {type(self.shared).__name__}, which would learn nothing: encoder and "
                'decoder embed with their own modules. Use modules_to_save=["embed_tokens"] without '
                "ensure_weight_tying or, if the output projection is tied, trainable_token_indices."
            )


class ProjectedModel(VaswaniTransformerPreTrainedModel):
    """Base class of models with the tied output projection (3.4) and the loss (5.4).

    Subclasses set `body_class`, and implement `forward` and decoding.

    Attributes:
        is_autoregressive: whether the model predicts a target from left to right.
        has_likelihood: whether the loss is -log p(target | source) per token, so that its exponential is a perplexity.
        takes_nan_handler: whether `generate()` supports the setting `nan_handler`.
    """

    body_class: ClassVar[type[EncoderDecoder]] = EncoderDecoder
    is_autoregressive: ClassVar[bool] = True
    has_likelihood: ClassVar[bool] = True
    takes_nan_handler: ClassVar[bool] = True
    _own_auto_class = "AutoModelForSeq2SeqLM"
    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config)
        self.model = self.body_class(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Run the encoder, unless `encoder_outputs` are given; arguments as in `forward`."""
        return self.model.encode(input_ids, attention_mask, encoder_outputs, **inputs)

    def loss_and_logits(
        self,
        hidden_states: Tensor,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        skip_logits: bool | None,
        num_items_in_batch: Tensor | int | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return loss and logits for the decoder output (k B, T, d_model); each is None unless requested."""
        if labels is not None and labels.shape != hidden_states.shape[:-1]:
            raise ValueError(
                f"labels: do not fit the target; got shape {tuple(labels.shape)}, expected "
                f"{tuple(hidden_states.shape[:-1])}. Pass a label for each target token, -100 where none counts."
            )

        # Logits: those that the caller wants to keep.
        if skip_logits is None:
            skip_logits = self.training
        if labels is None:  # then they are the only result
            skip_logits = False
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        logits = None
        if not skip_logits:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states if keeps_all else hidden_states[:, kept])  # (k B, T, V)
        if labels is None:
            return None, logits

        # Loss: from the logits if they exist or an adapter changes them, else without a (k B, T, V) tensor.
        if logits is not None and keeps_all:
            return cross_entropy(logits, labels, self.smoothing, num_items_in_batch), logits
        if self.has_plain_projection:
            loss = projected_cross_entropy(
                hidden_states, self.lm_head.weight, labels, self.smoothing, num_items_in_batch
            )
        else:
            loss = cross_entropy(self.lm_head(hidden_states), labels, self.smoothing, num_items_in_batch)
        return loss, logits

    def token_losses(self, hidden_states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss, and the loss (...) of each token without gradient, for states (..., d_model)."""
        if self.has_plain_projection:
            return summed_cross_entropy(hidden_states, self.lm_head.weight, labels, self.smoothing)
        losses = token_cross_entropy(self.lm_head(hidden_states), labels, self.smoothing)
        return losses.sum(), losses.detach()

    @property
    def smoothing(self) -> float:
        """Return eps_ls in training mode, and 0 in evaluation mode."""
        return self.config.label_smoothing if self.training else 0.0

    @property
    def has_plain_projection(self) -> bool:
        """Return whether the output projection is a matrix, without adapter, bias or tensor parallelism."""
        return is_unwrapped(self.lm_head, nn.Linear) and self.lm_head.bias is None

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as the base class does; saved code includes the pipeline and, for AutoModel, the body.

        Raises:
            ValueError: the output projection has a bias, which the package's models cannot load.
        """
        if getattr(self.lm_head, "bias", None) is not None:
            raise ValueError(
                "lm_head: its bias would be lost when the model is loaded; got "
                f"{self.lm_head.out_features} numbers, expected None. Save a projection without bias."
            )
        if self.is_remote_code():
            self.describe_code()
        return super().save_pretrained(*args, **kwargs)

    def describe_code(self) -> None:
        """Tell in the configuration which saved code has the pipeline and, for AutoModel, the body."""
        # Imported here only. This line also makes the Hub's loader copy the file.
        from .pipeline import PUBLISHED_PIPELINES

        self.config.custom_pipelines = PUBLISHED_PIPELINES
        body = self.body_class
        if body.__module__ != type(self).__module__:  # a user's subclass, with the package's body
            return
        file = body.__module__.rpartition(".")[2]
        auto_map = getattr(self.config, "auto_map", None) or {}
        self.config.auto_map = {**auto_map, "AutoModel": f"{file}.{body.__name__}"}


@dataclass
class LMOutput(Seq2SeqLMOutput):
    """Output of a model with an output projection.

    Fields are read by name, or by position among those that are not None. Since omitted logits would shift the
    positions after the loss, these are errors.
    """

    def __getitem__(self, k: Any) -> Any:
        is_position = not isinstance(k, str)
        if is_position and self.loss is not None and self.logits is None:
            positions = range(len(self))[k]
            last = positions if isinstance(positions, int) else max(positions, default=0)
            if last > 0:
                raise ValueError(
                    f"outputs[{k}]: the logits, field 1, were omitted, as in training; got only the loss and fields "
                    "after the logits. Pass skip_logits=False to forward, or read fields by name."
                )
        return super().__getitem__(k)


def can_return_whole_tuple(forward: Callable[..., LMOutput]) -> Callable[..., Any]:
    """Decorate `forward` as `can_return_tuple` does, but always compute logits for a tuple, since it has no names."""
    as_tuple = can_return_tuple(forward)

    @functools.wraps(forward)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        returns_dict = kwargs.get("return_dict")
        if returns_dict is None:
            returns_dict = self.config.return_dict
        if not returns_dict and kwargs.get("skip_logits") is None:
            kwargs["skip_logits"] = False
        return as_tuple(self, *args, **kwargs)

    return wrapper


def shift_right(labels: Tensor, config: VaswaniTransformerConfig) -> Tensor:
    """Return the start token followed by all but the last of `labels` (B, T) (3.1); -100 becomes padding."""
    if config.target_start_token_id is None or config.pad_token_id is None:
        raise ValueError(
            f"bos_token_id ({config.bos_token_id}), decoder_start_token_id ({config.decoder_start_token_id}) and "
            f"pad_token_id ({config.pad_token_id}) leave labels without a start or without padding; set pad_token_id "
            "and one of the other two, or pass decoder_input_ids."
        )
    shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=config.target_start_token_id)  # (B, T)
    return shifted.masked_fill(shifted == -100, config.pad_token_id)


class VaswaniTransformerModel(EncoderDecoder):
    """Encoder and decoder with a shared embedding matrix (3.1, 3.4), without the output projection."""


class VaswaniTransformerForConditionalGeneration(ProjectedModel, PaperBeamSearch, GenerationMixin):
    """The paper's model: encoder, decoder and the projection to the vocabulary (Figure 1)."""

    body_class = VaswaniTransformerModel

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return `labels` (B, T) shifted right; called by data collators."""
        return shift_right(labels, self.config)

    @can_return_whole_tuple
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
    ) -> LMOutput:
        """Compute the logits of a target's next tokens, or the loss of a target.

        Args:
            labels: (B, T) target token ids including the end token, not shifted; -100 or `<pad>` at positions without a
                loss. Shifted right, they are the default of `decoder_input_ids`.
            logits_to_keep: compute logits for this many last target positions, or for these indices; 0 for all.
            skip_logits: whether to omit `logits` if there are labels; None: in training mode only.
            num_items_in_batch: number of target tokens that divides the summed loss; None: that of `labels`.

            The others are those of `VaswaniTransformerModel`.

        Returns:
            With `labels`, the `loss` in nats per target token, label-smoothed in training mode. In evaluation mode it
            is the negative log-likelihood, whose exponential is the paper's perplexity. It is 0 if `labels` contain no
            token. `logits` are (k B, T, V), or None if omitted. Other fields are those of `VaswaniTransformerModel`.

        Raises:
            ValueError: the inputs of encoder or decoder are inconsistent, or there are labels but no start token.
        """
        # With labels, the target is known: it is the default of the decoder's input, and needs no cache.
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        if labels is not None:
            labels, num_items_in_batch = without_padding(labels, num_items_in_batch, self.config)
            if use_cache is None:
                use_cache = False
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
            return_dict=True,
            **kwargs,
        )
        loss, logits = self.loss_and_logits(
            outputs.last_hidden_state, labels, logits_to_keep, skip_logits, num_items_in_batch
        )
        other_fields = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return LMOutput(loss=loss, logits=logits, **other_fields)
