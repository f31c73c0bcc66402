"""Types and ranges of search settings in a generation_config.json, a recipe, an option or the demo."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..settings import LENGTH_PENALTY_TYPES, NarSettings
from .errors import UserError

MAX_COUNT = 2**31 - 1
MAX_ALPHA = 10  # lp(Y) of 7,000 tokens, and its inverse, are still float32 numbers


@dataclass(frozen=True)
class Range:
    """Range of finite numbers; a truth value is not a number."""

    least: float
    most: float = MAX_COUNT
    is_whole: bool = False

    def __contains__(self, value: object) -> bool:
        is_number = isinstance(value, int if self.is_whole else int | float) and not isinstance(value, bool)
        return is_number and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{'an integer' if self.is_whole else 'a number'} from {self.least:g} to {self.most:.10g}"


def ranges_of_family_settings() -> dict[str, Range]:
    """Return the ranges of the numbers among the settings of `NarSettings`, by name."""
    ranges = {}
    for setting in fields(NarSettings):
        least = setting.metadata.get("least")
        if least is not None:
            ranges[setting.name] = Range(max(least, -MAX_COUNT), is_whole=isinstance(least, int))
    return ranges


COUNT = Range(1, is_whole=True)
COUNT_OR_ZERO = Range(0, is_whole=True)
RANGES: dict[str, Range] = {
    **ranges_of_family_settings(),
    "num_beams": COUNT,
    "length_penalty": Range(-MAX_ALPHA, MAX_ALPHA),
    **dict.fromkeys(("min_length", "min_new_tokens", "top_k"), COUNT_OR_ZERO),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), COUNT_OR_ZERO),
    **dict.fromkeys(("temperature", "repetition_penalty", "encoder_repetition_penalty"), Range(0)),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), Range(0, 1)),
}
CHOICES: dict[str, tuple[bool | str, ...]] = {
    **{setting.name: (True, False) for setting in fields(NarSettings) if setting.type is bool},
    **{setting.name: setting.metadata["choices"] for setting in fields(NarSettings) if "choices" in setting.metadata},
    **dict.fromkeys(("use_cache", "output_attentions", "output_hidden_states", "output_logits"), (True, False)),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values"), (True, False)),
    "early_stopping": (True, False, "never"),
    "length_penalty_type": LENGTH_PENALTY_TYPES,
}
ID_LISTS: dict[str, int] = {
    **dict.fromkeys(("bos_token_id", "pad_token_id", "forced_bos_token_id"), 0),
    **dict.fromkeys(("decoder_start_token_id", "eos_token_id", "forced_eos_token_id"), 1),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), 1),
    "bad_words_ids": 2,
}
"""Settings with token ids, and the depth to which these may be in lists."""


def are_ids(value: object, depth: int, ids: Range) -> bool:
    """Return whether a value is a token id, or a list of ids with up to `depth` levels."""
    if isinstance(value, list):
        return depth > 0 and all(are_ids(item, depth - 1, ids) for item in value)
    return value in ids


def check_settings(prefix: str, settings: Mapping[str, Any], vocab_size: int, fix: str) -> None:
    """Check the types and ranges of the settings in these tables; None is always valid.

    An error begins with `prefix` and the setting's name, and ends with `fix`.
    """
    ids = Range(0, vocab_size - 1, is_whole=True)
    for name, value in settings.items():
        if value is None:
            continue
        if name in RANGES:
            is_valid = value in RANGES[name]
            expected = str(RANGES[name])
        elif name in CHOICES:
            is_valid = any(type(value) is type(choice) and value == choice for choice in CHOICES[name])
            expected = f"one of {', '.join(map(repr, CHOICES[name]))}"
        elif name in ID_LISTS:
            is_valid = are_ids(value, ID_LISTS[name], ids)
            expected = f"ids of the vocabulary, from 0 to {vocab_size - 1}"
        else:  # a setting without a table, which Transformers checks
            continue
        if not is_valid:
            raise UserError(f"{prefix}{name}: out of range; got {value!r}, expected {expected}; {fix}")
