"""NAT (Gu et al. 2018), and GLAT, the same model trained by glancing (Qian et al. 2021).

B batch, S source, T target, k target rows per source row, l lengths of a length beam, C length classes, H heads, d_k
and d_v the widths of a head, n source tokens, m target tokens. The decoder's input is a soft copy of the encoder's
output, and the length is predicted as the difference m - n. Fertilities and fine-tuning with reverse KL are not
implemented; docs/non-autoregressive.md shows noisy parallel decoding. Relative self-attention (Shaw et al. 2018) is an
addition.
"""

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.generation import GenerationMixin

from .config import positive_int
from .lengths import LengthConfig, LengthHead
from .model import EncoderDecoder
from .nar import NarTargets
from .nar_decoder import (
    LengthTarget,
    MeasuredSource,
    PositionalDecoder,
    TargetInputs,
    argmax,
    canvas,
    choose_positions,
    given_mask,
    real_tokens,
    soft_copy,
)
from .settings import NarSettings


@strict
class LengthDifferenceConfig(LengthConfig):
    """Hyperparameters of models that predict a length difference, in addition to those of `LengthConfig`.

    Args:
        min_length_difference: smallest length of a target minus that of its source that the model can predict.
        max_length_difference: the largest one.
    """

    min_length_difference: int = -20
    max_length_difference: int = 20

    def validate_length_differences(self) -> None:
        """Check that a length difference of 0 has a class."""
        if not self.min_length_difference <= 0 <= self.max_length_difference:
            raise ValueError(
                f"min_length_difference ({self.min_length_difference}) and max_length_difference "
                f"({self.max_length_difference}) must enclose 0; use a minimum <= 0 and a maximum >= 0."
            )


@strict
class VaswaniNatConfig(LengthDifferenceConfig):
    """Hyperparameters of NAT and GLAT.

    Args:
        mask_diagonal: whether to mask the diagonal of the decoder's self-attention.
        relative_attention_clip: clipping distance of relative self-attention; None for plain self-attention.
    """

    model_type = "vaswani_nat"

    mask_diagonal: bool = True
    relative_attention_clip: int | None = positive_int(default=4)


class LengthDifference(nn.Module):
    """Linear classifier of the length difference over C classes, on max-pooled encoder states."""

    def __init__(self, d_model: int, num_classes: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, num_classes)

    def forward(self, memory: Tensor, is_real: Tensor) -> Tensor:
        """Return the logits (B, C) for `memory` (B, S, d_model)."""
        lowest = torch.finfo(memory.dtype).min
        return self.proj(memory.masked_fill(~is_real.unsqueeze(-1), lowest).amax(1))  # (B, C)


class VaswaniNatModel(EncoderDecoder):
    """Encoder and positional decoder with a shared embedding matrix, without predictions."""

    config_class = VaswaniNatConfig
    decoder_class = PositionalDecoder
    _supports_flash_attn = False
    _supports_flex_attn = False


