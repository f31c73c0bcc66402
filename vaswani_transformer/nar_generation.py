"""`generate()` for models that predict all words at once: the lengths first, then every word of each length.

B sources, l lengths of a length beam, n returned targets of a source, T target, N positions, V vocabulary, R
iterations, or layers of a model that refines from layer to layer.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Never

import torch
from torch import Tensor, nn
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.utils import ModelOutput

from .config import TOKEN_IDS, as_token_ids
from .generation_settings import LIMITS, OWN_SETTINGS, CallSettings, default_settings
from .lengths import canvas
from .nar_head import EncodedSource, NarHead

SOURCE_INPUTS = ("input_ids", "attention_mask", "inputs_embeds", "encoder_outputs", "position_ids")
TARGET_INPUTS = ("labels", "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "target_lengths")
# Outputs of each step of a search; `output_scores` is none of them, since scores are always returned.
STEP_OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits")
COUNTS = ("num_iterations", "length_beam_size", "num_latent_samples", "num_return_sequences")
# alpha and w of the targets' scores; where length_penalty is not set, Transformers and its trainers save 1.0.
SCORE_SETTINGS = {"length_penalty": 1.0, "length_weight": 1.0}
# Every other setting must have Transformers' default: it would change a search from left to right.
SUPPORTED = {
    *OWN_SETTINGS,
    *SCORE_SETTINGS,
    *LIMITS,
    *STEP_OUTPUTS,
    *TOKEN_IDS,
    "num_return_sequences",
    "output_scores",
    "return_dict_in_generate",
    "suppress_tokens",
    "transformers_version",
    "use_cache",
}


@dataclass
class NarGenerateOutput(ModelOutput):
    """The result of `generate(return_dict_in_generate=True)`; the n targets of a source are neighbors, best first.

    Attributes:
        sequences: (n B, T + 1), the start token, the target, padding.
        sequences_scores: (n B,), which rank the targets, as `NarGeneration` says.
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


@dataclass
class NarSettings:
    """The settings of one call of `generate()`.

    `max_tokens` bounds m, and `max_source_relative_length` m - n; None: no bound.
    """

    num_iterations: int
    length_beam_size: int
    num_latent_samples: int
    num_return_sequences: int
    max_tokens: int | None
    max_source_relative_length: int | None
    suppressed: list[int]
    return_dict: bool
    return_history: bool
    do_sample: bool = False
    latent_temperature: float = 0.0
    length_penalty: float = SCORE_SETTINGS["length_penalty"]
    length_weight: float = SCORE_SETTINGS["length_weight"]


def fail(subject: str, problem: str, fix: str) -> Never:
    """Raise ValueError with the three on one line."""
    raise ValueError(f"{subject}: {problem}. {fix}")


def whole_number(name: str, value: object, fix: str, least: int | None = None) -> int:
    """Return `value`, also NumPy's, as an int."""
    if isinstance(value, bool) or not isinstance(value, Integral) or (least is not None and int(value) < least):
        expected = "a whole number" + ("" if least is None else f" of at least {least}")
        fail(name, f"got {value!r}, expected {expected}", fix)
    return int(value)


