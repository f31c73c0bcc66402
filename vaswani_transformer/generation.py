"""The paper's decoding inside `generate()` (6.1): the entry point of `search.py`.

B sources, k beams or n samples of a source, T tokens of a target so far, V vocabulary. `generate()` prepares a call as
for every model of Transformers and then calls `_beam_search` or `_sample`, which are overridden here. Length limits
that depend on the source are ordinary arguments by then, and hold in every way of decoding.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache, StaticLayer
from transformers.generation import (
    GenerateBeamEncoderDecoderOutput,
    GenerationConfig,
    GenerationMixin,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput

from .config import VaswaniTransformerConfig
from .decoder import empty_cache
from .generation_settings import CallSettings, SourceLimitCriteria, free_end, search_settings
from .pretrained import CACHE, KNOWN_VERSIONS, given_cache
from .search import Decoder, beam_search, greedy_search

SOURCE_INPUTS = ("attention_mask", "position_ids")
TARGET_INPUTS = ("decoder_attention_mask", "decoder_position_ids")
ENTRY_POINTS = ("_beam_search", "_sample")


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
