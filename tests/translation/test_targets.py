"""Given targets get the log-probabilities of the loss in evaluation mode, whatever their batch."""

from typing import Any

import pytest
import torch

from tests.models import (
    EVERY_FAMILY,
    LENGTH_FAMILY,
    SLOT_FAMILY,
    SOURCES,
    TARGETS,
    family_of_pairs,
    model_of_pairs,
    tiny_marian,
)
from vaswani_transformer import prepare_for_inference, score_targets, translate
from vaswani_transformer.translation.translator import TooLongError

VARIANTS = [*EVERY_FAMILY, "discrete"]


def family(name: str, **fields: Any) -> tuple[Any, Any]:
    if name == "discrete":
        return family_of_pairs("iterative_vae", latent="discrete", **fields)
    return family_of_pairs(name, **fields)


def evaluation_loss(model: Any, tokenizer: Any, source: str, target: str) -> tuple[float, int]:
    """Return the loss of a pair by the model's own `forward`, and the number of tokens that divided it."""
    batch = tokenizer([source], text_target=[target], return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**batch).loss.item(), batch["labels"].shape[1]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("batch_tokens", [1, 40, 2048])
def test_log_probability_is_the_negative_loss_in_evaluation_mode(name: str, batch_tokens: int) -> None:
    model, tokenizer = family(name)
    model.train()
    sources, targets = [*SOURCES, "cat"], [*TARGETS, "gato"]
    scores = list(score_targets(model, tokenizer, sources, targets, batch_tokens=batch_tokens, window=4))
    assert model.training
    for source, target, score in zip(sources, targets, scores, strict=True):
        loss, count = evaluation_loss(model, tokenizer, source, target)
        assert score.log_probability / count == pytest.approx(-loss, abs=1e-4)
        assert tokenizer.convert_tokens_to_ids(score.tokens) == tokenizer(target)["input_ids"]
        assert (score.length_log_probability is not None) == (name in (*LENGTH_FAMILY, "discrete"))
        assert (score.estimated_log_probability is not None) == (name == "flowseq")
        if name in SLOT_FAMILY:
            assert score.token_log_probabilities is None
        else:
            assert score.token_log_probabilities is not None
            assert len(score.token_log_probabilities) == count
            total = sum(score.token_log_probabilities) + (score.length_log_probability or 0)
            assert score.log_probability == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_prepared_model_gives_the_same_scores(name: str) -> None:
    model, tokenizer = family(name)
    prepared = prepare_for_inference(model)
    expected = [score.log_probability for score in score_targets(model, tokenizer, SOURCES, TARGETS)]
    actual = [score.log_probability for score in score_targets(prepared, tokenizer, SOURCES, TARGETS)]
    assert actual == pytest.approx(expected, rel=1e-4)


def test_weight_of_the_length_loss_changes_no_log_probability() -> None:
    model, tokenizer = family("nat")
    expected = [score.log_probability for score in score_targets(model, tokenizer, SOURCES, TARGETS)]
    model.config.length_loss_weight = 0.1
    assert [score.log_probability for score in score_targets(model, tokenizer, SOURCES, TARGETS)] == expected


def test_own_translation_has_the_score_of_the_search() -> None:
    model, tokenizer = model_of_pairs()
    search: dict[str, Any] = {"scores": True, "length_penalty": 0.0}
    for source, translation in zip(SOURCES, translate(model, tokenizer, SOURCES, **search), strict=True):
        (score,) = score_targets(model, tokenizer, [source], [translation.text])
        assert score.log_probability == pytest.approx(translation.hypotheses[0].score, abs=1e-4)


def test_trained_model_prefers_the_right_target_to_a_wrong_one() -> None:
    wrong = [*TARGETS[1:], TARGETS[0]]
    right, other = (list(score_targets(*model_of_pairs(), SOURCES, targets)) for targets in (TARGETS, wrong))
    assert all(best.log_probability > worse.log_probability for best, worse in zip(right, other, strict=True))


@pytest.mark.parametrize("name", SLOT_FAMILY)
def test_target_that_does_not_fit_has_no_probability(name: str) -> None:
    (score,) = score_targets(*family(name), ["cat"], ["gato " * 50])
    assert score.log_probability == -float("inf")


def test_estimate_of_flowseq_is_the_same_at_each_call_and_leaves_the_generator_alone() -> None:
    model, tokenizer = family("flowseq")
    first = list(score_targets(model, tokenizer, SOURCES, TARGETS))
    state = torch.get_rng_state()
    assert list(score_targets(model, tokenizer, SOURCES, TARGETS)) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.tensor(score.estimated_log_probability).isfinite() for score in first)


def test_empty_texts_are_scored_as_their_end() -> None:
    model, tokenizer = model_of_pairs()
    scores = list(score_targets(model, tokenizer, ["", "cat"], ["", ""]))
    assert [score.tokens for score in scores] == [["</s>"]] * 2
    loss, _ = evaluation_loss(model, tokenizer, "cat", "")
    assert scores[1].log_probability == pytest.approx(-loss, abs=1e-4)


def test_model_of_another_architecture_is_scored_too() -> None:
    _, tokenizer = model_of_pairs()
    model = tiny_marian(vocab_size=len(tokenizer), max_position_embeddings=40)
    scores = score_targets(model, tokenizer, SOURCES, TARGETS)
    for source, target, score in zip(SOURCES, TARGETS, scores, strict=True):
        loss, count = evaluation_loss(model, tokenizer, source, target)
        assert score.log_probability / count == pytest.approx(-loss, abs=1e-4)


def test_long_source_is_truncated_and_a_target_beyond_the_positions_is_an_error() -> None:
    model, tokenizer = family("autoregressive", position_embedding="learned", max_position_embeddings=20)
    (score,) = score_targets(model, tokenizer, ["hello " * 30], ["hola"])
    assert (score.is_truncated, score.max_source_tokens) == (True, 20)
    with pytest.raises(TooLongError):
        list(score_targets(model, tokenizer, ["hello " * 30], ["hola"], too_long="error"))
    with pytest.raises(
        ValueError, match=r"Target 2 \(the first is 1\): too long for the model's learned positions; got"
    ):
        list(score_targets(model, tokenizer, ["cat", "cat"], ["gato", "gato " * 30]))


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        (["a", "b"], ["c"], "targets: not as many texts as in sources; got 1, expected one for each"),
        (["a"], ["c", "d"], "targets: not as many texts as in sources; got more than 1, expected one for each"),
        (["a"], "c", "targets is the str 'c'; pass a list"),
        (["a"], [None], "Target 0: not a text"),
    ],
)
def test_targets_that_do_not_fit_the_sources_are_an_error(sources: Any, targets: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        list(score_targets(*model_of_pairs(), sources, targets))


def test_model_without_a_likelihood_of_words_and_length_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = family("ctc")
    monkeypatch.setattr(type(model), "has_likelihood", False)
    with pytest.raises(ValueError, match=r"model: has no likelihood of a target; got a Vaswani.* Use another model\."):
        score_targets(model, tokenizer, ["a"], ["b"])
