"""NAT: every word of the target in one pass (Gu et al. 2018), and GLAT, the same model trained by glancing.

B batch, S source, T target, k target rows of one source row, V vocabulary. The decoder's input is a soft copy of the
encoder's output, and the length is predicted as a difference from the source's. Left out of Gu et al.: fertilities,
fine-tuning with reverse KL, and a teacher that ranks samples; relative self-attention is added.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

from .body import EncoderDecoder
from .config import positive_int
from .lengths import LengthDifference, canvas, choose_positions, real_tokens, soft_copy
from .nar_generation import NarGeneration, NarSettings, NarTargets
from .nar_head import EncodedSource, NarConfig, Target, TargetInputs, TrainingRate
from .nat_decoder import PositionalDecoder


@strict
class LengthDifferenceConfig(NarConfig):
    """The hyperparameters of models that predict the length as a difference, beyond those of `NarConfig`.

    Args:
        min_length_difference, max_length_difference: the smallest and the largest m - n that has a class.

    Raises:
        huggingface_hub.errors.StrictDataclassError: as for `VaswaniTransformerConfig`.
    """

    min_length_difference: int = -20
    max_length_difference: int = 20

    def validate_length_differences(self) -> None:
        """Check that there is a class for equal lengths."""
        if not self.min_length_difference <= 0 <= self.max_length_difference:
            raise ValueError(
                f"min_length_difference ({self.min_length_difference}) and max_length_difference "
                f"({self.max_length_difference}) must enclose 0; give one of at most 0 and one of at least 0."
            )


@strict
class VaswaniNatConfig(LengthDifferenceConfig):
    """The hyperparameters of NAT and GLAT, in addition to those of `LengthDifferenceConfig`.

    Args:
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
    _supports_flash_attn = False
    _supports_flex_attn = False


class LengthDifferenceHead(NarGeneration):
    """A head whose length is a difference from the source's, and whose decoder begins with a copy of the source."""

    config_class = LengthDifferenceConfig
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: LengthDifferenceConfig) -> None:
        super().__init__(config)
        self.length_difference = LengthDifference(config.d_model, self.num_length_classes)
        self.post_init()

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Return a small batch for tracing: two sources of five tokens and the masks of two targets of five."""
        tokens = torch.arange(10, device=self.device).view(2, 5) % self.config.vocab_size
        ones = torch.ones_like(tokens)
        return {"input_ids": tokens, "attention_mask": ones, "decoder_attention_mask": ones}

    @property
    def num_length_classes(self) -> int:
        return self.config.max_length_difference - self.config.min_length_difference + 1

    def read_source(self, states: Tensor, attention_mask: Tensor | None) -> EncodedSource:
        """Return the encoder's output (B, S, d_model) with the logits of the length's difference."""
        is_real = real_tokens(attention_mask, states)
        return EncodedSource(states, attention_mask, is_real, self.length_difference(states, is_real))

    def length_classes(self, source: EncodedSource, lengths: Tensor) -> Tensor:
        """Return the class (k B,) of m - n for `lengths` (k B,); beyond the classes the nearest."""
        per_row = source.lengths.repeat_interleave(len(lengths) // len(source.lengths))
        smallest, largest = self.config.min_length_difference, self.config.max_length_difference
        return (lengths - per_row).clamp(smallest, largest) - smallest

    def best_lengths(self, source: EncodedSource, count: int) -> Tensor:
        differences = source.best_classes(count) + self.config.min_length_difference
        return (source.lengths[:, None] + differences).clamp(min=1)

    def make_target(self, source: EncodedSource, given: TargetInputs) -> Target:
        labels, num_items, inputs_embeds = given.labels, given.num_items_in_batch, given.decoder_inputs_embeds
        lengths, width = self.target_shape(source, labels, given.decoder_attention_mask, inputs_embeds)
        if labels is not None and num_items is None:
            num_items = labels.ne(-100).sum()
        target = Target(lengths, canvas(lengths, width), labels, num_items)
        if inputs_embeds is None:
            inputs_embeds = self.embed_target(source, target, **given.draws)
        target.decoder_inputs["inputs_embeds"] = inputs_embeds
        return target

    def embed_target(self, source: EncodedSource, target: Target, **draws: Any) -> Tensor:
        """Return what the decoder begins with (k B, T, d_model): the soft copy of the source."""
        return soft_copy(source.memory, source.is_real, target.lengths, target.mask.shape[1])


class VaswaniNatForConditionalGeneration(LengthDifferenceHead):
    """NAT, with `generate()` in one pass. `glancing_ratio` above 0 makes `forward` train it as GLAT.

    `forward` also takes `glancing_draws` (k B, T), uniform on [0, 1), by which glancing chooses the positions to show;
    None: drawn from torch's generator.

    Attributes:
        glancing_ratio: rho, the share of the first pass's mistakes that is shown, 0 to 1. It is no part of the
            configuration: a trainer sets it at each step (Qian et al. 2021 go from 0.5 to 0.3).
    """

    config_class = VaswaniNatConfig
    body_class = VaswaniNatModel
    draws = ("glancing_draws",)
    glancing_ratio = TrainingRate(0.0, 1, "is a share of mistakes")

    def embed_target(self, source: EncodedSource, target: Target, **draws: Any) -> Tensor:
        """Return the soft copy (k B, T, d_model); GLAT shows some words of the reference in it, which have no loss."""
        inputs_embeds, labels = super().embed_target(source, target), target.labels
        if labels is None or not self.training or self.glancing_ratio == 0:
            return inputs_embeds
        seen, target.outputs["accuracy"] = self.glance(source, inputs_embeds, labels, **draws)
        target.labels = labels.masked_fill(seen, -100)
        shown = self.model.decoder.embed_tokens(labels.clamp(min=0)).to(inputs_embeds.dtype)
        return torch.where(seen.unsqueeze(-1), shown, inputs_embeds)

    @torch.no_grad()
    def glance(
        self, source: EncodedSource, inputs_embeds: Tensor, labels: Tensor, glancing_draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the positions (k B, T) whose reference word GLAT shows, and the first pass's accuracy.

        Qian et al. 2021: with c mistakes in the first pass, floor(rho c) positions, drawn from all real
        ones and not from the mistakes only.
        """
        is_real = labels.ne(-100)  # (k B, T)
        states = self.run_decoder(source, is_real.long(), inputs_embeds=inputs_embeds)[0]  # (k B, T, d_model)
        wrong = [logits.argmax(-1) != words for logits, words in self.logits_of(states, is_real, labels)]
        mistakes = torch.zeros_like(is_real).masked_scatter(is_real, torch.cat(wrong)).sum(1)  # (k B,), c
        counts = (self.glancing_ratio * mistakes).floor().long()
        accuracy = 1 - mistakes.sum() / is_real.sum().clamp(min=1)
        return choose_positions(is_real, counts, draws=glancing_draws), accuracy

    def decode_targets(self, source: EncodedSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,) in one pass."""
        target = Target(lengths, canvas(lengths))
        states = self.run_decoder(source, target.mask, inputs_embeds=self.embed_target(source, target))[0]
        tokens, log_probs = self.read_words(states, lengths, target.mask.bool(), settings)
        return NarTargets(tokens, log_probs, [tokens])
