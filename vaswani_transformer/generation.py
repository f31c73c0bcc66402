"""The paper's beam search inside `generate()` (6.1).

B sources, k target rows of a source, T target, V vocabulary. Transformers' own search loops run unchanged; what the
paper does otherwise enters through the steps that a loop takes from the model: how a finished beam is scored, when a
source can stop, and how long each target may become. So does what makes the search fast: the beams of a source share
its encoding and the keys and values that cross-attention makes of it, sources that are done are no longer decoded, and
where nobody else looks at them the likeliest continuations are chosen without the loop.
"""

import functools
import inspect
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput

from .beam_cache import BeamCache
from .config import VaswaniTransformerConfig

LENGTH_PENALTY_TYPES = ("power", "gnmt")
GROUP = 16  # tokens; a power of two that keeps both steps of the choice of candidates short
ROWS = 8  # of logits, whose probabilities fit into a CPU's nearer memory
# The loop of Transformers 5.17 counts on as many columns as the vocabulary has entries.
CHOICE_OF_TOKENS = getattr(GenerationMixin, "_get_top_k_continuations", None)
LEAVES_CHOICE = CHOICE_OF_TOKENS is not None and "vocab_size" not in inspect.signature(CHOICE_OF_TOKENS).parameters
SOURCE_INPUTS = ("encoder_outputs", "attention_mask", "position_ids")


def length_penalty(length: Tensor | int, alpha: float) -> Tensor | float:
    """lp(Y) = ((5 + |Y|) / 6)^alpha of Wu et al. 2016, by which log P(Y | X) is divided (6.1)."""
    return ((5 + length) / 6) ** alpha


