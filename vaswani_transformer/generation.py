"""The paper's decoding inside Transformers' `generate()` (6.1), which calls `_beam_search` or `_sample`.

B sources, k beams or n samples per source, T target tokens so far, V vocabulary.
"""

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    GenerateBeamEncoderDecoderOutput,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput

from .config import TOKEN_IDS, VaswaniTransformerConfig, as_token_ids
from .pretrained import CACHE, INPUT_SHAPES, as_encoder_output, check_inputs, is_of_this_package, mixes_adapters
from .search import LENGTH_PENALTY_TYPES, SearchSettings, Stepper, beam_search, greedy_search
from .settings import (
    NAR_SETTINGS,
    SEARCH_SETTINGS,
    NarSettings,
    SharedSettings,
    check_number,
    default_settings,
    refuse,
)
from .stacks import empty_cache
from .stepper import ModelStepper, caller_inputs, share_sources, shares_sources

DEFAULT_LENGTH = 20  # Transformers' default limit
PAPER_LIMIT = {"max_source_relative_length": 50}  # 6.1
LIMITS = ("max_new_tokens", "max_length")
BEAM_DEFAULTS = {"num_beams": 1, "length_penalty": 1.0}  # values of None
UNMIXED = "table"  # learned positions, which all rows share
WEIGHTS = ("length_penalty", "length_penalty_type", "early_stopping")  # no effect with a single beam


def check_call(generation_config: object, **call: object) -> None:
    """Raise ValueError for arguments of `generate()` of a wrong type or shape."""
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        refuse("generation_config", "wrong type", generation_config, "a GenerationConfig(...)")
    tensors = INPUT_SHAPES.keys() - {"encoder_outputs"}  # which may be a tuple or a dictionary
    check_inputs(**{name: value for name, value in call.items() if name in tensors})


def is_off(value: object) -> bool:
    """Return whether a setting's value disables it in every model."""
    return value is False or (isinstance(value, Sequence) and not value)


