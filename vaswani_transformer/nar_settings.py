"""Settings of `generate()` for the non-autoregressive models.

For lengths, n and m are the numbers of source and target tokens, both including `</s>`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .config import SEARCH_SETTINGS, TOKEN_IDS, VaswaniTransformerConfig, as_token_ids
from .generation import CallSettings, check_number, default_settings, refuse


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


ADDED_SETTINGS = tuple(
    setting.name
    for setting in fields(NarSettings)
    if setting.name not in default_settings() and setting.name not in SEARCH_SETTINGS
)
"""Settings that this package adds to the GenerationConfig of non-autoregressive models."""


def is_off(value: object) -> bool:
    """Return whether a setting's value disables it in every model."""
    return value is False or (isinstance(value, Sequence) and not value)


def supported_values(
    call: CallSettings, config: VaswaniTransformerConfig, family_settings: Iterable[str], model_name: str
) -> dict[str, Any]:
    """Return the values of the settings that a model supports.

    Raises:
        ValueError: a setting that the model does not support is not None, False, empty or at its default.
    """
    # Arguments that Transformers does not know are settings too, since the model has no further inputs.
    values = dict(call.values)
    for name, value in call.inputs.items():
        if value is not None:
            values[name] = value

    supported = {setting.name for setting in fields(SharedSettings)}
    supported.update(family_settings)
    defaults = {**default_settings(), **vars(NarSettings())}
    for name in TOKEN_IDS:
        defaults[name] = getattr(config, name)
    defaults["decoder_start_token_id"] = config.target_start_token_id

    # A saved generation config also contains these; only in a call they must agree with the model.
    copied = {*TOKEN_IDS, "output_attentions", "output_hidden_states"} - call.given.keys()
    for name in sorted(values.keys() - supported - copied - {"transformers_version"}):
        value = values[name]
        default = defaults.get(name)
        if name in TOKEN_IDS:
            value = as_token_ids(value)
            default = as_token_ids(default)
        if value != default and not is_off(value) and not name.startswith("_"):
            refuse(name, f"not supported by {model_name}", value, repr(default))
    return {name: values[name] for name in supported & values.keys()}
