"""Configuration of the original Transformer, with the paper's models by name (Table 3, 6.1, 6.3)."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Self

from huggingface_hub.dataclasses import as_validated_field, strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from .settings import NAR_SETTINGS, SEARCH_SETTINGS, TOKEN_IDS, as_token_ids

MAX_LAYERS = 1000  # a typo here would exhaust the memory


def checked_field(is_valid: Callable[[Any], bool], problem: str) -> Callable[..., Any]:
    """Return a factory of validated dataclass fields; errors name the value and the `problem`."""

    @as_validated_field
    def check(value: Any) -> None:
        if not is_valid(value):
            raise ValueError(f"{value!r} {problem}")

    return check


positive_int = checked_field(
    lambda value: value is None or value >= 1,
    "is not positive; expected an integer of at least 1.",
)
layer_count = checked_field(
    lambda value: 1 <= value <= MAX_LAYERS,
    f"is not a valid number of layers; expected 1 to {MAX_LAYERS:,}.",
)
unit_rate = checked_field(
    lambda value: 0 <= value < 1,
    "is outside [0, 1); expected a rate of at least 0 and below 1, for example 0.1.",
)
positive_float = checked_field(
    lambda value: 0 < value < float("inf"),
    "is not positive and finite; expected a number above 0, for example 1e-6.",
)
loss_weight = checked_field(
    lambda value: 0 <= value < float("inf"),
    "is negative or not finite; expected a number of at least 0, for example 1.0.",
)
activation_name = checked_field(
    lambda value: value in ACT2FN,
    f"is not an activation function; expected 'relu' as in the paper, or one of {', '.join(ACT2FN)}.",
)
position_embedding_type = checked_field(
    lambda value: value in ("sinusoidal", "learned"),
    "is not a position embedding; expected 'sinusoidal' (3.5) or 'learned' (Table 3, E).",
)
always_true = checked_field(
    lambda value: value is True,
    "must be True: all models here are encoder-decoders. Leave it out.",
)

_BIG = {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3}
_PARSING = {"encoder_layers": 4, "decoder_layers": 4, "d_model": 1024}
PAPER_SETTINGS: dict[str, dict[str, int | float | str]] = {
    "base": {},
    "big": _BIG,
    "big-en-fr": {**_BIG, "dropout": 0.1, "vocab_size": 32000},
    "parsing": {**_PARSING, "vocab_size": 16000},
    "parsing-semi-supervised": {**_PARSING, "vocab_size": 32000},
    "A-h1": {"num_heads": 1},
    "A-h4": {"num_heads": 4},
    "A-h16": {"num_heads": 16},
    "A-h32": {"num_heads": 32},
    "B-dk16": {"d_k": 16},
    "B-dk32": {"d_k": 32},
    "C-n2": {"encoder_layers": 2, "decoder_layers": 2},
    "C-n4": {"encoder_layers": 4, "decoder_layers": 4},
    "C-n8": {"encoder_layers": 8, "decoder_layers": 8},
    "C-dmodel256": {"d_model": 256},
    "C-dmodel1024": {"d_model": 1024},
    "C-dff1024": {"d_ff": 1024},
    "C-dff4096": {"d_ff": 4096},
    "D-dropout0.0": {"dropout": 0.0},
    "D-dropout0.2": {"dropout": 0.2},
    "D-smoothing0.0": {"label_smoothing": 0.0},
    "D-smoothing0.2": {"label_smoothing": 0.2},
    "E": {"position_embedding": "learned"},
}


@strict
class VaswaniTransformerConfig(PreTrainedConfig):
    """Hyperparameters of the model; the defaults are the paper's base model (Table 3).

    Args:
        vocab_size: size of the vocabulary that source and target share (5.1).
        d_model: width of the embeddings and of every sub-layer's output (3.1).
        encoder_layers: N, the number of layers of the encoder (3.1).
        decoder_layers: the number of layers of the decoder, also N in the paper.
        num_heads: h, the number of attention heads of a layer (3.2.2).
        d_k: width of a head's queries and keys; None for d_model / num_heads.
        d_v: width of a head's values; None for d_model / num_heads.
        d_ff: inner width of the feed-forward networks (3.3).
        dropout: P_drop, the dropout rate of sub-layer outputs and embedded inputs (5.4).
        attention_dropout: dropout rate of the attention weights; 0 in the paper.
        activation_dropout: dropout rate after the activation of the feed-forward networks; 0 in the paper.
        activation_function: activation of the feed-forward networks, "relu" in the paper.
        position_embedding: "sinusoidal" (3.5) or "learned" (Table 3, row E).
        max_position_embeddings: number of learned positions; sinusoidal positions have no limit.
        attention_bias: whether the attention projections have biases; the paper has none.
        attention_window: r of restricted self-attention (section 4): each position attends to r positions on either
            side, in the decoder to the r before it. None for no restriction. Cross-attention is not restricted.
        layer_norm_eps: epsilon of every layer normalization.
        label_smoothing: eps_ls of the training loss (5.4).
        scale_embedding: whether embeddings are multiplied by sqrt(d_model) (3.4).
        tie_word_embeddings: whether the output projection is the embedding matrix (3.4); source and target always share
            one embedding matrix.
        use_cache: whether decoding caches the keys and values of earlier steps.
        bos_token_id: id of `<s>`.
        pad_token_id: id of `<pad>`, which fills up a batch and has no loss.
        eos_token_id: id of `</s>`, which ends sources and targets, or a list of such ids.
        decoder_start_token_id: id of the first token of every target; None for `bos_token_id`.

    Raises:
        huggingface_hub.errors.StrictDataclassError: a value has the wrong type, is out of range or inconsistent with
            the others. The message names the field, the value and a fix.
    """

    model_type = "vaswani_transformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache", "encoder_last_hidden_state"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "encoder_layers",
    }
    base_model_fsdp_plan = {}

    vocab_size: int = positive_int(default=37000)
    d_model: int = positive_int(default=512)
    encoder_layers: int = layer_count(default=6)
    decoder_layers: int = layer_count(default=6)
    num_heads: int = positive_int(default=8)
    d_k: int | None = positive_int(default=None)
    d_v: int | None = positive_int(default=None)
    d_ff: int = positive_int(default=2048)
    dropout: float | int = unit_rate(default=0.1)
    attention_dropout: float | int = unit_rate(default=0.0)
    activation_dropout: float | int = unit_rate(default=0.0)
    activation_function: str = activation_name(default="relu")
    position_embedding: str = position_embedding_type(default="sinusoidal")
    max_position_embeddings: int = positive_int(default=1024)
    attention_bias: bool = False
    attention_window: int | None = positive_int(default=None)
    layer_norm_eps: float | int = positive_float(default=1e-6)
    label_smoothing: float | int = unit_rate(default=0.1)
    scale_embedding: bool = True
    tie_word_embeddings: bool = True
    use_cache: bool = True
    is_encoder_decoder: bool = always_true(default=True)
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = None

    @property
    def embedding_scale(self) -> float:
        """Return the scale of token embeddings: sqrt(d_model) or 1."""
        return self.d_model**0.5 if self.scale_embedding else 1.0

    @property
    def head_dim(self) -> int:
        """Return d_k, the width of a head's queries and keys."""
        return self.d_k if self.d_k is not None else self.d_model // self.num_heads

    @property
    def value_head_dim(self) -> int:
        """Return d_v, the width of a head's values."""
        return self.d_v if self.d_v is not None else self.d_model // self.num_heads

    @property
    def target_start_token_id(self) -> int | None:
        """Return the id of the first token of every target."""
        return self.decoder_start_token_id if self.decoder_start_token_id is not None else self.bos_token_id

    @property
    def end_token_ids(self) -> list[int]:
        """Return the ids of all end tokens."""
        ids = self.eos_token_id
        return [ids] if isinstance(ids, int) else list(ids or [])

    @property
    def end_token_id(self) -> int | None:
        """Return the id of the first end token, or None."""
        return next(iter(self.end_token_ids), None)

    def token_id(self, name: str) -> int:
        """Return the id of a required special token, such as "pad_token_id" or "target_start_token_id".

        Raises:
            ValueError: the configuration defines no such token, or several.
        """
        value = getattr(self, name)
        if not isinstance(value, int):
            raise ValueError(
                f"{name}: not a single token id; got {value!r}, expected an integer. Set it in the configuration."
            )
        return value

    def make_generation_config(self, **settings: Any) -> GenerationConfig:
        """Return a GenerationConfig with `settings` and the special tokens of this configuration."""
        return GenerationConfig(**{name: getattr(self, name) for name in TOKEN_IDS}, **settings)

    def _get_generation_parameters(self) -> dict[str, Any]:
        """Return the settings of `generate()` that were put on this configuration by mistake."""
        misplaced = super()._get_generation_parameters()
        for name in (*SEARCH_SETTINGS, *NAR_SETTINGS):
            if hasattr(self, name):
                misplaced[name] = getattr(self, name)
        return misplaced

    def check_generation_settings(self, generation_config: GenerationConfig | None) -> None:
        """Raise ValueError if `generate()` would ignore settings on this configuration."""
        if generation_config is not None:
            return
        settings = self._get_generation_parameters()
        if settings:
            raise ValueError(
                f"model.config: generate() does not read settings from it; got {settings}, expected none. Set them on "
                "model.generation_config, or pass them to generate()."
            )

    def validate_architecture(self) -> None:
        """Check that the widths are consistent."""
        if self.position_embedding == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"d_model ({self.d_model}) must be even for sinusoidal positions, which come in pairs of a sine and a "
                'cosine; use an even d_model or position_embedding="learned".'
            )
        if self.d_model % self.num_heads and (self.d_k is None or self.d_v is None):
            raise ValueError(
                f"d_model ({self.d_model}) must be divisible by num_heads ({self.num_heads}) when d_k or d_v is not "
                "set; change one of them, or set both d_k and d_v."
            )

    def validate_token_ids(self) -> None:
        """Check that the special tokens, including `<mask>` of a CMLM, are in the vocabulary."""
        for name in (*TOKEN_IDS, "mask_token_id"):
            for token_id in as_token_ids(getattr(self, name, None)):
                if not 0 <= token_id < self.vocab_size:
                    raise ValueError(
                        f"{name} ({token_id}) is outside the vocabulary of {self.vocab_size} entries; use an id from "
                        f"0 to {self.vocab_size - 1}, or a larger vocab_size."
                    )

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the configuration of one stack, with its number of layers as `num_hidden_layers`.

        This is faster than Transformers' method, which `generate()` calls several times.
        """
        if decoder == encoder:
            return super().get_text_config(decoder, encoder)
        stack = copy.copy(self)
        stack.num_hidden_layers = stack.decoder_layers if decoder else stack.encoder_layers
        return stack

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Build the configuration from the contents of a config.json.

        `custom_pipelines` is dropped, since the installed package registers the pipeline.

        Raises:
            huggingface_hub.errors.StrictDataclassError: a field, also one of `kwargs`, is not valid.
        """
        if not cls.__module__.startswith(TRANSFORMERS_DYNAMIC_MODULE_NAME):
            config_dict = {name: value for name, value in config_dict.items() if name != "custom_pipelines"}
        loaded = super().from_dict(config_dict, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        config.validate()  # `kwargs` may have replaced fields
        return loaded

    @classmethod
    def from_paper(cls, name: str, **overrides: int | float | str | bool | None) -> Self:
        """Return the configuration of one of the paper's models.

        Beam search is set on the model. Call `model.use_paper_decoding()` for the search of 6.1. For parsing (6.3) call
        `model.generation_config.update(num_beams=21, length_penalty=0.3, max_source_relative_length=300)` after it.

        Args:
            name: a row of Table 3 ("base", "big", "A-h1" ... "E"), "big-en-fr" (6.1), "parsing" or
                "parsing-semi-supervised" (6.3). The paper does not state the heads and dropout of the parsers; this
                package uses 8 heads of width 128 and a dropout rate of 0.1.
            **overrides: fields with other values.

        Raises:
            ValueError: the name is not a model of the paper, or an override is not a field. The message lists the valid
                names.
        """
        if name not in PAPER_SETTINGS:
            raise ValueError(f"{name!r} is not a model of the paper; choose one of {', '.join(PAPER_SETTINGS)}.")
        fields = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(overrides.keys() - {*fields, *cls.attribute_map, "attn_implementation"})
        if unknown:
            own_fields = sorted(set(fields) - {field.name for field in dataclasses.fields(PreTrainedConfig)})
            raise ValueError(f"{unknown[0]}: not a field of {cls.__name__}; choose one of {', '.join(own_fields)}.")
        settings: dict[str, Any] = {**PAPER_SETTINGS[name], **overrides}
        return cls(**settings)
