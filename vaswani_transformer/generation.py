"""The paper's decoding inside `generate()` (6.1): its settings, and the door by which `search.py` enters.

B sources, k beams or n samples of a source, T tokens of a target so far, V vocabulary. `generate()` prepares a call as
for every model of Transformers and then calls `_beam_search` or `_sample`, which are overridden here. Length limits
that depend on the source are ordinary arguments by then, and hold in every way of decoding.
"""

import copy
import functools
import inspect
import math
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.generation import (
    EosTokenCriteria,
    GenerateBeamEncoderDecoderOutput,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from .config import VaswaniTransformerConfig
from .search import LENGTH_PENALTY_TYPES, Decoder, SearchSettings, beam_search, greedy_search
from .window import window_cache

logger = logging.get_logger(__name__)

SOURCE_INPUTS = ("encoder_outputs", "attention_mask", "position_ids")
TARGET_INPUTS = ("decoder_attention_mask", "decoder_position_ids")
KNOWN_VERSIONS = "5.17 to 5.23"
# What `generate()` of those versions hands to the methods by which the search enters it.
DOORS = {
    "_beam_search": {"input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus"},
    "_sample": {"input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"},
}


@functools.lru_cache(maxsize=8)
def arguments_of(method: Any) -> frozenset[str]:
    """Return the names of a function's arguments; none where there is no function."""
    return frozenset() if method is None else frozenset(inspect.signature(method).parameters)


def check_doors() -> None:
    """Check that `generate()` still calls what is overridden here.

    Raises:
        RuntimeError: a method of Transformers is missing or takes other arguments.
    """
    for name, arguments in DOORS.items():
        if missing := sorted(arguments - arguments_of(getattr(GenerationMixin, name, None))):
            raise RuntimeError(
                f"generate(): GenerationMixin.{name} of this Transformers does not take {', '.join(missing)}, so that "
                f"the search cannot enter it; install Transformers {KNOWN_VERSIONS}."
            )


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
    """The settings of one call: what it was given, else what the model has saved.

    Args:
        generation_config: the call's, or None.
        saved: the model's.
        kwargs: the call's further arguments.

    Attributes:
        config: the call's settings alone, to hand on to Transformers.
        kwargs: what is left for the model, and settings that are given as None against a saved one.
    """

    def __init__(
        self, generation_config: GenerationConfig | None, saved: GenerationConfig, kwargs: dict[str, Any]
    ) -> None:
        self.saved, self.kwargs = saved, dict(kwargs)
        self.config = GenerationConfig() if generation_config is None else copy.copy(generation_config)
        self.given = {name: value for name, value in vars(self.config).items() if value is not None}
        for name in list(self.kwargs):
            if name in ("length_penalty_type", "max_source_relative_length"):
                self.given[name] = self.kwargs.pop(name)
            elif hasattr(self.config, name) and not (name == "cache_implementation" and kwargs[name] == "paged"):
                self.given[name] = self.kwargs[name]
                if self.kwargs[name] is not None or getattr(saved, name, None) is None:
                    setattr(self.config, name, self.kwargs.pop(name))
        if hasattr(self.config, "max_source_relative_length"):
            self.given.setdefault("max_source_relative_length", None)
        if self.get("num_beams", 1) == 1:  # they mean nothing then, and Transformers would say so of saved ones
            self.config.length_penalty, self.config.early_stopping = 1.0, False

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting of the call, else of the model."""
        value = self.given[name] if name in self.given else getattr(self.saved, name, None)
        return default if value is None else value

    @property
    def has_own_limit(self) -> bool:
        """Whether the call says how long a target may become."""
        return any(self.given.get(name) is not None for name in ("max_new_tokens", "max_length"))

    @property
    def max_source_relative_length(self) -> int | None:
        """How much longer than its source a target may become; a limit of the call switches a saved one off."""
        if "max_source_relative_length" in self.given:
            return self.given["max_source_relative_length"]
        return None if self.has_own_limit else getattr(self.saved, "max_source_relative_length", None)

    def check(self) -> None:
        """Check the settings that the search reads.

        Raises:
            ValueError: one has a value that it cannot have.
        """
        beams, alpha = self.get("num_beams", 1), self.get("length_penalty", 1.0)
        penalty_type, relative = self.get("length_penalty_type", "power"), self.max_source_relative_length
        if penalty_type not in LENGTH_PENALTY_TYPES:
            raise ValueError(f"length_penalty_type is {penalty_type!r}; choose one of {LENGTH_PENALTY_TYPES}.")
        if isinstance(beams, bool) or not isinstance(beams, int) or beams < 1:
            raise ValueError(f"num_beams: no such beam; got {beams!r}, expected a whole number of at least 1.")
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise ValueError(f"length_penalty: not a number; got {alpha!r}, expected a finite one such as 0.6.")
        if relative is not None and (isinstance(relative, bool) or not isinstance(relative, int)):
            raise ValueError(
                f"max_source_relative_length: not a number of tokens; got {relative!r}, expected a whole number such "
                "as 50, or None."
            )
        if relative is not None and relative < 0:
            raise ValueError(f"max_source_relative_length ({relative}) is negative; give 0 or more, or None.")

    def prompt_length(self) -> int:
        """Return the number of tokens that each target begins with, the start token included."""
        prompt = self.kwargs.get("decoder_input_ids")
        if prompt is None:
            return 1
        start = torch.as_tensor(self.get("decoder_start_token_id", self.get("bos_token_id", -1)), device=prompt.device)
        return prompt.shape[1] + int((prompt[:, 0] != start).all())

    def source_limits(self, inputs: Tensor | None) -> Tensor | None:
        """Return how many new tokens each target may have (B,); None where its source does not limit it."""
        relative, mask = self.max_source_relative_length, self.kwargs.get("attention_mask")
        if relative is None:
            return None
        if mask is not None:
            return mask.ne(0).sum(-1) + relative
        encoded = self.kwargs.get("encoder_outputs")
        given = (inputs, self.kwargs.get("input_ids"), self.kwargs.get("inputs_embeds"), encoded and encoded[0])
        source = next((tensor for tensor in given if tensor is not None), None)
        return None if source is None else torch.full((len(source),), source.shape[1] + relative, device=source.device)

    def apply_limit(self, longest: int) -> None:
        """Limit every target of the call to `longest` new tokens, or fewer where the call says so."""
        if (max_new_tokens := self.get("max_new_tokens")) is not None:
            self.config.max_new_tokens = min(max_new_tokens, longest)
            return
        in_all = self.prompt_length() + longest
        if self.has_own_limit:
            in_all = min(in_all, self.given["max_length"])
        elif self.saved.max_length is not None and self.saved.max_length != in_all:
            logger.warning_once(
                f"generate(): the model's own generation config has max_length={self.saved.max_length}, which is "
                f"ignored: its max_source_relative_length={self.max_source_relative_length} limits each target. Give "
                "max_length or max_new_tokens in the call to limit it otherwise."
            )
        self.config.max_length = in_all

    def check_positions(self, config: VaswaniTransformerConfig) -> None:
        """Check that learned positions reach as far as a target may.

        Raises:
            ValueError: they do not.
        """
        table, max_length = config.max_position_embeddings, self.get("max_length")
        max_new_tokens = self.config.max_new_tokens or self.get("max_new_tokens")
        if max_new_tokens is not None:
            max_length = self.prompt_length() + max_new_tokens
        elif self.config.max_length is not None:
            max_length = self.config.max_length
        if config.position_embedding == "learned" and max_length is not None and max_length - 1 > table:
            raise ValueError(
                f"max_length ({max_length}, with the start token) goes beyond the table of {table} learned "
                f"positions; ask for a max_length of at most {table + 1} or max_new_tokens of at most {table}."
            )


class ModelDecoder:
    """The decoder step of any model of the package: its `forward` and a cache.

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
        self.model, self.inputs, self.beams_per_source, self.synced = model, inputs, beams_per_source, synced
        self.records: list[Any] | None = [] if records else None
        self.is_first = True
        self.last_inputs: dict[str, Any] = {}

    @property
    def cache(self) -> Cache | None:
        """Keys and values of earlier tokens and of the sources."""
        return self.inputs.get("past_key_values")

    def next_length(self, tokens: Tensor) -> int | None:
        """Return how many of `tokens` (k A, T) `forward` has not had yet; None for all of them."""
        if not self.is_first:
            return 1 if self.inputs.get("use_cache") else None
        mask = self.inputs.get("decoder_attention_mask")
        if self.cache is None or mask is None or mask.shape[1] != tokens.shape[1]:
            return None
        return tokens.shape[1] - self.cache.get_seq_length()

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits (k A, V) of the token after `tokens` (k A, T)."""
        self.last_inputs = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=self.next_length(tokens),
            is_first_iteration=self.is_first,
            **self.inputs,
        )
        if not self.is_first and self.synced:
            self.any_peer(True)
        outputs = self.model(**self.last_inputs, return_dict=True)
        self.is_first = False
        if outputs.get("past_key_values") is not None:
            self.inputs["past_key_values"] = outputs.past_key_values
        if (mask := self.inputs.get("decoder_attention_mask")) is not None:
            self.inputs["decoder_attention_mask"] = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        if (positions := self.inputs.get("decoder_position_ids")) is not None:
            self.inputs["decoder_position_ids"] = torch.cat((positions, positions[:, -1:] + 1), dim=1)
        if self.records is not None:
            self.records.append(outputs)
        return outputs.logits[:, -1].to(tokens.device)

    def reorder(self, beams: Tensor) -> None:
        """Continue each row from another of its source, whose keys and values stay where they are."""
        if self.cache is not None:
            getattr(self.cache, "self_attention_cache", self.cache).reorder_cache(beams)

    def keep(self, sources: Tensor) -> None:
        """Decode only these sources."""
        rows = (sources[:, None] * self.beams_per_source + torch.arange(self.beams_per_source).to(sources)).flatten()
        for names, index in ((SOURCE_INPUTS, sources), (TARGET_INPUTS, rows)):
            for name in names:
                if isinstance(value := self.inputs.get(name), Tensor):
                    self.inputs[name] = value[index.to(value.device)] if len(value) > 1 else value
        memory = self.inputs["encoder_outputs"][0]
        self.inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=memory[sources.to(memory.device)])
        if (cache := cast(EncoderDecoderCache | None, self.cache)) is None:
            return
        for part, index in ((cache.self_attention_cache, rows), (cache.cross_attention_cache, sources)):
            for layer in cast(list[DynamicLayer], part.layers):
                if layer.keys is not None:  # there may be more layers in a cache than in the decoder
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
        """Return an output of every step."""
        return tuple(getattr(outputs, name) for outputs in self.records or [])


def is_plain(cache: Cache | None) -> bool:
    """Return whether a cache is the one that `generate()` makes where nothing else is asked for."""
    if not isinstance(cache, EncoderDecoderCache):
        return cache is None
    return all(
        type(part) is DynamicCache and not part.offloading
        for part in (cache.self_attention_cache, cache.cross_attention_cache)
    )


def with_window_cache(inputs: dict[str, Any], config: VaswaniTransformerConfig, settings: Any) -> dict[str, Any]:
    """Return inputs of `forward` whose cache, if it is plain and empty, keeps the keys within `attention_window`.

    An assistant's cache is cut back to earlier tokens, whose keys it must still have.
    """
    cache, mask = inputs.get("past_key_values"), inputs.get("decoder_attention_mask")
    is_new = isinstance(cache, EncoderDecoderCache) and is_plain(cache) and not settings.caller_has_cache
    if config.attention_window is None or not is_new or settings.is_assistant:
        return inputs
    own = cast(EncoderDecoderCache, cache).cross_attention_cache
    return inputs | {"past_key_values": EncoderDecoderCache(window_cache(config, mask), own)}


def expand_cross_cache(cache: Cache | None, rows: int) -> Cache | None:
    """Return the cache with a row a target (`rows`) also for the source, as a caller expects it."""
    if isinstance(cache, EncoderDecoderCache):
        for layer in cast(list[DynamicLayer], cache.cross_attention_cache.layers):
            if layer.keys is not None and layer.values is not None and len(layer.keys) not in (0, rows):
                layer.values = layer.values.repeat_interleave(rows // len(layer.keys), dim=0)
                layer.keys = layer.keys.repeat_interleave(rows // len(layer.keys), dim=0)
    return cache


def one_row_per_source(inputs: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return inputs of `forward` with the first of each source's `rows` equal rows: its beams share it."""
    if rows == 1:
        return inputs
    source = {name: inputs[name][::rows] for name in SOURCE_INPUTS[1:] if isinstance(inputs.get(name), Tensor)}
    memory = inputs["encoder_outputs"][0][::rows].contiguous()
    return inputs | source | {"encoder_outputs": BaseModelOutput(last_hidden_state=memory)}


def search_settings(
    prompt: Tensor, processors: Any, criteria: StoppingCriteriaList, config: GenerationConfig, compacts: bool = True
) -> tuple[SearchSettings, list[Tensor]]:
    """Return the settings of a search over `prompt` (k B, T), and a list to which it adds each step's scores (k B, V).

    Limits and end tokens are known by number; of the other stopping criteria every step asks.
    """
    rows = max(config.num_beams, config.num_return_sequences)
    ends, others = [], StoppingCriteriaList()
    limits = torch.full((len(prompt) // rows,), config.max_length - prompt.shape[1], device=prompt.device)
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends.append(torch.as_tensor(criterion.eos_token_id).flatten().to(prompt.device))
        elif type(criterion) is SourceLimitCriteria:
            limits = torch.minimum(limits, criterion.limits.to(prompt.device))
        elif type(criterion) is MaxLengthCriteria and not warns(criterion):
            limits = limits.clamp(max=criterion.max_length - prompt.shape[1])
        else:
            others.append(criterion)
    end_tokens = torch.cat(ends) if ends else prompt.new_empty(0)
    eos = config.eos_token_id
    num_ends = 0 if eos is None else torch.as_tensor(eos).numel()
    pad = config.pad_token_id if config.pad_token_id is not None else next(iter(end_tokens.tolist()), -1)
    scores: list[Tensor] = []
    keeps_scores = bool(config.return_dict_in_generate and config.output_scores)

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
        ends=(lambda tokens: others(tokens, cast(Any, tuple(scores) or None))) if others else None,
        compacts=compacts,
    )
    return settings, scores


def warns(criterion: MaxLengthCriteria) -> bool:
    """Return whether a criterion has to be asked, since it warns of targets beyond a number of positions."""
    return criterion.max_position_embeddings is not None and criterion.max_length > criterion.max_position_embeddings


def step_outputs(decoder: ModelDecoder, encoder_outputs: Any, config: GenerationConfig, rows: int) -> dict[str, Any]:
    """Return the outputs of a search by step that `return_dict_in_generate` and its companions ask for."""
    attentions, states = config.output_attentions, config.output_hidden_states
    return {
        "logits": tuple(logits[:, -1].float() for logits in decoder.recorded("logits"))
        if config.output_logits
        else None,
        "encoder_attentions": encoder_outputs.get("attentions") if attentions else None,
        "encoder_hidden_states": encoder_outputs.get("hidden_states") if states else None,
        "decoder_attentions": decoder.recorded("decoder_attentions") if attentions else None,
        "cross_attentions": decoder.recorded("cross_attentions") if attentions else None,
        "decoder_hidden_states": decoder.recorded("decoder_hidden_states") if states else None,
        "past_key_values": expand_cross_cache(decoder.cache, rows),
    }


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

    def use_paper_decoding(self) -> None:
        """Decode as the paper does from now on: beam 4, lp(Y) with alpha 0.6, at most source length + 50 (6.1)."""
        self.generation_config = GenerationConfig(
            bos_token_id=self.config.bos_token_id,
            pad_token_id=self.config.pad_token_id,
            eos_token_id=self.config.eos_token_id,
            decoder_start_token_id=self.config.decoder_start_token_id,
            num_beams=4,
            length_penalty=0.6,
            length_penalty_type="gnmt",
            max_source_relative_length=50,
        )

    @functools.wraps(GenerationMixin.generate)
    def generate(  # ty: ignore[incompatible-attribute-override]
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
        check_doors()
        call = CallSettings(generation_config, cast(Any, self).generation_config, kwargs)
        call.check()
        limits = call.source_limits(inputs)
        if limits is not None:
            call.apply_limit(int(limits.max()))
            criterion = SourceLimitCriteria(limits, call.prompt_length())
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), criterion])
        call.check_positions(self.config)
        config = cast(Any, call.config)
        config.length_penalty_type = call.get("length_penalty_type", "power")
        config.caller_has_cache = kwargs.get("past_key_values") is not None
        if (encoded := kwargs.get("encoder_outputs")) is not None:  # a copy, whose rows Transformers may repeat
            values = dict(encoded) if isinstance(encoded, dict) else {"last_hidden_state": encoded[0]}
            call.kwargs["encoder_outputs"] = BaseModelOutput(**values)
        return super().generate(inputs, config, logits_processor, stopping_criteria, *args, **call.kwargs)

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
        config, k = cast(Any, generation_config), generation_config.num_beams
        model_kwargs = with_window_cache(model_kwargs, self.config, config)
        if config.prefill_chunk_size is not None or config.low_memory:
            if config.length_penalty_type == "gnmt":
                raise ValueError(
                    'generate(): length_penalty_type="gnmt" goes with neither prefill_chunk_size nor low_memory; leave '
                    'these out, or set length_penalty_type="power".'
                )
            return super()._beam_search(
                input_ids, logits_processor, stopping_criteria, config, synced_gpus=synced_gpus, **model_kwargs
            )
        is_shared = is_plain(model_kwargs.get("past_key_values")) and not config.caller_has_cache
        encoder_outputs = model_kwargs["encoder_outputs"]
        inputs = one_row_per_source(model_kwargs, k) if is_shared else model_kwargs
        records = bool(config.return_dict_in_generate)
        decoder = self.make_decoder(inputs, k, records=records, synced=synced_gpus)
        compacts = is_shared and not records and not synced_gpus
        settings, scores = search_settings(input_ids, logits_processor, stopping_criteria, config, compacts)
        found = beam_search(decoder, input_ids, settings)
        if isinstance(decoder, ModelDecoder):
            decoder.finish()
        if not records:
            return found.tokens
        return GenerateBeamEncoderDecoderOutput(
            sequences=cast(Any, found.tokens),
            sequences_scores=cast(Any, found.scores if config.output_scores else None),
            beam_indices=cast(Any, found.beam_indices),
            scores=cast(Any, tuple(scores) if config.output_scores else None),
            **step_outputs(cast(ModelDecoder, decoder), encoder_outputs, config, len(input_ids)),
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
        config = cast(Any, generation_config)
        model_kwargs = with_window_cache(model_kwargs, self.config, config)
        cache = model_kwargs.get("past_key_values")
        shows_more = config.return_dict_in_generate or streamer is not None or config.caller_has_cache
        is_special = synced_gpus or config.is_assistant or config.prefill_chunk_size is not None
        if shows_more or is_special or not is_plain(cache):
            return super()._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        rows = config.num_return_sequences
        settings, _ = search_settings(input_ids, logits_processor, stopping_criteria, config)
        return greedy_search(self.make_decoder(one_row_per_source(model_kwargs, rows), rows), input_ids, settings)


__all__ = ["CallSettings", "ModelDecoder", "PaperBeamSearch", "SourceLimitCriteria"]
