"""A broken model ends loading, and every command, with one line that names the fault."""

from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM

from tests.helpers import BROKEN, break_model, tiny_model, user_error
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.support.checked_loading import load_errors, load_model, load_tokenizer
from vaswani_transformer.support.errors import UserError


@pytest.mark.parametrize("way", BROKEN)
def test_weights_that_do_not_fit_or_are_not_finite_are_an_error_of_one_line(
    saved: Path, tmp_path: Path, way: str
) -> None:
    folder = break_model(saved, tmp_path / "model", way)
    for model_class in (AutoModelForSeq2SeqLM, VaswaniTransformerForConditionalGeneration):
        with pytest.raises(UserError) as error:
            load_model(str(folder), model_class)
        assert str(error.value).startswith(f"{folder}: {BROKEN[way]}")
        assert "\n" not in str(error.value)


def test_folder_without_a_model_is_an_error_of_one_line(tmp_path: Path) -> None:
    for name, message in (
        (str(tmp_path), "cannot be loaded: Unrecognized model"),
        (str(tmp_path / "none"), "no folder here, so a name on the Hub: cannot be loaded: Repo id must be"),
    ):
        with user_error(f"^{name}: {message}"):
            load_model(name)
    tiny_model().save_pretrained(tmp_path)
    with user_error("has no tokenizer; save the model's tokenizer there with save_pretrained"):
        load_tokenizer(str(tmp_path))


def test_any_failure_to_load_is_an_error_of_one_line() -> None:
    with user_error(r"^some/model: cannot be loaded: KeyError$"), load_errors("some/model"):
        raise KeyError
