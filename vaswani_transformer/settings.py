"""Everything that `generate()` can be told: its settings, their ranges, and those of one call.

B sources, S source tokens. For lengths, n and m are the numbers of source and target tokens, both including `</s>`.
"""

import copy
import functools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Never

import torch
from torch import Tensor
from transformers.generation import GenerationConfig

SEARCH_SETTINGS = ("length_penalty_type", "max_source_relative_length", "nan_handler")
"""Settings that this package adds to the GenerationConfig of every model."""
LENGTH_PENALTY_TYPES = ("power", "gnmt")
LIMITS = ("max_new_tokens", "max_length")
DEFAULT_LENGTH = 20  # Transformers' default limit
DECODING_STRATEGIES = ("greedy", "lookahead", "viterbi")
PAPER_LIMIT = {"max_source_relative_length": 50}  # 6.1
BEAM_DEFAULTS = {"num_beams": 1, "length_penalty": 1.0}  # values of None
WEIGHTS = ("length_penalty", "length_penalty_type", "early_stopping")  # no effect with a single beam
TOKEN_IDS = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")
"""Special tokens that a configuration and its GenerationConfig share."""


def as_token_ids(value: Any) -> list[int]:
    """Return token ids as a list; `value` is None, an integer, a list or a tensor."""
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


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
    nan_handler: Callable[[list[int]], None] | None = None  # gets the sources of NaN scores; None to warn

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(setting.default, bool) and value not in (True, False):
                refuse(setting.name, "not a truth value", value, "True or False")
            if value is not None:
                check_setting(setting.name, value)
                if setting.name in LEAST:
                    setattr(self, setting.name, type(LEAST[setting.name])(value))  # may be a NumPy number


@dataclass
class NarSettings(SharedSettings):
    """Settings of `generate()`: the shared ones, and those that a model supports if its `family_settings` name them.

    In a model that does not support a setting, it must keep its default.

    Candidate targets of a source are ranked by (log p(y | x, m) + w log p(m | x)) / m^alpha; a larger alpha favors
    longer targets. log p(y | x, m) is the sum of the tokens' log-probabilities. With a `latent_temperature` above 0 it
    is estimated by importance sampling.
    """

    num_beams: int = number(1, least=1)  # k, prefixes of CTC's search; 1 for the most likely path
    length_bonus: float = number(0.0, least=-math.inf)  # added to log p for each token, in CTC's search
    decoding_strategy: str = "lookahead"  # how a path through a graph is chosen
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


LEAST = {setting.name: setting.metadata["least"] for setting in fields(NarSettings) if "least" in setting.metadata}
"""Smallest values of numbers; those of a whole number are whole."""
CHOICES = {"decoding_strategy": DECODING_STRATEGIES, "length_penalty_type": LENGTH_PENALTY_TYPES}


