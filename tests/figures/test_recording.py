"""The steps of a search: against `generate()`, the model's own probabilities, and a search written as plain lists."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import FLOAT32
from tests.models import WITH_SCORES, family_of_pairs, model_of_pairs, small_model
from vaswani_transformer import prepare_for_inference
from vaswani_transformer.figures.recording import Candidate, best_finished, record_search, recorded_beams
from vaswani_transformer.translation.translator import token_log_probabilities

END = 2


def recorded(model: Any, **settings: Any) -> list[list[Candidate]]:
    """Return the steps of a search for the source of words 4 and 5."""
    inputs = {"input_ids": torch.tensor([[4, 5, 2]]), "attention_mask": torch.ones(1, 3), **settings}
    return recorded_beams(model, inputs).steps


def approximately(expected: Any) -> Any:
    return pytest.approx(expected, rel=FLOAT32["rtol"], abs=FLOAT32["atol"])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("prepares", [False, True])
def test_best_target_that_ended_is_what_generate_returns(seed: int, beams: int, prepares: bool) -> None:
    model = small_model(seed, vocab_size=40)
    model = prepare_for_inference(model) if prepares else model
    settings: dict[str, Any] = {"num_beams": beams, "num_return_sequences": beams, "max_new_tokens": 7}
    ended = best_finished(recorded(model, **settings))
    output = model.generate(torch.tensor([[4, 5, 2]]), **settings, **WITH_SCORES)
    sequences = [[token for token in row[1:] if token != 1] for row in output.sequences.tolist()]
    assert [list(each.tokens) for each in ended[:beams]] == sequences
    if beams > 1:
        assert [each.score for each in ended[:beams]] == approximately(output.sequences_scores.tolist())


@pytest.mark.parametrize("beams", [1, 3])
def test_log_p_is_the_sum_over_the_tokens_and_lp_that_of_the_paper(beams: int) -> None:
    model = small_model(1, vocab_size=40)
    steps = recorded(model, num_beams=beams, length_penalty=0.6, max_new_tokens=6)
    for candidate in (each for step in steps for each in step):
        labels = torch.tensor([candidate.tokens])
        mask = torch.ones(1, 3, dtype=torch.long)
        expected = token_log_probabilities(model, torch.tensor([[4, 5, 2]]), mask, labels).sum(1)
        assert candidate.log_prob == approximately(float(expected))
        assert candidate.length_penalty == approximately(((5 + len(candidate.tokens)) / 6) ** 0.6)


def plain_beams(model: Any, tokens: Tensor, k: int, steps: int) -> list[tuple[list[float], list[float]]]:
    """Return log P after each step: of those of the k best continuations that end, and of the k best that do not."""
    beams, results = [([0], 0.0)], []
    for _ in range(steps):
        every = []
        for beam, total in beams:
            logits = model(input_ids=tokens, decoder_input_ids=torch.tensor([beam])).logits[0, -1]
            log_probs = logits.log_softmax(-1).tolist()
            every += [([*beam, token], total + log_probs[token]) for token in range(len(log_probs))]
        every.sort(key=lambda pair: -pair[1])
        beams = [pair for pair in every if pair[0][-1] != END][:k]
        ended = [total for target, total in every[:k] if target[-1] == END]
        results.append((ended, [total for _, total in beams]))
    return results


@pytest.mark.parametrize("seed", [0, 1, 16])  # in 16 a target ends as the fourth best of three
def test_every_step_is_that_of_a_plain_search(seed: int) -> None:
    model, k = small_model(seed, vocab_size=40), 3
    before_limit = recorded(model, num_beams=k, max_new_tokens=5)[:4]
    plain_steps = plain_beams(model, torch.tensor([[4, 5, 2]]), k, len(before_limit))
    for step, expected in zip(before_limit, plain_steps, strict=True):
        for is_finished, values in zip((True, False), expected, strict=True):
            found = [each.log_prob for each in step if each.is_kept and each.is_finished == is_finished]
            assert found == approximately(values)
        assert sum(not each.is_kept for each in step) == 1


@pytest.mark.parametrize(("family", "passes"), [("nat", 1), ("iterative_vae", 2), ("flowseq", 1), ("cmlm", 3)])
def test_history_has_every_pass_and_ends_in_the_output(family: str, passes: int) -> None:
    model, tokenizer = family_of_pairs(family)
    settings: dict[str, Any] = {"length_beam_size": 3} | ({"num_iterations": 3} if family == "cmlm" else {})
    batch = tokenizer(["hello world"], return_tensors="pt")
    expected = model.generate(**batch, **settings)[0, 1:].tolist()
    target, data = record_search(model, tokenizer, "hello world", **settings)
    assert target == tokenizer.decode(expected, skip_special_tokens=True)
    assert [len(each["tokens"]) for each in data["passes"]] == passes * [len(expected)]
    assert data["passes"][-1]["tokens"] == expected
    assert data["passes"][-1]["text"] == target
    assert data["name"] == {"cmlm": "iteration", "iterative_vae": "layer"}.get(family, "pass")


@pytest.mark.parametrize("beams", [1, 4])
def test_candidate_continues_the_one_that_it_names(beams: int) -> None:
    model, tokenizer = model_of_pairs()
    target, data = record_search(model, tokenizer, "the cat is black", num_beams=beams)
    assert (target, data["start"]) == ("el gato es negro", "<s>")
    before = [{"text": ""}]
    for step in data["steps"]:
        for candidate in step:
            parent = before[max(0, candidate["parent"])]
            assert candidate["text"].replace("\ufffd", "").startswith(parent["text"].replace("\ufffd", "").rstrip())
        assert sum(not candidate["isKept"] for candidate in step) <= 1
        before = step
    assert {candidate["parent"] for candidate in data["steps"][0]} == {-1}


@pytest.mark.parametrize("beams", [1, 4])
def test_search_from_a_longer_prompt_shows_the_prompt_and_continues_it(beams: int) -> None:
    model, tokenizer = model_of_pairs()
    prompt = [0, *tokenizer("el gato", add_special_tokens=False).input_ids]
    prompt_ids = torch.tensor([prompt])
    target, data = record_search(model, tokenizer, "the cat is black", num_beams=beams, decoder_input_ids=prompt_ids)
    expected = model.generate(
        **tokenizer("the cat is black", return_tensors="pt"), num_beams=beams, decoder_input_ids=prompt_ids
    )
    assert target == tokenizer.decode(expected[0], skip_special_tokens=True)
    assert data["start"].startswith("<s> el")
    assert all(candidate["text"].startswith("el gato") for step in data["steps"] for candidate in step)
