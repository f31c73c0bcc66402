"""The head of the non-autoregressive models: `forward`, its outputs, and `generate()`.

B batch, S source, T target, k target rows per source row, l lengths of a length beam, n targets returned per source, N
positions, V vocabulary, R iterations or refining layers. For lengths, n and m are the numbers of source and target
tokens, both including `</s>`.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from .config import VaswaniTransformerConfig, checked_field
from .generation import mixes_adapters
from .loss import accumulation_dtype, chunk_size, without_padding
from .model import LMOutput, ProjectedModel, can_return_whole_tuple
from .nar_decoder import EncodedSource, Target, TargetInputs, argmax, real_tokens
from .settings import TOKEN_IDS, CallSettings, NarSettings, as_token_ids, refuse
from .stacks import check_inputs, pop_cache

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


@dataclass
class NarLMOutput(LMOutput):
    """Output of a non-autoregressive model; the fields below are None without labels."""

    token_loss: Tensor | None = None  # mean in nats per target token; label-smoothed in training mode
    length_loss: Tensor | None = None  # cross-entropy of a predicted length, divided by the same number of tokens
    accuracy: Tensor | None = None  # with glancing: share of the words to show that the first pass predicts


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


class NarGenerationConfig(GenerationConfig):
    """A generation config whose `length_penalty` needs no beams, since it ranks lengths or paths."""

    def validate(self, *args: Any, **kwargs: Any) -> None:
        length_penalty, self.length_penalty = self.length_penalty, None
        try:
            super().validate(*args, **kwargs)
        finally:
            self.length_penalty = length_penalty


class NarHead(ProjectedModel, GenerationMixin):
    """Base class of non-autoregressive heads: output projection, `forward` and `generate()`."""

    model: Any  # an `EncoderDecoder` with a `NarDecoder`
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

    def make_target(self, source: Any, inputs: TargetInputs) -> Target:
        """Return the target of `forward`, prepared for the decoder and the losses."""
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
            further={name: kwargs.pop(name, None) for name in self.further_arguments},
        )
        # Trainers and PEFT pass the arguments of a cache to every model.
        kwargs.pop("use_cache", None)
        if pop_cache(kwargs.pop("past_key_values", None), kwargs) is not None:
            raise ValueError(
                f"past_key_values: {type(self).__name__} predicts all words at once and uses no cache; got one, "
                "expected None. Of PEFT's methods, PREFIX_TUNING needs a cache; use LORA or PROMPT_TUNING."
            )

        # What remains in `kwargs` goes to both stacks, but the positions are those of the source.
        encoder_outputs = self.encode(input_ids, attention_mask, encoder_outputs, inputs_embeds=inputs_embeds, **kwargs)
        kwargs.pop("position_ids", None)
        source = self.read_source(encoder_outputs[0], attention_mask)
        target = self.make_target(source, target_inputs)
        outputs = self.model.decoder.run(source, target.mask, **target.decoder_inputs, **kwargs)
        predictions = target.predictions(self, outputs[0], skip_logits)
        return self.output_class(
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            **predictions,
        )

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

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save the model, as every model of the package, with any valid search."""
        if type(self.generation_config) is GenerationConfig:
            self.generation_config = copy.copy(self.generation_config)
            self.generation_config.__class__ = NarGenerationConfig
        super().save_pretrained(*args, **kwargs)

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
        given = [len(source[name]) for name in ("input_ids", "inputs_embeds") if source[name] is not None]
        mixes_adapters(self, self.unmixed if has_row_per_source else ".*", rows=given[0] if given else None)
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
