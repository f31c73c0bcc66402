"""What the non-autoregressive heads share: the canvas, encoded sources, decoders, and targets with their losses.

B batch, S source, T target, k target rows per source row, C length classes, N positions, V vocabulary, H heads, d_k and
d_v the widths of a head. For lengths, n and m are the numbers of source and target tokens, both including `</s>`.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as DecoderOutput

from .config import VaswaniTransformerConfig
from .layers import (
    AddAndNorm,
    MultiHeadAttention,
    SelfAttention,
    VaswaniTransformerDecoderLayer,
    additive_mask,
    padding_mask,
    read_table,
    text_positions,
)
from .loss import accumulation_dtype, reduce_loss
from .pretrained import tensor_parallel_plan
from .stacks import VaswaniTransformerDecoder, check_mask, check_rows


def check_right_padded(labels: Tensor) -> None:
    """Raise ValueError if a row of `labels` (B, T) has a token after padding; skipped in a compiled graph."""
    if torch.compiler.is_compiling() or labels.shape[1] < 2:
        return
    is_late = (labels[:, 1:].ne(-100) & labels[:, :-1].eq(-100)).any(1)  # (B,)
    if bool(is_late.any()):
        raise ValueError(
            f"labels: a target must begin at the first position; got row {int(is_late.nonzero()[0])} with a token "
            "after padding. Pad targets on the right."
        )


def real_tokens(attention_mask: Tensor | None, memory: Tensor) -> Tensor:
    """Return the mask (B, S), bool, of the tokens in `memory` (B, S, d_model); all True for a source without any."""
    if attention_mask is None:
        return torch.ones(memory.shape[:2], dtype=torch.bool, device=memory.device)
    check_mask(attention_mask, *memory.shape[:2], name="attention_mask")
    is_real = attention_mask.to(memory.device).ne(0)
    return is_real | ~is_real.any(1, keepdim=True)


def canvas(lengths: Tensor, width: int | None = None) -> Tensor:
    """Return the target mask (k B, T), 1 at positions 0..m-1, for `lengths` (k B,); T defaults to the longest."""
    width = int(lengths.max()) if width is None else width
    return (torch.arange(width, device=lengths.device) < lengths[:, None]).long()


def soft_copy(memory: Tensor, is_real: Tensor, mask: Tensor) -> Tensor:
    """Return the decoder input (k B, T, d_model), at position i the state of source token floor(i n / m).

    Unlike in Gu et al. 2018, the encoder's output is copied instead of the embeddings.

    Args:
        memory: (B, S, d_model), the encoder's output.
        is_real: (B, S), True at tokens; padding may be anywhere.
        mask: (k B, T), 1 at the m tokens of each target; positions beyond them repeat the last source token.
    """
    # The rank among the source tokens that each target position copies.
    width = mask.shape[1]
    source_lengths = is_real.sum(1)[:, None, None]  # (B, 1, 1), n
    target_lengths = mask.sum(1).clamp(min=1).view(memory.shape[0], -1, 1)  # (B, k, 1), m
    ranks = torch.arange(width, device=memory.device) * source_lengths // target_lengths  # (B, k, T)
    ranks = torch.minimum(ranks, source_lengths - 1)

    # The index of the token of each rank, since padding may be anywhere.
    order = is_real.long().argsort(dim=1, descending=True, stable=True)  # (B, S), tokens first, in their order
    indices = order.gather(1, ranks.flatten(1))  # (B, k T)

    d_model = memory.shape[-1]
    copied = memory.gather(1, indices.unsqueeze(-1).expand(-1, -1, d_model))  # (B, k T, d_model)
    return copied.view(-1, width, d_model)


def choose_positions(is_candidate: Tensor, counts: Tensor, draws: Tensor | None = None) -> Tensor:
    """Return `counts` (B,) random candidates per row as a mask (B, T).

    `draws` (B, T), uniform on [0, 1), determine them; if None, they come from torch's generator.
    """
    if draws is None:
        draws = torch.rand(is_candidate.shape, device=is_candidate.device)
    order = draws.masked_fill(~is_candidate, 2.0).argsort(1)  # candidates first
    ranks = order.argsort(1)
    return is_candidate & (ranks < counts[:, None])


GROUP = 128  # number of logits in a group of `argmax`


def argmax(logits: Tensor) -> Tensor:
    """Return the index (N,) of the first of the largest `logits` (N, V).

    torch's `amax` is faster on CPUs than its `argmax`, which searches only the best group here.
    """
    groups = logits.shape[1] // GROUP
    if groups == 0 or logits.device.type != "cpu" or torch.compiler.is_compiling():
        return logits.argmax(1)

    # The group with the largest maximum.
    grouped = logits[:, : groups * GROUP].unflatten(1, (groups, GROUP))  # (N, groups, 128)
    remainder = logits[:, groups * GROUP :]
    best_group = grouped.amax(2).argmax(1)  # (N,)

    # The largest of its members and of the logits in no group.
    rows = torch.arange(len(best_group), device=best_group.device)
    members = torch.cat([grouped[rows, best_group], remainder], dim=1)  # (N, 128 + the remainder)
    index = members.argmax(1)
    is_in_group = index < GROUP
    return index + GROUP * torch.where(is_in_group, best_group, groups - 1)


class NarDecoderLayer(VaswaniTransformerDecoderLayer):
    """The paper's decoder layer without a causal mask; it caches only cross-attention."""

    self_attention = SelfAttention

    def attend_to_target(
        self, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None, **kwargs: object
    ) -> Tensor:
        return super().attend_to_target(hidden_states, attention_mask, None, **kwargs)


