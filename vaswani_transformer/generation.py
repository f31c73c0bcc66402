"""The paper's decoding inside Transformers' `generate()` (6.1), which calls `_beam_search` or `_sample`.

B sources, A active sources, k beams or n samples per source, T target tokens so far, V vocabulary.
"""

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache, StaticLayer
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

from .config import VaswaniTransformerConfig
from .search import SearchSettings, Stepper, beam_search, greedy_search
from .settings import PAPER_LIMIT, CallSettings
from .stacks import CACHE, as_encoder_output, check_inputs, empty_cache, pop_cache

UNMIXED = "table"  # learned positions, which all rows share
SOURCE_INPUTS = ("attention_mask", "position_ids")
TARGET_INPUTS = ("decoder_attention_mask", "decoder_position_ids")


def mixes_adapters(model: nn.Module, unmixed: str, rows: int | None = None) -> bool:
    """Return whether PEFT applies a different adapter to each row, because of `adapter_names` in the call.

    Args:
        model: the model, whose modules have hooks of PEFT with the names.
        unmixed: regular expression of the names of modules that do not compute row by row.
        rows: number of rows outside the encoder; None if it is that of the sources, which PEFT itself checks.

    Raises:
        ValueError: an adapter is on one of the `unmixed` modules, or there is not a name for each of the rows.
    """
    mixes = False
    for path, module in model.named_modules():
        hooks = [getattr(hook, "keywords", {}) for hook in module._forward_pre_hooks.values()]
        names = [keywords["adapter_names"] for keywords in hooks if keywords.get("adapter_names")]
        if not names:
            continue
        mixes = True
        *parents, name = path.split(".")
        expected = len(names[-1]) if rows is None or "encoder" in parents else rows
        if re.fullmatch(unmixed, name) or len(names[-1]) != expected:
            numbers = "one adapter" if re.fullmatch(unmixed, name) else f"{expected}, one for each row"
            fix = "Pass num_beams as an argument, not in a generation config"  # for which PEFT repeats the names
            if len(names[-1]) > expected:
                fix = "Set num_beams in a generation config, not as an argument"
            raise ValueError(
                f"adapter_names: cannot differ by row in {path}; got {len(names[-1])} names, expected {numbers}. "
                f"{fix}, or decode the texts of each adapter separately."
            )
    return mixes


class CallerCache(EncoderDecoderCache):
    """A caller's cache, with a row for each beam; a cache of the search has a row for each source."""

    def __init__(self, cache: EncoderDecoderCache) -> None:
        super().__init__(cache.self_attention_cache, cache.cross_attention_cache)
        self.is_updated = cache.is_updated


def caller_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a `generate()` call with the cache under Transformers' name."""
    inputs = dict(inputs)
    cache = pop_cache(inputs.pop("past_key_values", None), inputs)
    if cache is not None:
        inputs[CACHE] = CallerCache(cache) if isinstance(cache, EncoderDecoderCache) else cache
        prompt = inputs.get("decoder_input_ids")
        has_mask = inputs.get("decoder_attention_mask") is not None
        if prompt is not None and not has_mask and 0 < cache.get_seq_length() < prompt.shape[1]:
            # Tells Transformers that the cache contains a prefix.
            inputs["decoder_attention_mask"] = torch.ones_like(prompt)
    return inputs


def shares_sources(inputs: dict[str, Any]) -> bool:
    """Return whether the search may use its own cache: `inputs` have none or the default of `generate()`."""
    cache = inputs.get(CACHE)
    if type(cache) is not EncoderDecoderCache:
        return cache is None
    caches = (cache.self_attention_cache, cache.cross_attention_cache)
    return all(type(stack_cache) is DynamicCache and not stack_cache.offloading for stack_cache in caches)


def select_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows `index` of `values`; a single row, such as of position ids, serves all sources."""
    return values[index.to(values.device)] if len(values) > 1 else values


def with_sources(inputs: dict[str, Any], select: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return inputs of `forward` with `select` applied to the source inputs."""
    selected = dict(inputs)
    memory = select(inputs["encoder_outputs"][0]).contiguous()
    selected["encoder_outputs"] = BaseModelOutput(last_hidden_state=memory)
    for name in SOURCE_INPUTS:
        if inputs.get(name) is not None:
            selected[name] = select(inputs[name])
    return selected


