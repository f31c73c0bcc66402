"""The paper's decoding inside `generate()` (6.1): the settings of a call, and the entry points of `search.py`.

B sources, k beams or n samples of a source, T tokens of a target so far, V vocabulary. `generate()` prepares a call as
for every model of Transformers and then calls `_beam_search` or `_sample`, which are overridden here. Length limits
that depend on the source are ordinary arguments by then, and hold in every way of decoding.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache, StaticLayer
from transformers.generation import (
    EosTokenCriteria,
    ForcedEOSTokenLogitsProcessor,
    GenerateBeamEncoderDecoderOutput,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from .config import NAR_SETTINGS, VaswaniTransformerConfig, as_token_ids
from .pretrained import CACHE, KNOWN_VERSIONS, given_cache
from .search import LENGTH_PENALTY_TYPES, Decoder, SearchSettings, beam_search, greedy_search
from .stacks import empty_cache

logger = logging.get_logger(__name__)

DEFAULT_NEW_TOKENS = 20  # of Transformers, where nothing limits a target
PAPER_LIMIT = {"max_source_relative_length": 50}  # 6.1
LIMITS = ("max_new_tokens", "max_length")
OWN_SETTINGS = {*NAR_SETTINGS, "max_source_relative_length"}
WEIGHTS = ("length_penalty", "length_penalty_type", "early_stopping")  # of beams, without a meaning for one
SOURCE_INPUTS = ("attention_mask", "position_ids")
TARGET_INPUTS = ("decoder_attention_mask", "decoder_position_ids")
ENTRY_POINTS = ("_beam_search", "_sample")


@functools.cache
def default_settings() -> dict[str, Any]:
    """Return Transformers' settings with their defaults, and the one that `PaperBeamSearch` adds to a search."""
    defaults = vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()
    return defaults | {"length_penalty_type": "power"}


