"""Check the search that a folder saves, before it takes time or memory: types, token ids, ranges.

V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any

from .errors import UserError

LONGEST = 1_000_000  # tokens or words of any saved length; no search of a text is longer
MAX_ALPHA = 50  # of lp(Y): the longest translations to this power are still finite
MAX_SCORES = 1 << 28  # of a step: beams of one text, times V; the first step has V candidates

TOKENS = {
    *("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"),
}
BEAMS = {"num_beams", "num_beam_groups", "num_return_sequences"}
LENGTHS = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_source_relative_length"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_iterations", "length_beam_size", "top_k"),
    *("prompt_lookup_num_tokens", "max_cache_len", "num_latent_samples"),
}
NUMBERS = {
    *("length_penalty", "repetition_penalty", "encoder_repetition_penalty", "diversity_penalty", "penalty_alpha"),
    *("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "guidance_scale"),
    *("max_time", "latent_temperature", "length_weight"),
}
FLAGS = {
    *("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_history"),
    "token_healing",
}


def is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, most: float) -> bool:
    return (
        isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value) and abs(value) <= most
    )


def are_token_ids(value: Any, vocabulary: int) -> bool:
    """Return whether a value is a token, or a list of tokens or of lists of them, inside a vocabulary."""
    if isinstance(value, list):
        return all(are_token_ids(member, vocabulary) for member in value)
    return is_whole(value, 0, vocabulary - 1)


def expected_value(name: str, value: Any, vocabulary: int) -> str | None:
    """Return what a setting has to be where it is something else; None where it is valid, or of another kind."""
    if name in TOKENS and not are_token_ids(value, vocabulary):
        return f"token ids from 0 to {vocabulary - 1}, the model's vocabulary"
    if name in BEAMS and not is_whole(value, 1, most := max(1, min(vocabulary, MAX_SCORES // vocabulary))):
        return f"a whole number from 1 to {most:,}, which a vocabulary of {vocabulary:,} allows"
    if name in LENGTHS and not is_whole(value, 0, LONGEST):
        return f"a whole number from 0 to {LONGEST:,}"
    if name == "length_penalty" and not is_number(value, MAX_ALPHA):
        return f"a finite number from -{MAX_ALPHA} to {MAX_ALPHA}"
    if name in NUMBERS and not is_number(value, math.inf):
        return "a finite number"
    if name == "exponential_decay_length_penalty" and not (
        isinstance(value, list) and len(value) == 2 and is_whole(value[0], 0, LONGEST) and is_number(value[1], math.inf)
    ):
        return "a length and a factor, such as [20, 1.1]"
    return "true or false" if name in FLAGS and not isinstance(value, bool) else None


def check_search_settings(name: str, settings: Mapping[str, Any], vocabulary: int) -> None:
    """Check the settings of the GenerationConfig that the model `name` saves, for a `vocabulary` of V entries.

    None switches any of them off.
    """
    for setting, value in settings.items():
        expected = None if value is None else expected_value(setting, value, vocabulary)
        if expected is not None:
            got = repr(value)
            got = got if len(got) <= 60 else f"{got[:60]}..."
            raise UserError(
                f"{name}: {setting} of its saved search is invalid; got {got}, expected {expected}. Restore "
                "generation_config.json, or save the model again."
            )
