"""`Stepper` that calls a model's `forward`, with one row of encoder outputs and cross-attention keys per source.

B sources, A active sources, k beams or samples per source, T target tokens so far, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache, StaticLayer
from transformers.generation import GenerationConfig
from transformers.modeling_outputs import BaseModelOutput

from .pretrained import CACHE, pop_cache
from .stacks import empty_cache

SOURCE_INPUTS = ("attention_mask", "position_ids")
TARGET_INPUTS = ("decoder_attention_mask", "decoder_position_ids")


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