class SourceLimitCriteria(StoppingCriteria):
    """End each target at its own limit: "input length + 50" in the paper (6.1).

    Args:
        limits: (B,) the number of new tokens.
        prompt_length: the tokens that each target begins with.
    """

    def __init__(self, limits: Tensor, prompt_length: int) -> None:
        self.limits, self.prompt_length = limits, prompt_length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return whether each row (R,) has reached its limit."""
        limits = self.limits.repeat_interleave(input_ids.shape[0] // self.limits.shape[0])  # (R,)
        return limits.to(input_ids.device) <= input_ids.shape[1] - self.prompt_length


class CallSettings:
    """The settings of one call of any model: its arguments, otherwise the model's saved values.

    Args:
        generation_config: the call's, or None.
        model: the model, with its generation config.
        kwargs: the call's further arguments.

    Attributes:
        config: only the call's settings, for Transformers.
        kwargs: what is left for the model, and settings that are given as None against a saved one.
        given: the call's settings, None included.
        values: the settings that hold, None excluded.
    """

    def __init__(self, generation_config: GenerationConfig | None, model: Any, kwargs: dict[str, Any]) -> None:
        saved, self.kwargs = model.generation_config, dict(kwargs)
        self.saved, self.model_config = saved, model.config
        self.is_autoregressive = getattr(model, "is_autoregressive", True)
        self.config = GenerationConfig() if generation_config is None else copy.copy(generation_config)
        set_values = vars(self.config).items()
        self.given = {name: value for name, value in set_values if value is not None or name in OWN_SETTINGS}
        for name, value in kwargs.items():
            if name in ("length_penalty_type", "max_source_relative_length"):
                self.given[name] = self.kwargs.pop(name)
            elif hasattr(self.config, name) and (name, value) != ("cache_implementation", "paged"):
                self.given[name] = value
                chosen = {"num_beams": 1, "length_penalty": 1.0}.get(name) if value is None else value
                if chosen is not None or getattr(saved, name, None) is None:
                    setattr(self.config, name, chosen)
                    del self.kwargs[name]
            elif name in OWN_SETTINGS:
                self.given[name] = value
        self.values = self.merge()
        if self.kwargs.get("max_length", 0) is None and self.get("max_new_tokens") is None:
            # None against a saved one; Transformers would compare it with a number.
            self.config.max_length = self.prompt_length() + DEFAULT_NEW_TOKENS
            del self.kwargs["max_length"]
        if self.get("num_beams", 1) == 1:  # they mean nothing then, and Transformers would warn of saved ones
            self.config.length_penalty, self.config.early_stopping = 1.0, False

    def merge(self) -> dict[str, Any]:
        """Return the settings of the call over the model's own, without those that have no effect beside others.

        A limit of the call switches a saved `max_source_relative_length` off. A saved `max_length` holds only without
        another limit, and unless it is Transformers' default, which Seq2SeqTrainer saves. Where each source has a limit
        of its own, no target is forced to its end.
        """
        saved, relative = dict(vars(self.saved)), "max_source_relative_length"
        if any(self.given.get(name) is not None for name in LIMITS):
            saved.pop(relative, None)
        values = {name: value for name, value in (saved | self.given).items() if value is not None}
        is_default = saved.get("max_length") == default_settings().get("max_length")
        if "max_length" not in self.given and (is_default or relative in values or "max_new_tokens" in values):
            values.pop("max_length", None)
        forced, ends = (as_token_ids(values.get(name)) for name in ("forced_eos_token_id", "eos_token_id"))
        if relative in values and set(forced) <= set(ends):
            values.pop("forced_eos_token_id", None)
        return values

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting of the call, else of the model."""
        return self.values.get(name, default)

    def search(self) -> dict[str, Any]:
        """Return the complete search, as commands record it.

        It leaves out Transformers' defaults, except for beams and their length penalty, and what means nothing.
        """
        hidden = ("_", "output_", "return_", "transformers_version", "use_cache")
        hidden += WEIGHTS if self.is_autoregressive and self.get("num_beams", 1) == 1 else ()
        return {
            name: value
            for name, value in sorted(self.values.items())
            if not name.startswith(hidden)
            if name in ("num_beams", *WEIGHTS[:2]) or value != default_settings().get(name)
        }

    def check(self) -> None:
        """Raise ValueError for a setting that has a value that it cannot have, or two that exclude each other."""
        beams, alpha = self.get("num_beams", 1), self.get("length_penalty", 1.0)
        penalty_type, relative = self.get("length_penalty_type", "power"), self.get("max_source_relative_length")
        if penalty_type not in LENGTH_PENALTY_TYPES:
            raise ValueError(f"length_penalty_type is {penalty_type!r}; choose one of {LENGTH_PENALTY_TYPES}.")
        if isinstance(alpha, bool) or not isinstance(alpha, Real) or not math.isfinite(alpha):
            raise ValueError(f"length_penalty: not a number; got {alpha!r}, expected a finite one such as 0.6.")
        counts = (("num_beams", beams, 1), ("max_source_relative_length", 0 if relative is None else relative, 0))
        prompt = self.kwargs.get("decoder_input_ids")
        if prompt is not None and 0 in prompt.shape:
            raise ValueError(
                f"decoder_input_ids: a target begins with a token; got shape {tuple(prompt.shape)}, expected at least "
                "one for each target. Leave them out to begin with the start token."
            )
        for name, count, least in counts:
            if isinstance(count, bool) or not isinstance(count, Integral) or count < least:
                expected = f"expected a whole number of at least {least}, or None"
                raise ValueError(f"{name}: not a number of beams or tokens; got {count!r}, {expected}.")
        if relative is not None and (forced := self.get("forced_eos_token_id")) is not None:
            raise ValueError(
                f"forced_eos_token_id: forces the end at one length for all targets, and max_source_relative_length "
                f"gives each source its own; got {forced!r} and {relative}. Set one of them to None."
            )

    def prompt_length(self) -> int:
        """Return the number of tokens that each target begins with, the start token included."""
        prompt = self.kwargs.get("decoder_input_ids")
        if prompt is None:
            return 1
        start = torch.as_tensor(self.get("decoder_start_token_id", self.get("bos_token_id", -1)), device=prompt.device)
        return prompt.shape[1] + int((prompt[:, 0] != start).all())

    def source_limits(self, inputs: Tensor | None) -> Tensor | None:
        """Return how many new tokens each target may have (B,); None where its source does not limit it."""
        relative, mask = self.get("max_source_relative_length"), self.kwargs.get("attention_mask")
        if relative is None:
            return None
        if mask is None:
            encoded = self.kwargs.get("encoder_outputs")
            given = (inputs, self.kwargs.get("input_ids"), self.kwargs.get("inputs_embeds"), encoded and encoded[0])
            source = next((tensor for tensor in given if tensor is not None), None)
            if source is None:
                return None
            mask = torch.ones(source.shape[:2], device=source.device)
        limits = mask.ne(0).sum(-1) + relative
        return limits if self.table is None else limits.clamp(max=self.table + 1 - self.prompt_length())

    @property
    def table(self) -> int | None:
        """The number of learned positions of a model of this package; None where positions have no end."""
        is_learned = getattr(self.model_config, "position_embedding", None) == "learned"
        return self.model_config.max_position_embeddings if is_learned else None

    def target_limits(self) -> Tensor:
        """Return how many new tokens each target may have (B,); `attention_mask` must be one of the arguments."""
        relative, limit = self.source_limits(None), self.get("max_new_tokens")
        if limit is None and (max_length := self.get("max_length")) is not None:
            limit = max_length - self.prompt_length()
        if relative is not None:
            return relative if limit is None else relative.clamp(max=limit)
        mask = self.kwargs["attention_mask"]
        return torch.full((len(mask),), DEFAULT_NEW_TOKENS if limit is None else limit, device=mask.device)

    def apply_limit(self, longest: int) -> None:
        """Limit every target of the call to `longest` new tokens, or fewer where the call gives fewer."""
        if (max_new_tokens := self.get("max_new_tokens")) is not None:
            self.config.max_new_tokens = min(max_new_tokens, longest)
            return
        in_all = self.prompt_length() + longest
        is_saved = not self.given.keys() & {"max_length", "max_source_relative_length"}
        if (max_length := self.get("max_length")) is not None:
            in_all = min(in_all, max_length)
        elif is_saved and self.saved.max_length not in (None, in_all):
            logger.warning_once(
                f"generate(): the model's own generation config has max_length={self.saved.max_length}, which is "
                f"ignored: its max_source_relative_length={self.get('max_source_relative_length')} limits each target. "
                "Give max_length or max_new_tokens in the call to limit it otherwise."
            )
        self.config.max_length = in_all

    def check_positions(self) -> None:
        """Raise ValueError where a target may go beyond learned positions."""
        table, max_length = self.table, self.config.max_length or self.get("max_length")
        max_new_tokens = self.config.max_new_tokens or self.get("max_new_tokens")
        if max_new_tokens is not None:
            max_length = self.prompt_length() + max_new_tokens
        if table is not None and max_length is not None and max_length - 1 > table:
            raise ValueError(
                f"max_length ({max_length}, with the start token) goes beyond the table of {table} learned "
                f"positions; ask for a max_length of at most {table + 1} or max_new_tokens of at most {table}."
            )