class LengthDifferenceHead(LengthHead):
    """Head that predicts a length difference and starts its decoder with a soft copy of the source."""

    config_class = LengthDifferenceConfig
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: LengthDifferenceConfig) -> None:
        super().__init__(config)
        self.num_length_classes = config.max_length_difference - config.min_length_difference + 1
        self.length_difference = LengthDifference(config.d_model, self.num_length_classes)
        self.post_init()

    def read_source(self, states: Tensor, attention_mask: Tensor | None) -> MeasuredSource:
        """Return the encoder's output (B, S, d_model) with the logits of the length difference."""
        is_real = real_tokens(attention_mask, states)
        logits = self.length_difference(states, is_real)  # (B, C)
        first_length = is_real.sum(1) + self.config.min_length_difference
        return MeasuredSource(states, attention_mask, is_real, logits, first_length)

    def make_target(self, source: MeasuredSource, inputs: TargetInputs) -> LengthTarget:
        """Return the target with the decoder's input, and in training with what the family's training changes."""
        mask = given_mask(source, inputs)
        if mask is None:
            mask = canvas(self.best_lengths(source, 1).flatten())

        # Training may remove labels, but the losses are divided by the number of all tokens.
        num_items = inputs.num_items
        if num_items is None and inputs.labels is not None:
            num_items = inputs.labels.ne(-100).sum()
        target = LengthTarget(mask, inputs.labels, num_items, source=source)

        states = inputs.inputs_embeds
        if states is None and self.training and inputs.labels is not None:
            states = self.training_input(source, target, inputs.labels, inputs.further)
        elif states is None:
            states = self.decoder_input(source, target.mask)
        target.decoder_inputs["inputs_embeds"] = states
        return target

    def decoder_input(self, source: MeasuredSource, mask: Tensor, temperature: float = 0.0) -> Tensor:
        """Return the decoder input (k B, T, d_model) of targets of `mask` (k B, T): the soft copy of the source."""
        return soft_copy(source.memory, source.is_real, mask)

    def training_input(
        self, source: MeasuredSource, target: LengthTarget, labels: Tensor, draws: dict[str, Tensor | None]
    ) -> Tensor:
        """Return the decoder input (k B, T, d_model) in training; it may change the labels of `target`."""
        raise NotImplementedError

    def first_pass(self, source: MeasuredSource, mask: Tensor, inputs_embeds: Tensor) -> Tensor:
        """Return the decoder's states (k B, T, d_model) for targets of `mask` (k B, T), without their words."""
        return self.model.decoder.run(source, mask, inputs_embeds=inputs_embeds)[0]

    def decode_targets(self, source: MeasuredSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,), all words in parallel."""
        mask = canvas(lengths)  # (l B, T)
        inputs_embeds = self.decoder_input(source, mask, settings.latent_temperature)
        states = self.first_pass(source, mask, inputs_embeds)
        tokens, log_probs = self.read_words(
            states, lengths, mask.bool(), settings.suppress_tokens, settings.reads_scores
        )
        return NarTargets(tokens, log_probs, history=[tokens])


class VaswaniNatForConditionalGeneration(LengthDifferenceHead, GenerationMixin):
    """NAT, with `generate()` in one pass. A `glancing_ratio` above 0 trains it as GLAT (Qian et al. 2021).

    `forward` also takes `glancing_draws` (k B, T), uniform on [0, 1), that determine the words shown by glancing. If
    None, they are drawn from torch's generator.

    Attributes:
        glancing_ratio: rho, the number of words shown per mistake of the first pass, 0 to 1. It is not part of the
            configuration; a trainer sets it at each step. Qian et al. decrease it from 0.5 to 0.3.
    """

    config_class = VaswaniNatConfig
    body_class = VaswaniNatModel
    further_arguments = ("glancing_draws",)
    glancing_ratio: float = 0.0

    def training_input(
        self, source: MeasuredSource, target: LengthTarget, labels: Tensor, draws: dict[str, Tensor | None]
    ) -> Tensor:
        """Return the soft copy (k B, T, d_model), with the reference words that GLAT shows; these have no loss."""
        inputs_embeds = self.decoder_input(source, target.mask)
        if self.glancing_ratio == 0:
            return inputs_embeds
        is_shown, accuracy = self.glance(source, inputs_embeds, labels, draws["glancing_draws"])
        target.labels = labels.masked_fill(is_shown, -100)
        target.outputs["accuracy"] = accuracy
        words = self.model.decoder.embed_tokens(labels.clamp(min=0)).to(inputs_embeds.dtype)  # (k B, T, d_model)
        return torch.where(is_shown.unsqueeze(-1), words, inputs_embeds)

    @torch.no_grad()
    def glance(
        self, source: MeasuredSource, inputs_embeds: Tensor, labels: Tensor, draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the positions (k B, T) of the reference words to show, and the accuracy of the first pass.

        After c mistakes in the first pass, floor(rho c) positions are chosen among all tokens.
        """
        is_real = labels.ne(-100)  # (k B, T)
        states = self.first_pass(source, is_real.long(), inputs_embeds)  # (k B, T, d_model)
        mistakes = self.count_mistakes(states, labels)  # (k B,), c
        counts = (self.glancing_ratio * mistakes).floor().long()
        accuracy = 1 - mistakes.sum() / is_real.sum().clamp(min=1)
        return choose_positions(is_real, counts, draws), accuracy

    def count_mistakes(self, states: Tensor, labels: Tensor) -> Tensor:
        """Return the number (k B,) of `labels` (k B, T) that states (k B, T, d_model) do not predict as most likely."""
        is_real = labels.ne(-100)  # (k B, T)
        is_wrong = [argmax(logits) != words for logits, words in self.logits_of(states, is_real, labels)]
        return torch.zeros_like(is_real).masked_scatter(is_real, torch.cat(is_wrong)).sum(1)
