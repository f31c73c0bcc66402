"""The paper's beam search inside generate(): its scores, its limits and its stop (6.1)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import GenerationMixin

from tests.builders import plain_search, small_model, source
from tests.ending_models import ending_model, sources
from tests.helpers import FLOAT32, WITH_SCORES, padded_batch
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer import search as search_module
from vaswani_transformer.pretrained import CACHE
from vaswani_transformer.search import SearchSettings, SearchState, length_penalty, score_bound

START, END = 0, 2


def best_of_all(
    model: VaswaniTransformerForConditionalGeneration, input_ids: Tensor, limit: int, alpha: float, penalty: str
) -> tuple[float, list[int]]:
    """Score every target of at most `limit` new tokens by log P(Y | X) / lp(Y); return the best score and target."""
    best = (-float("inf"), [])
    open_targets = [([START], 0.0)]
    while open_targets:
        prefixes = torch.tensor([tokens for tokens, _ in open_targets])
        with torch.no_grad():
            logits = model(input_ids=input_ids.expand(len(prefixes), -1), decoder_input_ids=prefixes).logits
        log_probs = logits[:, -1].log_softmax(-1).tolist()
        longer = []
        for (tokens, score), row in zip(open_targets, log_probs, strict=True):
            for token, log_prob in enumerate(row):
                target, total = [*tokens, token], score + log_prob
                if token == END or len(target) - 1 == limit:
                    length = len(target) - 1
                    best = max(best, (total / (length if penalty == "power" else (5 + length) / 6) ** alpha, target))
                else:
                    longer.append((target, total))
        open_targets = longer
    return best


@pytest.mark.parametrize(
    ("vocab_size", "beams", "alpha", "limit", "penalty"),
    [
        *[(6, 125, alpha, 4, "gnmt") for alpha in (0.0, 0.6, 2.0, -1.0)],
        (5, 21, 0.3, 3, "gnmt"),
        *[(5, 21, alpha, 3, "power") for alpha in (0.0, 1.0)],
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(6))
def test_beam_as_wide_as_the_language_finds_the_best_of_all_targets(
    seed: int, vocab_size: int, beams: int, alpha: float, limit: int, penalty: str
) -> None:
    """Before the last step 5^3 targets are open, or 4^2 with the beam of the parsing experiments (6.3)."""
    model = small_model(seed, vocab_size=vocab_size)
    input_ids = source(3 + seed % (vocab_size - 3))
    score, target = best_of_all(model, input_ids, limit, alpha, penalty)
    generated = model.generate(
        input_ids,
        num_beams=beams,
        length_penalty=alpha,
        length_penalty_type=penalty,
        early_stopping="never",
        max_source_relative_length=limit - 2,
        **WITH_SCORES,
    )
    assert generated.sequences[0].tolist()[: len(target)] == target
    assert generated.sequences_scores[0].item() == pytest.approx(score, abs=1e-4)


@pytest.mark.slow
def test_parsing_search_ends_at_source_length_plus_300_with_the_true_score(tmp_path: Path) -> None:
    """The settings (6.3) are saved and loaded; without an end token every target reaches the limit."""
    model = small_model(0)
    model.generation_config.update(num_beams=21, length_penalty=0.3, max_source_relative_length=300)
    model.save_pretrained(tmp_path)
    model = VaswaniTransformerForConditionalGeneration.from_pretrained(tmp_path)
    generated = model.generate(source(3, 4), num_return_sequences=21, suppress_tokens=[1, END], **WITH_SCORES)
    assert generated.sequences.shape == (21, 1 + 3 + 300)
    for sequence, score in zip(generated.sequences[::10], generated.sequences_scores[::10], strict=True):
        with torch.no_grad():
            logits = model(input_ids=source(3, 4), decoder_input_ids=sequence[None, :-1]).logits[0]
        total = logits.log_softmax(-1).gather(1, sequence[1:, None]).sum()
        torch.testing.assert_close(score, total / ((5 + 303) / 6) ** 0.3, rtol=1e-4, atol=1e-3)  # a sum of 303


def test_length_penalty_is_lp_of_wu_et_al() -> None:
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(7, 1.0) == 2.0
    assert length_penalty(19, 0.5) == 2.0


@pytest.mark.parametrize(
    ("alpha", "penalty", "early_stopping", "length"),
    [
        (0.6, "gnmt", False, 9),
        (0.6, "gnmt", "never", 9),
        (-0.6, "gnmt", False, 5),
        (0.6, "power", "never", 9),
        (0.6, "power", False, 4),
        (-0.6, "power", "never", 4),
    ],
)
def test_bound_of_an_open_beam_is_its_score_at_the_length_that_is_best_for_it(
    alpha: float, penalty: str, early_stopping: bool | str, length: int
) -> None:
    """Four of nine tokens are there. Under "power" the length is that of Transformers' estimate."""
    search = SearchSettings(
        limits=torch.tensor([9]),
        end_tokens=torch.tensor([END]),
        pad_token=1,
        num_beams=2,
        alpha=alpha,
        length_penalty_type=penalty,
        early_stopping=early_stopping,
    )
    state = SearchState.start(torch.zeros(2, 1, dtype=torch.long), search)
    state.scores = torch.tensor([[-3.0, -4.0]])
    expected = -3.0 / length_penalty(length, alpha, penalty)
    assert score_bound(state, 4, search).item() == pytest.approx(expected)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("pad", [0, 1])
