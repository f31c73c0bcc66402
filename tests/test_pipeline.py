"""`pipeline("vaswani-translation")` has the shapes of the Transformers 4 pipeline and the results of `generate()`."""

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset as HubDataset
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import GenerationConfig, pipeline

from tests.models import PAIRS, WITH_SCORES, ModelAndTokenizer, paper_model_of_pairs, tiny_model
from vaswani_transformer import (
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
    prepare_for_inference,
)
from vaswani_transformer.pipeline import TASK
from vaswani_transformer.pipeline import VaswaniTransformerTranslationPipeline as Translator
from vaswani_transformer.tokenizer import text_encoder

SOURCES, TARGETS = list(PAIRS), list(PAIRS.values())
Calls = list[tuple[dict[str, Any], Tensor]]  # arguments and result of each


@pytest.fixture(scope="module")
def components() -> ModelAndTokenizer:
    return paper_model_of_pairs()


@pytest.fixture
def translator(components: ModelAndTokenizer) -> Translator:
    return pipeline(TASK, model=components[0], tokenizer=components[1], device="cpu")


@pytest.fixture
def generations(components: ModelAndTokenizer, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Record arguments and result of every later call of the model's `generate()`."""
    calls, generate = [], components[0].generate

    def watched(**arguments: Any) -> Tensor:
        calls.append((arguments, generate(**arguments)))
        return calls[-1][1]

    monkeypatch.setattr(components[0], "generate", watched)
    return calls


def generated(components: ModelAndTokenizer, text: str, **settings: Any) -> list[str]:
    """Return the translations of a single text by `generate()`, without special tokens."""
    model, tokenizer = components
    batch = tokenizer([text], return_tensors="pt")
    return tokenizer.batch_decode(model.generate(**batch, **settings), skip_special_tokens=True)


def as_records(texts: list[str]) -> list[dict[str, str]]:
    return [{"translation_text": text} for text in texts]


def test_pipeline_returns_a_list_for_a_text_a_list_and_a_column(translator: Translator) -> None:
    assert translator(SOURCES[0]) == as_records(TARGETS[:1])
    assert translator(SOURCES) == as_records(TARGETS)
    assert translator(tuple(SOURCES)) == as_records(TARGETS)
    assert translator(SOURCES[:1]) == as_records(TARGETS[:1])
    assert translator(HubDataset.from_dict({"en": SOURCES})["en"], batch_size=4) == as_records(TARGETS)
    assert translator([]) == []
    assert translator("") == as_records([""])
    assert translator(" \n", num_return_sequences=2) == as_records(["", ""])


def test_pipeline_returns_an_iterator_for_an_iterator_or_dataset(translator: Translator) -> None:
    each, sources = [as_records([target]) for target in TARGETS], cast(Dataset, SOURCES)
    for texts in (iter(SOURCES), (text for text in SOURCES), Subset(sources, range(len(SOURCES)))):
        results = translator(texts, batch_size=4)
        assert not isinstance(results, list)
        assert list(results) == each


def test_batches_by_length_begin_with_the_longest_and_keep_order_and_translations(
    components: ModelAndTokenizer, translator: Translator, generations: Calls
) -> None:
    texts = ["cat", *SOURCES[:3], "", "the cat is black i love you", "  "]
    expected = [generated(components, text)[0] if text.strip() else "" for text in texts]
    generations.clear()
    for batch_size in (1, 2, 5, 100):
        assert translator(texts, batch_size=batch_size) == as_records(expected)
    widths = [arguments["input_ids"].shape[1] for arguments, _ in generations[: len(texts)]]
    assert widths == sorted(widths, reverse=True)  # a batch of one text each


def test_n_best_lists_are_lists_of_lists_in_batches_too(components: ModelAndTokenizer, translator: Translator) -> None:
    expected = [as_records(generated(components, text, num_return_sequences=3)) for text in SOURCES]
    assert all(len(best) == 3 for best in expected)
    assert translator(SOURCES, num_return_sequences=3, batch_size=4) == expected
    assert translator(SOURCES[0], num_return_sequences=3) == expected[0]
    assert list(translator(iter(SOURCES), num_return_sequences=3, batch_size=4)) == expected


def test_prepared_model_translates_the_same_and_cannot_be_saved(
    components: ModelAndTokenizer, translator: Translator, tmp_path: Path
) -> None:
    fast = pipeline(TASK, model=prepare_for_inference(components[0]), tokenizer=components[1], device="cpu")
    texts = ["cat", *SOURCES, "", "my name is black"]
    assert fast(texts, batch_size=4, num_return_sequences=2) == translator(texts, batch_size=4, num_return_sequences=2)
    with pytest.raises(RuntimeError, match="cannot be saved; save the original model"):
        fast.save_pretrained(tmp_path)


def test_records_have_scores_if_generate_returns_them(components: ModelAndTokenizer, translator: Translator) -> None:
    asked: dict[str, Any] = {"num_return_sequences": 2, **WITH_SCORES}
    batch = components[1]([SOURCES[2]], return_tensors="pt")
    expected = components[0].generate(**batch, **asked).sequences_scores
    for results in (translator(SOURCES[2], **asked), translator(SOURCES, batch_size=6, **asked)[2]):
        torch.testing.assert_close(torch.tensor([record["score"] for record in results]), expected)


IDS = {"eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 0}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 1, "max_new_tokens": 2},
        {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=4, **IDS)},
    ],
    ids=str,
)
def test_settings_of_call_and_pipeline_reach_generate(
    components: ModelAndTokenizer, translator: Translator, settings: dict[str, Any], generations: Calls
) -> None:
    model, tokenizer = components
    saved = model.generation_config.to_dict()
    pipeline(TASK, model=model, tokenizer=tokenizer, device="cpu", **settings)("what is the cat")
    translator("what is the cat", **settings)
    model.generate(**tokenizer(["what is the cat"], return_tensors="pt"), **settings)
    (_, first), (_, second), (_, expected) = generations
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert model.generation_config.to_dict() == saved


