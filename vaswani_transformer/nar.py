"""What the models share that predict all words at once: lengths, decoder, losses, `generate()`.

B batch, S source, T target, k target rows of one source row, C length classes, l lengths of a length beam, n returned
targets of a source, N positions, V vocabulary, R iterations, or layers of a model that refines from layer to layer. n
and m are also a sentence's real source and target tokens, `</s>` counted on both sides.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Never

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions, Seq2SeqLMOutput
from transformers.utils import ModelOutput, can_return_tuple

from .attention import SelfAttention, padding_mask
from .config import TOKEN_IDS, VaswaniTransformerConfig, as_token_ids, loss_weight
from .embeddings import text_positions
from .generation import CallSettings, default_settings
from .layers import VaswaniTransformerDecoderLayer
from .loss import accumulation_dtype, chunk_size, reduce_loss, without_padding
from .model import ProjectedModel, as_encoder_output
from .pretrained import given_cache
from .stacks import VaswaniTransformerDecoder, check_rows


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


def check_right_padded(mask: Tensor, name: str) -> None:
    """Raise ValueError if a row of `mask` (B, T) has a token after padding; a compiled graph cannot check it."""
    if torch.compiler.is_compiling() or mask.shape[1] < 2:
        return
    is_late = (mask[:, 1:] & ~mask[:, :-1]).any(1)  # (B,)
    if bool(is_late.any()):
        raise ValueError(
            f"{name}: a target must begin at the first position; got row {int(is_late.nonzero()[0])} with a token "
            "after padding. Pad targets on the right."
        )


def real_tokens(attention_mask: Tensor | None, memory: Tensor) -> Tensor:
    """Return which rows of `memory` (B, S, d_model) are tokens: (B, S), bool; in a source without any, all are."""
    if attention_mask is None:
        return torch.ones(memory.shape[:2], dtype=torch.bool, device=memory.device)
    if attention_mask.shape != memory.shape[:2]:
        got, expected = tuple(attention_mask.shape), tuple(memory.shape[:2])
        raise ValueError(
            f"attention_mask: lengths are counted from it; got shape {got}, expected {expected}, a number for each "
            "source token. Give the mask of these sources."
        )
    is_real = attention_mask.to(memory.device).ne(0)
    return is_real | ~is_real.any(1, keepdim=True)


def canvas(lengths: Tensor, width: int | None = None) -> Tensor:
    """Return the target's mask (k B, T), 1 at positions 0..m-1, for `lengths` (k B,); T is `width` or the longest."""
    width = int(lengths.max()) if width is None else width
    return (torch.arange(width, device=lengths.device) < lengths[:, None]).long()


def choose_positions(
    is_candidate: Tensor, counts: Tensor, generator: torch.Generator | None = None, draws: Tensor | None = None
) -> Tensor:
    """Return a random choice of `counts` (B,) of the candidates (B, T) in each row: (B, T), bool.

    `draws` (B, T), uniform on [0, 1), decide; None: they are drawn from `generator`.
    """
    if draws is None:
        draws = torch.rand(is_candidate.shape, generator=generator, device=is_candidate.device)
    ranks = draws.masked_fill(~is_candidate, 2.0).argsort(1).argsort(1)  # candidates first
    return is_candidate & (ranks < counts[:, None])


class NarDecoderLayer(VaswaniTransformerDecoderLayer):
    """The paper's decoder layer without a causal mask; a cache holds only cross-attention."""

    self_attention = SelfAttention

    def attend_to_target(
        self, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None, **kwargs: Any
    ) -> Tensor:
        """Apply self-attention to states (k B, T, d_model), without the cache."""
        return super().attend_to_target(hidden_states, attention_mask, None, **kwargs)