def finite_number(name: str, value: object, fix: str, least: float = -sys.float_info.max) -> float:
    """Return `value`, also NumPy's, as a float."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) < float("inf"):
        expected = "a finite number" + ("" if least < 0 else f" of at least {least:g}")
        fail(name, f"got {value!r}, expected {expected}", fix)
    return float(value)


class NarGeneration(NarHead, GenerationMixin):
    """A head with `generate()` of Transformers' signature, and its own settings of a generation config or of the call.

    num_iterations: passes of the decoder over each target; more than 1 only where the model refines (CMLM). Default 1.
    length_beam_size: l, the best length classes that are tried for each source; the target with the largest score wins.
        Classes below length 1, or beyond a limit, give equal targets. Default 1.
    length_penalty, length_weight: alpha and w of the score (log p(y | x, m) + w log p(m | x)) / m^alpha of a target of
        m tokens; the larger alpha, the longer the targets. Default 1.0 each. log p(y | x, m) is the sum of the tokens'
        log-probabilities, or at a `latent_temperature` above 0 an estimate by importance weights.
    latent_temperature, num_latent_samples: the standard deviation of the noise that the latents of a model with a prior
        (FlowSeq) are made from, and the number of such latents for each length. Default 0.0, for which all latents are
        the same, and 1.
    return_history: whether `return_dict_in_generate` also returns the tokens after each iteration, or after each layer
        of a model that refines from layer to layer (IterativeVAE). Default False.
    max_source_relative_length: how many tokens longer than its own source, `</s>` counted on both sides, a target may
        become, as in a search from left to right; None for no such limit. Default None.

    Some of Transformers' settings apply. `max_length` and `max_new_tokens` bound the lengths, saved ones as in a search
    from left to right. `num_return_sequences` returns up to l targets of a source, and `suppress_tokens` excludes
    tokens such as `<unk>`. `do_sample` turns on the noise of a model that has some (IterativeVAE). Every other setting
    raises ValueError unless it has Transformers' default.
    """

    refines: ClassVar[bool] = False
    has_latents: ClassVar[bool] = False

    @property
    def samples(self) -> bool:
        """Return whether `do_sample` has an effect."""
        return False

    @property
    def num_length_classes(self) -> int:
        """Return C, the lengths that a length beam can try."""
        raise NotImplementedError

    def decode_targets(self, source: EncodedSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,)."""
        raise NotImplementedError

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Callable] | None = None,
        stopping_criteria: Sequence[Callable] | None = None,
        prefix_allowed_tokens_fn: Callable | None = None,
        synced_gpus: bool | None = None,
        assistant_model: object | None = None,
        streamer: object | None = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        custom_generate: object | None = None,
        **kwargs: Any,
    ) -> Tensor | NarGenerateOutput:
        """Predict a target for each source.

        Args:
            inputs: (B, S) source token ids; `input_ids` is another name for it.
            generation_config: settings that win over the model's own; arguments of the call win over both.
            synced_gpus: ignored: every process makes the same number of passes.
            attention_mask, inputs_embeds, encoder_outputs, position_ids: as in `forward`.
            labels, decoder_input_ids, decoder_attention_mask, target_lengths: ignored, so that a trainer can pass a
                complete batch.

        Returns:
            (n B, T + 1) tokens that begin with the start token, or a `NarGenerateOutput`.

        Raises:
            ValueError: an argument or a setting that this way of decoding does not have; the message names the way out.
        """
        given = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "assistant_model": assistant_model,
            "streamer": streamer,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            "custom_generate": custom_generate,
        }
        self.check_arguments(given)
        self.config.check_generation_settings(generation_config)
        source_inputs = {name: kwargs.pop(name) for name in SOURCE_INPUTS if name in kwargs}
        if inputs is not None:
            if source_inputs.get("input_ids") is not None:
                fail("input_ids", "got them also as the first argument", "Give the source once.")
            source_inputs["input_ids"] = inputs
        settings = self.read_settings(generation_config, {k: v for k, v in kwargs.items() if k not in TARGET_INPUTS})
        source = self.read_source(self.encode(**source_inputs)[0], source_inputs.get("attention_mask"))
        lengths = self.best_lengths(source, settings.length_beam_size)  # (B, l)
        if settings.max_tokens is not None:
            lengths = lengths.clamp(max=settings.max_tokens)
        if settings.max_source_relative_length is not None:
            lengths = torch.minimum(lengths, source.lengths[:, None] + settings.max_source_relative_length)
        lengths = lengths.repeat_interleave(settings.num_latent_samples, dim=1)
        targets = self.decode_targets(source, lengths.flatten(), settings)
        return self.best_targets(source, targets, lengths, settings)

    def check_arguments(self, given: dict[str, Any]) -> None:
        """Raise ValueError for an argument that needs a search from left to right."""
        for name, value in given.items():
            if value is not None and not (isinstance(value, Sequence) and len(value) == 0):
                got = type(value).__name__ if isinstance(value, nn.Module) else repr(value)
                fail(name, f"{type(self).__name__} predicts all tokens at once; got {got}", "Leave it out.")

    def read_settings(self, generation_config: GenerationConfig | None, call: dict[str, Any]) -> NarSettings:
        """Return the settings of a call: its own, then its configuration's, then the model's."""
        for name in call.keys() - default_settings().keys() - OWN_SETTINGS:
            fail(
                name, "generate() has no such argument", f"Give source inputs ({', '.join(SOURCE_INPUTS)}) or settings."
            )
        merged = CallSettings(generation_config, self, call)
        given, values = merged.given, merged.values
        self.check_search(values)
        for name in STEP_OUTPUTS:  # the model's own configuration may ask `forward` for them
            if given.get(name):
                fail(name, "generate() returns scores only; got True", "Leave it out, or call the model itself.")
        for name in TOKEN_IDS:
            field = "target_start_token_id" if name == "decoder_start_token_id" else name
            value, expected = given.get(name), getattr(self.config, field)
            if value is not None and as_token_ids(value) != as_token_ids(expected):
                fail(name, f"got {value!r}, the model's configuration has {expected!r}", "Set it there.")
        relative = values.get("max_source_relative_length")
        if relative is not None:
            relative = whole_number("max_source_relative_length", relative, "Give one such as 50, or None.", 0)
        settings = NarSettings(
            **{name: whole_number(name, values.get(name, 1), "Give 1 or more.") for name in COUNTS},
            max_tokens=self.max_tokens(values),
            max_source_relative_length=relative,
            suppressed=self.suppressed_tokens(values.get("suppress_tokens") or []),
            return_dict=bool(values.get("return_dict_in_generate")),
            return_history=bool(values.get("return_history")),
            do_sample=bool(values.get("do_sample")),
            latent_temperature=finite_number(
                "latent_temperature", values.get("latent_temperature", 0.0), "Give 0 for the mode.", 0.0
            ),
            **{
                name: finite_number(name, values.get(name, default), f"Give {default}, or leave it out.")
                for name, default in SCORE_SETTINGS.items()
            },
        )
        self.check_settings(settings)
        return settings

    def check_search(self, values: dict[str, Any]) -> None:
        """Raise ValueError for a setting that only a search from left to right, or a draw of words, could obey."""
        supported = SUPPORTED | ({"do_sample"} if self.samples else set())
        for name, value in values.items():
            default = default_settings().get(name)
            if name not in supported and not name.startswith("_") and value != default:
                problem = f"{type(self).__name__} predicts all tokens at once; got {value!r}, expected {default!r}"
                fail(name, problem, "Leave it out, or set it to None in the generation config.")

    def check_settings(self, settings: NarSettings) -> None:
        """Raise ValueError where counts lie outside their range."""
        name, iterations, beam = type(self).__name__, settings.num_iterations, settings.length_beam_size
        if iterations < 1:
            fail("num_iterations", f"got {iterations}, expected at least 1", "Give 1 for a single pass.")
        if iterations > 1 and not self.refines:
            fail("num_iterations", f"{name} has one pass; got {iterations}", "Give 1, or use a CMLM to refine.")
        self.check_samples(settings)
        if not 1 <= beam <= self.num_length_classes:
            allowed = f"expected 1 to {self.num_length_classes}, the model's length classes"
            fail("length_beam_size", f"got {beam}, {allowed}", "Give one in that range.")
        tried, names = beam, "length_beam_size"
        if settings.num_latent_samples > 1:
            tried, names = beam * settings.num_latent_samples, "length_beam_size times num_latent_samples"
        if not 1 <= settings.num_return_sequences <= tried:
            problem = f"got {settings.num_return_sequences}, expected 1 to {names} ({tried})"
            fail("num_return_sequences", problem, "Give a larger length_beam_size.")

    def check_samples(self, settings: NarSettings) -> None:
        """Raise ValueError for samples of latents where the model has none, or where all of them are equal."""
        samples, heat = settings.num_latent_samples, settings.latent_temperature
        for name, value, off in (("num_latent_samples", samples, 1), ("latent_temperature", heat, 0)):
            if value != off and not self.has_latents:
                problem = f"{type(self).__name__} has no prior over latents; got {value}"
                fail(name, problem, f"Give {off}, or use a FlowSeq.")
        if samples < 1:
            fail("num_latent_samples", f"got {samples}, expected at least 1", "Give 1 for a single one.")
        if samples > 1 and not heat:
            problem = f"at latent_temperature 0 all latents are the same; got {samples}, expected 1"
            fail("num_latent_samples", problem, "Set a latent_temperature such as 0.5.")

    def max_tokens(self, values: dict[str, Any]) -> int | None:
        """Return the largest m that the settings and a table of learned positions allow; None: no bound."""
        bounds = []
        for name, least in zip(LIMITS, (1, 2), strict=True):  # the start token counts in the second
            if not bounds and name in values:  # the first wins, as in Transformers
                bounds.append(whole_number(name, values[name], "A target has its `</s>`.", least) - least + 1)
        bounds += [self.config.max_position_embeddings] if self.config.position_embedding == "learned" else []
        return min(bounds, default=None)

    def suppressed_tokens(self, extra: list[int]) -> list[int]:
        """Return the ids that are never predicted freely: start, padding, end, `<mask>` and `extra` ones."""
        config, is_list = self.config, isinstance(extra, (list, tuple))
        if not is_list or not all(
            isinstance(token, Integral) and 0 <= int(token) < config.vocab_size for token in extra
        ):
            allowed = f"expected a list of ids from 0 to {config.vocab_size - 1}"
            fail("suppress_tokens", f"got {extra!r}, {allowed}", "Give ids of the vocabulary.")
        names = (*TOKEN_IDS, "mask_token_id")
        special = {token for name in names for token in as_token_ids(getattr(config, name, None))}
        return sorted(special.union(extra))

    def read_words(
        self,
        states: Tensor,
        lengths: Tensor,
        is_read: Tensor,
        settings: NarSettings,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens (l B, T) of `states` (l B, T, d_model), and their log-probabilities (l B, T).

        The end token is at the last position of each of `lengths` (l B,), for any logits; no other position has a
        suppressed id. All of them keep their share of the probability. Where `is_read` (l B, T) is False both are those
        of `known`; None: 0.
        """
        is_last = torch.arange(is_read.shape[1], device=lengths.device) == lengths[:, None] - 1  # (l B, T)
        banned = torch.tensor(settings.suppressed, dtype=torch.long, device=states.device)
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
        start, pad = self.config.target_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            problem = f"got start {start} and padding {pad}, and a sequence needs both"
            fail("decoder_start_token_id, pad_token_id", problem, "Set them in the configuration.")
        scores, order = self.score(source, targets, lengths, settings).sort(dim=1, descending=True, stable=True)
        order, scores = order[:, : settings.num_return_sequences], scores[:, : settings.num_return_sequences]
        rows = order + torch.arange(len(lengths), device=order.device)[:, None] * lengths.shape[1]  # (B, n)
        rows = rows.flatten()
        lengths = lengths.flatten()[rows]  # (n B,)
        is_real = canvas(lengths).bool()  # (n B, T)

        def sequences(tokens: Tensor) -> Tensor:
            kept = tokens[rows, : is_real.shape[1]].masked_fill(~is_real, pad)  # (n B, T)
            return nn.functional.pad(kept, (1, 0), value=start)  # (n B, T + 1)

        if not settings.return_dict:
            return sequences(targets.tokens)
        history = torch.stack([sequences(tokens) for tokens in targets.history]) if settings.return_history else None
        return NarGenerateOutput(
            sequences=sequences(targets.tokens),
            sequences_scores=scores.flatten(),
            token_scores=targets.log_probs[rows, : is_real.shape[1]],
            lengths=lengths,
            history=history,
        )
