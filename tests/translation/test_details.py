"""Details of translations: each token has its log-probability, and each word its word of the source."""

from itertools import accumulate
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import alignments
from tests import ROOT
from tests.models import FAMILY, SOURCES, TARGETS, family_of_pairs, model_of_pairs, paper_model_of_pairs, tiny_marian
from vaswani_transformer import VaswaniTransformerTokenizer, prepare_for_inference, score_targets, translate
from vaswani_transformer.tokenizer import source_encoder
from vaswani_transformer.translation import Details
from vaswani_transformer.translation.details import NO_WORD, align, special_ids, words_of_source, words_of_tokens


def tokenizer_of_words(algorithm: str) -> VaswaniTransformerTokenizer:
    texts = [*SOURCES, *TARGETS, "naïve — (so-called) cats"]
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(texts, 400, algorithm)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.add_tokens(["<2es>"], special_tokens=True)
    return tokenizer


TOKENIZERS = {algorithm: tokenizer_of_words(algorithm) for algorithm in ("bpe", "wordpiece")}
WORDS = ["cat", "so-called", "naïve", "雪", "—", "(the", "house!)", "</s>", "§", "<2es>"]


@pytest.mark.parametrize("algorithm", TOKENIZERS)
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=4))
def test_each_token_belongs_to_a_word_between_spaces_of_the_text(algorithm: str, words: list[str]) -> None:
    tokenizer = TOKENIZERS[algorithm]
    text = " ".join(words)
    ids = source_encoder(tokenizer)(text)["input_ids"]
    *indices, end = words_of_source(tokenizer, text, ids)
    assert end == NO_WORD
    assert {*indices} - {NO_WORD} == {*range(len(words))}
    if tokenizer.unk_token_id not in ids:
        for number, word in enumerate(words):
            tokens = [index for index, each in zip(ids, indices, strict=False) if each == number]
            assert cast(str, tokenizer.decode(tokens)).strip() == word
        decoded = words_of_tokens(tokenizer, ids, [tokenizer.eos_token_id])  # a space counts to the word before it
        assert list(accumulate(decoded, max)) == list(accumulate([*indices, end], max))


def test_special_tokens_that_the_text_does_not_show_belong_to_no_word() -> None:
    tokenizer = TOKENIZERS["bpe"]
    ids = tokenizer("<2es> the")["input_ids"]
    assert words_of_source(tokenizer, "<2es> the", ids)[0] == 0
    words = words_of_tokens(tokenizer, ids, special_ids(tokenizer))
    assert (words[0], words[-2], words[-1]) == (NO_WORD, 0, NO_WORD)


def test_end_of_a_truncated_text_belongs_to_no_word() -> None:
    tokenizer = TOKENIZERS["bpe"]
    *ids, end = tokenizer("the cat sat")["input_ids"]
    words = words_of_source(tokenizer, "the cat sat", ids)
    assert words_of_source(tokenizer, "the cat sat", [*ids[:-2], end]) == [*words[:-2], NO_WORD]


def test_word_is_aligned_with_the_word_that_gets_most_attention_over_all_tokens_of_both() -> None:
    weights = [
        [0.4, 0.3, 0.2, 0.0, 0.1],
        [0.1, 0.2, 0.3, 0.0, 0.4],
        [0.0, 0.0, 0.1, 0.2, 0.7],
        [1.0, 0.0, 0.0, 0.0, 0.0],
    ]
    source, target = [0, 1, 1, 2, NO_WORD], [0, 0, 1, NO_WORD]
    assert align(torch.tensor(weights), source, target) == [(1, 0), (2, 1)]
    assert align(torch.tensor(weights), [NO_WORD] * 5, target) == []
    assert align(torch.tensor(weights), source, [NO_WORD] * 4) == []
    assert Details([], [], [(1, 0), (2, 1)]).pharaoh == "1-0 2-1"


def test_details_have_the_scores_of_the_tokens_and_a_link_of_each_target_word() -> None:
    model, tokenizer = paper_model_of_pairs()
    search: dict[str, Any] = {"num_return_sequences": 2, "batch_tokens": 60, "alignment_layer": 1}
    for translation in translate(prepare_for_inference(model), tokenizer, SOURCES, details_from=model, **search):
        assert translation.details is translation.hypotheses[0].details
        (score,) = score_targets(model, tokenizer, [translation.source], [translation.text])
        details = translation.details
        assert details is not None
        assert details.tokens == score.tokens
        assert details.token_log_probabilities == pytest.approx(score.token_log_probabilities, abs=1e-4)
        for hypothesis in translation.hypotheses:
            assert hypothesis.details is not None
            sources, targets = zip(*hypothesis.details.alignment, strict=True)
            assert len(hypothesis.details.tokens) == hypothesis.tokens
            assert sorted(targets) == [*range(len(hypothesis.text.split()))]
            assert max(sources) < len(translation.source.split())


def test_text_of_white_space_has_empty_details_and_a_translation_without_the_option_none() -> None:
    model, tokenizer = model_of_pairs()
    (translation,) = translate(model, tokenizer, [" "], details_from=model)
    assert translation.details == Details([], [], [])
    (translation,) = translate(model, tokenizer, [SOURCES[0]])
    assert translation.details is None


def test_model_of_another_architecture_has_details_too() -> None:
    _, tokenizer = model_of_pairs()
    model = tiny_marian(vocab_size=len(tokenizer), max_position_embeddings=60)
    search: dict[str, Any] = {"num_beams": 1, "max_new_tokens": 9}
    for translation in translate(model, tokenizer, SOURCES, details_from=model, **search):
        assert translation.details is not None
        assert len(translation.details.tokens) == translation.hypotheses[0].tokens


@pytest.mark.parametrize("family", FAMILY)
def test_model_that_predicts_all_words_at_once_has_no_details(family: str) -> None:
    model, tokenizer = family_of_pairs(family)
    with pytest.raises(ValueError, match=r"details_from: not supported by the model; got a Vaswani.* Leave it out\."):
        translate(model, tokenizer, ["cat"], details_from=model)


@pytest.mark.parametrize("layer", [0, 3])
def test_layer_that_the_model_lacks_is_an_error(layer: int) -> None:
    model, tokenizer = model_of_pairs()
    message = f"alignment_layer: not one of the model's decoder layers; got {layer}, expected 1 to 2"
    with pytest.raises(ValueError, match=message):
        list(translate(model, tokenizer, ["cat"], details_from=model, alignment_layer=layer))


@pytest.mark.slow
def test_last_layer_of_the_trained_model_aligns_best(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    alignments.main(["models/tatoeba-en-de", "tests/translation/alignments.jsonl"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rates = [float(rate) for _, _, rate, _ in rows[2:]]
    assert len(rates) == 3
    assert rates[2] < 0.3 < min(rates[:2])
