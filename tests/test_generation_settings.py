"""The settings of the paper's search: the call wins over the model's, and an invalid setting is an error."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

from tests.builders import small_model, source
from tests.helpers import WITH_SCORES, tiny_model
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.generation import CallSettings

END = 2


def limit_of(model: VaswaniTransformerForConditionalGeneration, **arguments: Any) -> int:
    """Return the number of new tokens of a target that nothing ends, for a source of three tokens.

    It is what the settings say before the search.
    """
    settings: dict[str, Any] = arguments | {"attention_mask": torch.ones(1, 3)}
    call = CallSettings(settings.pop("generation_config", None), model, settings)
    length = model.generate(source(3, 4), suppress_tokens=[1, 2], **arguments).shape[1] - 1
    assert call.target_limits().tolist() == [length]
    return length


def test_argument_of_the_call_wins_over_the_saved_limit() -> None:
    model = small_model(0)
    search: dict[str, Any] = {"num_beams": 2, "length_penalty_type": "gnmt", "max_source_relative_length": 5}
    model.generation_config = model.config.make_generation_config(**search)
    assert limit_of(model) == 8
    assert limit_of(model, max_new_tokens=11) == 11
    assert limit_of(model, max_length=12) == 11
    assert limit_of(model, max_source_relative_length=1) == 4
    assert limit_of(model, max_source_relative_length=9, max_new_tokens=6) == 6
    assert limit_of(model, max_source_relative_length=2, max_new_tokens=6) == 5
    assert limit_of(model, max_source_relative_length=None, max_new_tokens=4) == 4
    assert limit_of(model, generation_config=GenerationConfig(max_new_tokens=10, num_beams=1)) == 10
    assert limit_of(model, generation_config=GenerationConfig(num_beams=1)) == 8


def test_max_length_in_the_models_own_config_never_shortens_the_limit() -> None:
    model = small_model(0)
    model.generation_config.max_length = 4  # Seq2SeqTrainer leaves 20 there after an evaluation
    assert limit_of(model, max_source_relative_length=5) == 8
    assert limit_of(model) == limit_of(model, max_length=None) == 53
    special = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    for max_length, new_tokens in ((4, 3), (None, 20)):  # 20: of Transformers
        model.generation_config = GenerationConfig(**special, max_length=max_length)
        assert limit_of(model) == new_tokens
        assert limit_of(model, max_length=None) == 20


INVALID = [
    ({"length_penalty_type": "wu"}, r"length_penalty_type: .*got 'wu', expected one of power, gnmt"),
    ({"max_source_relative_length": -1}, r"max_source_relative_length: .*got -1, expected a whole number of at"),
    ({"max_source_relative_length": 2.5}, r"max_source_relative_length: .*got 2\.5, expected a whole number"),
    ({"max_source_relative_length": True}, r"max_source_relative_length: .*got True, expected a whole number"),
    ({"length_penalty": "x"}, r"length_penalty: .*got 'x', expected a finite number"),
    ({"length_penalty": float("nan")}, r"length_penalty: .*got nan, expected a finite number"),
    ({"num_beams": 0}, r"num_beams: .*got 0, expected a whole number of at least 1"),
    ({"forced_eos_token_id": 4, "max_source_relative_length": 3}, r"forced_eos_token_id: .*got 4 and 3\. Set one"),
]


@pytest.mark.parametrize("level", ["call", "config", "model"])
@pytest.mark.parametrize(("settings", "message"), INVALID)
def test_invalid_setting_is_an_error_of_one_line(settings: dict[str, Any], message: str, level: str) -> None:
    model = small_model(0)
    if level == "model":
        vars(model.generation_config).update(settings)
    config = GenerationConfig(num_beams=2)
    vars(config).update(settings)
    given = {"call": settings, "config": {"generation_config": config}, "model": {}}[level]
    with pytest.raises(ValueError, match=message) as error:
        model.generate(source(3), **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("level", ["call", "config", "model"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_forced_end_that_is_the_end_is_ignored_where_each_source_has_a_limit(num_beams: int, level: str) -> None:
    model, forced = small_model(0), {"forced_eos_token_id": END}
    config, call = GenerationConfig(num_beams=num_beams), forced if level == "call" else {}
    expected = model.generate(source(3, 4), config, min_new_tokens=53)
    vars({"call": GenerationConfig(), "config": config, "model": model.generation_config}[level]).update(forced)
    targets = model.generate(source(3, 4), config, min_new_tokens=53, **call)
    assert (targets.shape[1], END in targets) == (54, False)
    assert torch.equal(targets, expected)
    assert model.generate(source(3, 4), config, min_new_tokens=3, max_new_tokens=3, **call)[0, -1] == END


def test_none_against_a_saved_beam_setting_is_transformers_default() -> None:
    model = small_model(1)
    assert torch.equal(model.generate(source(3, 4), num_beams=None), model.generate(source(3, 4), num_beams=1))
    first, second = (model.generate(source(3, 4), length_penalty=alpha, **WITH_SCORES) for alpha in (None, 1.0))
    assert torch.equal(first.sequences_scores, second.sequences_scores)


def test_numbers_of_numpy_are_settings_like_pythons() -> None:
    model = small_model(1)
    given: dict[str, Any] = {"num_beams": np.int64(3), "length_penalty": np.float32(0.5)}
    given |= {"max_source_relative_length": np.int32(2)}
    expected = model.generate(source(3, 4), num_beams=3, length_penalty=0.5, max_source_relative_length=2)
    assert torch.equal(model.generate(source(3, 4), **given), expected)


def test_saved_beam_setting_gives_no_warning_in_a_greedy_search(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = small_model(0)
    with caplog.at_level("WARNING"):
        model.generate(source(3), num_beams=1)
    assert not caplog.records


def test_search_that_only_transformers_has_is_an_error_under_gnmt() -> None:
    with pytest.raises(
        ValueError, match='length_penalty_type="gnmt" goes with neither prefill_chunk_size nor low_memory'
    ):
        small_model(0).generate(source(3), prefill_chunk_size=2)


def test_target_beyond_the_learned_positions_is_an_error_before_the_first_step() -> None:
    model = small_model(0, position_embedding="learned", max_position_embeddings=6)
    assert model.generate(source(3), max_new_tokens=6).shape[1] <= 7
    with pytest.raises(
        ValueError, match=r"max_length \(8, .*table of 6 learned positions; .* max_new_tokens of at most 6"
    ):
        model.generate(source(3), max_new_tokens=7)
    padded, mask = torch.tensor([[3, END, 1, 1, 1]]), torch.tensor([[1, 1, 0, 0, 0]])
    assert model.generate(padded, attention_mask=mask, max_source_relative_length=4).shape[1] <= 7
    assert model.generate(source(3), suppress_tokens=[END], max_source_relative_length=50).shape[1] == 7
    model.generation_config.max_new_tokens = 7
    assert model.generate(padded, attention_mask=mask, max_source_relative_length=4).shape[1] <= 7
    with pytest.raises(ValueError, match=r"max_length \(8, .* max_new_tokens of at most 6"):
        model.generate(source(3), max_source_relative_length=None)


def test_papers_settings_are_saved_with_the_model(tmp_path: Path) -> None:
    small_model(0).save_pretrained(tmp_path)
    search = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generation_config
    assert (search.num_beams, search.length_penalty) == (4, 0.6)
    assert (search.length_penalty_type, search.max_source_relative_length) == ("gnmt", 50)


def test_model_without_saved_settings_decodes_greedily() -> None:
    model = tiny_model()
    inputs = torch.randint(3, 99, (1, 4))
    greedy = model.generate(inputs, num_beams=1, do_sample=False, max_new_tokens=5)
    assert torch.equal(model.generate(inputs, max_new_tokens=5), greedy)