class NarDecoder(VaswaniTransformerDecoder):
    """The paper's decoder without a causal mask."""

    layer_class = NarDecoderLayer
    _no_split_modules = ["NarDecoderLayer"]

    def run(
        self, source: "EncodedSource", target_mask: Tensor, cache: Cache | None = None, **inputs: Any
    ) -> DecoderOutput:
        """Run the decoder on targets with the mask `target_mask` (k B, T)."""
        return self(
            attention_mask=target_mask,
            encoder_hidden_states=source.memory,
            encoder_attention_mask=source.attention_mask,
            past_key_values=cache,
            use_cache=False,
            return_dict=True,
            **inputs,
        )

    def self_attention_mask(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: Cache | None
    ) -> Tensor | None:
        """Return the padding mask in the attention implementation's format."""
        return padding_mask(self.config, inputs_embeds, attention_mask)

    def position_encodings(self, hidden_states: Tensor) -> Tensor:
        """Return the position encodings (1, T, d_model) for `hidden_states` (k B, T, d_model), in their dtype."""
        positions = text_positions(hidden_states, None)  # (1, T)
        return self.input_embedding.positions(positions, hidden_states.shape[1]).to(hidden_states.dtype)


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

    def __init__(self, config: Any, layer_idx: int) -> None:  # a VaswaniNatConfig
        super().__init__(config, layer_idx)
        if config.relative_attention_clip is not None:
            self.self_attn = RelativeSelfAttention(config, layer_idx, config.relative_attention_clip)
        self.positional_attn = PositionalAttention(config, layer_idx)
        self.positional_attn_add_norm = AddAndNorm(config)

    def forward(  # ty: ignore[incompatible-method-override] - only `PositionalDecoder` has such layers
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor | None,
        positions: Tensor,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
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
            further=(positions,),
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


@dataclass
class EncodedSource:
    """An encoded source."""

    memory: Tensor  # (B, S, d_model), input of cross-attention
    attention_mask: Tensor | None  # (B, S), as passed by the caller
    is_real: Tensor  # (B, S), True at tokens

    @property
    def lengths(self) -> Tensor:
        """Return n (B,), the number of tokens of each source."""
        return self.is_real.sum(1)


@dataclass
class MeasuredSource(EncodedSource):
    """An encoded source with its length prediction."""

    length_logits: Tensor  # (B, C)
    first_length: Tensor  # (B,), target length of class 0; each further class is one token longer

    def length_classes(self, lengths: Tensor) -> Tensor:
        """Return the nearest length class (k B,) of `lengths` (k B,)."""
        first = self.first_length.repeat_interleave(len(lengths) // len(self.first_length))
        return (lengths.clamp(min=1) - first).clamp(0, self.length_logits.shape[1] - 1)

    def length_losses(self, lengths: Tensor) -> Tensor:
        """Return the cross-entropy (k B,) of `lengths` (k B,)."""
        logits = self.length_logits.to(accumulation_dtype(self.length_logits.dtype))
        logits = logits.repeat_interleave(len(lengths) // len(logits), dim=0)  # (k B, C)
        return nn.functional.cross_entropy(logits, self.length_classes(lengths), reduction="none")


class TargetInputs(NamedTuple):
    """Target arguments of `forward`."""

    labels: Tensor | None = None
    num_items: Tensor | int | None = None
    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    inputs_embeds: Tensor | None = None
    lengths: Tensor | None = None
    further: dict[str, Any] = {}  # the `further_arguments` of the model family; None if not passed


def input_mask(source: EncodedSource, mask: Tensor | None, inputs_embeds: Tensor | None) -> Tensor | None:
    """Return the mask (k B, T) of the decoder's input, by `mask`, else by its embeddings; None without both."""
    device = source.memory.device
    if mask is None and inputs_embeds is not None:
        mask = torch.ones(inputs_embeds.shape[:2], device=device)
    if mask is None:
        return None
    check_rows(mask.shape[0], source.memory.shape[0])
    lengths = mask.to(device).ne(0).sum(1)  # (k B,)
    return canvas(lengths, mask.shape[1])


def given_mask(source: EncodedSource, inputs: TargetInputs) -> Tensor | None:
    """Return the target mask (k B, T), from the labels, else the mask or embeddings; None without any of them."""
    labels = inputs.labels
    if labels is None:
        return input_mask(source, inputs.attention_mask, inputs.inputs_embeds)
    check_right_padded(labels)
    check_rows(labels.shape[0], source.memory.shape[0])
    lengths = labels.to(source.memory.device).ne(-100).sum(1)  # (k B,)
    return canvas(lengths, labels.shape[1])


@dataclass
class Target:
    """A target prepared for a model family's decoder and losses."""

    mask: Tensor  # (k B, T), 1 at tokens
    labels: Tensor | None = None  # (k B, T), token ids, -100 at positions without a loss; None: no loss
    num_items: Tensor | int | None = None  # divisor of every summed loss; None: the number of labels
    decoder_inputs: dict[str, Any] = field(default_factory=dict)  # input_ids or inputs_embeds, and settings
    outputs: dict[str, Tensor] = field(default_factory=dict)  # output fields computed before the decoder

    def mean(self, summed: Tensor) -> Tensor:
        """Divide a sum over targets by the number of their tokens."""
        return summed if self.labels is None else reduce_loss(summed, self.labels, self.num_items)

    def predictions(self, head: Any, states: Tensor, skip_logits: bool | None) -> dict[str, Tensor | None]:
        """Return logits and, with labels, the loss and its terms by name, from the decoder's states (k B, T, d_model).

        `head` is the model with the output projection; `skip_logits` is that of `forward`.
        """
        raise NotImplementedError


class Latent(Protocol):
    """Latents of a decoder pass, which add terms to the loss."""

    def loss(self, head: Any, target: "LengthTarget", predictions: dict[str, Any]) -> dict[str, Tensor]:
        """Return further output fields, and replacements of some `predictions`, such as `loss`."""


@dataclass
class LengthTarget(Target):
    """A target of a model that predicts a length, which is a term of the loss."""

    source: MeasuredSource = field(kw_only=True)
    latent: Latent | None = field(default=None, kw_only=True)  # those that the decoder's pass has

    def predictions(self, head: Any, states: Tensor, skip_logits: bool | None) -> dict[str, Tensor | None]:
        token_loss, logits = head.loss_and_logits(states, self.labels, 0, skip_logits, self.num_items)
        predictions = {"logits": logits}
        if token_loss is None:
            return predictions
        lengths = self.mask.sum(1)  # (k B,)
        has_target = lengths > 0  # rows without a target have no loss
        length_loss = self.mean((self.source.length_losses(lengths) * has_target).sum())
        loss = token_loss + head.config.length_loss_weight * length_loss
        predictions.update(loss=loss, token_loss=token_loss, length_loss=length_loss, **self.outputs)
        if self.latent is not None:
            predictions.update(self.latent.loss(head, self, predictions))
        return predictions