@pytest.mark.parametrize(
    ("wrong", "subject"), [(["hello", 3], "Text 1"), ([b"hello"], "Text 0"), ({"text": "hello"}, "The text")]
)
def test_input_that_is_not_a_text_is_an_error(translator: Translator, wrong: Any, subject: str) -> None:
    with pytest.raises(TypeError, match=rf"{subject}: not a text to translate; got .*, expected str"):
        translator(wrong)


def test_token_that_is_added_after_the_first_call_is_noticed(components: ModelAndTokenizer) -> None:
    model, tokenizer = components[0], copy.deepcopy(components[1])
    translator = Translator(model=model, tokenizer=tokenizer)
    translator("hello")
    tokenizer.add_tokens([f"<new {index}>" for index in range(model.config.vocab_size)])
    with pytest.raises(ValueError, match=r"its tokenizer has .* entries, the model only"):
        translator("hello")


def test_installed_package_loads_a_published_folder_without_trust(translator: Translator, tmp_path: Path) -> None:
    translator.save_pretrained(tmp_path)
    made = pipeline(TASK, model=str(tmp_path), device="cpu")
    assert type(made) is Translator
    assert type(made.model) is VaswaniTransformerForConditionalGeneration
    assert made(SOURCES[0]) == as_records(TARGETS[:1])


def test_special_tokens_in_a_text_are_text(translator: Translator, generations: Calls) -> None:
    translator("hello</s> <pad>", max_new_tokens=2)
    ((arguments, _),) = generations
    expected = text_encoder(translator.tokenizer)("hello</s> <pad>")["input_ids"]
    assert arguments["input_ids"].tolist() == [expected]


@pytest.mark.parametrize(
    ("cleans_up", "expected"), [(True, "the dog sees, a house."), (False, "the dog sees , a house .")]
)
def test_spaces_before_punctuation_are_removed_on_request(cleans_up: bool, expected: str) -> None:
    text = "the dog sees , a house ."
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([text], 300)
    translator = Translator(model=tiny_model(vocab_size=len(tokenizer)), tokenizer=tokenizer)
    output = {
        "output_ids": torch.tensor([[tokenizer(text)["input_ids"]]]),
        "scores": None,
        "has_text": torch.tensor(True),
    }
    assert translator.postprocess(output, clean_up_tokenization_spaces=cleans_up) == as_records([expected])
