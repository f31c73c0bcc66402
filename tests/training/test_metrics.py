"""BLEU behind evaluate's metric classes."""

import math

import evaluate
import pytest

from training.metrics import SacreBleu, bleu


def test_bleu_is_one_of_evaluates_metrics():
    assert isinstance(SacreBleu(keep_in_memory=True), evaluate.Metric)


def test_bleu_equals_its_definition():
    """Papineni et al. 2002 by hand: precisions 5/6, 3/5, 2/4, 1/3 and no brevity penalty."""
    score = bleu(["the cat sat on a mat"], ["the cat sat on the mat"], tokenize="none")
    assert score["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_a_translation_that_is_too_short_pays_for_it():
    score = bleu(["a b c d"], ["a b c d e"], tokenize="none")
    assert score["bleu"] == pytest.approx(100 * math.exp(1 - 5 / 4))
    assert score["brevity_penalty"] == pytest.approx(math.exp(-1 / 4))


def test_the_signature_names_the_tokeniser():
    assert "tok:13a" in bleu(["a b c d"], ["a b c d"])["signature"]
    assert "tok:none" in bleu(["a b c d"], ["a b c d"], tokenize="none")["signature"]
