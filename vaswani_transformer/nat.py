"""NAT (Gu et al. 2018), and GLAT, the same model trained by glancing (Qian et al. 2021).

B batch, S source, T target, k target rows per source row, l lengths of a length beam, C length classes, H heads, d_k
and d_v the widths of a head, n source tokens, m target tokens. The decoder's input is a soft copy of the encoder's
output, and the length is predicted as the difference m - n. Fertilities and fine-tuning with reverse KL are not
implemented; docs/non-autoregressive.md shows noisy parallel decoding. Relative self-attention (Shaw et al. 2018) is an
addition.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from .config import VaswaniTransformerConfig, positive_int
from .layers import AddAndNorm, MultiHeadAttention, SelfAttention, additive_mask, read_table
from .lengths import LengthConfig, LengthHead, MeasuredSource
from .model import EncoderDecoder
from .nar import (
    NarDecoder,
    NarDecoderLayer,
    NarSettings,
    NarTargets,
    Target,
    TargetInputs,
    argmax,
    canvas,
    choose_positions,
    real_tokens,
    soft_copy,
)
from .pretrained import tensor_parallel_plan


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


class RelativeSelfAttention(SelfAttention):
    """Relative self-attention, equations (3) and (4) of Shaw et al. 2018.

    With r = clip(j - i, -c, c) + c, score_ij = q_i . (k_j + R^K_r) / sqrt(d_k) and out_i = sum_j a_ij (v_j + R^V_r).
    The heads of a layer share the tables R^K (2c + 1, d_k) and R^V (2c + 1, d_v). To avoid a (T, T, d_k) tensor,
    q R^K^T is gathered at r, and the weights are summed by r. All attention implementations use this code.

    Args:
        clip: c, the clipping distance.
    """

    def __init__(self, config: VaswaniTransformerConfig, layer_idx: int, clip: int) -> None:
        super().__init__(config, layer_idx)
        self.clip = clip
        self.relative_keys = nn.Embedding(2 * clip + 1, self.head_dim)
        self.relative_values = nn.Embedding(2 * clip + 1, self.value_head_dim)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, T, H, d_v) and the weights (B, H, T, T); the mask is boolean or additive."""
        rows = 2 * self.clip + 1
        relative_keys = read_table(self.relative_keys, rows, query.device).to(query.dtype)  # (2c + 1, d_k)
        relative_values = read_table(self.relative_values, rows, query.device).to(value.dtype)  # (2c + 1, d_v)

        # r of every pair of positions.
        positions = torch.arange(query.shape[2], device=query.device)
        distances = (positions - positions[:, None]).clamp(-self.clip, self.clip) + self.clip  # (T, T)
        distances = distances.expand(*query.shape[:3], -1)  # (B, H, T, T)

        # Equation (4): the weights.
        scores_by_distance = query @ relative_keys.T  # (B, H, T, 2c + 1)
        scores = query @ key.transpose(-2, -1) + scores_by_distance.gather(-1, distances)  # (B, H, T, T)
        scores = scores * self.scaling
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        elif attention_mask is not None:
            scores = scores + attention_mask
        weights = nn.functional.dropout(scores.softmax(-1), p=self.dropout, training=self.training)
        weights = weights.to(value.dtype)

        # Equation (3): the weighted sum.
        weights_by_distance = torch.zeros_like(weights[..., :1]).repeat(1, 1, 1, rows)
        weights_by_distance = weights_by_distance.scatter_add(-1, distances, weights)  # (B, H, T, 2c + 1)
        attended = weights @ value + weights_by_distance @ relative_values  # (B, H, T, d_v)
        return attended.transpose(1, 2).contiguous(), weights


class PositionalAttention(MultiHeadAttention):
    """Attention with positions as queries and keys, and states as values (Gu et al. 2018, 3.2).

    It is not a subclass of `SelfAttention`, so that its weights are not among the recorded self-attentions.
    """

    def forward(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None = None,
        keys: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, T, d_model) for `positions` (1, T, d_model), and the weights if any.

        `keys` (B, T, d_model) replace the positions as keys.
        """
        if keys is None:
            keys = positions
        batch = hidden_states.shape[0]
        query = self.split_heads(self.q_proj(positions), self.head_dim).expand(batch, -1, -1, -1)  # (B, H, T, d_k)
        key = self.split_heads(self.k_proj(keys), self.head_dim).expand(batch, -1, -1, -1)  # (B, H, T, d_k)
        value = self.split_heads(self.v_proj(hidden_states), self.value_head_dim)  # (B, H, T, d_v)
        attended, weights = self.attend(query, key, value, attention_mask, **kwargs)  # (B, T, H, d_v)
        return self.o_proj(attended.flatten(-2)), weights


class PositionalDecoderLayer(NarDecoderLayer):
    """Self-attention, positional attention, cross-attention and feed-forward network (Gu et al. 2018, Figure 2)."""

    def __init__(self, config: VaswaniNatConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.relative_attention_clip is not None:
            self.self_attn = RelativeSelfAttention(config, layer_idx, config.relative_attention_clip)
        self.positional_attn = PositionalAttention(config, layer_idx)
        self.positional_attn_add_norm = AddAndNorm(config)

    def forward(  # ty: ignore[incompatible-method-override] - only `PositionalDecoder` has such layers
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        *,
        positions: Tensor,
        self_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the layer's output (k B, T, d_model).

        Args:
            attention_mask: mask of the positional attention.
            encoder_hidden_states: (B, S, d_model), the encoder's output; None to skip cross-attention.
            positions: (1, T, d_model), the position encodings.
            self_attention_mask: mask of the self-attention.
        """
        hidden_states = self.attend_to_target(hidden_states, self_attention_mask, past_key_values, **kwargs)
        attended, _ = self.positional_attn(hidden_states, positions, attention_mask, **kwargs)
        hidden_states = self.positional_attn_add_norm(hidden_states, attended)
        if encoder_hidden_states is not None:
            hidden_states = self.attend_to_source(
                hidden_states, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs
            )
        return self.feed_forward_add_norm(hidden_states, self.feed_forward(hidden_states))


