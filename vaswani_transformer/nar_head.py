"""The base of all non-autoregressive heads: the encoded source, the canvas, the way through the decoder, the losses.

B batch, S source, T target, k target rows of one source row, C length classes, l lengths of a length beam, V
vocabulary. n and m are a sentence's real source and target tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.dataclasses import as_validated_field
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
)

from .body import ProjectedModel
from .decoder import check_rows
from .lengths import check_right_padded, length_cross_entropy
from .loss import reduce_loss
from .pretrained import check_labels_are_ids


@as_validated_field
def loss_weight(value: float | int) -> None:
    """Check the weight of a loss: at least 0 and finite."""
    if not 0 <= value < float("inf"):
        raise ValueError(f"{value} is negative or not finite; give a number of at least 0, for example 1.0.")


def check_labels(labels: Tensor | None, num_items_in_batch: Tensor | int | None) -> None:
    """Raise ValueError for labels that are no token ids, or for their number without them.

    A Trainer that computes its own loss of logits keeps them.
    """
    if labels is None and num_items_in_batch is not None:
        raise ValueError(
            "labels: got none with num_items_in_batch, and a loss of only the logits trains no length. Set the "
            "Trainer's label_smoothing_factor to 0 and no compute_loss_func; config.label_smoothing smooths."
        )
    if labels is not None:
        check_labels_are_ids(labels)


@dataclass
class EncodedSource:
    """An encoded source, as the non-autoregressive heads read it.

    Attributes:
        memory: (B, S, d_model), what cross-attention reads.
        attention_mask: (B, S), as the caller gave it.
        is_real: (B, S), which rows are tokens.
        length_logits: (B, C), of the length classes.
    """

    memory: Tensor
    attention_mask: Tensor | None
    is_real: Tensor
    length_logits: Tensor

    @property
    def lengths(self) -> Tensor:
        """Return n (B,), the real tokens of each source."""
        return self.is_real.sum(1)


@dataclass
class NarLMOutput(Seq2SeqLMOutput):
    """The output of a non-autoregressive model; the fields that Transformers lacks are None without labels.

    Attributes:
        token_loss: the loss of the tokens, a mean in nats; label-smoothed in training mode.
        length_loss: the cross-entropy of the length over the same divisor; `loss` adds `length_loss_weight` times it.
        accuracy: with glancing, the share of target tokens that the first pass predicts; otherwise None.
    """

    token_loss: Tensor | None = None
    length_loss: Tensor | None = None
    accuracy: Tensor | None = None


class WeighsDivergence:
    """A head whose loss has a KL divergence, weighed by the attribute `kl_scale`, 1.0 unless a trainer sets it."""

    _kl_scale = 1.0

    @property
    def kl_scale(self) -> float:
        return self._kl_scale

    @kl_scale.setter
    def kl_scale(self, value: float) -> None:
        if not 0 <= value < float("inf"):
            raise ValueError(
                f"kl_scale: it weighs a loss; got {value}, expected a finite number of at least 0. Set one."
            )
        self._kl_scale = value


class NarHead(ProjectedModel):
    """A body, its projection and a prediction of length.

    A subclass defines how it reads the encoder's output (`read_source`), the class of a length (`length_classes`) and
    the best lengths (`best_lengths`). It adds `forward` and `decode_targets`.
    """

    is_autoregressive = False

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return the encoder's output for a source, or `encoder_outputs` where they are given."""
        self.model.check_shared_adapter()
        if isinstance(encoder_outputs, BaseModelOutput):
            return encoder_outputs
        if encoder_outputs is not None:
            names = ("last_hidden_state", "hidden_states", "attentions")
            given: dict[str, Any] = dict(zip(names, encoder_outputs, strict=False))
            return BaseModelOutput(**given)
        return self.run_encoder(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)

    def run_encoder(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return the encoder's output for a source."""
        return self.model.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def read_source(self, states: Tensor, attention_mask: Tensor | None) -> EncodedSource:
        """Return what the head reads in the encoder's output."""
        raise NotImplementedError

    def length_classes(self, source: EncodedSource, lengths: Tensor) -> Tensor:
        """Return the length class (k B,) of targets of `lengths` (k B,)."""
        raise NotImplementedError

    def best_lengths(self, source: EncodedSource, count: int) -> Tensor:
        """Return the `count` best target lengths (B, l) of each source, the best first."""
        raise NotImplementedError

    def target_shape(
        self,
        source: EncodedSource,
        labels: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, int]:
        """Return the target lengths (k B,) and T: of the labels, else of the mask, else as they are predicted.

        Raises:
            ValueError: labels with a token after padding, or rows that no source has.
        """
        device = source.memory.device
        if (given := attention_mask if labels is None else labels) is not None:
            check_rows(given.shape[0], source.memory.shape[0])
            is_token = given.to(device).ne(0 if labels is None else -100)  # (k B, T)
            if labels is not None:
                check_right_padded(is_token, "labels")
            return is_token.sum(1), is_token.shape[1]
        if inputs_embeds is not None:
            rows, width = inputs_embeds.shape[:2]
            return torch.full((rows,), width, device=device), width
        lengths = self.best_lengths(source, 1).flatten()
        return lengths, int(lengths.max())

    def run_decoder(
        self,
        source: EncodedSource,
        target_mask: Tensor,
        cache: Cache | None = None,
        **inputs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the decoder's output (k B, T, d_model) where `target_mask` (k B, T) is 1.

        `inputs` are `input_ids` or `inputs_embeds`, and settings.
        """
        return self.model.decoder(
            attention_mask=target_mask,
            encoder_hidden_states=source.memory,
            encoder_attention_mask=source.attention_mask,
            past_key_values=cache,
            use_cache=False,
            **inputs,
        )

    def length_loss(
        self, source: EncodedSource, lengths: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        """Return the summed cross-entropy of `lengths` (k B,), divided as the loss of the tokens is."""
        logits = source.length_logits.repeat_interleave(len(lengths) // len(source.length_logits), dim=0)  # (k B, C)
        summed = length_cross_entropy(logits, self.length_classes(source, lengths), lengths > 0)
        return reduce_loss(summed, labels, num_items_in_batch)

    def make_output(
        self,
        encoder_outputs: BaseModelOutput,
        decoder_outputs: BaseModelOutputWithPastAndCrossAttentions,
        token_loss: Tensor | None,
        length_loss: Tensor | None,
        logits: Tensor | None,
        accuracy: Tensor | None = None,
    ) -> NarLMOutput:
        """Return the output of `forward`, its loss the weighted sum of the two."""
        loss = None
        if token_loss is not None and length_loss is not None:
            loss = token_loss + self.config.length_loss_weight * length_loss
        return NarLMOutput(
            loss=loss,
            logits=logits,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            token_loss=token_loss,
            length_loss=length_loss,
            accuracy=accuracy,
        )