@dataclass(eq=False)
class SourceLimitCriteria(StoppingCriteria):
    """Stop each target at its own limit: "input length + 50" in the paper (6.1)."""

    limits: Tensor  # (B,), largest number of new tokens of each source's targets
    prompt_length: int  # number of tokens that each target begins with

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """Return whether each row (R,) has reached its limit."""
        limits = self.limits.repeat_interleave(input_ids.shape[0] // self.limits.shape[0])  # (R,)
        return limits.to(input_ids.device) <= input_ids.shape[1] - self.prompt_length


class CallSettings:
    """Settings of one `generate()` call: its arguments, else its generation config, else that of the model.

    A limit in the call disables a saved `max_source_relative_length`. A saved `max_length` applies only if no other
    limit is set, and only if it is not Transformers' default, which Seq2SeqTrainer saves. With a limit per source, the
    end token is not forced.

    Attributes:
        inputs: arguments that are not settings.
        in_call: settings of the call, including None.
        saved: settings of the model, excluding None.
        values: effective settings, excluding None.
        num_positions: number of learned positions of a model of this package; None for sinusoidal ones.
    """

    def __init__(self, generation_config: GenerationConfig | None, model: Any, kwargs: dict[str, Any]) -> None:
        self.generation_config = GenerationConfig() if generation_config is None else generation_config
        self.is_autoregressive = getattr(model, "is_autoregressive", True)
        self.num_positions: int | None = None
        if getattr(model.config, "position_embedding", None) == "learned":
            self.num_positions = model.config.max_position_embeddings

        # Arguments that are not settings are inputs of the model.
        added = SEARCH_SETTINGS if self.is_autoregressive else (*SEARCH_SETTINGS, *NAR_SETTINGS)
        configured = vars(self.generation_config)
        settings = {*configured, *added}
        self.inputs = {name: value for name, value in kwargs.items() if name not in settings}

        # Arguments override the generation config. There, None means that Transformers' setting is not set; in an
        # argument, and for a setting of this package, it disables the saved value.
        self.in_call = {name: value for name, value in configured.items() if value is not None or name in added}
        for name in kwargs.keys() & settings:
            self.in_call[name] = BEAM_DEFAULTS.get(name) if kwargs[name] is None else kwargs[name]

        self.saved = {name: value for name, value in vars(model.generation_config).items() if value is not None}
        self.values = self.effective_values()

    def effective_values(self) -> dict[str, Any]:
        """Return the settings of the call, else those of the model, without limits that the call disables."""
        values = {**self.saved, **self.in_call}

        # A limit in the call replaces the saved limit per source.
        has_call_limit = any(self.in_call.get(name) is not None for name in LIMITS)
        if has_call_limit and "max_source_relative_length" not in self.in_call:
            values.pop("max_source_relative_length", None)
        values = {name: value for name, value in values.items() if value is not None}

        # A saved `max_length` gives way to every other limit, since it may be Transformers' default.
        is_default = self.saved.get("max_length") == DEFAULT_LENGTH
        has_other_limit = "max_source_relative_length" in values or "max_new_tokens" in values
        if "max_length" not in self.in_call and (is_default or has_other_limit):
            values.pop("max_length", None)

        # Transformers forces the end token at one length for all targets, which does not suit a limit per source.
        forced = as_token_ids(values.get("forced_eos_token_id"))
        ends = as_token_ids(values.get("eos_token_id"))
        if "max_source_relative_length" in values and set(forced) <= set(ends):
            values.pop("forced_eos_token_id", None)
        return values

    def search(self) -> dict[str, Any]:
        """Return the settings that commands record: those that are set, beams and length penalty."""
        hidden = ("_", "output_", "return_", "transformers_version", "use_cache")
        if self.is_autoregressive and self.values.get("num_beams", 1) == 1:
            hidden += WEIGHTS
        always_recorded = ("num_beams", "length_penalty", "length_penalty_type")
        return {
            name: value
            for name, value in sorted(self.values.items())
            if not name.startswith(hidden)
            if name in always_recorded or value != default_settings().get(name)
        }

    def check(self) -> None:
        """Raise ValueError for settings that are out of range or exclude each other."""
        for name, least in (("length_penalty", -math.inf), ("num_beams", 1), ("max_source_relative_length", 0)):
            if name in self.values:
                check_number(name, self.values[name], least)

        watermark = self.in_call.get("watermarking_config")
        if isinstance(watermark, dict):
            refuse("watermarking_config", "wrong type", watermark, "a WatermarkingConfig(...)")

        penalty = self.values.get("length_penalty_type", "power")
        if penalty not in LENGTH_PENALTY_TYPES:
            refuse("length_penalty_type", "unknown", penalty, f"one of {', '.join(LENGTH_PENALTY_TYPES)}")

        forced = self.values.get("forced_eos_token_id")
        relative = self.values.get("max_source_relative_length")
        if forced is not None and relative is not None:
            raise ValueError(
                "forced_eos_token_id: conflicts with max_source_relative_length, since it forces every target to the "
                f"same length; got {forced!r} and {relative}, expected one of them. Set the other to None."
            )

    @functools.cached_property
    def prompt_length(self) -> int:
        """Number of tokens that each target begins with, including the start token."""
        prompt = self.inputs.get("decoder_input_ids")
        if prompt is None:
            return 1
        start = self.values.get("decoder_start_token_id", self.values.get("bos_token_id", -1))
        lacks_start = (prompt[:, 0] != torch.as_tensor(start, device=prompt.device)).all()
        return prompt.shape[1] + int(lacks_start)  # Transformers puts the start token before such a prompt

    def common_limit(self) -> int | None:
        """Return the limit of new tokens that all targets share; None if there is none."""
        if "max_new_tokens" in self.values:
            return self.values["max_new_tokens"]
        if "max_length" in self.values:
            return self.values["max_length"] - self.prompt_length
        return None

    def inferred_mask(self, inputs: Tensor | None) -> Tensor | None:
        """Return the mask (B, S) that Transformers infers from the source; None without a source."""
        encoded = self.inputs.get("encoder_outputs")
        sources = (inputs, self.inputs.get("input_ids"), self.inputs.get("inputs_embeds"), encoded and encoded[0])
        source = next((tensor for tensor in sources if tensor is not None), None)
        if source is None:
            return None
        pad = self.values.get("pad_token_id")
        ends = as_token_ids(self.values.get("eos_token_id"))
        if source.dim() == 2 and pad is not None and pad not in ends:
            return source.ne(pad)
        return torch.ones(source.shape[:2], device=source.device)

    def source_limits(self, inputs: Tensor | None = None) -> Tensor | None:
        """Return the source-dependent limit (B,) of new tokens; None if there is none."""
        relative = self.values.get("max_source_relative_length")
        if relative is None:
            return None
        mask = self.inputs.get("attention_mask")
        if mask is None:
            mask = self.inferred_mask(inputs)
        if mask is None:
            return None
        limits = mask.ne(0).sum(-1) + relative  # (B,)
        if self.num_positions is None:
            return limits
        return limits.clamp(max=self.num_positions + 1 - self.prompt_length)

    def target_limits(self) -> Tensor:
        """Return the limit (B,) of new tokens of each target; the arguments must include `attention_mask`."""
        common = self.common_limit()
        limits = self.source_limits()
        if limits is None:
            mask = self.inputs["attention_mask"]
            return torch.full((len(mask),), DEFAULT_LENGTH if common is None else common, device=mask.device)
        return limits if common is None else limits.clamp(max=common)

    def longest_limit(self, limits: Tensor | None) -> int | None:
        """Return the largest number of new tokens of any target; None for Transformers' default."""
        common = self.common_limit()
        if limits is not None and len(limits):
            largest = int(limits.max())
            return largest if common is None else min(largest, common)
        if common is None and "max_length" in self.saved.keys() & self.in_call.keys():
            return DEFAULT_LENGTH  # the call sets the saved `max_length` to None
        return common

    def for_non_autoregressive(self, model: Any) -> dict[str, Any]:
        """Return the values of the settings that a non-autoregressive model supports.

        Raises:
            ValueError: a setting that the model does not support is not None, False, empty or at its default.
        """
        # Arguments that Transformers does not know are settings too, since the model has no further inputs.
        values = dict(self.values)
        for name, value in self.inputs.items():
            if value is not None:
                values[name] = value

        supported = {setting.name for setting in fields(SharedSettings)}
        supported.update(model.family_settings)
        defaults = {**default_settings(), **vars(NarSettings())}
        for name in TOKEN_IDS:
            defaults[name] = getattr(model.config, name)
        defaults["decoder_start_token_id"] = model.config.target_start_token_id

        # A saved generation config also contains these; only in a call they must agree with the model.
        copied = {*TOKEN_IDS, "output_attentions", "output_hidden_states"} - self.in_call.keys()
        for name in sorted(values.keys() - supported - copied - {"transformers_version"}):
            value = values[name]
            default = defaults.get(name)
            if name in TOKEN_IDS:
                value = as_token_ids(value)
                default = as_token_ids(default)
            if value != default and not is_off(value) and not name.startswith("_"):
                refuse(name, f"not supported by {type(model).__name__}", value, repr(default))
        return {name: values[name] for name in supported & values.keys()}

    def for_transformers(self, limits: Tensor | None) -> tuple[GenerationConfig, dict[str, None]]:
        """Return a generation config with limits (B,) of the sources, and the saved settings that the call disables.

        Raises:
            ValueError: a target may exceed the learned positions.
        """
        config = copy.copy(self.generation_config)
        vars(config).update({name: self.values.get(name) for name in self.in_call})
        config.length_penalty_type = self.values.get("length_penalty_type", "power")
        if self.values.get("num_beams", 1) == 1:  # Transformers would warn of saved ones
            config.length_penalty = 1.0
            config.early_stopping = False
        switched_off = dict.fromkeys(self.saved.keys() - self.values.keys() - {"max_length", *SEARCH_SETTINGS})

        # Transformers gets the longest limit, in the setting that the call uses; criteria end the shorter targets.
        longest = self.longest_limit(limits)
        if longest is None:
            return config, switched_off
        max_length = self.prompt_length + longest
        if "max_new_tokens" in self.values:
            config.max_new_tokens = longest
        else:
            config.max_length = max_length

        # The last token is not an input, so it needs no position.
        most = self.num_positions
        if most is not None and max_length - 1 > most:
            raise ValueError(
                f"max_length ({max_length}, including the start token) exceeds the {most} learned positions; use "
                f"max_length <= {most + 1} or max_new_tokens <= {most}."
            )
        return config, switched_off


def default_limit(model: Any, **settings: Any) -> dict[str, Any]:
    """Return the paper's length limit if neither the call nor the model sets one, else no settings.

    It replaces Transformers' default of 20 tokens. Non-autoregressive models and those of other packages need none.
    """
    generation_config = settings.pop("generation_config", None)
    call = CallSettings(generation_config, model, settings)
    has_limit = not call.values.keys().isdisjoint({*LIMITS, *PAPER_LIMIT})
    if has_limit or not is_of_this_package(model) or not call.is_autoregressive:
        return {}
    return PAPER_LIMIT


def split_criteria(
    criteria: StoppingCriteriaList, prompt: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor, StoppingCriteriaList]:
    """Return the limits (B,), the end tokens (E,) and the remaining criteria, which express neither.

    Args:
        prompt: tokens (k B, T) that the targets begin with.
        limits: (B,), the largest number of new tokens by the generation config.
    """
    end_tokens = [prompt.new_empty(0)]
    remaining = StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            end_tokens.append(torch.as_tensor(criterion.eos_token_id, device=prompt.device).flatten())
        elif type(criterion) is SourceLimitCriteria:
            limits = torch.minimum(limits, criterion.limits.to(prompt.device))
        elif type(criterion) is MaxLengthCriteria:
            limits = limits.clamp(max=criterion.max_length - prompt.shape[1])
        else:
            remaining.append(criterion)
    return limits, torch.cat(end_tokens), remaining


def search_settings(
    prompt: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    compacts: bool = True,
) -> tuple[SearchSettings, list[Tensor]]:
    """Return the settings of a search from `prompt` (k B, T), and a list that collects each step's scores (k B, V).

    The search handles limits and end tokens itself, and calls only the other criteria.
    """
    # Limits and end tokens, which the search reads from the criteria.
    rows_per_source = max(config.num_beams, config.num_return_sequences)
    limits = torch.full((len(prompt) // rows_per_source,), config.max_length - prompt.shape[1], device=prompt.device)
    limits, end_tokens, remaining = split_criteria(criteria, prompt, limits)
    pad = config.pad_token_id
    if pad is None:
        pad = next(iter(end_tokens.tolist()), -1)

    # Processors that can drop sources do so with the search, on copies, since the caller may use them again.
    can_drop = bool(processors) and all(hasattr(processor, "keep") for processor in processors)
    if can_drop:
        processors = type(processors)(map(copy.copy, processors))

    def keep(sources: Tensor) -> None:
        for processor in processors:
            processor.keep(sources)

    # Recorded scores have a row for each beam, so no source may be dropped.
    scores: list[Tensor] = []
    records_scores = bool(config.return_dict_in_generate and config.output_scores)

    def process(tokens: Tensor, log_probs: Tensor) -> Tensor:
        processed = processors(tokens, log_probs)
        if records_scores:
            scores.append(processed)
        return processed

    def ends(tokens: Tensor) -> Tensor:
        return remaining(tokens, cast(Any, tuple(scores) or None))

    # More candidates than beams, so that k open beams remain if each end token continues each of them.
    candidates = max(2, 1 + len(as_token_ids(config.eos_token_id))) * config.num_beams
    settings = SearchSettings(
        limits=limits,
        end_tokens=end_tokens,
        pad_token=int(pad),
        num_beams=config.num_beams,
        num_returned=config.num_return_sequences,
        candidates=candidates,
        alpha=config.length_penalty,
        length_penalty_type=getattr(config, "length_penalty_type", "power"),
        early_stopping=config.early_stopping,
        do_sample=bool(config.do_sample),
        process=process if processors or records_scores else None,
        keep=keep if can_drop and not (records_scores or config.do_sample) else None,
        ends=ends if remaining else None,
        compacts=compacts,
    )
    return settings, scores


class PaperBeamSearch(GenerationMixin):
    """The paper's beam search (6.1), with two settings in addition to those of Transformers:

    length_penalty_type: "gnmt" divides log P(Y | X) by lp(Y) with `length_penalty` as alpha; "power", the default, by
        Transformers' |Y|^length_penalty.
    max_source_relative_length: largest difference of target and source length, both including `</s>`; None for no
        limit. `max_new_tokens` or `max_length` in the call disable a saved limit; if the call has both, the shorter one
        applies.

    Under "gnmt" the search of a source stops when no open beam can still enter the n best, if `early_stopping` is False
    or "never". True stops it at `num_beams` finished targets.
    """

    config: VaswaniTransformerConfig
    generation_config: GenerationConfig
    model: Any
    training: bool

    def use_paper_decoding(self) -> None:
        """Set the paper's decoding: beam size 4, lp(Y) with alpha 0.6, at most source length + 50 tokens (6.1)."""
        self.generation_config = self.config.make_generation_config(
            num_beams=4, length_penalty=0.6, length_penalty_type="gnmt", **PAPER_LIMIT
        )

    @functools.wraps(GenerationMixin.generate)
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Generate targets as Transformers does, with the two additional settings of this class.

        Raises:
            ValueError: a setting is out of range, or a target may exceed the learned positions.
        """
        check_call(generation_config, inputs=inputs, **kwargs)
        self.config.check_generation_settings(generation_config)
        encoded = kwargs.get("encoder_outputs")
        if encoded is not None:  # a copy, since Transformers may repeat its rows
            kwargs["encoder_outputs"] = BaseModelOutput(**as_encoder_output(encoded))

        # The settings of this package become settings and criteria that Transformers knows.
        call = CallSettings(generation_config, self, kwargs)
        call.check()
        limits = call.source_limits(inputs)
        config, switched_off = call.for_transformers(limits)
        if limits is not None and len(limits):
            criterion = SourceLimitCriteria(limits, call.prompt_length)
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), criterion])
        if self.training and self.model.decoder.gradient_checkpointing:  # excludes a cache in Transformers
            config.use_cache = False
        arguments = {**caller_inputs(call.inputs), **switched_off}
        return super().generate(inputs, config, logits_processor, stopping_criteria, *args, **arguments)

    def make_stepper(self, inputs: dict[str, Any], beams_per_source: int, **options: bool) -> Stepper:
        """Return the stepper of a search; arguments as in `ModelStepper`."""
        return ModelStepper(self, inputs, beams_per_source, **options)

    def _beam_search(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Run a beam search for `generate()` from `input_ids` (k B, T)."""
        config = generation_config
        k = config.num_beams
        mixes = mixes_adapters(self, UNMIXED, len(input_ids))
        if config.prefill_chunk_size is not None or config.low_memory:
            if config.prefill_chunk_size is not None and config.length_penalty_type == "gnmt":
                raise ValueError(
                    'generate(): length_penalty_type="gnmt" does not support prefill_chunk_size; leave it out, or set '
                    'length_penalty_type="power".'
                )
            return super()._beam_search(
                input_ids, logits_processor, stopping_criteria, config, synced_gpus=synced_gpus, **model_kwargs
            )

        # Beams share the encoder outputs of their source. Finished sources stay in the batch if a caller's cache, the
        # recorded outputs, other processes or the adapters of the rows need every row.
        is_shared = shares_sources(model_kwargs) and not mixes
        records = bool(config.return_dict_in_generate)
        inputs = share_sources(model_kwargs, k) if is_shared else model_kwargs
        stepper = self.make_stepper(inputs, k, records=records, synced=synced_gpus)
        compacts = is_shared and not records and not synced_gpus
        settings, scores = search_settings(input_ids, logits_processor, stopping_criteria, config, compacts)
        hypotheses = beam_search(stepper, input_ids, settings)
        if isinstance(stepper, ModelStepper):
            stepper.finish()
        if not records:
            return hypotheses.tokens

        # What a caller asks for in addition to the tokens.
        if is_shared and stepper.cache is not None:  # callers expect a row per beam
            stepper.cache.cross_attention_cache.batch_repeat_interleave(k)
        return GenerateBeamEncoderDecoderOutput(
            sequences=hypotheses.tokens,
            sequences_scores=hypotheses.scores if config.output_scores else None,
            beam_indices=hypotheses.beam_indices,
            scores=tuple(scores) if config.output_scores else None,
            **stepper.step_outputs(model_kwargs["encoder_outputs"], config),
        )

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run greedy search or sampling for `generate()`; Transformers' loop handles output beyond tokens."""
        config = generation_config
        is_shared = shares_sources(model_kwargs) and not config.is_assistant and config.prefill_chunk_size is None
        returns_tokens_only = not (config.return_dict_in_generate or streamer is not None or synced_gpus)
        if is_shared and returns_tokens_only and not mixes_adapters(self, UNMIXED, len(input_ids)):
            # The targets of a source share its encoder output, and finished sources leave the batch.
            rows = config.num_return_sequences
            stepper = self.make_stepper(share_sources(model_kwargs, rows), rows)
            settings, _ = search_settings(input_ids, logits_processor, stopping_criteria, config)
            return greedy_search(stepper, input_ids, settings)

        # Transformers' loop, with this package's cache, which a window keeps short.
        if is_shared and model_kwargs.get(CACHE) is not None:
            model_kwargs[CACHE] = empty_cache(self.config)
        return super()._sample(
            input_ids,
            logits_processor,
            stopping_criteria,
            config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
