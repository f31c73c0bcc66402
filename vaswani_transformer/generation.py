"""The paper's beam search inside `generate()` (6.1).

B sources, T target. Transformers' own search loop runs unchanged; what the paper does otherwise enters through the
steps that the loop takes from the model: how a finished beam is scored, when a source can stop, and how long each
target may become. The beams of a source share its encoding, and the keys and values that cross-attention makes of it.
"""

from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationConfig, GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput

from .config import VaswaniTransformerConfig

LENGTH_PENALTY_TYPES = ("power", "gnmt")
SOURCE_INPUTS = ("encoder_outputs", "attention_mask", "position_ids")


def length_penalty(length: Tensor | int, alpha: float) -> Tensor | float:
    """lp(Y) = ((5 + |Y|) / 6)^alpha of Wu et al. 2016, by which log P(Y | X) is divided (6.1)."""
    return ((5 + length) / 6) ** alpha


class SourceRelativeLength(StoppingCriteria):
    """Each target ends at its own limit: "input length + 50" in the paper (6.1)."""

    def __init__(self, limits: Tensor, prompt_length: int) -> None:
        self.limits = limits
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        limits = self.limits.repeat_interleave(input_ids.shape[0] // self.limits.shape[0])  # (rows,)
        return limits.to(input_ids.device) <= input_ids.shape[1] - self.prompt_length


class PaperPenalty(float):
    """alpha, with what bounds the score of an open beam; it rides through the search loop as its length penalty."""

    limits: Tensor
    """(B, 1), the new tokens that each target may have."""
    num_returned: int
    """n of the n best that the caller wants."""

    def __new__(cls, alpha: float, limits: Tensor, num_returned: int) -> Self:
        penalty = super().__new__(cls, alpha)
        penalty.limits, penalty.num_returned = limits, num_returned
        return penalty


class PaperBeamSearch(GenerationMixin):
    """Two settings of a generation config, or arguments of `generate()`, beside Transformers' own.

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

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        given = {} if generation_config is None else generation_config.to_dict()
        call = given | {name: kwargs.pop(name) for name in self._paper_settings(kwargs)}
        has_own_limit = any(kwargs.get(name, given.get(name)) is not None for name in ("max_new_tokens", "max_length"))
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        saved = self.generation_config
        penalty_type = call.get("length_penalty_type", getattr(saved, "length_penalty_type", "power"))
        if penalty_type not in LENGTH_PENALTY_TYPES:
            raise ValueError(f"length_penalty_type is {penalty_type!r}; choose one of {LENGTH_PENALTY_TYPES}.")
        relative = getattr(saved, "max_source_relative_length", None)
        relative = call.get("max_source_relative_length", None if has_own_limit else relative)
        if relative is not None and relative < 0:
            raise ValueError(f"max_source_relative_length ({relative}) is negative; give 0 or more, or None.")
        prepared.length_penalty_type, prepared.max_source_relative_length = penalty_type, relative
        prepared._has_own_limit = has_own_limit or prepared.max_new_tokens is not None
        if isinstance(model_kwargs.get("encoder_outputs"), tuple):
            model_kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=model_kwargs["encoder_outputs"][0])
        mask = model_kwargs.get("attention_mask")
        prepared._longest_source = None if mask is None else int(mask.ne(0).sum(-1).max())
        return prepared, model_kwargs

    @staticmethod
    def _paper_settings(kwargs: dict[str, Any]) -> list[str]:
        return [name for name in ("length_penalty_type", "max_source_relative_length") if name in kwargs]

    def _prepare_generated_length(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> GenerationConfig:
        prepared = super()._prepare_generated_length(generation_config, *args, **kwargs)
        if prepared.max_source_relative_length is not None:
            source_length = prepared._longest_source
            source_length = kwargs["inputs_tensor"].shape[1] if source_length is None else source_length
            longest = kwargs["input_ids_length"] + source_length + prepared.max_source_relative_length
            prepared.max_length = min(prepared.max_length, longest) if prepared._has_own_limit else longest
        table = self.config.max_position_embeddings
        if self.config.position_embedding == "learned" and prepared.max_length - 1 > table:
            raise ValueError(
                f"max_length ({prepared.max_length}, with the start token) goes beyond the table of {table} learned "
                f"positions; ask for a max_length of at most {table + 1} or max_new_tokens of at most {table}."
            )
        return prepared

    def _validate_generated_length(
        self, generation_config: GenerationConfig, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        has_default_max_length = has_default_max_length and generation_config.max_source_relative_length is None
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Tensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Give each source its target rows, and leave the source a single row, which its beams share."""
        if model_kwargs.get("past_key_values") is not None:  # a cache of the caller's, with a row a target
            return super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **model_kwargs)
        source = {name: model_kwargs.pop(name) for name in SOURCE_INPUTS if name in model_kwargs}
        input_ids, expanded = super()._expand_inputs_for_generation(expand_size, False, input_ids, **model_kwargs)
        return input_ids, expanded | source

    def _reorder_cache(self, past_key_values: EncoderDecoderCache, beam_idx: Tensor) -> EncoderDecoderCache:
        """Beams change places within their source alone, so what is kept of the source stays where it is."""
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        return past_key_values

    @staticmethod
    def _hand_back(found: Any, rows: int) -> Any:
        """What the search found, its cache with a row a target also for the source."""
        cache = None if isinstance(found, Tensor) else found.get("past_key_values")
        if isinstance(cache, EncoderDecoderCache):
            for layer in cache.cross_attention_cache.layers:
                if layer.is_initialized and layer.keys.shape[0] != rows:
                    layer.keys = layer.keys.repeat_interleave(rows // layer.keys.shape[0], dim=0)
                    layer.values = layer.values.repeat_interleave(rows // layer.values.shape[0], dim=0)
        return found

    def _source_limits(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> Tensor | None:
        """How many new tokens each target may have (B,); None where its source does not limit it."""
        if generation_config.max_source_relative_length is None:
            return None
        memory = model_kwargs["encoder_outputs"][0]  # (B, S, d_model), or a row a target beside a cache of the caller's
        mask = model_kwargs.get("attention_mask")
        lengths = torch.full(memory.shape[:1], memory.shape[1], device=memory.device)
        if mask is not None:
            lengths = mask.ne(0).sum(-1)
        sources = input_ids.shape[0] // max(generation_config.num_beams, generation_config.num_return_sequences)
        return lengths[:: lengths.shape[0] // sources] + generation_config.max_source_relative_length

    def _limited(
        self, input_ids: Tensor, criteria: StoppingCriteriaList, limits: Tensor | None
    ) -> StoppingCriteriaList:
        if limits is None:
            return criteria
        return StoppingCriteriaList([*criteria, SourceRelativeLength(limits, input_ids.shape[1])])

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        limits = self._source_limits(input_ids, generation_config, kwargs)
        criteria = self._limited(input_ids, stopping_criteria, limits)
        found = super()._sample(input_ids, logits_processor, criteria, generation_config, **kwargs)
        return self._hand_back(found, input_ids.shape[0])

    def _assisted_decoding(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        limits = self._source_limits(input_ids, generation_config, kwargs)
        criteria = self._limited(input_ids, stopping_criteria, limits)
        return super()._assisted_decoding(input_ids, logits_processor, criteria, generation_config, **kwargs)

    def _beam_search(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        limits = self._source_limits(input_ids, generation_config, kwargs)
        criteria = self._limited(input_ids, stopping_criteria, limits)
        if generation_config.length_penalty_type == "gnmt":
            longest = generation_config.max_length - input_ids.shape[1]
            bounds = torch.full((input_ids.shape[0] // generation_config.num_beams,), longest)
            bounds = bounds.to(input_ids.device) if limits is None else limits.clamp(max=longest)
            generation_config.length_penalty = PaperPenalty(
                generation_config.length_penalty, bounds[:, None], generation_config.num_return_sequences
            )
        found = super()._beam_search(input_ids, logits_processor, criteria, generation_config, **kwargs)
        if generation_config.pad_token_id == 0:
            self._pad_with_zero(found, input_ids.shape[1], generation_config, limits)
        return self._hand_back(found, input_ids.shape[0])

    @staticmethod
    def _pad_with_zero(found: Any, prompt_length: int, config: GenerationConfig, limits: Tensor | None) -> None:
        """Put the padding behind each target that the loop, which takes id 0 for none, has filled with `</s>`."""
        sequences = found if isinstance(found, Tensor) else found.sequences  # (rows, T)
        new = sequences[:, prompt_length:]
        ends = torch.isin(new, config._eos_token_tensor) if config._eos_token_tensor is not None else new < 0
        is_over = ends.cumsum(1) - ends.long() > 0
        if limits is not None:
            own = limits.repeat_interleave(new.shape[0] // limits.shape[0])
            is_over |= torch.arange(new.shape[1], device=new.device) >= own[:, None]
        new[is_over] = 0

    def _update_finished_beams(self, **kwargs: Any) -> Any:
        alpha = kwargs["length_penalty"]
        if isinstance(alpha, PaperPenalty):
            length = kwargs["cur_len"] + 1 - kwargs["decoder_prompt_len"]
            kwargs["topk_log_probs"] = kwargs["topk_log_probs"] / length_penalty(length, float(alpha))
            kwargs["length_penalty"] = 0.0
        return super()._update_finished_beams(**kwargs)

    def _check_early_stop_heuristic(self, **kwargs: Any) -> Tensor:
        alpha = kwargs["length_penalty"]
        if not isinstance(alpha, PaperPenalty):
            return GenerationMixin._check_early_stop_heuristic(**kwargs)
        next_length = kwargs["cur_len"] + 1 - kwargs["decoder_prompt_len"]
        length = alpha.limits if alpha > 0 else torch.full_like(alpha.limits, next_length)
        bound = kwargs["running_beam_scores"][:, :1] / cast(Tensor, length_penalty(length, float(alpha)))  # (B, 1)
        nth = alpha.num_returned - 1
        worst_wanted = kwargs["beam_scores"][:, nth : nth + 1]  # (B, 1)
        can_improve = ~kwargs["is_sent_finished"][:, nth : nth + 1] | (bound > worst_wanted)
        return kwargs["is_early_stop_heuristic_unsatisfied"] & can_improve


__all__ = ["PaperBeamSearch", "length_penalty"]