def default_limit(model: Any, **settings: Any) -> dict[str, Any]:
    """Return the paper's limit for a call to which neither its settings nor the model's own give any, else nothing.

    `generate()` would end such a target at Transformers' default of 20 tokens. Models of other packages have no such
    setting, and one that predicts all words at once predicts the length.
    """
    values = CallSettings(settings.pop("generation_config", None), model, settings).values
    has_limit = not values.keys().isdisjoint({*LIMITS, *PAPER_LIMIT})
    return PAPER_LIMIT if hasattr(model, "use_paper_decoding") and not has_limit else {}


def free_end(processors: Any, criteria: StoppingCriteriaList) -> Any:
    """Return the processors of a search, without a forced end where each source has a limit of its own."""
    if not any(isinstance(criterion, SourceLimitCriteria) for criterion in criteria):
        return processors
    return type(processors)(one for one in processors if not isinstance(one, ForcedEOSTokenLogitsProcessor))


def split_criteria(
    criteria: StoppingCriteriaList, prompt: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor, StoppingCriteriaList]:
    """Return the limits (B,) and end tokens (E,) that criteria contain, and the criteria that every step must call."""
    ends, others = [prompt.new_empty(0)], StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends.append(torch.as_tensor(criterion.eos_token_id, device=prompt.device).flatten())
        elif type(criterion) is SourceLimitCriteria:
            limits = torch.minimum(limits, criterion.limits.to(prompt.device))
        elif type(criterion) is MaxLengthCriteria:
            limits = limits.clamp(max=criterion.max_length - prompt.shape[1])
        else:
            others.append(criterion)
    return limits, torch.cat(ends), others


