"""Shared code of the non-autoregressive models: decoder, inputs and outputs, and `generate()`.

B batch, S source, T target, k target rows per source row, l lengths of a length beam, n targets returned per source, N
positions, V vocabulary, R iterations or refining layers. For lengths, n and m are the numbers of source and target
tokens, both including `</s>`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as DecoderOutput
from transformers.utils import ModelOutput

from .config import VaswaniTransformerConfig, checked_field
from .generation import mixes_adapters
from .layers import SelfAttention, VaswaniTransformerDecoderLayer, padding_mask, text_positions
from .loss import accumulation_dtype, chunk_size, reduce_loss, without_padding
from .model import LMOutput, ProjectedModel, can_return_whole_tuple
from .settings import TOKEN_IDS, CallSettings, NarSettings, as_token_ids, refuse
from .stacks import VaswaniTransformerDecoder, as_encoder_output, check_inputs, check_mask, check_rows, pop_cache

always_none = checked_field(lambda value: value is None, "is not supported by non-autoregressive models; leave it out.")


@strict
class NarConfig(VaswaniTransformerConfig):
    """Hyperparameters of every non-autoregressive model, in addition to those of `VaswaniTransformerConfig`."""

    keys_to_ignore_at_inference = [
        *VaswaniTransformerConfig.keys_to_ignore_at_inference,
        *("token_loss", "length_loss", "accuracy"),
    ]

    use_cache: bool = False
    attention_window: int | None = always_none(default=None)


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

    def self_attention_mask(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: Cache | None
    ) -> Tensor | None:
        """Return the padding mask in the attention implementation's format."""
        return padding_mask(self.config, inputs_embeds, attention_mask)

    def position_encodings(self, hidden_states: Tensor) -> Tensor:
        """Return the position encodings (1, T, d_model) for `hidden_states` (k B, T, d_model), in their dtype."""
        positions = text_positions(hidden_states, None)  # (1, T)
        return self.input_embedding.positions(positions, hidden_states.shape[1]).to(hidden_states.dtype)


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
class NarLMOutput(LMOutput):
    """Output of a non-autoregressive model; the fields below are None without labels."""

    token_loss: Tensor | None = None  # mean in nats per target token; label-smoothed in training mode
    length_loss: Tensor | None = None  # cross-entropy of a predicted length, divided by the same number of tokens
    accuracy: Tensor | None = None  # with glancing: share of the words to show that the first pass predicts


class TargetInputs(NamedTuple):
    """Target arguments of `forward`."""

    labels: Tensor | None = None
    num_items: Tensor | int | None = None
    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    inputs_embeds: Tensor | None = None
    lengths: Tensor | None = None
    skip_logits: bool | None = None
    further: dict[str, Any] = {}  # the `further_arguments` of the model family; None if not passed


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


class NarTargets(NamedTuple):
    """Predicted targets, one row for each length of each source."""

    tokens: Tensor  # (l B, T)
    log_probs: Tensor  # (l B, T), of the tokens; 0 at padding or if no scores are needed
    history: list[Tensor]  # tokens after each iteration or layer
    log_likelihoods: Tensor | None = None  # (l B,), log p(y | x, m); None: the sum of log_probs
    committed: list[Tensor] | None = None  # (l B, T) each, which tokens of `history` are final; None: unknown


@dataclass
class NarGenerateOutput(ModelOutput):
    """Result of `generate(return_dict_in_generate=True)`; the n targets of a source are consecutive, best first."""

    sequences: Tensor | None = None  # (n B, T + 1), start token, target, padding
    sequences_scores: Tensor | None = None  # (n B,), the scores of `NarSettings`
    token_scores: Tensor | None = None  # (n B, T), log-probability of each token after the start; 0 at padding
    lengths: Tensor | None = None  # (n B,), m of each target, including `</s>`
    history: Tensor | None = None  # (R, n B, T + 1), sequences after each iteration or layer, on request
    committed: Tensor | None = None  # (R, n B, T), where a revealed latent has committed the token, with `history`