class SourceRelativeLength(StoppingCriteria):
    """Each target ends at its own limit: "input length + 50" in the paper (6.1)."""

    def __init__(self, limits: Tensor, prompt_length: int) -> None:
        self.limits, self.shortest = limits, int(limits.min())
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        limits = self.limits.repeat_interleave(input_ids.shape[0] // self.limits.shape[0])  # (rows,)
        return limits.to(input_ids.device) <= input_ids.shape[1] - self.prompt_length


def likeliest(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest entries (rows, `count`) of each row (rows, N), in falling order, and their places.

    A large one lies in a group of tokens whose largest is large: sixteen to a group, only the `count` best groups are
    looked through.
    """
    rows, entries = log_probs.shape
    groups = entries // GROUP
    if groups < count:
        return log_probs.topk(count, dim=1)
    grouped = log_probs.narrow(1, 0, groups * GROUP).view(rows, GROUP, groups)
    best = grouped.amax(1).topk(count, dim=1).indices  # (rows, count)
    offsets, last = members(groups, entries, log_probs.device)
    places = (best.unsqueeze(2) + offsets).flatten(1)  # (rows, count GROUP)
    places = torch.cat([places, last.expand(rows, -1)], dim=1) if len(last) else places
    found, order = log_probs.gather(1, places).topk(count, dim=1)
    return found, places.gather(1, order)


@functools.lru_cache(maxsize=8)
def members(groups: int, entries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """How far the members of a group lie from its first (16,), and the places that are in none of the groups."""
    with torch.inference_mode(False):
        last = torch.arange(groups * GROUP, entries, device=device)
        return torch.arange(0, groups * GROUP, groups, device=device), last


def best_continuations(logits: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest continuations of the beams of each source, by one token.

    Args:
        logits: (k B, V), of the next token of each beam.
        scores: (B, k), the log-probabilities of the beams so far.

    Returns:
        The log-probabilities (B, `count`) of beams with their next token, in falling order, and where each is in all
        those of a source (k V).
    """
    k, entries = scores.shape[1], logits.shape[1]

    def best(logits: Tensor, scores: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = None if memory is None else memory[: len(logits)]
        log_probs = torch.log_softmax(logits.float(), 1, out=out).add_(scores.view(-1, 1))
        return likeliest(log_probs.view(-1, k * entries), count)

    if logits.device.type != "cpu" or len(logits) <= max(k, ROWS):
        return best(logits, scores)
    at_once = max(1, ROWS // k)  # sources, whose log-probabilities take the same memory: new memory is slow to come by
    memory = scores.new_empty(at_once * k, entries)
    parts = zip(logits.split(at_once * k), scores.split(at_once), strict=True)
    found, places = zip(*(best(*part, memory) for part in parts), strict=True)
    return torch.cat(found), torch.cat(places)


class Course:
    """One call of a search loop: what bounds it, and which of its sources are still open.

    Attributes:
        num_sources, num_rows: B and k B.
        cache: what `generate()` keeps keys and values in.
        is_open: (B,), whether the result of a source can still change.
        owns_cache: whether the cache is a plain one that nobody else sees.
        leaves: whether sources that are done are no longer decoded.
        kept: the sources that are decoded, by their number; None while all are.
        source: the inputs of `forward` for those, once some have left.
        alpha: of lp(Y) where that scores finished beams, otherwise None.
        limits: (B, 1), beside alpha, the new tokens that each target may have.
        num_returned: n of the n best that the caller wants.
        chooses: whether the likeliest continuations are chosen here, and the loop never sees the vocabulary.
        logits: (k B', V) of the B' sources that are decoded, until `choose` has looked at them, where so.
        nothing: (k B, 1, 1), what the loop sees of them, where so.
        has_ends: whether one of the last continuations may have ended, where so.
        has_finished: whether a target may have finished so far, where so.
    """

    def __init__(self, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig) -> None:
        cache = model_kwargs.get("past_key_values")
        parts = (
            (cache.self_attention_cache, cache.cross_attention_cache) if isinstance(cache, EncoderDecoderCache) else ()
        )
        is_plain = bool(parts) and all(type(part) is DynamicCache and not part.offloading for part in parts)
        self.cache = cache
        self.num_rows, self.num_sources = input_ids.shape[0], model_kwargs["encoder_outputs"][0].shape[0]
        self.is_open = torch.ones(self.num_sources, dtype=torch.bool, device=input_ids.device)
        is_seen = config.return_dict_in_generate or config._brings_cache
        self.owns_cache = is_plain and not is_seen
        self.leaves = self.owns_cache and self.num_sources > 1
        self.kept: Tensor | None = None
        self.source: dict[str, Any] = {}
        self.alpha: float | None = None
        self.limits: Tensor | None = None
        self.num_returned = config.num_return_sequences
        self.chooses = False
        self.logits: Tensor | None = None
        self.nothing = torch.zeros(self.num_rows, 1, 1, device=input_ids.device)
        self.has_ends = True
        self.has_finished = False

    def rows_of(self, sources: Tensor) -> Tensor:
        """The target rows of sources, by their number."""
        k = self.num_rows // self.num_sources
        return (sources[:, None] * k + torch.arange(k, device=sources.device)).flatten()

    def leave(self, cache: EncoderDecoderCache | None) -> None:
        """Drop the sources that are done from what is decoded, and from the cache."""
        stays = self.is_open if self.kept is None else self.is_open[self.kept]
        if cache is None or not self.leaves or bool(stays.all()) or not bool(stays.any()):
            return
        places = stays.nonzero().flatten()
        self.kept = places if self.kept is None else self.kept[places]
        self.source = {}
        for part, rows in ((cache.self_attention_cache, self.rows_of(places)), (cache.cross_attention_cache, places)):
            if isinstance(part, BeamCache):
                part.batch_select_indices(rows)
            for layer in cast(list[DynamicLayer], part.layers):
                if layer.keys is not None:  # there may be more layers in a cache than in the decoder
                    layer.batch_select_indices(rows.to(layer.keys.device))

    def select(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of `forward` for the sources that are decoded."""
        if self.kept is None:
            return inputs
        if not self.source:
            mask, memory = inputs.get("attention_mask"), inputs["encoder_outputs"][0]
            self.source["encoder_outputs"] = BaseModelOutput(last_hidden_state=memory[self.kept.to(memory.device)])
            self.source |= {} if mask is None else {"attention_mask": mask[self.kept.to(mask.device)]}
        rows = self.rows_of(self.kept)
        names = ("decoder_input_ids", "decoder_attention_mask", "decoder_position_ids")
        given = {name: inputs[name] for name in names if inputs.get(name) is not None}
        targets = {name: value[rows] if value.shape[0] == self.num_rows else value for name, value in given.items()}
        return inputs | targets | self.source

    def reordered(self, beam_idx: Tensor) -> Tensor:
        """Where the rows that are decoded come from, from where all rows (k B,) come from."""
        if self.kept is None:
            return beam_idx
        rows = self.rows_of(self.kept)
        places = torch.empty(self.num_rows, dtype=torch.long, device=rows.device)
        places[rows] = torch.arange(len(rows), device=rows.device)
        return places[beam_idx[rows]]

    def present(self, logits: Tensor) -> Tensor:
        """The logits (rows, T, V) of what was decoded, as the loop shall see them: (k B, 1, V).

        Where it leaves the choice, it sees a single column of zeros, which add nothing to the beams' scores.
        """
        last = logits[:, -1].to(self.is_open.device)
        if self.chooses:
            self.logits = last
            return self.nothing
        if self.kept is not None:
            last = last.new_zeros(self.num_rows, last.shape[1]).index_copy_(0, self.rows_of(self.kept), last)
        return last[:, None]

    def choose(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest continuations of all sources, those that are no longer decoded staying as they are.

        Args:
            scores: (B, k), the log-probabilities of the beams so far.

        Returns:
            (B, `count`) each: log-probabilities, the rows that are continued and the tokens.
        """
        logits, self.logits = cast(Tensor, self.logits), None
        decoded = scores if self.kept is None else scores[self.kept]
        found, places = best_continuations(logits, decoded, count)
        if self.kept is not None:
            found = scores[:, :1].repeat(1, count).index_copy_(0, self.kept, found)
            places = places.new_zeros(len(scores), count).index_copy_(0, self.kept, places)
        rows = places // logits.shape[1]
        tokens = places.sub(rows, alpha=logits.shape[1])
        if len(rows) > 1:
            rows += torch.arange(0, self.num_rows, scores.shape[1], device=rows.device)[:, None]
        return found, rows, tokens


COURSE: ContextVar[Course | None] = ContextVar("course", default=None)


class BriefCriteria(StoppingCriteriaList):
    """The same criteria; while lengths end no target, and a single token ends one, that token is all that is asked."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends = [criterion.eos_token_id for criterion in self if type(criterion) is EosTokenCriteria]
        others = [criterion for criterion in self if type(criterion) is not EosTokenCriteria]
        is_one = not kwargs and len(ends) == 1 and ends[0].dim() < 2 and ends[0].numel() == 1
        if not is_one or not all(no_end(criterion, input_ids.shape[1]) for criterion in others):
            return cast(Tensor, super().__call__(input_ids, scores, **kwargs))
        return input_ids[:, -1] == ends[0].to(input_ids.device)


def no_end(criterion: StoppingCriteria, length: int) -> bool:
    """Whether a criterion is known to end no target of so many tokens, and to say nothing of it."""
    if type(criterion) is SourceRelativeLength:
        return length - criterion.prompt_length < criterion.shortest
    if type(criterion) is not MaxLengthCriteria:
        return False
    return length < criterion.max_length and length <= (criterion.max_position_embeddings or length)


class ClosingCriteria(BriefCriteria):
    """Stopping criteria that tell a course which of its sources have no open row any more."""

    def __init__(self, criteria: StoppingCriteriaList, course: Course) -> None:
        super().__init__(criteria)
        self.course = course
        self.is_over = torch.zeros(course.num_rows, dtype=torch.bool, device=course.is_open.device)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        is_over = super().__call__(input_ids, scores, **kwargs)  # (k B,)
        self.is_over |= is_over
        self.course.is_open = ~self.is_over.unflatten(0, (self.course.num_sources, -1)).all(1)
        return is_over


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
        given = {} if generation_config is None else vars(generation_config)
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
        prepared._brings_cache = model_kwargs.get("past_key_values") is not None
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

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The inputs of `forward` for the next token, without the sources that are done."""
        if (course := COURSE.get()) is None:
            return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        course.leave(kwargs.get("past_key_values"))
        return course.select(super().prepare_inputs_for_generation(input_ids, *args, **kwargs))

    def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Here the loop has its outputs, and has not looked at them yet."""
        if (course := COURSE.get()) is not None:
            outputs.logits = course.present(outputs.logits)
        return super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)

    def _reorder_cache(self, past_key_values: EncoderDecoderCache, beam_idx: Tensor) -> EncoderDecoderCache:
        """Beams change places within their source alone, so what is kept of the source stays where it is."""
        course = COURSE.get()
        past_key_values.self_attention_cache.reorder_cache(beam_idx if course is None else course.reordered(beam_idx))
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
        own = [] if limits is None else [SourceRelativeLength(limits, input_ids.shape[1])]
        return BriefCriteria([*criteria, *own])

    def _run(self, loop: Any, input_ids: Tensor, course: Course | None, *args: Any, **kwargs: Any) -> Any:
        """What a loop of Transformers finds, on the course that its steps then know of, or on none."""
        token = COURSE.set(course)
        try:
            found = loop(input_ids, *args, **kwargs)
        finally:
            COURSE.reset(token)
        return self._hand_back(found, input_ids.shape[0])

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        criteria = self._limited(
            input_ids, stopping_criteria, self._source_limits(input_ids, generation_config, kwargs)
        )
        course = Course(input_ids, kwargs, generation_config)
        # Without an end token the loop goes on writing where another criterion has ended a row.
        course.leaves = course.leaves and any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        criteria = ClosingCriteria(criteria, course) if course.leaves else criteria
        return self._run(super()._sample, input_ids, course, logits_processor, criteria, generation_config, **kwargs)

    def _assisted_decoding(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        criteria = self._limited(
            input_ids, stopping_criteria, self._source_limits(input_ids, generation_config, kwargs)
        )
        return self._run(
            super()._assisted_decoding, input_ids, None, logits_processor, criteria, generation_config, **kwargs
        )

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
        course = Course(input_ids, kwargs, generation_config)
        shows_all = generation_config.output_logits or generation_config.output_scores
        course.chooses = LEAVES_CHOICE and not (logits_processor or generation_config.do_sample or shows_all)
        if generation_config.length_penalty_type == "gnmt":
            longest = generation_config.max_length - input_ids.shape[1]
            bounds = torch.full((input_ids.shape[0] // generation_config.num_beams,), longest)
            bounds = bounds.to(input_ids.device) if limits is None else limits.clamp(max=longest)
            course.alpha, course.limits = generation_config.length_penalty, bounds[:, None]
        found = self._run(
            super()._beam_search, input_ids, course, logits_processor, criteria, generation_config, **kwargs
        )
        if generation_config.pad_token_id == 0:
            self._pad_with_zero(found, input_ids.shape[1], generation_config, limits)
        return found

    def _get_top_k_continuations(self, **kwargs: Any) -> Any:
        course = COURSE.get()
        if course is None or not course.chooses:
            return super()._get_top_k_continuations(**kwargs)
        found, rows, tokens = course.choose(kwargs["accumulated_log_probs"], kwargs["beams_to_keep"])  # (B, 2 k) each
        names, places = ("running_sequences", "running_beam_indices"), rows.flatten()
        continued = (kwargs[name].flatten(0, 1).index_select(0, places) for name in names)
        sequences, indices = (part.view(*rows.shape, -1) for part in continued)
        sequences.select(2, kwargs["cur_len"]).copy_(tokens)
        indices.select(2, kwargs["cur_len"] - kwargs["decoder_prompt_len"]).copy_(rows)
        return found, sequences, indices

    def _get_running_beams_for_next_iteration(self, **kwargs: Any) -> Any:
        """The likeliest continuations that go on, which are simply the first where none has ended."""
        if (course := COURSE.get()) is not None and course.chooses:
            course.has_ends = bool(kwargs["next_token_hits_stopping_criteria"].any())
            if not course.has_ends:
                names = ("topk_running_sequences", "topk_log_probs", "topk_running_beam_indices")
                return tuple(kwargs[name][:, : kwargs["num_beams"]] for name in names)
        return super()._get_running_beams_for_next_iteration(**kwargs)

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
        course = COURSE.get()
        if course is not None and course.chooses:
            # Where the choice is made here, a place that no finished beam has taken is never handed out.
            ends = course.has_ends and kwargs["next_token_hits_stopping_criteria"] & kwargs["top_num_beam_mask"]
            if ends is False or not bool(ends.any()):
                return tuple(kwargs[name] for name in ("sequences", "beam_scores", "beam_indices", "is_sent_finished"))
            course.has_finished = True
        if course is not None and course.alpha is not None:
            length = kwargs["cur_len"] + 1 - kwargs["decoder_prompt_len"]
            kwargs["topk_log_probs"] = kwargs["topk_log_probs"] / length_penalty(length, course.alpha)
            kwargs["length_penalty"] = 0.0
        return super()._update_finished_beams(**kwargs)

    def _check_early_stop_heuristic(self, **kwargs: Any) -> Tensor:
        course = COURSE.get()
        if course is None:
            return GenerationMixin._check_early_stop_heuristic(**kwargs)
        if course.chooses and not course.has_finished:
            return kwargs["is_early_stop_heuristic_unsatisfied"]
        if course.alpha is None:
            can_improve = GenerationMixin._check_early_stop_heuristic(**kwargs)  # (B, 1)
        else:
            can_improve = kwargs["is_early_stop_heuristic_unsatisfied"] & self._can_improve(course, **kwargs)
        is_full = kwargs["is_sent_finished"].all(1) if kwargs["early_stopping"] is True else False
        course.is_open = can_improve[:, 0] & ~torch.as_tensor(is_full, device=can_improve.device)
        return can_improve if course.alpha is None else course.is_open[:, None]

    @staticmethod
    def _beam_search_has_unfinished_sequences(*args: Any, **kwargs: Any) -> Any:
        course = COURSE.get()
        if course is not None and course.chooses and not (course.has_ends or course.has_finished):
            return True
        return GenerationMixin._beam_search_has_unfinished_sequences(*args, **kwargs)

    @staticmethod
    def _can_improve(course: Course, **kwargs: Any) -> Tensor:
        """Whether an open beam of each source can still enter its n best under lp(Y) (B, 1)."""
        limits, alpha = cast(Tensor, course.limits), cast(float, course.alpha)
        next_length = kwargs["cur_len"] + 1 - kwargs["decoder_prompt_len"]
        length = limits if alpha > 0 else torch.full_like(limits, next_length)
        bound = kwargs["running_beam_scores"][:, :1] / cast(Tensor, length_penalty(length, alpha))  # (B, 1)
        nth = course.num_returned - 1
        worst_wanted = kwargs["beam_scores"][:, nth : nth + 1]  # (B, 1)
        return ~kwargs["is_sent_finished"][:, nth : nth + 1] | (bound > worst_wanted)


__all__ = ["PaperBeamSearch", "length_penalty"]
