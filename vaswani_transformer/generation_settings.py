"""The settings of one call of `generate()`, and of the search that it makes.

B sources, k beams or n samples of a source, T tokens of a target so far, V vocabulary.
"""

import copy
import functools
import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging

from .config import NAR_SETTINGS, as_token_ids
from .search import LENGTH_PENALTY_TYPES, SearchSettings

logger = logging.get_logger(__name__)

DEFAULT_NEW_TOKENS = 20  # of Transformers, where nothing limits a target
PAPER_LIMIT = {"max_source_relative_length": 50}  # 6.1
LIMITS = ("max_new_tokens", "max_length")
OWN_SETTINGS = {*NAR_SETTINGS, "max_source_relative_length"}
WEIGHTS = ("length_penalty", "length_penalty_type", "early_stopping")  # of beams, without a meaning for one


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
