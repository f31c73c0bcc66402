"""The base of all non-autoregressive heads: the encoded source, the canvas, the way through the decoder, the losses.

B batch, S source, T target, k target rows of one source row, C length classes, l lengths of a length beam, V
vocabulary. n and m are a sentence's real source and target tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions, Seq2SeqLMOutput
from transformers.utils import can_return_tuple

from .body import ProjectedModel, as_encoder_output
from .config import VaswaniTransformerConfig, loss_weight
from .decoder import check_rows
from .lengths import check_right_padded, length_cross_entropy
from .loss import accumulation_dtype, chunk_size, reduce_loss, without_padding
from .pretrained import given_cache


@strict
class NarConfig(VaswaniTransformerConfig):
    """The hyperparameters of every non-autoregressive model, beyond those of `VaswaniTransformerConfig`.

    Args:
        length_loss_weight: w, the weight of the length's cross-entropy relative to a token's.
    """

    keys_to_ignore_at_inference = [
        *VaswaniTransformerConfig.keys_to_ignore_at_inference,
        "token_loss",
        "length_loss",
        "accuracy",
    ]

    length_loss_weight: float | int = loss_weight(default=1.0)
    use_cache: bool = False

    def validate_attention_window(self) -> None:
        """Check that no restricted self-attention is asked for."""
        if self.attention_window is not None:
            raise ValueError(
                f"attention_window: {self.model_type} has no restricted self-attention; got {self.attention_window}, "
                "expected None. Leave it out."
            )


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

    def best_classes(self, count: int) -> Tensor:
        """Return the `count` likeliest length classes (B, l) of each source, the likeliest first."""
        return self.length_logits.sort(dim=1, descending=True, stable=True).indices[:, :count]


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


@dataclass
class TargetInputs:
    """The arguments of `forward` that describe a target, with the names that they have there.

    Attributes:
        draws: the random numbers that the caller gives, by the names in `NarHead.draws`.
    """

    labels: Tensor | None
    num_items_in_batch: Tensor | int | None
    decoder_input_ids: Tensor | None
    decoder_attention_mask: Tensor | None
    decoder_inputs_embeds: Tensor | None
    target_lengths: Tensor | None
    draws: dict[str, Tensor | None]


@dataclass
class Target:
    """A target, as a family prepares it for its decoder and its losses.

    Attributes:
        lengths: (k B,), m of each target.
        mask: (k B, T), 1 at the positions of its tokens.
        labels: (k B, T), the tokens whose loss counts, -100 elsewhere; None: there is no loss.
        num_items: the number that divides every summed loss; None: that of `labels`.
        decoder_inputs: `input_ids` or `inputs_embeds`, and settings of the decoder.
        outputs: the family's own fields of the output, as far as they need no decoder.
    """

    lengths: Tensor
    mask: Tensor
    labels: Tensor | None = None
    num_items: Tensor | int | None = None
    decoder_inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def mean(self, summed: Tensor) -> Tensor:
        """Return a sum over targets as a mean over their tokens."""
        return summed if self.labels is None else reduce_loss(summed, self.labels, self.num_items)


class TrainingRate:
    """A number that training sets on a head, step by step; it is no part of the configuration or of the weights.

    Args:
        default: its value until then.
        largest: the largest value that it may have; None: any finite one.
        purpose: what it is, for the message about another value.
    """

    def __init__(self, default: float, largest: float | None, purpose: str) -> None:
        self.default, self.largest, self.purpose = default, largest, purpose

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, head: Any, owner: type | None = None) -> float:
        return getattr(head, f"_{self.name}", self.default)

    def __set__(self, head: Any, value: float) -> None:
        largest = self.largest
        if not 0 <= value < float("inf") or (largest is not None and value > largest):
            expected = "a finite number of at least 0" if largest is None else f"0 to {largest}"
            raise ValueError(f"{self.name}: it {self.purpose}; got {value}, expected {expected}. Set such a number.")
        setattr(head, f"_{self.name}", value)


class NarHead(ProjectedModel):
    """A body, its projection and a prediction of length.

    A subclass defines how it reads the encoder's output (`read_source`), the class of a length (`length_classes`), the
    best lengths (`best_lengths`), and what its decoder gets for a target (`make_target`). It adds its own terms of the
    loss (`losses`).

    Attributes:
        output_class: the output of `forward`.
        draws: the names of random numbers that `forward` takes in addition, for `make_target`; torch's generator draws
            those that are not given.
    """

    is_autoregressive = False
    output_class: ClassVar[type[NarLMOutput]] = NarLMOutput
    draws: ClassVar[tuple[str, ...]] = ()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        target_lengths: Tensor | None = None,
        skip_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> NarLMOutput:
        """Compute the logits of every target token in one pass, or the loss of a target.

        Args:
            input_ids: (B, S) source token ids.
            attention_mask: (B, S), 0 where a source token is padding, on either side; None: every token counts.
            decoder_input_ids: (k B, T) target token ids, for a decoder that reads words (CMLM); others ignore them.
            decoder_attention_mask: (k B, T), as many ones in a row as its target has tokens.
            encoder_outputs: the encoder's output for the source; None: the encoder runs.
            inputs_embeds: (B, S, d_model), scaled embeddings in place of `input_ids`.
            decoder_inputs_embeds: (k B, T, d_model) in place of what the decoder begins with.
            labels: (k B, T) target token ids with their end token, not shifted, -100 or `<pad>` at padding, which is
                on the right. They give the lengths. Row i belongs to source i // k.
            target_lengths: (k B,), m of each target of `decoder_input_ids`.
            skip_logits: whether to leave out `logits` when there are labels; None: in training mode only.
            num_items_in_batch: the number of target tokens to divide all summed losses by; None: those of `labels`.
            position_ids: (B, S) positions of the source; None: counted over unmasked tokens.

        Returns:
            With `labels` the `loss`, which is `token_loss` + `length_loss_weight` `length_loss` and the family's own
            terms. All are means over target tokens in nats; `token_loss` is label-smoothed in training mode. `logits`
            are (k B, T, V); without labels and mask T is the predicted length. On request there are the hidden states
            and attentions of both stacks.

        Raises:
            ValueError: the stacks' errors; labels with a token after padding; a count without labels; a cache.
        """
        if labels is not None:
            labels, num_items_in_batch = without_padding(labels, num_items_in_batch, self.config)
        elif num_items_in_batch is not None:  # a Trainer that computes its own loss of logits keeps the labels
            raise ValueError(
                "labels: got none with num_items_in_batch, and a loss of only the logits trains no length. Set the "
                "Trainer's label_smoothing_factor to 0 and no compute_loss_func; config.label_smoothing smooths."
            )
        draws = {name: kwargs.pop(name, None) for name in self.draws}
        kwargs.pop("use_cache", None)
        if given_cache(kwargs.pop("past_key_values", None), kwargs) is not None:
            raise ValueError(
                f"past_key_values: {type(self).__name__} predicts all words at once and has no cache; got one, "
                "expected None. Of PEFT's methods PREFIX_TUNING needs a cache; use LORA or PROMPT_TUNING."
            )
        encoder_outputs = self.encode(input_ids, attention_mask, encoder_outputs, inputs_embeds, **kwargs)
        kwargs.pop("position_ids", None)
        source = self.read_source(encoder_outputs[0], attention_mask)
        words = (decoder_input_ids, decoder_attention_mask, decoder_inputs_embeds)
        given = TargetInputs(labels, num_items_in_batch, *words, target_lengths, draws)
        target = self.make_target(source, given)
        outputs = self.run_decoder(source, target.mask, **target.decoder_inputs, **kwargs)
        token_loss, logits = self.loss_and_logits(outputs[0], target.labels, 0, skip_logits, target.num_items)
        return self.output_class(
            logits=logits,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            **({} if token_loss is None else self.losses(source, target, token_loss)),
        )

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        inputs_embeds: Tensor | None = None,
        **settings: Any,
    ) -> BaseModelOutput:
        """Return the encoder's output for a source, or `encoder_outputs` where they are given."""
        self.model.check_adapters()
        if encoder_outputs is not None:
            return as_encoder_output(encoder_outputs)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        return self.run_encoder(**inputs, return_dict=True, **settings)

    def run_encoder(self, **inputs: Any) -> BaseModelOutput:
        return self.model.encoder(**inputs)

    def read_source(self, states: Tensor, attention_mask: Tensor | None) -> EncodedSource:
        """Return what the head reads in the encoder's output."""
        raise NotImplementedError

    def length_classes(self, source: EncodedSource, lengths: Tensor) -> Tensor:
        """Return the length class (k B,) of targets of `lengths` (k B,)."""
        raise NotImplementedError

    def best_lengths(self, source: EncodedSource, count: int) -> Tensor:
        """Return the `count` best target lengths (B, l) of each source, the best first."""
        raise NotImplementedError

    def make_target(self, source: EncodedSource, given: TargetInputs) -> Target:
        """Return the target of `forward`."""
        raise NotImplementedError

    def target_shape(
        self,
        source: EncodedSource,
        labels: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, int]:
        """Return the target lengths (k B,) and T: of the labels, else of the mask, else as they are predicted."""
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
        self, source: EncodedSource, target_mask: Tensor, cache: Cache | None = None, **inputs: Any
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
            return_dict=True,
            **inputs,
        )

    def logits_of(self, states: Tensor, is_real: Tensor, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the logits (N, V) of some positions at a time, in at least float32, and `values` (k B, T) there (N,).

        Args:
            states: (k B, T, d_model), the decoder's output.
            is_real: (k B, T), the positions, for whose number an accelerator's host waits.
        """
        rows = is_real.flatten().nonzero()[:, 0]
        size = chunk_size(states.device)
        chunks = [rows_of.flatten(0, 1).index_select(0, rows).split(size) for rows_of in (states, *values)]
        for chunk, *others in zip(*chunks, strict=True):
            logits = self.lm_head(chunk)  # (N, V)
            yield logits.to(accumulation_dtype(logits.dtype)), *others

    def losses(self, source: EncodedSource, target: Target, token_loss: Tensor) -> dict[str, Any]:
        """Return the `loss`, its parts, and the family's own fields of the output."""
        lengths = target.lengths
        logits = source.length_logits.repeat_interleave(len(lengths) // len(source.length_logits), dim=0)  # (k B, C)
        summed = length_cross_entropy(logits, self.length_classes(source, lengths), lengths > 0)
        length_loss = target.mean(summed)
        loss = token_loss + self.config.length_loss_weight * length_loss
        return {"loss": loss, "token_loss": token_loss, "length_loss": length_loss, **target.outputs}