def test_every_sentence_of_a_batch_has_its_own_limit(pad: int, num_beams: int) -> None:
    """Without an end token every target reaches its limit, the length of its source plus two."""
    model = small_model(0, pad_token_id=pad, bos_token_id=1 - pad)
    input_ids, mask = padded_batch([3, 5, 1])
    options: dict[str, Any] = {"num_beams": num_beams, "max_source_relative_length": 2, "suppress_tokens": [0, 1, END]}
    generated = model.generate((input_ids % 3 + 3).masked_fill(mask == 0, pad), attention_mask=mask, **options)
    assert (generated[:, 1:] != pad).sum(1).tolist() == [5, 7, 3]


@pytest.mark.parametrize("seed", range(4))
def test_beams_of_a_sentence_are_the_same_in_a_batch_and_by_itself(seed: int) -> None:
    model = small_model(seed, vocab_size=12).double()
    batch = sources([4, 2, 6], vocab_size=12)
    options: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 4, "max_source_relative_length": 3} | WITH_SCORES
    together = model.generate(**batch, **options)
    for row, length in enumerate([4, 2, 6]):
        single = model.generate(batch["input_ids"][row : row + 1, :length], **options)
        of_the_row = together.sequences[4 * row : 4 * row + 4]
        width = single.sequences.shape[1]
        assert torch.equal(of_the_row[:, :width], single.sequences)
        assert (of_the_row[:, width:] == 1).all()
        torch.testing.assert_close(together.sequences_scores[4 * row : 4 * row + 4], single.sequences_scores, **FLOAT32)


@pytest.mark.parametrize("seed", range(6))
def test_scores_equal_those_computed_from_the_logits(seed: int) -> None:
    model = small_model(seed, vocab_size=9)
    generated = model.generate(source(4, 5), num_return_sequences=3, max_source_relative_length=4, **WITH_SCORES)
    for sequence, score in zip(generated.sequences, generated.sequences_scores, strict=True):
        tokens = sequence.tolist()
        target = sequence[: tokens.index(END) + 1 if END in tokens else 8]  # the limit: three source tokens and four
        with torch.no_grad():
            log_probs = model(input_ids=source(4, 5), decoder_input_ids=target[None, :-1]).logits[0].log_softmax(-1)
        total = log_probs.gather(1, target[1:, None]).sum()
        torch.testing.assert_close(score, total / length_penalty(len(target) - 1, 0.6), **FLOAT32)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(0, 10_000), st.sampled_from([-0.5, 0.0, 0.3, 0.6, 1.0, 1.5]), st.integers(2, 4), st.data())