def share_sources(inputs: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return inputs of `forward` with one row per source instead of `rows` equal ones, and without a cache."""
    shared = with_sources(inputs, lambda values: values[::rows])
    shared[CACHE] = None
    return shared


class ModelStepper:
    """`Stepper` that calls a model's `forward` with a cache.

    Args:
        model: the model.
        inputs: inputs of `forward`, prepared by `generate()`: encoder outputs, masks, cache.
        beams_per_source: k; source inputs have one row per source, or k equal ones.
        records: whether to keep the outputs of every step.
        synced: whether all processes must take the same number of steps.
    """

    def __init__(
        self, model: Any, inputs: dict[str, Any], beams_per_source: int, records: bool = False, synced: bool = False
    ) -> None:
        if inputs.get("use_cache") and inputs.get(CACHE) is None:
            inputs = {**inputs, CACHE: empty_cache(model.config)}
        self.model = model
        self.inputs = inputs
        self.beams_per_source = beams_per_source
        self.synced = synced
        self.records: list[Any] | None = [] if records else None
        self.last_inputs: dict[str, Any] = {}

    @property
    def cache(self) -> Cache | None:
        """Cached keys and values of earlier tokens and of the sources."""
        return self.inputs.get(CACHE)

    def next_length(self, tokens: Tensor) -> int | None:
        """Return how many of `tokens` (k A, T) are new to `forward`; None for all."""
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

        # The next step sees one token more.
        mask = self.inputs.get("decoder_attention_mask")
        if mask is not None:
            self.inputs["decoder_attention_mask"] = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        positions = self.inputs.get("decoder_position_ids")
        if positions is not None:
            self.inputs["decoder_position_ids"] = torch.cat((positions, positions[:, -1:] + 1), dim=1)
        if self.records is not None:
            self.records.append(outputs)
        return outputs.logits[:, -1].to(tokens.device)

    def reorder(self, beams: Tensor) -> None:
        """Reorder the self-attention cache; tensors of a static cache keep their addresses, as CUDA graphs need."""
        cache: Any = getattr(self.cache, "self_attention_cache", self.cache)
        layers = [] if cache is None else cache.layers
        for layer in layers:
            if not isinstance(layer, StaticLayer):
                layer.reorder_cache(beams)
                continue
            for states in (layer.keys, layer.values):
                if states is not None:
                    states.copy_(states.index_select(0, beams.to(states.device)))

    def keep(self, sources: Tensor) -> None:
        """Drop all other sources; only for a search with its own cache, or none."""
        beams = torch.arange(self.beams_per_source, device=sources.device)
        rows = (sources[:, None] * self.beams_per_source + beams).flatten()

        self.inputs = with_sources(self.inputs, lambda values: select_rows(values, sources))
        for name in TARGET_INPUTS:
            if self.inputs.get(name) is not None:
                self.inputs[name] = select_rows(self.inputs[name], rows)
        if not isinstance(self.cache, EncoderDecoderCache):
            return
        for cache, index in ((self.cache.self_attention_cache, rows), (self.cache.cross_attention_cache, sources)):
            for layer in cache.layers:
                if isinstance(layer, DynamicLayer) and layer.keys is not None:
                    layer.batch_select_indices(index.to(layer.keys.device))

    def any_peer(self, goes_on: bool) -> bool:
        """Return whether any process takes one more step."""
        counter = torch.tensor(float(goes_on), device=self.model.device)
        torch.distributed.all_reduce(counter)
        return bool(counter > 0)

    def finish(self) -> None:
        """Run `forward` until all processes have finished."""
        while self.synced and self.any_peer(False):
            self.model(**self.last_inputs, return_dict=True)

    def step_outputs(self, encoder_outputs: Any, config: GenerationConfig) -> dict[str, Any]:
        """Return the requested outputs of each step: logits, attentions, hidden states."""
        outputs: dict[str, Any] = {CACHE: self.cache}

        def recorded(name: str) -> tuple[Any, ...]:
            return tuple(getattr(step, name) for step in self.records or [])

        if config.output_logits:
            outputs["logits"] = tuple(logits[:, -1].float() for logits in recorded("logits"))
        if config.output_attentions:
            outputs["encoder_attentions"] = encoder_outputs.get("attentions")
            outputs["decoder_attentions"] = recorded("decoder_attentions")
            outputs["cross_attentions"] = recorded("cross_attentions")
        if config.output_hidden_states:
            outputs["encoder_hidden_states"] = encoder_outputs.get("hidden_states")
            outputs["decoder_hidden_states"] = recorded("decoder_hidden_states")
        return outputs


@dataclass(eq=False)
class SourceLimitCriteria(StoppingCriteria):
    """Stop each target at its own limit: "input length + 50" in the paper (6.1)."""

    limits: Tensor  # (B,), largest number of new tokens of each source's targets
    prompt_length: int  # number of tokens that each target begins with

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """Return whether each row (R,) has reached its limit."""
        limits = self.limits.repeat_interleave(input_ids.shape[0] // self.limits.shape[0])  # (R,)
        return limits.to(input_ids.device) <= input_ids.shape[1] - self.prompt_length


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

    settings = SearchSettings(
        limits=limits,
        end_tokens=end_tokens,
        pad_token=int(pad),
        num_beams=config.num_beams,
        num_returned=config.num_return_sequences,
        alpha=config.length_penalty,
        length_penalty_type=getattr(config, "length_penalty_type", "power"),
        early_stopping=config.early_stopping,
        do_sample=bool(config.do_sample),
        process=process if processors or records_scores else None,
        keep=keep if can_drop and not (records_scores or config.do_sample) else None,
        ends=ends if remaining else None,
        nan_handler=getattr(config, "nan_handler", None),
        compacts=compacts,
    )
    return settings, scores


class PaperBeamSearch(GenerationMixin):
    """The paper's beam search (6.1), with three settings in addition to those of Transformers:

    length_penalty_type: "gnmt" divides log P(Y | X) by lp(Y) with `length_penalty` as alpha; "power", the default, by
        Transformers' |Y|^length_penalty.
    max_source_relative_length: largest difference of target and source length, both including `</s>`; None for no
        limit. `max_new_tokens` or `max_length` in the call disable a saved limit; if the call has both, the shorter one
        applies.
    nan_handler: function that gets the indices of sources whose scores are NaN at the end of the search; None to warn.

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
        """Generate targets as Transformers does, with the additional settings of this class.

        Raises:
            ValueError: a setting is out of range, or a target may exceed the learned positions.
        """
        check_inputs(inputs=inputs, **kwargs)
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