class PositionalDecoder(NarDecoder):
    """Non-autoregressive decoder with positional attention and a self-attention with masked diagonal."""

    layer_class = PositionalDecoderLayer
    _no_split_modules = ["PositionalDecoderLayer"]
    _tp_plan = tensor_parallel_plan("self_attn", "positional_attn", "cross_attn")
    _supports_flash_attn = False
    _supports_flex_attn = False

    def run_layers(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        memory: Tensor | None,
        source_mask: Tensor | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> Tensor:
        """Run all layers on `hidden_states` (k B, T, d_model), with positions and the self-attention's own mask."""
        positions = self.position_encodings(hidden_states)  # (1, T, d_model)
        self_attention_mask = self.without_diagonal(mask, hidden_states)
        return super().run_layers(
            hidden_states,
            mask,
            memory,
            source_mask,
            past_key_values,
            positions=positions,
            self_attention_mask=self_attention_mask,
            **kwargs,
        )

    def without_diagonal(self, mask: Tensor | None, hidden_states: Tensor) -> Tensor | None:
        """Return `mask` with a masked diagonal (k B or 1, 1, T, T); targets of one token keep theirs.

        With `mask_diagonal=False` in the configuration it is returned unchanged.
        """
        if not self.config.mask_diagonal:
            return mask
        length = hidden_states.shape[1]
        is_off_diagonal = ~torch.eye(length, dtype=torch.bool, device=hidden_states.device)  # (T, T)
        if mask is None:
            mask = torch.ones_like(is_off_diagonal)[None, None]  # (1, 1, T, T)
        is_key = mask if mask.dtype == torch.bool else mask == 0  # (k B or 1, 1, T, T)
        is_only_key = is_key.sum(-1, keepdim=True) == 1
        allowed = is_key & (is_off_diagonal | is_only_key)
        if self.config._attn_implementation == "eager":
            return additive_mask(allowed, hidden_states.dtype)
        return allowed


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

    def make_target(self, source: MeasuredSource, inputs: TargetInputs) -> Target:
        # Training may remove labels, but the losses are divided by the number of all tokens.
        num_items = inputs.num_items
        if num_items is None and inputs.labels is not None:
            num_items = inputs.labels.ne(-100).sum()
        target = Target(self.target_mask(source, inputs), inputs.labels, num_items)

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
        self, source: MeasuredSource, target: Target, labels: Tensor, draws: dict[str, Tensor | None]
    ) -> Tensor:
        """Return the decoder input (k B, T, d_model) in training; it may change the labels of `target`."""
        raise NotImplementedError

    def decode_targets(self, source: MeasuredSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,), all words in parallel."""
        mask = canvas(lengths)  # (l B, T)
        inputs_embeds = self.decoder_input(source, mask, settings.latent_temperature)
        states = self.run_decoder(source, mask, inputs_embeds=inputs_embeds)[0]
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
        self, source: MeasuredSource, target: Target, labels: Tensor, draws: dict[str, Tensor | None]
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
        states = self.run_decoder(source, is_real.long(), inputs_embeds=inputs_embeds)[0]  # (k B, T, d_model)
        mistakes = self.count_mistakes(states, labels)  # (k B,), c
        counts = (self.glancing_ratio * mistakes).floor().long()
        accuracy = 1 - mistakes.sum() / is_real.sum().clamp(min=1)
        return choose_positions(is_real, counts, draws), accuracy

    def count_mistakes(self, states: Tensor, labels: Tensor) -> Tensor:
        """Return the number (k B,) of `labels` (k B, T) that states (k B, T, d_model) do not predict as most likely."""
        is_real = labels.ne(-100)  # (k B, T)
        is_wrong = [argmax(logits) != words for logits, words in self.logits_of(states, is_real, labels)]
        return torch.zeros_like(is_real).masked_scatter(is_real, torch.cat(is_wrong)).sum(1)
