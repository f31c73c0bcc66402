"""NAT: every word of the target in one pass (Gu et al. 2018), and GLAT, the same model trained by glancing.

B batch, S source, T target, k target rows of one source row, V vocabulary. The decoder's input is a soft copy of the
encoder's output, and the length is predicted as a difference from the source's. Left out of Gu et al.: fertilities,
fine-tuning with reverse KL, and a teacher that ranks samples; relative self-attention is added.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import can_return_tuple

from .body import EncoderDecoder
from .config import VaswaniTransformerConfig, positive_int
from .lengths import LengthDifference, canvas, choose_positions, real_tokens, soft_copy
from .loss import chunk_size
from .nar_generation import NarGeneration, NarSettings, NarTargets
from .nar_head import EncodedSource, NarHead, NarLMOutput, check_labels, loss_weight
from .nat_decoder import PositionalDecoder


@strict
class LengthDifferenceConfig(VaswaniTransformerConfig):
    """The hyperparameters of models that predict the length as a difference, beyond `VaswaniTransformerConfig`'s.

    Args:
        min_length_difference, max_length_difference: the smallest and the largest m - n that has a class.
        length_loss_weight: w, the weight of the length's cross-entropy relative to a token's.

    Raises:
        huggingface_hub.errors.StrictDataclassError: as for `VaswaniTransformerConfig`.
    """

    keys_to_ignore_at_inference = [
        *VaswaniTransformerConfig.keys_to_ignore_at_inference,
        "token_loss",
        "length_loss",
        "accuracy",
    ]

    min_length_difference: int = -20
    max_length_difference: int = 20
    length_loss_weight: float | int = loss_weight(default=1.0)
    use_cache: bool = False

    def validate_length_differences(self) -> None:
        """Check that there is a class for equal lengths."""
        if not self.min_length_difference <= 0 <= self.max_length_difference:
            raise ValueError(
                f"min_length_difference ({self.min_length_difference}) and max_length_difference "
                f"({self.max_length_difference}) must enclose 0; give one of at most 0 and one of at least 0."
            )


@strict
class VaswaniNatConfig(LengthDifferenceConfig):
    """The hyperparameters of NAT and GLAT, in addition to those of `VaswaniTransformerConfig`.

    Args:
        min_length_difference, max_length_difference: the smallest and the largest m - n that has a class.
        length_loss_weight: w, the weight of the length's cross-entropy relative to a token's.
        mask_diagonal: whether no position of the target attends to itself in self-attention.
        relative_attention_clip: the largest distance that relative self-attention distinguishes; None for plain
            self-attention.

    Raises:
        huggingface_hub.errors.StrictDataclassError: as for `VaswaniTransformerConfig`.
    """

    model_type = "vaswani_nat"

    mask_diagonal: bool = True
    relative_attention_clip: int | None = positive_int(default=4)


class VaswaniNatModel(EncoderDecoder):
    """Encoder and positional decoder over one embedding matrix, without the prediction of length and of tokens."""

    config_class = VaswaniNatConfig
    decoder_class = PositionalDecoder
    _no_split_modules = ["VaswaniTransformerEncoderLayer", "PositionalDecoderLayer"]
    _supports_flash_attn = False
    _supports_flex_attn = False


class PositionalHead(NarHead, NarGeneration, GenerationMixin):
    """A head whose length is a difference from the source's; a subclass adds `forward` and `decode_targets`."""

    config_class = LengthDifferenceConfig
    _no_split_modules = VaswaniNatModel._no_split_modules
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: LengthDifferenceConfig) -> None:
        super().__init__(config)
        self.length_difference = LengthDifference(
            config.d_model, config.min_length_difference, config.max_length_difference
        )
        self.post_init()

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Return a small batch for tracing: two sources of five tokens and the masks of two targets of five."""
        tokens = torch.arange(10, device=self.device).view(2, 5) % self.config.vocab_size
        ones = torch.ones_like(tokens)
        return {"input_ids": tokens, "attention_mask": ones, "decoder_attention_mask": ones}

    @property
    def num_length_classes(self) -> int:
        """Return C, the lengths that a length beam can try."""
        return self.config.max_length_difference - self.config.min_length_difference + 1

    def read_source(self, states: Tensor, attention_mask: Tensor | None) -> EncodedSource:
        """Return the encoder's output (B, S, d_model) with the logits of the length's difference."""
        is_real = real_tokens(attention_mask, states)
        return EncodedSource(states, attention_mask, is_real, self.length_difference(states, is_real))

    def length_classes(self, source: EncodedSource, lengths: Tensor) -> Tensor:
        """Return the class (k B,) of m - n for `lengths` (k B,)."""
        per_row = source.lengths.repeat_interleave(len(lengths) // len(source.lengths))
        return self.length_difference.classes(per_row, lengths)

    def best_lengths(self, source: EncodedSource, count: int) -> Tensor:
        """Return the `count` best target lengths (B, l) of each source, the best first."""
        classes = source.length_logits.sort(dim=1, descending=True, stable=True).indices[:, :count]  # (B, l)
        return self.length_difference.lengths(classes, source.lengths)

    def read_words(self, states: Tensor, lengths: Tensor, settings: NarSettings) -> tuple[Tensor, Tensor]:
        """Return the likeliest words (l B, T) of `states` (l B, T, d_model), and their log-probabilities (l B, T).

        Both are 0 at padding, from `lengths` (l B,) on.
        """
        is_real = canvas(lengths, states.shape[1]).bool()  # (l B, T)
        is_last = is_real & ~canvas(lengths - 1, states.shape[1]).bool()  # (l B, T)
        rows = is_real.flatten().nonzero()[:, 0]  # (N,), all that an accelerator's host waits for here
        states, is_last = states.flatten(0, 1).index_select(0, rows), is_last.flatten().index_select(0, rows)
        chosen, log_probs = self.choose_tokens(states, is_last, settings.suppressed)  # (N,) each
        tokens = torch.zeros_like(is_real, dtype=torch.long).masked_scatter(is_real, chosen)
        return tokens, log_probs.new_zeros(is_real.shape).masked_scatter(is_real, log_probs)


class VaswaniNatForConditionalGeneration(PositionalHead):
    """NAT, with `generate()` in one pass. `glancing_ratio` above 0 makes `forward` train it as GLAT.

    Attributes:
        glancing_ratio: rho, the share of the first pass's mistakes that is shown, 0 to 1. It is no part of the
            configuration: a trainer sets it at each step (Qian et al. 2021 go from 0.5 to 0.3).
    """

    config_class = VaswaniNatConfig
    body_class = VaswaniNatModel

    def __init__(self, config: VaswaniNatConfig) -> None:
        super().__init__(config)
        self.glancing_ratio = 0.0

    @property
    def glancing_ratio(self) -> float:
        return self._glancing_ratio

    @glancing_ratio.setter
    def glancing_ratio(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise ValueError(
                f"glancing_ratio: it is a share of mistakes; got {value}, expected 0 to 1. Set such a share."
            )
        self._glancing_ratio = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        skip_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        glancing_draws: Tensor | None = None,
        **kwargs: Any,
    ) -> NarLMOutput:
        """Compute the logits of every target token in one pass, or the loss of a target.

        Args:
            input_ids: (B, S) source token ids.
            attention_mask: (B, S), 0 where a source token is padding, on either side; None: every token counts.
            decoder_attention_mask: (k B, T), as many ones in a row as its target has tokens.
            encoder_outputs: the encoder's output for the source; None: the encoder runs.
            inputs_embeds: (B, S, d_model), scaled embeddings in place of `input_ids`.
            decoder_inputs_embeds: (k B, T, d_model) in place of the soft copy.
            labels: (k B, T) target token ids with their end token, not shifted, -100 at padding, which is on the
                right. They give the lengths. Row i belongs to source i // k.
            skip_logits: whether to leave out `logits` when there are labels; None: in training mode only.
            num_items_in_batch: the number of target tokens to divide both summed losses by; None: those of `labels`.
            glancing_draws: (k B, T), uniform on [0, 1), by which glancing chooses the positions to show; None: drawn
                from torch's generator.
            position_ids: (B, S) positions of the source; None: counted over unmasked tokens.
            decoder_input_ids: ignored, since the decoder has no words.

        Returns:
            With `labels` the `loss`, which is `token_loss` + `length_loss_weight` `length_loss`. Both are means over
            target tokens in nats; `token_loss` is label-smoothed in training mode. `logits` are (k B, T, V); without
            labels and mask T is the predicted length. On request there are the hidden states and attentions of both
            stacks.

        Raises:
            ValueError: the stacks' errors; labels with a token after padding; a count without labels.
        """
        check_labels(labels, num_items_in_batch)
        kwargs.pop("decoder_input_ids", None)
        kwargs.pop("use_cache", None)
        encoder_outputs = self.encode(input_ids, attention_mask, encoder_outputs, inputs_embeds, **kwargs)
        source = self.read_source(encoder_outputs[0], attention_mask)
        lengths, width = self.target_shape(source, labels, decoder_attention_mask, decoder_inputs_embeds)
        learned, accuracy = labels, None
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = soft_copy(source.memory, source.is_real, lengths, width)  # (k B, T, d_model)
            if labels is not None and self.training and self.glancing_ratio > 0:
                seen, accuracy = self.glance(source, lengths, decoder_inputs_embeds, labels, glancing_draws)
                shown = self.model.decoder.embed_tokens(labels.clamp(min=0)).to(decoder_inputs_embeds.dtype)
                decoder_inputs_embeds = torch.where(seen.unsqueeze(-1), shown, decoder_inputs_embeds)
                learned = labels.masked_fill(seen, -100)
        if labels is not None and num_items_in_batch is None:
            num_items_in_batch = labels.ne(-100).sum()
        kwargs.pop("position_ids", None)
        outputs = self.run_decoder(source, canvas(lengths, width), inputs_embeds=decoder_inputs_embeds, **kwargs)
        token_loss, logits = self.loss_and_logits(outputs[0], learned, 0, skip_logits, num_items_in_batch)
        length_loss = None
        if labels is not None:
            length_loss = self.length_loss(source, lengths, labels, num_items_in_batch)
        return self.make_output(encoder_outputs, outputs, token_loss, length_loss, logits, accuracy)

    @torch.no_grad()
    def glance(
        self, source: EncodedSource, lengths: Tensor, inputs_embeds: Tensor, labels: Tensor, draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the positions (k B, T) whose reference word GLAT shows, and the first pass's accuracy.

        Qian et al. 2021: with c mistakes in the first pass, floor(rho c) positions, drawn from all real
        ones and not from the mistakes only.
        """
        outputs = self.run_decoder(source, canvas(lengths, labels.shape[1]), inputs_embeds=inputs_embeds)
        is_real = labels.ne(-100)  # (k B, T)
        rows = is_real.flatten().nonzero()[:, 0]  # (N,), all that an accelerator's host waits for here
        states = outputs[0].flatten(0, 1).index_select(0, rows)  # (N, d_model)
        best = torch.cat([self.lm_head(chunk).argmax(-1) for chunk in states.split(chunk_size(states.device))])
        is_wrong = torch.zeros_like(is_real).flatten()
        is_wrong = is_wrong.index_copy(0, rows, best != labels.flatten().index_select(0, rows)).view_as(is_real)
        mistakes = is_wrong.sum(1)  # (k B,), c
        counts = (self.glancing_ratio * mistakes).floor().long()
        return choose_positions(is_real, counts, draws=draws), 1 - mistakes.sum() / is_real.sum().clamp(min=1)

    def decode_targets(self, source: EncodedSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,) in one pass."""
        mask = canvas(lengths)  # (l B, T)
        inputs_embeds = soft_copy(source.memory, source.is_real, lengths, mask.shape[1])
        outputs = self.run_decoder(source, mask, inputs_embeds=inputs_embeds)
        tokens, log_probs = self.read_words(outputs[0], lengths, settings)
        return NarTargets(tokens, log_probs, [tokens])
