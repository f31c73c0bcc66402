"""BLEU and chrF, and the BLEU of the literature."""

import math

import pytest
import sacremoses

from training.tasks.metrics import bleu, chrf, split_compounds, tokenized_bleu


def test_bleu_equals_its_definition() -> None:
    """Papineni et al. 2002 by hand: precisions 5/6, 3/5, 2/4, 1/3 and no brevity penalty."""
    score = bleu(["the cat sat on a mat"], ["the cat sat on the mat"], tokenize="none")
    assert score["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_bleu_penalizes_a_translation_that_is_too_short() -> None:
    score = bleu(["a b c d"], ["a b c d e"], tokenize="none")
    assert score["bleu"] == pytest.approx(100 * math.exp(1 - 5 / 4))
    assert score["brevity_penalty"] == pytest.approx(math.exp(-1 / 4))


def test_signature_names_the_tokenizer() -> None:
    assert "tok:13a" in bleu(["a b c d"], ["a b c d"])["signature"]
    assert "tok:none" in bleu(["a b c d"], ["a b c d"], tokenize="none")["signature"]


def test_chrf_equals_its_definition() -> None:
    """Popovic 2015 by hand, up to trigrams of characters in "abc" against "abd", which share no trigram.

    Precision and recall, equal for texts of one length, are the means 2/3, 1/2, 0 of one, two and three characters.
    """
    score = chrf(["abc"], ["abd"])
    assert score["chrf"] == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)
    assert "nc:6" in score["signature"]


def test_chrf_ignores_white_space() -> None:
    assert chrf(["a b , c"], ["a b, c"])["chrf"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rich-text format", "rich ##AT##-##AT## text format"),
        ("well-to-do", "well ##AT##-##AT## to ##AT##-##AT## do"),
        ("a-b-c", "a ##AT##-##AT## b-c"),  # as perl's s///g, which reads no letter twice
        ("1990 - 2000 -x x-", "1990 - 2000 -x x-"),
    ],
)
def test_compounds_are_split_at_hyphens_within_words(text: str, expected: str) -> None:
    assert split_compounds(text) == expected


def test_tokenized_bleu_counts_the_tokens_of_moses() -> None:
    actual = tokenized_bleu(['Er sagt, "z.B." & so.'], ["Er sagt : & so ."], "de")
    expected = bleu(["Er sagt , &quot; z.B. &quot; &amp; so ."], ["Er sagt : &amp; so ."], tokenize="none")
    assert actual["bleu"] == pytest.approx(expected["bleu"])
    assert actual["signature"] == f"{expected['signature']}|text:moses-de-sacremoses-{sacremoses.__version__}"


def test_tokenized_bleu_of_tokenized_files_counts_their_own_tokens() -> None:
    actual = tokenized_bleu(["a b, c d"], ["a b, c e"], None)
    expected = bleu(["a b, c d"], ["a b, c e"], tokenize="none")
    assert actual["bleu"] == expected["bleu"]
    assert actual["signature"].endswith("|text:tokens")


def test_splitting_compounds_raises_bleu_if_their_parts_are_right() -> None:
    """5 of 6 unigrams, 4 of 5 bigrams, 3 of 4 and 2 of 3 match, in place of 2 of 3, 1 of 2 and none."""
    pair = ["das rich-text format da"], ["das rich-text format dort"]
    split = tokenized_bleu(*pair, None, compounds=True)
    assert split["bleu"] == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    assert split["bleu"] > tokenized_bleu(*pair, None)["bleu"]
    assert split["signature"].endswith("|text:tokens|compounds:split")