def test_stop_never_changes_the_result(seed: int, alpha: float, num_beams: int, data: st.DataObject) -> None:
    """Each example searches for twenty sources at once, 3,000 in all, and again until no open beam has tokens left."""
    model = small_model(seed, vocab_size=8)
    returned = data.draw(st.integers(1, num_beams))
    options: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": returned, "length_penalty": alpha}
    options |= {"early_stopping": data.draw(st.sampled_from([False, "never"])), "max_source_relative_length": 4}
    inputs = torch.randint(3, 8, (20, 4))
    stopped = model.generate(inputs, **options, **WITH_SCORES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "can_improve", lambda state, *_: torch.ones_like(state.is_active))
        exhausted = model.generate(inputs, **options, **WITH_SCORES)
    torch.testing.assert_close(stopped.sequences_scores, exhausted.sequences_scores, **FLOAT32)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10_000),
    alpha=st.sampled_from([-1.0, 0.0, 0.7, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    num_beams=st.integers(2, 5),
    new_tokens=st.integers(1, 12),
    data=st.data(),
)
def test_search_under_power_equals_transformers_own(
    seed: int,
    alpha: float,
    early_stopping: bool | str,
    lengths: list[int],
    num_beams: int,
    new_tokens: int,
    data: st.DataObject,
) -> None:
    """Token for token in float64 by its shortcuts, and score for score of the loop that returns them."""
    model = ending_model(seed, vocab_size=97)
    plain = plain_search(model)
    assert type(plain)._beam_search is GenerationMixin._beam_search
    returned = data.draw(st.integers(1, num_beams))
    options: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": returned, **sources(lengths)}
    options |= {"length_penalty": alpha, "early_stopping": early_stopping, "max_new_tokens": new_tokens}
    options |= {"eos_token_id": data.draw(st.sampled_from([[END], [END, *range(40, 70)]]))}
    theirs = plain.generate(**options, **WITH_SCORES)
    assert torch.equal(model.generate(**options, length_penalty_type="power"), theirs.sequences)
    ours = model.generate(**options, **WITH_SCORES, length_penalty_type="power")
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours.beam_indices, theirs.beam_indices)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, **FLOAT32)


@pytest.mark.parametrize("seed", range(4))
def test_search_with_more_end_tokens_than_others_equals_transformers_own(seed: int) -> None:
    """Nine of twelve tokens end a target, and long targets score best, so beams must continue by less likely tokens."""
    model = small_model(seed, vocab_size=12).double()
    options: dict[str, Any] = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 6} | WITH_SCORES
    options |= {"length_penalty": 2.0, "early_stopping": "never", "eos_token_id": list(range(END, 11))}
    ours = model.generate(source(3, 4), length_penalty_type="power", **options)
    theirs = plain_search(model).generate(source(3, 4), **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, **FLOAT32)


@pytest.mark.parametrize("name", ["output_logits", "output_attentions", "output_hidden_states"])
def test_outputs_of_every_step_are_those_of_transformers_own_search(name: str) -> None:
    model = small_model(0, vocab_size=12).double()
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 4, "return_dict_in_generate": True, name: True}
    ours = model.generate(source(3, 4), length_penalty_type="power", **options)
    theirs = plain_search(model).generate(source(3, 4), **options)
    assert ours.keys() == theirs.keys()
    for key in ours.keys() - {CACHE}:
        torch.testing.assert_close(ours[key], theirs[key], check_dtype=False, **FLOAT32)


@pytest.mark.parametrize("seed", range(8))
def test_early_stopping_ends_at_as_many_finished_targets_as_beams(seed: int) -> None:
    """It may miss the best target, but never returns a better score than the full search."""
    model = small_model(seed, vocab_size=8)
    options: dict[str, Any] = {"max_source_relative_length": 6} | WITH_SCORES
    early = model.generate(source(4, 5, 6), early_stopping=True, **options)
    late = model.generate(source(4, 5, 6), early_stopping=False, **options)
    assert len(early.scores) <= len(late.scores)
    assert early.sequences_scores[0] <= late.sequences_scores[0] + 1e-5


def test_limit_holds_for_every_way_of_calling_generate() -> None:
    model = small_model(0)
    input_ids, mask = torch.tensor([[3, 4, END, 1, 1]]), torch.tensor([[1, 1, 1, 0, 0]])
    options: dict[str, Any] = {"max_source_relative_length": 2, "suppress_tokens": [1, END], "num_beams": 1}
    encoded = model.get_encoder()(input_ids, attention_mask=mask).to_tuple()
    for way in ({"input_ids": input_ids, "prompt_lookup_num_tokens": 2}, {"encoder_outputs": encoded}):
        assert model.generate(attention_mask=mask, **options, **way).shape[1] - 1 == 5


@pytest.mark.parametrize("starts", [True, False])
def test_prompt_without_the_start_token_gets_it_and_counts_it(starts: bool) -> None:
    """Transformers puts it before such a prompt; the limit counts new tokens only."""
    model, prompt = small_model(0), torch.tensor([[START, 3, 4] if starts else [3, 4]])
    generated = model.generate(
        source(3), decoder_input_ids=prompt, max_source_relative_length=1, suppress_tokens=[1, END]
    )
    assert generated.shape == (1, 3 + 2 + 1)