SOURCE_INPUTS = ("input_ids", "attention_mask", "encoder_outputs", "inputs_embeds", "position_ids")
"""Source arguments of `generate()`."""
IGNORED = {
    *("labels", "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "target_lengths"),
    "synced_gpus",  # every process runs the same number of passes
}
"""Arguments that `generate()` ignores, so that a trainer can pass a complete batch."""


class NarHead(ProjectedModel, GenerationMixin):
    """Base class of non-autoregressive heads: output projection, `forward` and `generate()`."""

    is_autoregressive = False
    has_likelihood = False  # the length is given
    output_class: ClassVar[type[NarLMOutput]] = NarLMOutput  # of `forward`
    further_arguments: ClassVar[tuple[str, ...]] = ()  # names of further arguments of `forward`
    family_settings: tuple[str, ...] = ()  # further `NarSettings` that this model supports
    num_length_classes: int = 1  # the largest `length_beam_size`
    unmixed: str = ".*"  # modules that cannot apply a different adapter to each row, as in `mixes_adapters`

    def read_source(self, states: Tensor, attention_mask: Tensor | None) -> EncodedSource:
        """Return the encoded source for the encoder's `states`."""
        return EncodedSource(states, attention_mask, real_tokens(attention_mask, states))

    def predict(
        self, states: Tensor, attention_mask: Tensor | None, inputs: TargetInputs, **kwargs: Any
    ) -> tuple[DecoderOutput, dict[str, Tensor | None]]:
        """Return the decoder's output for the encoder's `states` (B, S, d_model), and logits and losses by name."""
        raise NotImplementedError

    def decode(
        self, states: Tensor, attention_mask: Tensor | None, settings: NarSettings
    ) -> "Tensor | NarGenerateOutput":
        """Return the result of `generate()` for the encoder's `states` (B, S, d_model)."""
        raise NotImplementedError

    @can_return_whole_tuple
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
        """Compute the logits (k B, T, V) of all target tokens in one pass, or the loss of a target.

        The source arguments are those of an autoregressive model. Without labels or a target mask, T is predicted.

        Args:
            decoder_input_ids: (k B, T) target token ids for a CMLM; others ignore them.
            decoder_attention_mask: (k B, T), 1 at target tokens.
            decoder_inputs_embeds: (k B, T, d_model), replaces the decoder's initial states.
            labels: (k B, T) target token ids including the end token, not shifted, padded on the right with -100 or
                `<pad>`. They determine the lengths. Row i belongs to source i // k.
            target_lengths: (k B,), m of each target of `decoder_input_ids`.
            skip_logits: whether to omit `logits` if there are labels; None: in training mode only.
            num_items_in_batch: number of target tokens that divides all summed losses; None: that of `labels`.

        Returns:
            The logits, and with `labels` the `loss`: `token_loss` + `length_loss_weight` `length_loss` + the terms of
            the model family, all in nats per target token.

        Raises:
            ValueError: source or target inputs are inconsistent, labels have a token after padding, the number of items
                comes without labels, or a cache is passed.
        """
        if labels is not None:
            labels, num_items_in_batch = without_padding(labels, num_items_in_batch, self.config)
        elif num_items_in_batch is not None:  # from a Trainer that computes the loss from the logits
            raise ValueError(
                "labels: missing, but num_items_in_batch is set; got None, expected labels, since this model computes "
                "its own loss. Set the Trainer's label_smoothing_factor to 0 and no compute_loss_func; smooth by "
                "config.label_smoothing."
            )
        check_inputs(
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_inputs_embeds=decoder_inputs_embeds,
            target_lengths=target_lengths,
        )
        target_inputs = TargetInputs(
            labels=labels,
            num_items=num_items_in_batch,
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            lengths=target_lengths,
            skip_logits=skip_logits,
            further={name: kwargs.pop(name, None) for name in self.further_arguments},
        )
        self.remove_cache_arguments(kwargs)

        # What remains in `kwargs` goes to both stacks, but the positions are those of the source.
        encoder_outputs = self.encode(input_ids, attention_mask, encoder_outputs, inputs_embeds=inputs_embeds, **kwargs)
        kwargs.pop("position_ids", None)
        outputs, predictions = self.predict(encoder_outputs[0], attention_mask, target_inputs, **kwargs)
        return self.output_class(
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            **predictions,
        )

    def remove_cache_arguments(self, kwargs: dict[str, Any]) -> None:
        """Remove the cache arguments that trainers and PEFT pass to every model; raise ValueError for a cache."""
        kwargs.pop("use_cache", None)
        if pop_cache(kwargs.pop("past_key_values", None), kwargs) is not None:
            raise ValueError(
                f"past_key_values: {type(self).__name__} predicts all words at once and uses no cache; got one, "
                "expected None. Of PEFT's methods, PREFIX_TUNING needs a cache; use LORA or PROMPT_TUNING."
            )

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Run the encoder, unless `encoder_outputs` are given; arguments as in `forward`."""
        if encoder_outputs is not None:
            return as_encoder_output(encoder_outputs)
        self.model.check_adapters()
        return self.run_encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **inputs)

    def run_encoder(self, **inputs: Any) -> BaseModelOutput:
        return self.model.encoder(**inputs)

    def run_decoder(
        self, source: EncodedSource, target_mask: Tensor, cache: Cache | None = None, **inputs: Any
    ) -> DecoderOutput:
        """Run the decoder on targets with the mask `target_mask` (k B, T)."""
        return self.model.decoder(
            attention_mask=target_mask,
            encoder_hidden_states=source.memory,
            encoder_attention_mask=source.attention_mask,
            past_key_values=cache,
            use_cache=False,
            return_dict=True,
            **inputs,
        )

    def input_mask(self, source: EncodedSource, mask: Tensor | None, inputs_embeds: Tensor | None) -> Tensor | None:
        """Return the mask (k B, T) of the decoder's input, by `mask`, else by its embeddings; None without both."""
        device = source.memory.device
        if mask is None and inputs_embeds is not None:
            mask = torch.ones(inputs_embeds.shape[:2], device=device)
        if mask is None:
            return None
        check_rows(mask.shape[0], source.memory.shape[0])
        lengths = mask.to(device).ne(0).sum(1)  # (k B,)
        return canvas(lengths, mask.shape[1])

    def logits_of(self, states: Tensor, is_real: Tensor, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield chunks of logits (N, V), in at least float32, with the corresponding entries (N,) of `values` (k B, T).

        The positions are those where `is_real` (k B, T). Counting them synchronizes with an accelerator.
        """
        rows = is_real.flatten().nonzero()[:, 0]
        size = chunk_size(states.device)
        chunks = []
        for tensor in (states, *values):
            chunks.append(tensor.flatten(0, 1).index_select(0, rows).split(size))
        for states_of_chunk, *values_of_chunk in zip(*chunks, strict=True):
            logits = self.lm_head(states_of_chunk)  # (N, V)
            yield logits.to(accumulation_dtype(logits.dtype)), *values_of_chunk

    @torch.no_grad()
    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **call: Any
    ) -> Tensor | NarGenerateOutput:
        """Predict a target for each source.

        Args:
            inputs: (B, S) source token ids; `input_ids` is an alias.
            generation_config: settings that override those of the model; arguments of the call override both.
            call: `attention_mask`, `inputs_embeds`, `encoder_outputs` and `position_ids` of the source, as in
                `forward`, and settings of `NarSettings`. Other settings must be off or at their defaults. Target
                arguments of `forward` and `synced_gpus` are ignored, so that a trainer can pass a complete batch.

        Returns:
            Tokens (n B, T + 1) that begin with the start token, or a `NarGenerateOutput`.

        Raises:
            ValueError: this model does not support a setting, or a value is out of range.
        """
        self.config.check_generation_settings(generation_config)
        check_inputs(inputs=inputs, **call)
        source = {name: call.pop(name, None) for name in SOURCE_INPUTS}
        if inputs is not None:
            if source["input_ids"] is not None:
                refuse("input_ids", "the same argument as inputs, and both are set", source["input_ids"], "None")
            source["input_ids"] = inputs
        settings = self.read_settings(generation_config, {name: call[name] for name in call.keys() - IGNORED})
        has_row_per_source = settings.length_beam_size * settings.num_latent_samples == 1
        mixes_adapters(self, self.unmixed if has_row_per_source else ".*")
        encoder_outputs = self.encode(**source)
        return self.decode(encoder_outputs[0], source["attention_mask"], settings)

    def read_settings(self, generation_config: GenerationConfig | None, call: dict[str, Any]) -> NarSettings:
        """Return the settings of the call, else of its generation config, else of the model.

        Raises:
            ValueError: a setting that this model does not support is not None, False, empty or at its default; or a
                suppressed token is not in the vocabulary.
        """
        values = CallSettings(generation_config, self, call).for_non_autoregressive(self)
        settings = NarSettings(**values)

        # Words of the caller are suppressed in addition to special tokens.
        suppressed = as_token_ids(settings.suppress_tokens)
        size = self.config.vocab_size
        if not all(0 <= token < size for token in suppressed):
            refuse("suppress_tokens", "outside the vocabulary", suppressed, f"ids from 0 to {size - 1}")
        settings.suppress_tokens = suppressed + self.special_tokens()
        return settings

    def special_tokens(self) -> list[int]:
        """Return the ids of all special tokens."""
        token_ids = []
        for name in (*TOKEN_IDS, "mask_token_id"):
            token_ids += as_token_ids(getattr(self.config, name, None))
        return token_ids

    def length_limits(self, source: EncodedSource, settings: NarSettings) -> Tensor:
        """Return the largest target length (B,) of each source by the settings."""
        limits = torch.full_like(source.lengths, torch.iinfo(torch.long).max)  # (B,)
        if settings.max_new_tokens is not None:
            limits = limits.clamp(max=settings.max_new_tokens)
        elif settings.max_length is not None:
            limits = limits.clamp(max=settings.max_length - 1)  # without the start token
        if settings.max_source_relative_length is not None:
            limits = torch.minimum(limits, source.lengths + settings.max_source_relative_length)
        return limits

    def most_likely_words(
        self, states: Tensor, is_predicted: Tensor, is_end: Tensor, suppress_tokens: list[int] | None, has_scores: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens (l B, T) of `states` (l B, T, d_model), and their log-probabilities (l B, T).

        Positions where `is_end` (l B, T) always get the end token, and no other position has one of `suppress_tokens`;
        probabilities are not renormalized. Both results are 0 where `is_predicted` (l B, T) is False, and without
        `has_scores` all log-probabilities are, but NaN where the logits are.
        """
        # The logits of the predicted positions, chunk by chunk.
        wide = accumulation_dtype(states.dtype)
        chunks = self.logits_of(states, is_predicted, is_end)
        has_logits = is_predicted
        if torch.compiler.is_compiling():  # a graph needs fixed shapes, so it computes all of them
            logits = self.lm_head(states.flatten(0, 1))  # (l B T, V)
            chunks = iter([(logits.to(wide), is_end.flatten())])
            has_logits = torch.ones_like(is_predicted)

        # The words of each chunk go back to their positions.
        suppressed = torch.tensor(suppress_tokens or [], dtype=torch.long, device=states.device)
        results = [self.best_words(logits, ends, suppressed, has_scores) for logits, ends in chunks]
        best_tokens = torch.cat([tokens for tokens, _ in results])
        best_log_probs = torch.cat([log_probs for _, log_probs in results])
        tokens = torch.zeros_like(is_predicted, dtype=torch.long).masked_scatter(has_logits, best_tokens)
        log_probs = states.new_zeros(is_predicted.shape, dtype=wide).masked_scatter(has_logits, best_log_probs)
        return tokens.masked_fill(~is_predicted, 0), log_probs.masked_fill(~is_predicted, 0)

    def best_words(self, logits: Tensor, is_end: Tensor, suppressed: Tensor, has_scores: bool) -> tuple[Tensor, Tensor]:
        """Return the results (N,) of `most_likely_words` for `logits` (N, V), which are overwritten."""
        # The best token, which is never suppressed, except where the target ends.
        suppressed_logits = logits.index_select(1, suppressed)
        best = argmax(logits.index_fill_(1, suppressed, float("-inf")))  # (N,)
        is_nan = logits.gather(1, best[:, None]).squeeze(1).isnan()
        if self.config.end_token_id is not None:
            best = best.masked_fill(is_end, self.config.end_token_id)

        # Its probability among all tokens.
        log_probs = torch.zeros_like(best, dtype=logits.dtype)
        if has_scores:
            logits.index_copy_(1, suppressed, suppressed_logits)
            log_probs = logits.gather(1, best[:, None]).squeeze(1) - logits.logsumexp(1)
        return best, log_probs.masked_fill(is_nan, float("nan"))
