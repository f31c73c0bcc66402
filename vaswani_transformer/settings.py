"""Settings of `generate()`: those of non-autoregressive models, and those that this package adds to Transformers'.

For lengths, n and m are the numbers of source and target tokens, both including `</s>`.
"""

import functools
import math
import textwrap
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Never

from transformers.generation import GenerationConfig

SEARCH_SETTINGS = ("length_penalty_type", "max_source_relative_length")
"""Settings that this package adds to the GenerationConfig of every model."""


@functools.cache
def default_settings() -> dict[str, Any]:
    """Return the defaults of Transformers' settings and of `length_penalty_type`."""
    defaults = dict(vars(GenerationConfig()))
    defaults.update(GenerationConfig._get_default_generation_params())
    defaults["length_penalty_type"] = "power"
    return defaults


def refuse(name: str, problem: str, value: object, expected: str) -> Never:
    """Raise ValueError for an argument or setting of `generate()`."""
    got = textwrap.shorten(repr(value), 100)
    raise ValueError(
        f"{name}: {problem}; got {got}, expected {expected}. Leave it out, or set it to None in the generation config."
    )


def check_number(name: str, value: object, least: float) -> None:
    """Raise ValueError unless a setting is a finite number of at least `least`, a whole one if `least` is whole."""
    is_whole = isinstance(least, int)
    number_type = Integral if is_whole else Real
    is_number = isinstance(value, number_type) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        expected = "a whole number" if is_whole else "a finite number"
        if math.isfinite(least):
            expected += f" of at least {least}"
        refuse(name, "out of range", value, expected)


def number(default: float | None, least: float) -> Any:
    """Return a dataclass field for finite numbers of at least `least`; an integer `least` requires integers."""
    return field(default=default, metadata={"least": least})


@dataclass
class SharedSettings:
    """Settings of `generate()` that every non-autoregressive model supports."""

    max_new_tokens: int | None = number(None, least=1)  # largest m
    max_length: int | None = number(None, least=2)  # largest m + 1; max_new_tokens takes precedence
    max_source_relative_length: int | None = number(None, least=0)  # largest m - n
    suppress_tokens: list[int] | None = None  # never predicted, such as <unk>; special tokens never are
    return_history: bool = False  # return the tokens after each iteration or layer
    return_dict_in_generate: bool = False  # return a NarGenerateOutput
    output_scores: bool = False  # no effect: a NarGenerateOutput always has scores

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            least = setting.metadata.get("least")
            if isinstance(setting.default, bool) and value not in (True, False):
                refuse(setting.name, "not a truth value", value, "True or False")
            if value is None or least is None:
                continue
            check_number(setting.name, value, least)
            setattr(self, setting.name, type(least)(value))  # may be a NumPy number


@dataclass
class NarSettings(SharedSettings):
    """Settings of `generate()`: the shared ones, and those that a model supports if its `family_settings` name them.

    In a model that does not support a setting, it must keep its default.

    Candidate targets of a source are ranked by (log p(y | x, m) + w log p(m | x)) / m^alpha; a larger alpha favors
    longer targets. log p(y | x, m) is the sum of the tokens' log-probabilities. With a `latent_temperature` above 0 it
    is estimated by importance sampling.
    """

    num_beams: int = number(1, least=1)  # k, prefixes of CTC's search; 1 for the most likely path
    length_bonus: float = number(0.0, least=-math.inf)  # added to log p for each word, in CTC's search
    num_iterations: int = number(1, least=1)  # R, decoder passes of a refining model
    length_beam_size: int = number(1, least=1)  # l, the number of best lengths to decode
    num_return_sequences: int = number(1, least=1)  # n, at most the number of candidates
    length_penalty: float = number(1.0, least=-math.inf)  # alpha
    length_weight: float = number(1.0, least=-math.inf)  # w
    latent_temperature: float = number(0.0, least=0.0)  # standard deviation of the prior's noise
    num_latent_samples: int = number(1, least=1)  # noisy latents for each length
    do_sample: bool = False  # sample discrete latents

    @property
    def reads_scores(self) -> bool:
        """Return whether the result depends on the scores of targets."""
        return self.length_beam_size > 1 or self.num_latent_samples > 1 or self.return_dict_in_generate


NAR_SETTINGS = tuple(
    setting.name
    for setting in fields(NarSettings)
    if setting.name not in vars(GenerationConfig()) and setting.name not in SEARCH_SETTINGS
)
"""Settings that this package adds to the GenerationConfig of non-autoregressive models."""
