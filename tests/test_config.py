"""The config has the paper's defaults and models by name, and its errors name field, value and fix."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from tests.batches import random_tokens
from tests.models import EVERY_FAMILY, TINY, tiny_config
from vaswani_transformer import VaswaniIterativeVaeConfig, VaswaniTransformerConfig

# The base model of the paper, 3.1 to 3.4, 5.1 and 5.4, and the ids and the epsilon that saved models rely on.
BASE: dict[str, Any] = {
    **{"vocab_size": 37000, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "num_heads": 8, "d_ff": 2048},
    **{"dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0, "label_smoothing": 0.1},
    **{"activation_function": "relu", "position_embedding": "sinusoidal", "attention_bias": False},
    **{"attention_window": None, "scale_embedding": True, "tie_word_embeddings": True},
    **{"layer_norm_eps": 1e-6, "max_position_embeddings": 1024, "use_cache": True, "decoder_start_token_id": None},
    **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
}
# The fields that each of the paper's models changes in the base model: Table 3, 6.1 (English-French), 6.3 (parsing).
PAPER: dict[str, dict[str, Any]] = {
    "base": {},
    "big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
    "big-en-fr": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.1, "vocab_size": 32000},
    "parsing": {"d_model": 1024, "encoder_layers": 4, "decoder_layers": 4, "vocab_size": 16000},
    "parsing-semi-supervised": {"d_model": 1024, "encoder_layers": 4, "decoder_layers": 4, "vocab_size": 32000},
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
# The d_k and d_v that Table 3 prints if they are not 64. The paper does not give the heads in parsing; 8 is our
# reading.
HEAD_WIDTHS = {
    "A-h1": (512, 512),
    "A-h4": (128, 128),
    "A-h16": (32, 32),
    "A-h32": (16, 16),
    "B-dk16": (16, 64),
    "B-dk32": (32, 64),
    "C-dmodel256": (32, 32),
    "C-dmodel1024": (128, 128),
    "parsing": (128, 128),
    "parsing-semi-supervised": (128, 128),
}


@pytest.mark.parametrize(
    "fields",
    [
        {"d_model": 30, "num_heads": 4, "d_k": 3, "d_v": 5},  # not divisible
        {"d_model": 33, "num_heads": 3, "position_embedding": "learned"},  # odd
        {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0, "label_smoothing": 0, "layer_norm_eps": 1},
        {"eos_token_id": [2, 3]},
    ],
    ids=str,
)
def test_field_that_is_not_the_usual_one_is_accepted(fields: dict[str, Any]) -> None:
    config = VaswaniTransformerConfig(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize("ends", [None, [2, 3]])
def test_token_id_is_one_id_or_an_error_that_names_the_field(ends: list[int] | None) -> None:
    config = tiny_config(eos_token_id=ends, decoder_start_token_id=5)
    assert (config.token_id("pad_token_id"), config.token_id("target_start_token_id")) == (1, 5)
    with pytest.raises(ValueError, match=rf"^eos_token_id: .*got {re.escape(str(ends))}, expected an integer\. Set it"):
        config.token_id("eos_token_id")


def test_attribute_names_of_transformers_map_to_the_paper_s_fields() -> None:
    config = tiny_config(encoder_layers=3)
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (32, 4, 3)
    config.hidden_size, config.num_attention_heads, config.num_hidden_layers = 64, 8, 5
    assert (config.d_model, config.num_heads, config.encoder_layers) == (64, 8, 5)
    names: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    assert VaswaniTransformerConfig(**names).d_model == 64


# For every error: the fields given, then words of the message that name field, value and fix.
REFUSALS = [
    *(
        ({field: 0}, (field, "0", "at least 1"))
        for field in (
            *("vocab_size", "d_model", "num_heads", "d_k", "d_v", "d_ff"),
            *("max_position_embeddings", "attention_window"),
        )
    ),
    *(
        ({field: value}, (field, str(value), "at least 0 and below 1"))
        for field in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
        for value in (1, -0.1, float("nan"))
    ),
    *(({field: 0}, (field, "0", "expected 1 to 1,000")) for field in ("encoder_layers", "decoder_layers")),
    ({"layer_norm_eps": 0}, ("layer_norm_eps", "0", "above 0")),
    ({"activation_function": "rleu"}, ("activation_function", "'rleu'", "relu", "gelu")),
    ({"position_embedding": "rotary"}, ("position_embedding", "'rotary'", "'sinusoidal'", "'learned'")),
    ({"d_model": 33, "num_heads": 3}, ("d_model (33)", "even", 'position_embedding="learned"')),
    ({"d_model": 30, "num_heads": 4}, ("d_model (30)", "num_heads (4)", "divisible", "d_k and d_v")),
    ({"d_model": 30, "num_heads": 4, "d_k": 3}, ("d_model (30)", "num_heads (4)", "divisible", "d_k and d_v")),
    *(
        ({"vocab_size": 99, field: value}, (f"{field} ({value})", "99", "0 to 98", "vocab_size"))
        for field in ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")
        for value in (99, -1)
    ),
    ({"vocab_size": 99, "eos_token_id": [2, 99]}, ("eos_token_id (99)", "99", "0 to 98", "vocab_size")),
    ({"d_model": "512"}, ("d_model", "'512'", "int")),
    ({"num_heads": True}, ("num_heads", "True", "int")),
    ({"dropout": "0.1"}, ("dropout", "'0.1'", "float")),
    ({"attention_bias": 1}, ("attention_bias", "1", "bool")),
    ({"is_encoder_decoder": False}, ("is_encoder_decoder", "False", "must be True")),
    ({"vocab_size": None}, ("vocab_size", "None", "int")),
]


@pytest.mark.parametrize(("fields", "words"), REFUSALS, ids=[str(fields) for fields, _ in REFUSALS])
def test_config_error_names_field_value_and_fix(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(StrictDataclassError) as error:
        VaswaniTransformerConfig(**fields)
    for word in words:
        assert word in str(error.value)


def test_saved_config_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_dict() | {"dropout": 2}))
    with pytest.raises(StrictDataclassError, match="dropout"):
        VaswaniTransformerConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("overrides", [{"num_heads": 7}, {"hint": False}, {"max_length_difference": -1}], ids=str)
def test_field_that_replaces_a_saved_one_is_checked_with_the_others(overrides: dict[str, Any], tmp_path: Path) -> None:
    VaswaniIterativeVaeConfig(**TINY).save_pretrained(tmp_path)
    [name] = overrides
    with pytest.raises(StrictDataclassError, match=name):
        AutoConfig.from_pretrained(tmp_path, **overrides)


def test_unknown_paper_model_is_an_error_with_the_list() -> None:
    with pytest.raises(ValueError, match="'big-en-de' is not a model of the paper") as error:
        VaswaniTransformerConfig.from_paper("big-en-de")
    listed = str(error.value).split("choose one of ")[1].rstrip(".").split(", ")
    assert listed == list(PAPER)


@pytest.mark.parametrize("name", PAPER)
def test_paper_models_have_their_values(name: str) -> None:
    config = VaswaniTransformerConfig.from_paper(name)
    assert config.to_dict() == VaswaniTransformerConfig().to_dict() | BASE | PAPER[name]
    assert (config.head_dim, config.value_head_dim) == HEAD_WIDTHS.get(name, (64, 64))


def test_overrides_replace_the_paper_s_values() -> None:
    config = VaswaniTransformerConfig.from_paper("big", vocab_size=36000, dropout=0)
    assert (config.vocab_size, config.dropout, config.d_model) == (36000, 0, 1024)


def test_override_of_an_unknown_field_is_an_error_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"^droput: not a field of VaswaniTransformerConfig; choose one of .*dropout"):
        VaswaniTransformerConfig.from_paper("big", droput=0.1)
    config = VaswaniTransformerConfig.from_paper("big", hidden_size=64, dtype="bfloat16", attn_implementation="eager")
    assert (config.d_model, str(config.dtype), config._attn_implementation) == (64, "torch.bfloat16", "eager")


def test_tensor_parallel_plans_are_on_the_classes_and_not_on_the_config() -> None:
    assert VaswaniTransformerConfig.base_model_tp_plan is None
    assert VaswaniTransformerConfig().base_model_tp_plan is None


@pytest.mark.parametrize(
    "side", [{}, {"decoder": True}, {"encoder": True}, {"decoder": True, "encoder": True}], ids=str
)
def test_stack_config_has_the_depth_of_its_stack(side: dict[str, Any]) -> None:
    config = tiny_config(encoder_layers=3, decoder_layers=5)
    ours, theirs = config.get_text_config(**side), PreTrainedConfig.get_text_config(config, **side)
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "vocab_size", "is_encoder_decoder")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    assert (ours is config) == (theirs is config)
    ours.num_hidden_layers = 7
    assert (ours is config) or (config.encoder_layers, config.decoder_layers) == (3, 5)


@pytest.mark.parametrize("setting", [{"num_beams": 5}, {"max_length": 4}, {"num_iterations": 4}], ids=str)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_setting_of_generation_on_the_model_s_configuration_is_an_error(family: str, setting: dict[str, int]) -> None:
    """Transformers raises too, and like it a call with a configuration does not."""
    model = EVERY_FAMILY[family]()
    model.generate(random_tokens(2, 3), generation_config=model.generation_config)
    vars(model.config).update(setting)
    with pytest.raises(ValueError, match=rf"^model\.config: .* got {setting}, expected none\. .*generation_config"):
        model.generate(random_tokens(2, 3))
    model.generate(random_tokens(2, 3), generation_config=model.generation_config)
