"""What a recipe's data cannot teach its model, or takes long, is said before training."""

import dataclasses
import logging
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.helpers import user_error
from training.recipe.families import FAMILIES
from training.recipe.fields import DataRecipe, Recipe, TrainingRecipe
from training.run.checks import check_predictable_lengths, check_same_steps, config_for_tokenizer, warn_of_long_texts


def pairs_of(*lengths: tuple[int, int]) -> Dataset:
    """Return pairs with these numbers of source and target tokens."""
    return Dataset.from_dict({"input_ids": [[5] * n for n, _ in lengths], "labels": [[5] * m for _, m in lengths]})


def test_every_kind_that_predicts_lengths_names_their_limits() -> None:
    assert all(bool(kind.length_limits) != kind.is_autoregressive for kind in FAMILIES.values())


@pytest.mark.parametrize(
    ("model", "fitting", "other", "message"),
    [
        ({"kind": "nat"}, [(30, 10), (3, 23)], (3, 24), "targets differ .* got 21 to 21 tokens, expected -20 to 20"),
        ({"kind": "nat", "min_length_difference": -2}, [(5, 3)], (5, 2), "got -3 to -3 tokens, expected -2 to 20"),
        ({"kind": "iterative_vae"}, [(3, 23)], (3, 24), "model.min_length_difference, model.max_length_difference: "),
        ({"kind": "cmlm", "max_target_length": 8}, [(99, 1), (1, 8)], (9, 9), "got 9 to 9 tokens, expected 1 to 8"),
    ],
)
def test_targets_of_lengths_that_a_model_never_predicts_are_counted(
    model: dict[str, str | int],
    fitting: list[tuple[int, int]],
    other: tuple[int, int],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe = Recipe(model=model)
    config = recipe.model_config(vocab_size=99, **({"mask_token_id": 98} if model["kind"] == "cmlm" else {}))
    check_predictable_lengths(recipe, config, pairs_of(*fitting))
    assert not caplog.records
    check_predictable_lengths(recipe, config, pairs_of(*fitting, other))
    assert f"1 of the {len(fitting) + 1} training targets" in caplog.text
    with user_error(rf"2 of the 2 training .*{message}" if message[0] != "m" else f"^{message}2 of"):
        check_predictable_lengths(recipe, config, pairs_of(other, other))


def test_model_has_an_embedding_for_every_id_of_a_vocabulary_that_leaves_some_out() -> None:
    words = Tokenizer(WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "tree": 8}, unk_token="<unk>"))
    tokens = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **tokens)
    assert config_for_tokenizer(Recipe(), tokenizer).vocab_size == 9


def test_steps_of_a_stream_do_not_depend_on_micro_batches() -> None:
    pairs = pairs_of(*(3 * [(9, 9)] + 3 * [(1, 1)]))
    training = TrainingRecipe(source_tokens=30, target_tokens=30, device_tokens=30)
    before, recipe = (Recipe(training=each) for each in (training, dataclasses.replace(training, device_tokens=6)))
    with user_error(r"^training\.device_tokens: 6 splits the pairs into other steps"):
        check_same_steps(before, recipe, pairs)
    check_same_steps(before, dataclasses.replace(recipe, data=DataRecipe(streaming=True)), pairs)


def test_long_texts_of_an_evaluation_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe(data=DataRecipe(max_length=20))
    splits: Any = {"train": pairs_of((99, 99)), "validation": pairs_of((20, 20)), "test": pairs_of((3, 3))}
    warn_of_long_texts(recipe, DatasetDict(splits))
    assert not caplog.records
    warn_of_long_texts(recipe, DatasetDict(splits | {"validation": pairs_of((9, 9), (3000, 9))}))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "data.validation: 1 of 2 pairs are longer than data.max_length (20), the longest"
    )