def check_setting(name: str, value: object, refuse: Callable[[str, str, object, str], Never] = refuse) -> None:
    """Call `refuse`, which raises an error, if the value of a setting in `LEAST` or `CHOICES` is out of range."""
    if name in CHOICES and value not in CHOICES[name]:
        refuse(name, "unknown", value, f"one of {', '.join(CHOICES[name])}")
    if name not in LEAST:
        return
    least = LEAST[name]
    is_whole = isinstance(least, int)
    is_number = isinstance(value, Integral if is_whole else Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        expected = "a whole number" if is_whole else "a finite number"
        if math.isfinite(least):
            expected += f" of at least {least}"
        refuse(name, "out of range", value, expected)


NAR_SETTINGS = tuple(
    setting.name
    for setting in fields(NarSettings)
    if setting.name not in vars(GenerationConfig()) and setting.name not in SEARCH_SETTINGS
)
"""Settings that this package adds to the GenerationConfig of non-autoregressive models."""


def is_off(value: object) -> bool:
    """Return whether a setting's value disables it in every model."""
    return value is False or (isinstance(value, Sequence) and not value)


class CallSettings:
    """Settings of one `generate()` call: its arguments, else its generation config, else that of the model.

    A limit in the call disables a saved `max_source_relative_length`. A saved `max_length` applies only if no other
    limit is set, and only if it is not Transformers' default, which Seq2SeqTrainer saves. With a limit per source, the
    end token is not forced.

    Attributes:
        inputs: arguments that are not settings.
        in_call: settings of the call, including None.
        saved: settings of the model, excluding None.
        values: effective settings, excluding None.
        num_positions: number of learned positions of a model of this package; None for sinusoidal ones.
    """

    def __init__(self, generation_config: GenerationConfig | None, model: Any, kwargs: dict[str, Any]) -> None:
        if generation_config is None:
            generation_config = GenerationConfig()
        elif not isinstance(generation_config, GenerationConfig):
            refuse("generation_config", "wrong type", generation_config, "a GenerationConfig(...)")
        self.generation_config = generation_config
        self.is_autoregressive = getattr(model, "is_autoregressive", True)
        self.num_positions: int | None = None
        if getattr(model.config, "position_embedding", None) == "learned":
            self.num_positions = model.config.max_position_embeddings

        # Arguments that are not settings are inputs of the model.
        added = SEARCH_SETTINGS if self.is_autoregressive else (*SEARCH_SETTINGS, *NAR_SETTINGS)
        configured = vars(self.generation_config)
        settings = {*configured, *added}
        self.inputs = {name: value for name, value in kwargs.items() if name not in settings}

        # Arguments override the generation config. There, None means that Transformers' setting is not set; in an
        # argument, and for a setting of this package, it disables the saved value.
        self.in_call = {}
        for name, value in configured.items():
            if value is not None or name in added:
                self.in_call[name] = value
        for name in kwargs.keys() & settings:
            self.in_call[name] = BEAM_DEFAULTS.get(name) if kwargs[name] is None else kwargs[name]

        self.saved = {name: value for name, value in vars(model.generation_config).items() if value is not None}
        self.values = self.effective_values()

    def effective_values(self) -> dict[str, Any]:
        """Return the settings of the call, else those of the model, without limits that the call disables."""
        values = {**self.saved, **self.in_call}

        # A limit in the call replaces the saved limit per source.
        has_call_limit = any(self.in_call.get(name) is not None for name in LIMITS)
        if has_call_limit and "max_source_relative_length" not in self.in_call:
            values.pop("max_source_relative_length", None)
        values = {name: value for name, value in values.items() if value is not None}

        # A saved `max_length` gives way to every other limit, since it may be Transformers' default.
        is_default = self.saved.get("max_length") == DEFAULT_LENGTH
        has_other_limit = "max_source_relative_length" in values or "max_new_tokens" in values
        if "max_length" not in self.in_call and (is_default or has_other_limit):
            values.pop("max_length", None)

        # Transformers forces the end token at one length for all targets, which does not suit a limit per source.
        forced = as_token_ids(values.get("forced_eos_token_id"))
        ends = as_token_ids(values.get("eos_token_id"))
        if "max_source_relative_length" in values and set(forced) <= set(ends):
            values.pop("forced_eos_token_id", None)
        return values

    def search(self) -> dict[str, Any]:
        """Return the settings that commands record: those that are set, beams and length penalty."""
        hidden = ("_", "output_", "return_", "transformers_version", "use_cache")
        if self.is_autoregressive and self.values.get("num_beams", 1) == 1:
            hidden += WEIGHTS
        always_recorded = ("num_beams", "length_penalty", "length_penalty_type")
        return {
            name: value
            for name, value in sorted(self.values.items())
            if not name.startswith(hidden)
            if name in always_recorded or value != default_settings().get(name)
        }

    def check(self) -> None:
        """Raise ValueError for settings that are out of range or exclude each other."""
        for name in ("length_penalty", "length_penalty_type", "num_beams", "max_source_relative_length"):
            if name in self.values:
                check_setting(name, self.values[name])

        watermark = self.in_call.get("watermarking_config")
        if isinstance(watermark, dict):
            refuse("watermarking_config", "wrong type", watermark, "a WatermarkingConfig(...)")

        forced = self.values.get("forced_eos_token_id")
        relative = self.values.get("max_source_relative_length")
        if forced is not None and relative is not None:
            raise ValueError(
                "forced_eos_token_id: conflicts with max_source_relative_length, since it forces every target to the "
                f"same length; got {forced!r} and {relative}, expected one of them. Set the other to None."
            )

    @functools.cached_property
    def prompt_length(self) -> int:
        """Number of tokens that each target begins with, including the start token."""
        prompt = self.inputs.get("decoder_input_ids")
        if prompt is None:
            return 1
        start = self.values.get("decoder_start_token_id", self.values.get("bos_token_id", -1))
        lacks_start = (prompt[:, 0] != torch.as_tensor(start, device=prompt.device)).all()
        return prompt.shape[1] + int(lacks_start)  # Transformers puts the start token before such a prompt

    def common_limit(self) -> int | None:
        """Return the limit of new tokens that all targets share; None if there is none."""
        if "max_new_tokens" in self.values:
            return self.values["max_new_tokens"]
        if "max_length" in self.values:
            return self.values["max_length"] - self.prompt_length
        return None

    def inferred_mask(self, inputs: Tensor | None) -> Tensor | None:
        """Return the mask (B, S) that Transformers infers from the source; None without a source."""
        sources = [inputs, self.inputs.get("input_ids"), self.inputs.get("inputs_embeds")]
        encoded = self.inputs.get("encoder_outputs")
        if encoded:
            sources.append(encoded[0])
        given = [source for source in sources if source is not None]
        if not given:
            return None
        source = given[0]
        pad = self.values.get("pad_token_id")
        ends = as_token_ids(self.values.get("eos_token_id"))
        if source.dim() == 2 and pad is not None and pad not in ends:
            return source.ne(pad)
        return torch.ones(source.shape[:2], device=source.device)

    def source_limits(self, inputs: Tensor | None = None) -> Tensor | None:
        """Return the source-dependent limit (B,) of new tokens; None if there is none."""
        relative = self.values.get("max_source_relative_length")
        if relative is None:
            return None
        mask = self.inputs.get("attention_mask")
        if mask is None:
            mask = self.inferred_mask(inputs)
        if mask is None:
            return None
        limits = mask.ne(0).sum(-1) + relative  # (B,)
        if self.num_positions is None:
            return limits
        return limits.clamp(max=self.num_positions + 1 - self.prompt_length)

    def target_limits(self) -> Tensor:
        """Return the limit (B,) of new tokens of each target; the arguments must include `attention_mask`."""
        common = self.common_limit()
        limits = self.source_limits()
        if limits is None:
            mask = self.inputs["attention_mask"]
            return torch.full((len(mask),), DEFAULT_LENGTH if common is None else common, device=mask.device)
        return limits if common is None else limits.clamp(max=common)

    def longest_limit(self, limits: Tensor | None) -> int | None:
        """Return the largest number of new tokens of any target; None for Transformers' default."""
        common = self.common_limit()
        if limits is not None and len(limits):
            largest = int(limits.max())
            return largest if common is None else min(largest, common)
        if common is None and "max_length" in self.saved.keys() & self.in_call.keys():
            return DEFAULT_LENGTH  # the call sets the saved `max_length` to None
        return common

    def for_non_autoregressive(self, model: Any) -> dict[str, Any]:
        """Return the values of the settings that a non-autoregressive model supports.

        Raises:
            ValueError: a setting that the model does not support is not None, False, empty or at its default.
        """
        # Arguments that Transformers does not know are settings too, since the model has no further inputs.
        values = dict(self.values)
        for name, value in self.inputs.items():
            if value is not None:
                values[name] = value

        supported = {setting.name for setting in fields(SharedSettings)}
        supported.update(model.family_settings)
        defaults = {**default_settings(), **vars(NarSettings())}
        for name in TOKEN_IDS:
            defaults[name] = getattr(model.config, name)
        defaults["decoder_start_token_id"] = model.config.target_start_token_id

        # A saved generation config also contains these; only in a call they must agree with the model.
        copied = {*TOKEN_IDS, "output_attentions", "output_hidden_states"} - self.in_call.keys()
        for name in sorted(values.keys() - supported - copied - {"transformers_version"}):
            value = values[name]
            default = defaults.get(name)
            if name in TOKEN_IDS:
                value = as_token_ids(value)
                default = as_token_ids(default)
            if value != default and not is_off(value) and not name.startswith("_"):
                refuse(name, f"not supported by {type(model).__name__}", value, repr(default))
        return {name: values[name] for name in supported & values.keys()}

    def for_transformers(self, limits: Tensor | None) -> tuple[GenerationConfig, dict[str, None]]:
        """Return a generation config with limits (B,) of the sources, and the saved settings that the call disables.

        Raises:
            ValueError: a target may exceed the learned positions.
        """
        config = copy.copy(self.generation_config)
        vars(config).update({name: self.values.get(name) for name in self.in_call})
        config.length_penalty_type = self.values.get("length_penalty_type", "power")
        if self.values.get("num_beams", 1) == 1:  # Transformers would warn of saved ones
            config.length_penalty = 1.0
            config.early_stopping = False
        switched_off = dict.fromkeys(self.saved.keys() - self.values.keys() - {"max_length", *SEARCH_SETTINGS})

        # Transformers gets the longest limit, in the setting that the call uses; criteria end the shorter targets.
        longest = self.longest_limit(limits)
        if longest is None:
            return config, switched_off
        max_length = self.prompt_length + longest
        if "max_new_tokens" in self.values:
            config.max_new_tokens = longest
        else:
            config.max_length = max_length

        # The last token is not an input, so it needs no position.
        most = self.num_positions
        if most is not None and max_length - 1 > most:
            raise ValueError(
                f"max_length ({max_length}, including the start token) exceeds the {most} learned positions; use "
                f"max_length <= {most + 1} or max_new_tokens <= {most}."
            )
        return config, switched_off


def default_limit(model: Any, **settings: Any) -> dict[str, Any]:
    """Return the paper's length limit if neither the call nor the model sets one, else no settings.

    It replaces Transformers' default of 20 tokens. Non-autoregressive models and those of other packages need none.
    """
    generation_config = settings.pop("generation_config", None)
    call = CallSettings(generation_config, model, settings)
    has_limit = not call.values.keys().isdisjoint({*LIMITS, *PAPER_LIMIT})
    if has_limit or not hasattr(model, "use_paper_decoding"):
        return {}
    return PAPER_LIMIT
