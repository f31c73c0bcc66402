"""The engine takes the saved search and the call's settings, and names those that CTranslate2 lacks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import uneven_model
from vaswani_transformer.convert.ctranslate2_exporter import to_ctranslate2
from vaswani_transformer.translation import ctranslate2_engine
from vaswani_transformer.translation.ctranslate2_engine import CTranslate2Engine

pytest.importorskip("ctranslate2")
END = 2


def test_saved_search_settings_hold_and_those_of_the_call_win(tmp_path: Path) -> None:
    model = uneven_model()
    model.use_paper_decoding()
    folder = to_ctranslate2(model, None, tmp_path / "converted", positions=100)
    saved = CTranslate2Engine(folder)
    assert (saved.num_beams, saved.alpha, saved.penalty_type) == (4, 0.6, "gnmt")
    assert (saved.limit(7), saved.limit(90), saved.max_source_tokens()) == (57, 100, 50)
    given = CTranslate2Engine(folder, num_beams=2, length_penalty=0.0, length_penalty_type="power", max_new_tokens=9)
    assert (given.num_beams, given.alpha, given.penalty_type, given.limit(7)) == (2, 0.0, "power", 9)
    both = CTranslate2Engine(folder, max_new_tokens=9, max_source_relative_length=1)
    assert (both.limit(7), both.limit(30)) == (8, 9)
    model.generation_config.max_new_tokens = 9  # holds together with the call's relative limit, as in generate()
    assert CTranslate2Engine(to_ctranslate2(model, None, tmp_path / "new"), max_source_relative_length=1).limit(30) == 9
    with pytest.raises(ValueError, match=r"A text of 101 tokens is longer than the table of 100 positions; shorten"):
        saved([[3] * 101])


def test_tokens_that_the_saved_config_suppresses_are_never_written(tmp_path: Path) -> None:
    model = uneven_model(vocab_size=12)
    model.generation_config.bad_words_ids = [[word] for word in range(12) if word != 7]
    folder = to_ctranslate2(model, None, tmp_path / "converted")
    for beams in (1, 3):
        (((tokens, _),),) = CTranslate2Engine(folder, num_beams=beams, max_new_tokens=4, threads=1)([[5, 6, END]])
        assert tokens == [7, 7, 7, 7]


@pytest.mark.parametrize("saved", [{"eos_token_id": [END, 5]}, {"decoder_start_token_id": 9}, {"bos_token_id": 9}])
def test_targets_begin_and_end_with_the_tokens_of_the_saved_config(saved: dict[str, Any], tmp_path: Path) -> None:
    model = uneven_model(vocab_size=12)
    search: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 30, "early_stopping": "never"}
    source = [[8, 10, 11, END]]
    plain = model.generate(torch.tensor(source), **search)[0, 1:].tolist()
    model.generation_config.update(**saved)
    expected = model.generate(torch.tensor(source), **search)[0, 1:].tolist()
    folder = to_ctranslate2(model, None, tmp_path / "converted")
    (((tokens, _),),) = CTranslate2Engine(folder, num_beams=3, max_new_tokens=30, patience=99, threads=1)(source)
    assert tokens == expected != plain


def test_saved_settings_that_the_engine_lacks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = []
    monkeypatch.setattr(ctranslate2_engine.logger, "warning", lambda text, *parts: warnings.append(text % parts))
    model = uneven_model()
    CTranslate2Engine(to_ctranslate2(model, None, tmp_path / "plain"))
    assert warnings == []
    saved = {"encoder_repetition_penalty": 1.1, "exponential_decay_length_penalty": [20, 1.1]}
    saved |= {"forced_eos_token_id": END, "no_repeat_ngram_size": 3, "repetition_penalty": 1.2}
    model.generation_config.update(num_beams=4, **saved)
    CTranslate2Engine(to_ctranslate2(model, None, tmp_path / "converted"))
    names = ", ".join(saved)
    assert warnings == [f"{tmp_path / 'converted'}: CTranslate2 searches without the saved {names}."]


def test_default_limit_is_fifty_tokens_more_than_the_source(tmp_path: Path) -> None:
    folder = to_ctranslate2(uneven_model(), None, tmp_path / "converted")
    assert CTranslate2Engine(folder).limit(7) == 57
    with pytest.raises(ValueError, match="length_penalty_type is 'wu'; choose one of"):
        CTranslate2Engine(folder, length_penalty_type="wu")
    with pytest.raises(TypeError, match="texts is the str 'a'; give a list of texts"):
        CTranslate2Engine(folder).translate("a")