def search_settings(
    prompt: Tensor, processors: Any, criteria: StoppingCriteriaList, config: GenerationConfig, compacts: bool = True
) -> tuple[SearchSettings, list[Tensor]]:
    """Return the settings of a search over `prompt` (k B, T), and a list for each step's scores (k B, V)."""
    rows = max(config.num_beams, config.num_return_sequences)
    limits = torch.full((len(prompt) // rows,), config.max_length - prompt.shape[1], device=prompt.device)
    limits, end_tokens, others = split_criteria(criteria, prompt, limits)
    num_ends = len(as_token_ids(config.eos_token_id))
    pad = config.pad_token_id if config.pad_token_id is not None else next(iter(end_tokens.tolist()), -1)
    scores: list[Tensor] = []
    keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
    follows = bool(processors) and all(hasattr(processor, "keep") for processor in processors)
    if follows:  # copies: the caller's processors keep all sources
        processors = type(processors)(map(copy.copy, processors))

    def keep(sources: Tensor) -> None:
        for processor in processors:
            processor.keep(sources)

    def process(tokens: Tensor, log_probs: Tensor) -> Tensor:
        processed = processors(tokens, log_probs)
        if keeps_scores:
            scores.append(processed)
        return processed

    settings = SearchSettings(
        limits=limits,
        end_tokens=end_tokens,
        pad_token=int(pad),
        num_beams=config.num_beams,
        num_returned=config.num_return_sequences,
        candidates=max(2, 1 + num_ends) * config.num_beams,
        alpha=config.length_penalty,
        length_penalty_type=getattr(config, "length_penalty_type", "power"),
        early_stopping=config.early_stopping,
        do_sample=bool(config.do_sample),
        process=process if processors or keeps_scores else None,
        keep=keep if follows and not (keeps_scores or config.do_sample) else None,
        ends=(lambda tokens: others(tokens, tuple(scores) or None)) if others else None,
        compacts=compacts,
    )
    return settings, scores


@functools.lru_cache(maxsize=8)
def arguments_of(method: Any) -> frozenset[str]:
    """Return the names of a function's arguments; none where there is no function."""
    return frozenset() if method is None else frozenset(inspect.signature(method).parameters)


def check_entry_points(search: type) -> None:
    """Raise RuntimeError unless Transformers has the methods that `search` overrides, with the same arguments."""
    for name in ENTRY_POINTS:
        overridden, theirs = getattr(search, name), getattr(GenerationMixin, name, None)
        if missing := sorted(arguments_of(overridden) - arguments_of(theirs) - {"model_kwargs"}):
            raise RuntimeError(
                f"generate(): GenerationMixin.{name} of this Transformers does not take {', '.join(missing)}, so that "
                f"the search cannot enter it; install Transformers {KNOWN_VERSIONS}."
            )


class ModelDecoder:
    """A `Decoder` of any model of the package: its `forward` and a cache.

    Args:
        model: the model.
        inputs: what `generate()` has prepared for `forward`: encoder outputs, masks, cache.
        beams_per_source: k; the sources' inputs have one row each, or k equal ones.
        records: whether to keep logits and outputs of every step.
        synced: whether every process has to take as many steps as all others.
    """

    def __init__(
        self, model: Any, inputs: dict[str, Any], beams_per_source: int, records: bool = False, synced: bool = False
    ) -> None:
        if inputs.get("use_cache") and inputs.get(CACHE) is None:
            inputs = inputs | {CACHE: empty_cache(model.config, inputs.get("decoder_attention_mask"))}
        self.model, self.inputs, self.beams_per_source, self.synced = model, inputs, beams_per_source, synced
        self.records: list[Any] | None = [] if records else None
        self.last_inputs: dict[str, Any] = {}  # empty before the first step

    @property
    def cache(self) -> Cache | None:
        """Keys and values of earlier tokens and of the sources."""
        return self.inputs.get(CACHE)

    def next_length(self, tokens: Tensor) -> int | None:
        """Return how many of `tokens` (k A, T) `forward` has not had yet; None for all of them."""
        if self.last_inputs:
            return 1 if self.inputs.get("use_cache") else None
        mask = self.inputs.get("decoder_attention_mask")
        if self.cache is None or mask is None or mask.shape[1] != tokens.shape[1]:
            return None
        return tokens.shape[1] - self.cache.get_seq_length()

    def step(self, tokens: Tensor) -> Tensor:
        is_first = not self.last_inputs
        if self.synced and not is_first:
            self.any_peer(True)
        self.last_inputs = self.model.prepare_inputs_for_generation(
            tokens, next_sequence_length=self.next_length(tokens), is_first_iteration=is_first, **self.inputs
        )
        outputs = self.model(**self.last_inputs, return_dict=True)
        if outputs.get(CACHE) is not None:
            self.inputs[CACHE] = outputs[CACHE]
        if (mask := self.inputs.get("decoder_attention_mask")) is not None:
            self.inputs["decoder_attention_mask"] = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        if (positions := self.inputs.get("decoder_position_ids")) is not None:
            self.inputs["decoder_position_ids"] = torch.cat((positions, positions[:, -1:] + 1), dim=1)
        if self.records is not None:
            self.records.append(outputs)
        return outputs.logits[:, -1].to(tokens.device)

    def reorder(self, beams: Tensor) -> None:
        """Continue each row from another of its source, whose keys and values stay where they are.

        Tensors of a static cache keep their addresses, as CUDA graphs need.
        """
        for layer in getattr(self.cache, "self_attention_cache", self.cache).layers if self.cache is not None else ():
            if not isinstance(layer, StaticLayer):
                layer.reorder_cache(beams)
                continue
            for states in (layer.keys, layer.values):
                if states is not None:
                    states.copy_(states.index_select(0, beams.to(states.device)))

    def keep(self, sources: Tensor) -> None:
        beams = torch.arange(self.beams_per_source, device=sources.device)
        rows = (sources[:, None] * self.beams_per_source + beams).flatten()

        def select(values: Tensor, index: Tensor = sources) -> Tensor:
            return values[index.to(values.device)] if len(values) > 1 else values

        self.inputs = with_sources(self.inputs, select)
        for name in TARGET_INPUTS:
            if self.inputs.get(name) is not None:
                self.inputs[name] = select(self.inputs[name], rows)
        if not isinstance(self.cache, EncoderDecoderCache):
            return
        for part, index in ((self.cache.self_attention_cache, rows), (self.cache.cross_attention_cache, sources)):
            for layer in part.layers:
                if isinstance(layer, DynamicLayer) and layer.keys is not None:
                    layer.batch_select_indices(index.to(layer.keys.device))

    def any_peer(self, goes_on: bool) -> bool:
        """Return whether this or any other process takes another step."""
        counter = torch.tensor(float(goes_on), device=self.model.device)
        torch.distributed.all_reduce(counter)
        return bool(counter > 0)

    def finish(self) -> None:
        """Take steps without a result while other processes take theirs."""
        while self.synced and self.any_peer(False):
            self.model(**self.last_inputs, return_dict=True)

    def recorded(self, name: str) -> tuple[Any, ...]:
        return tuple(getattr(outputs, name) for outputs in self.records or [])


def has_new_cache(inputs: dict[str, Any], config: GenerationConfig) -> bool:
    """Return whether the cache is the empty one that `generate()` makes by default; the search has its own."""
    cache = inputs.get(CACHE)
    if config.caller_has_cache or not isinstance(cache, EncoderDecoderCache):
        return cache is None
    parts = (cache.self_attention_cache, cache.cross_attention_cache)
    return all(type(part) is DynamicCache and not part.offloading for part in parts)


def with_sources(inputs: dict[str, Any], select: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return inputs of `forward` with those rows of the sources' inputs that `select` returns."""
    memory = select(inputs["encoder_outputs"][0]).contiguous()
    selected = {name: select(inputs[name]) for name in SOURCE_INPUTS if inputs.get(name) is not None}
    return inputs | selected | {"encoder_outputs": BaseModelOutput(last_hidden_state=memory)}


def share_sources(inputs: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return inputs of `forward` with one row a source for its `rows` beams, and without a cache."""
    return with_sources(inputs, lambda values: values[::rows]) | {CACHE: None}


def step_outputs(decoder: ModelDecoder, encoder_outputs: Any, config: GenerationConfig) -> dict[str, Any]:
    """Return the outputs of a search by step that `return_dict_in_generate` and its companions ask for."""
    outputs: dict[str, Any] = {CACHE: decoder.cache}
    if config.output_logits:
        outputs["logits"] = tuple(logits[:, -1].float() for logits in decoder.recorded("logits"))
    if config.output_attentions:
        outputs["encoder_attentions"] = encoder_outputs.get("attentions")
        outputs |= {name: decoder.recorded(name) for name in ("decoder_attentions", "cross_attentions")}
    if config.output_hidden_states:
        outputs["encoder_hidden_states"] = encoder_outputs.get("hidden_states")
        outputs["decoder_hidden_states"] = decoder.recorded("decoder_hidden_states")
    return outputs


class PaperBeamSearch(GenerationMixin):
    """Two settings of a generation config, or arguments of `generate()`, in addition to Transformers' own.

    length_penalty_type: "gnmt", where a target's score is log P(Y | X) / lp(Y) with `length_penalty` as alpha, or
        "power", Transformers' own |Y|^length_penalty and its default.
    max_source_relative_length: how many tokens longer than its own source, `</s>` counted on both sides, a target may
        become; None for no such limit. `max_new_tokens` or `max_length` given in the call switch a saved limit off;
        given together with it in the call, the shorter holds.

    Under "gnmt" the search for a source stops when no open beam can still enter the n best, whether `early_stopping`
    is False or "never"; True stops it at `num_beams` finished targets.
    """

    config: VaswaniTransformerConfig
    generation_config: GenerationConfig
    model: Any  # encoder and decoder
    training: bool

    def use_paper_decoding(self) -> None:
        """Decode as the paper does from now on: beam 4, lp(Y) with alpha 0.6, at most source length + 50 (6.1)."""
        self.generation_config = self.config.make_generation_config(
            num_beams=4, length_penalty=0.6, length_penalty_type="gnmt", max_source_relative_length=50
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
        """Generate as every model of Transformers does, with the two settings of this class in addition.

        Raises:
            ValueError: a setting has a value that it cannot have, or a target may go beyond learned positions.
            RuntimeError: this version of Transformers has no place for the search.
        """
        check_entry_points(PaperBeamSearch)
        self.config.check_generation_settings(generation_config)
        call = CallSettings(generation_config, self, kwargs)
        call.check()
        limits = call.source_limits(inputs)
        if limits is not None and len(limits):
            call.apply_limit(int(limits.max()))
            criterion = SourceLimitCriteria(limits, call.prompt_length())
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), criterion])
        call.check_positions()
        if (cache := given_cache(call.kwargs.pop("past_key_values", None), call.kwargs)) is not None:
            call.kwargs[CACHE] = cache
            prompt, name = call.kwargs.get("decoder_input_ids"), "decoder_attention_mask"
            if prompt is not None and call.kwargs.get(name) is None and 0 < cache.get_seq_length() < prompt.shape[1]:
                call.kwargs[name] = torch.ones_like(prompt)  # by which Transformers sees that the cache holds a prefix
        vars(call.config).update(
            length_penalty_type=call.get("length_penalty_type", "power"),
            caller_has_cache=cache is not None,
        )
        if self.training and self.model.decoder.gradient_checkpointing:  # Transformers' layers take no cache then
            call.config.use_cache = False
        if (encoded := kwargs.get("encoder_outputs")) is not None:  # a copy, whose rows Transformers may repeat
            values = dict(encoded) if isinstance(encoded, dict) else {"last_hidden_state": encoded[0]}
            call.kwargs["encoder_outputs"] = BaseModelOutput(**values)
        return super().generate(inputs, call.config, logits_processor, stopping_criteria, *args, **call.kwargs)

    def make_decoder(self, inputs: dict[str, Any], beams_per_source: int, **options: bool) -> Decoder:
        """Return what takes the steps of a search; `ModelDecoder` explains the arguments."""
        return ModelDecoder(self, inputs, beams_per_source, **options)

    def _beam_search(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Beam search for `generate()`, over the k rows of each source (k B, T)."""
        config, k = generation_config, generation_config.num_beams
        logits_processor = free_end(logits_processor, stopping_criteria)
        if config.prefill_chunk_size is not None or config.low_memory:
            if config.length_penalty_type == "gnmt":
                raise ValueError(
                    'generate(): length_penalty_type="gnmt" goes with neither prefill_chunk_size nor low_memory; leave '
                    'these out, or set length_penalty_type="power".'
                )
            given = (input_ids, logits_processor, stopping_criteria, config)
            return super()._beam_search(*given, synced_gpus=synced_gpus, **model_kwargs)
        shares_source, records = has_new_cache(model_kwargs, config), bool(config.return_dict_in_generate)
        inputs = share_sources(model_kwargs, k) if shares_source else model_kwargs
        decoder = self.make_decoder(inputs, k, records=records, synced=synced_gpus)
        compacts = shares_source and not records and not synced_gpus
        settings, scores = search_settings(input_ids, logits_processor, stopping_criteria, config, compacts)
        hypotheses = beam_search(decoder, input_ids, settings)
        if isinstance(decoder, ModelDecoder):
            decoder.finish()
        if not records:
            return hypotheses.tokens
        if shares_source and decoder.cache is not None:  # who gets the cache expects a row for each beam in it
            decoder.cache.cross_attention_cache.batch_repeat_interleave(k)
        return GenerateBeamEncoderDecoderOutput(
            sequences=hypotheses.tokens,
            sequences_scores=hypotheses.scores if config.output_scores else None,
            beam_indices=hypotheses.beam_indices,
            scores=tuple(scores) if config.output_scores else None,
            **step_outputs(decoder, model_kwargs["encoder_outputs"], config),
        )

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Greedy search or sampling for `generate()`; what shows more than tokens goes to Transformers' own loop."""
        config, rows = generation_config, generation_config.num_return_sequences
        logits_processor = free_end(logits_processor, stopping_criteria)
        is_special = config.is_assistant or config.prefill_chunk_size is not None
        shares_source = has_new_cache(model_kwargs, config) and not is_special
        if not shares_source or config.return_dict_in_generate or streamer is not None or synced_gpus:
            if shares_source and model_kwargs.get(CACHE) is not None:
                cache = empty_cache(self.config, model_kwargs.get("decoder_attention_mask"))
                model_kwargs = model_kwargs | {CACHE: cache}
            given = (input_ids, logits_processor, stopping_criteria, config)
            return super()._sample(*given, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)
        settings, _ = search_settings(input_ids, logits_processor, stopping_criteria, config)
        return greedy_search(self.make_decoder(share_sources(model_kwargs, rows), rows), input_ids, settings)