class NarDecoder(VaswaniTransformerDecoder):
    """The paper's decoder without a causal mask."""

    layer_class = NarDecoderLayer
    _no_split_modules = ["NarDecoderLayer"]

    def self_attention_mask(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: Cache | None
    ) -> Tensor | BlockMask | None:
        """Return the mask of padding, in the form that the attention implementation takes."""
        return padding_mask(self.config, inputs_embeds, attention_mask)

    def position_encodings(self, hidden_states: Tensor) -> Tensor:
        """Return PE (1, T, d_model) of the positions of `hidden_states` (k B, T, d_model), in their dtype."""
        length = hidden_states.shape[1]
        positions = text_positions(hidden_states, None)  # (1, T)
        return self.input_embedding.positions(positions, length).to(hidden_states.dtype)


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


SOURCE_INPUTS = ("input_ids", "attention_mask", "inputs_embeds", "encoder_outputs", "position_ids")
TARGET_INPUTS = ("labels", "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "target_lengths")
IGNORED = {*TARGET_INPUTS, "output_scores", "transformers_version", "use_cache"}
# A generation config has them from the model's configuration; `generate()` reads them there.
COPIED = (*TOKEN_IDS, "output_attentions", "output_hidden_states")


@dataclass
class NarGenerateOutput(ModelOutput):
    """The result of `generate(return_dict_in_generate=True)`; the n targets of a source are neighbors, best first.

    Attributes:
        sequences: (n B, T + 1), the start token, the target, padding.
        sequences_scores: (n B,), which rank the targets, as `NarSettings` says.
        token_scores: (n B, T), the log-probability of each token after the start; 0 at padding.
        lengths: (n B,), m of each target, `</s>` counted.
        history: (R, n B, T + 1), the sequences after each iteration or layer; None unless `return_history`.
    """

    sequences: Tensor | None = None
    sequences_scores: Tensor | None = None
    token_scores: Tensor | None = None
    lengths: Tensor | None = None
    history: Tensor | None = None


@dataclass
class NarTargets:
    """Targets as they are predicted, one row for each length of each source.

    Attributes:
        tokens: (l B, T).
        log_probs: (l B, T), of `tokens`; 0 at padding.
        history: `tokens` after each iteration or layer.
        likelihoods: (l B,), log p(y | x, m) of each target; None for the sum of `log_probs`.
    """

    tokens: Tensor
    log_probs: Tensor
    history: list[Tensor]
    likelihoods: Tensor | None = None


def refuse(name: str, problem: str, value: object, expected: str) -> Never:
    """Raise ValueError for an argument or setting of `generate()`."""
    got = textwrap.shorten(repr(value), 100)  # of a model or a tensor
    raise ValueError(
        f"{name}: {problem}; got {got}, expected {expected}. Leave it out, or set it to None in the generation config."
    )


def number(default: float | None, least: float) -> Any:
    """Return a field of settings for finite numbers of at least `least`, whole ones where `least` is whole."""
    return field(default=default, metadata={"least": least})


@dataclass
class NarSettings:
    """The settings of `generate()`, which the call, its generation config or the model's gives.

    Attributes:
        num_iterations: R, the passes of the decoder over each target, of a model that refines (CMLM).
        length_beam_size: l, the best length classes that are tried for each source; the target with the largest score
            wins. Classes below length 1, or beyond a limit, give equal targets.
        num_return_sequences: n, the targets of a source, of those that are tried.
        length_penalty, length_weight: alpha and w of the score (log p(y | x, m) + w log p(m | x)) / m^alpha of a target
            of m tokens; the larger alpha, the longer the targets. log p(y | x, m) is the sum of the tokens'
            log-probabilities, or at a `latent_temperature` above 0 an estimate by importance weights.
        latent_temperature: the standard deviation of the noise that the latents of a model with a prior (FlowSeq) are
            made from.
        num_latent_samples: the number of such latents for each length.
        max_new_tokens, max_length: bounds of m, the second with the start token; the first wins.
        max_source_relative_length: how many tokens longer than its own source a target may become.
        suppress_tokens: tokens that are not predicted, such as `<unk>`.
        do_sample: whether a model with noise (IterativeVAE) uses it.
        return_history: whether the output has the tokens after each iteration, or after each layer of a model that
            refines from layer to layer (IterativeVAE).
        return_dict_in_generate: whether the output is a `NarGenerateOutput`.
    """

    num_iterations: int = number(1, least=1)
    length_beam_size: int = number(1, least=1)
    num_return_sequences: int = number(1, least=1)
    length_penalty: float = number(1.0, least=-math.inf)
    length_weight: float = number(1.0, least=-math.inf)
    latent_temperature: float = number(0.0, least=0.0)
    num_latent_samples: int = number(1, least=1)
    max_new_tokens: int | None = number(None, least=1)
    max_length: int | None = number(None, least=2)
    max_source_relative_length: int | None = number(None, least=0)
    suppress_tokens: list[int] | None = None
    do_sample: bool = False
    return_history: bool = False
    return_dict_in_generate: bool = False

    def __post_init__(self) -> None:
        for name, least in [(one.name, one.metadata["least"]) for one in fields(self) if one.metadata]:
            if (value := getattr(self, name)) is None:
                continue
            is_whole = isinstance(least, int)
            is_number = isinstance(value, Integral if is_whole else Real) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value < least:
                limit = f" of at least {least}" if math.isfinite(least) else ""
                refuse(name, "out of range", value, f"a {'whole' if is_whole else 'finite'} number{limit}")
            setattr(self, name, type(least)(value))  # it may be NumPy's


class NarHead(ProjectedModel, GenerationMixin):
    """A body, its projection, a prediction of length, and `generate()` with the settings of `NarSettings`.

    A subclass defines how it reads the encoder's output (`read_source`), the class of a length (`length_classes`), the
    best lengths (`best_lengths`), what its decoder gets for a target (`make_target`), and how it decodes
    (`decode_targets`). It adds its own terms of the loss (`losses`).

    Attributes:
        output_class: the output of `forward`.
        draws: the names of random numbers that `forward` takes in addition, for `make_target`; torch's generator draws
            those that are not given.
        refines, has_latents: whether `num_iterations`, and whether the settings of latents have an effect.
    """

    is_autoregressive = False
    refines: ClassVar[bool] = False
    has_latents: ClassVar[bool] = False
    output_class: ClassVar[type[NarLMOutput]] = NarLMOutput
    draws: ClassVar[tuple[str, ...]] = ()

    @property
    def samples(self) -> bool:
        """Return whether `do_sample` has an effect."""
        return False

    @property
    def num_length_classes(self) -> int:
        """Return C, the lengths that a length beam can try."""
        raise NotImplementedError

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

    def decode_targets(self, source: EncodedSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,)."""
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
        lengths, logits = target.lengths, source.length_logits  # (k B,), (B, C)
        logits = logits.to(accumulation_dtype(logits.dtype)).repeat_interleave(len(lengths) // len(logits), dim=0)
        losses = nn.functional.cross_entropy(logits, self.length_classes(source, lengths), reduction="none")  # (k B,)
        length_loss = target.mean((losses * (lengths > 0)).sum())
        loss = token_loss + self.config.length_loss_weight * length_loss
        return {"loss": loss, "token_loss": token_loss, "length_loss": length_loss, **target.outputs}

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        synced_gpus: bool | None = None,
        **kwargs: Any,
    ) -> Tensor | NarGenerateOutput:
        """Predict a target for each source.

        Args:
            inputs: (B, S) source token ids; `input_ids` is another name for it.
            generation_config: settings that win over the model's own; arguments of the call win over both.
            synced_gpus: ignored: every process makes the same number of passes.
            kwargs: settings; `attention_mask`, `inputs_embeds`, `encoder_outputs` and `position_ids` as in `forward`.
                What `forward` takes of a target is ignored, so that a trainer can pass a complete batch.

        Returns:
            (n B, T + 1) tokens that begin with the start token, or a `NarGenerateOutput`.

        Raises:
            ValueError: an argument or a setting that this model does not have, or a value out of its range.
        """
        self.config.check_generation_settings(generation_config)
        names = SOURCE_INPUTS if inputs is None else SOURCE_INPUTS[1:]
        source_inputs = {name: kwargs.pop(name) for name in names if name in kwargs}
        if inputs is not None:
            source_inputs["input_ids"] = inputs
        settings = self.read_settings(generation_config, kwargs)
        source = self.read_source(self.encode(**source_inputs)[0], source_inputs.get("attention_mask"))
        lengths = self.best_lengths(source, settings.length_beam_size)  # (B, l)
        if (longest := self.longest_target(settings)) is not None:
            lengths = lengths.clamp(max=longest)
        if settings.max_source_relative_length is not None:
            lengths = torch.minimum(lengths, source.lengths[:, None] + settings.max_source_relative_length)
        lengths = lengths.repeat_interleave(settings.num_latent_samples, dim=1)
        targets = self.decode_targets(source, lengths.flatten(), settings)
        return self.best_targets(source, targets, lengths, settings)

    def read_settings(self, generation_config: GenerationConfig | None, call: dict[str, Any]) -> NarSettings:
        """Return the settings of a call: its own, then its configuration's, then the model's.

        One rule refuses the rest: what is no setting of this model must be None, False, empty, or have its default.
        """
        merged = CallSettings(generation_config, self, call)
        values = {name: value for name, value in merged.values.items() if name in merged.given or name not in COPIED}
        values |= {name: value for name, value in call.items() if name not in merged.given and value is not None}
        has_latents, defaults = self.has_latents, vars(NarSettings())
        of_some = {"num_iterations": self.refines, "do_sample": self.samples}
        of_some |= {"latent_temperature": has_latents, "num_latent_samples": has_latents}
        known = {name for name in defaults if of_some.get(name, True)}
        defaults = default_settings() | defaults | {name: getattr(self.config, name) for name in TOKEN_IDS}
        defaults["decoder_start_token_id"] = self.config.target_start_token_id
        for name in sorted(values.keys() - known - IGNORED):
            value, default = values[name], defaults.get(name)
            if name in TOKEN_IDS:
                value, default = as_token_ids(value), as_token_ids(default)
            is_off = value is False or (isinstance(value, Sequence) and not value)
            if value != default and not is_off and not name.startswith("_"):
                refuse(name, f"no setting of {type(self).__name__}", value, repr(default))
        settings = NarSettings(**{name: values[name] for name in known & values.keys()})
        limits = {
            "length_beam_size": (self.num_length_classes, "the model's length classes"),
            "num_latent_samples": (
                math.inf if settings.latent_temperature else 1,
                "for at latent_temperature 0 all are the same",
            ),
            "num_return_sequences": (
                settings.length_beam_size * settings.num_latent_samples,
                "length_beam_size times num_latent_samples",
            ),
        }
        for name, (most, reason) in limits.items():
            if (value := getattr(settings, name)) > most:
                refuse(name, "out of range", value, f"at most {most}, {reason}")
        return settings

    def longest_target(self, settings: NarSettings) -> int | None:
        """Return the largest m that the settings and a table of learned positions allow; None: no bound."""
        longest = settings.max_new_tokens
        if longest is None and settings.max_length is not None:
            longest = settings.max_length - 1  # without the start token
        if self.config.position_embedding == "learned":
            table = self.config.max_position_embeddings
            longest = table if longest is None else min(longest, table)
        return longest

    def banned_tokens(self, settings: NarSettings, device: torch.device) -> Tensor:
        """Return the ids that are never predicted freely: start, padding, end, `<mask>` and suppressed ones."""
        banned, size = as_token_ids(settings.suppress_tokens), self.config.vocab_size
        if not all(0 <= token < size for token in banned):
            refuse("suppress_tokens", "outside the vocabulary", banned, f"ids from 0 to {size - 1}")
        special = (as_token_ids(getattr(self.config, name, None)) for name in (*TOKEN_IDS, "mask_token_id"))
        return torch.tensor(sum(special, banned), dtype=torch.long, device=device)

    def read_words(
        self,
        states: Tensor,
        lengths: Tensor,
        is_read: Tensor,
        settings: NarSettings,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens (l B, T) of `states` (l B, T, d_model), and their log-probabilities (l B, T).

        The end token is at the last position of each of `lengths` (l B,), for any logits; no other position has a
        suppressed id. All of them keep their share of the probability. Where `is_read` (l B, T) is False both are those
        of `known`; None: 0.
        """
        is_last = torch.arange(is_read.shape[1], device=lengths.device) == lengths[:, None] - 1  # (l B, T)
        banned = self.banned_tokens(settings, states.device)
        chosen, chosen_log_probs = [], []
        for logits, ends in self.logits_of(states, is_read, is_last):
            best = logits.index_fill(1, banned, float("-inf")).argmax(1)
            if self.config.end_token_id is not None:
                best = best.masked_fill(ends, self.config.end_token_id)
            chosen.append(best)
            chosen_log_probs.append(logits.gather(1, best[:, None]).squeeze(1) - logits.logsumexp(1))
        nothing = torch.zeros_like(is_read, dtype=torch.long), torch.zeros(is_read.shape, device=is_read.device)
        tokens, log_probs = nothing if known is None else known
        log_probs = log_probs.to(chosen_log_probs[0].dtype).masked_scatter(is_read, torch.cat(chosen_log_probs))
        return tokens.masked_scatter(is_read, torch.cat(chosen)), log_probs

    def score(self, source: EncodedSource, targets: NarTargets, lengths: Tensor, settings: NarSettings) -> Tensor:
        """Return (log p(y | x, m) + w log p(m | x)) / m^alpha (B, l) of targets of `lengths` (B, l)."""
        likelihoods = targets.log_probs.sum(1) if targets.likelihoods is None else targets.likelihoods
        classes = self.length_classes(source, lengths.flatten()).view_as(lengths)
        log_lengths = source.length_logits.to(likelihoods.dtype).log_softmax(-1).gather(1, classes)  # (B, l)
        scores = likelihoods.view_as(lengths) + settings.length_weight * log_lengths
        return scores / lengths.to(scores.dtype) ** settings.length_penalty

    def best_targets(
        self, source: EncodedSource, targets: NarTargets, lengths: Tensor, settings: NarSettings
    ) -> Tensor | NarGenerateOutput:
        """Return the n targets of each source with the largest scores; `lengths` is (B, l)."""
        start, pad = self.config.token_id("target_start_token_id"), self.config.token_id("pad_token_id")
        scores, order = self.score(source, targets, lengths, settings).sort(dim=1, descending=True, stable=True)
        order, scores = order[:, : settings.num_return_sequences], scores[:, : settings.num_return_sequences]
        rows = order + torch.arange(len(lengths), device=order.device)[:, None] * lengths.shape[1]  # (B, n)
        rows = rows.flatten()
        lengths = lengths.flatten()[rows]  # (n B,)
        is_real = canvas(lengths).bool()  # (n B, T)

        def sequences(tokens: Tensor) -> Tensor:
            kept = tokens[rows, : is_real.shape[1]].masked_fill(~is_real, pad)  # (n B, T)
            return nn.functional.pad(kept, (1, 0), value=start)  # (n B, T + 1)

        if not settings.return_dict_in_generate:
            return sequences(targets.tokens)
        history = torch.stack([sequences(tokens) for tokens in targets.history]) if settings.return_history else None
        return NarGenerateOutput(
            sequences=sequences(targets.tokens),
            sequences_scores=scores.flatten(),
            token_scores=targets.log_probs[rows, : is_real.shape[1]],
            lengths=lengths,
            history=history,
        )
