"""The paper's beam search inside `generate()` (6.1): scores, limits and stop; its shortcuts change no result."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMixin

from tests.batches import FLOAT32, Batch, padded_batch
from tests.models import WITH_SCORES, plain_search, small_model
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer import generation as generation_module
from vaswani_transformer import search as search_module
from vaswani_transformer.search import (
    SearchSettings,
    SearchState,
    can_improve,
    length_penalty,
    select_continuations,
    top_continuations,
)
from vaswani_transformer.stacks import CACHE

START, END = 0, 2


def ending_model(
    seed: int, vocab_size: int = 40, eagerness: float = 3.0, **overrides: Any
) -> VaswaniTransformerForConditionalGeneration:
    """Return a random model with a raised logit of the end token, in float64 so that rounding decides nothing."""
    model = small_model(seed, vocab_size, **overrides).double()
    norm: Any = model.model.decoder.layers[-1].feed_forward_add_norm.norm
    end = model.lm_head.weight[END]
    norm.weight.data.fill_(1.0)
    norm.bias.data += eagerness * end / end.square().sum()
    return model.requires_grad_(False)


def sources(lengths: list[int], vocab_size: int = 40) -> Batch:
    """Return random sources of these lengths, without special tokens, and their mask."""
    tokens, mask = padded_batch(lengths)
    return {"input_ids": (tokens % (vocab_size - 3) + 3).masked_fill(mask == 0, 1), "attention_mask": mask}


SOURCE = torch.tensor([[3, 4, 2]])  # two words and the end
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "sampling": {"num_beams": 1, "do_sample": True, "num_return_sequences": 2},
    "beam": {"num_beams": 3},
    "many": {"num_beams": 4, "num_return_sequences": 3},
    "full": {"num_beams": 3, "early_stopping": True},
    "power": {"num_beams": 3, "length_penalty_type": "power"},
}
BATCH = [4, 2, 6, 1, 3]


def call_arguments(way: str, **more: Any) -> Batch:
    """Return the arguments of a call in one of `WAYS`, and seed what it draws."""
    torch.manual_seed(3)
    return sources(BATCH) | {"max_source_relative_length": 8} | WAYS[way] | more


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
@pytest.mark.parametrize("seed", range(3))
def test_beam_as_wide_as_the_language_finds_the_best_of_all_targets(
    seed: int, vocab_size: int, beams: int, alpha: float, limit: int, penalty: str
) -> None:
    """Before the last step 5^3 targets are open, or 4^2 with the beam of the parsing experiments (6.3)."""
    model = small_model(seed, vocab_size=vocab_size)
    input_ids = torch.tensor([[3 + seed % (vocab_size - 3), 2]])
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


def test_length_penalty_is_lp_of_wu_et_al() -> None:
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(7, 1.0) == 2.0
    assert length_penalty(19, 0.5) == 2.0


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("pad", [0, 1])
def test_every_sentence_of_a_batch_has_its_own_limit(pad: int, num_beams: int) -> None:
    """Without an end token every target reaches its limit, the length of its source plus two."""
    model = small_model(0, pad_token_id=pad, bos_token_id=1 - pad)
    input_ids, mask = padded_batch([3, 5, 1])
    options: dict[str, Any] = {"num_beams": num_beams, "max_source_relative_length": 2, "suppress_tokens": [0, 1, END]}
    generated = model.generate((input_ids % 3 + 3).masked_fill(mask == 0, pad), attention_mask=mask, **options)
    assert (generated[:, 1:] != pad).sum(1).tolist() == [5, 7, 3]


@pytest.mark.slow
@settings(max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([-0.5, 0.0, 0.3, 0.6, 1.0, 1.5]), st.integers(2, 4), st.data())
def test_stop_never_changes_the_result(seed: int, alpha: float, num_beams: int, data: st.DataObject) -> None:
    """Each example searches for twenty sources at once, 1,000 in all, and again until no open beam has tokens left."""
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


@settings(max_examples=30)
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
    ours = model.generate(SOURCE, length_penalty_type="power", **options)
    theirs = plain_search(model).generate(SOURCE, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, **FLOAT32)


@pytest.mark.parametrize("name", ["output_logits", "output_attentions", "output_hidden_states"])
def test_outputs_of_every_step_are_those_of_transformers_own_search(name: str) -> None:
    model = small_model(0, vocab_size=12).double()
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 4, "return_dict_in_generate": True, name: True}
    ours = model.generate(SOURCE, length_penalty_type="power", **options)
    theirs = plain_search(model).generate(SOURCE, **options)
    assert ours.keys() == theirs.keys()
    for key in ours.keys() - {CACHE}:
        torch.testing.assert_close(ours[key], theirs[key], check_dtype=False, **FLOAT32)


@pytest.mark.parametrize("starts", [True, False])
def test_prompt_without_the_start_token_gets_it_and_counts_it(starts: bool) -> None:
    """Transformers puts it before such a prompt; the limit counts new tokens only."""
    model, prompt = small_model(0), torch.tensor([[START, 3, 4] if starts else [3, 4]])
    generated = model.generate(
        torch.tensor([[3, 2]]), decoder_input_ids=prompt, max_source_relative_length=1, suppress_tokens=[1, END]
    )
    assert generated.shape == (1, 3 + 2 + 1)


class SumCriterion(StoppingCriteria):
    """A caller's criterion that ends the targets whose sum of tokens is a multiple of a number."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return input_ids.sum(1) % 7 == 5


@pytest.mark.parametrize("num_beams", [1, 3])
def test_stopping_criteria_end_the_targets_that_they_end_in_transformers_own_search(num_beams: int) -> None:
    for seed in range(3):
        model = ending_model(seed)
        options: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": 8, **sources([4, 2, 6])}
        options |= {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria([7, 9]), SumCriterion()])}
        expected = plain_search(model).generate(**options)
        ours: dict[str, Any] = {"length_penalty": 1.0, "length_penalty_type": "power"}
        assert torch.equal(model.generate(**options, **ours, max_source_relative_length=None), expected)


def test_sampled_candidates_are_sorted_so_that_the_best_of_them_continue() -> None:
    """Transformers' search draws 2 k candidates too, and keeps the k best, not the first k of a random order."""
    settings = SearchSettings(limits=torch.tensor([5, 5]), end_tokens=torch.tensor([END]), pad_token=1, num_beams=3)
    settings = replace(settings, do_sample=True)
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        state = SearchState.start(torch.zeros(6, 1, dtype=torch.long), settings)
        state.scores = torch.randn(2, 3, generator=generator)
        log_probs = torch.randn(6, 9, generator=generator).log_softmax(-1)
        continued = (log_probs.view(2, 3, 9) + state.scores[:, :, None]).flatten(1)
        torch.manual_seed(seed)
        drawn = torch.multinomial(continued.softmax(-1), 6)
        torch.manual_seed(seed)
        values, rows, tokens = select_continuations(log_probs, state, settings)
        assert torch.equal(values, values.sort(descending=True).values)
        indices = (rows - torch.tensor([[0], [3]])) * 9 + tokens
        assert torch.equal(indices.sort().values, drawn.sort().values)
        assert torch.equal(values, continued.gather(1, indices))


def sorted_continuations(log_probs: Tensor, scores: Tensor, count: int) -> torch.return_types.topk:
    """Return the same by a sort of the complete vocabulary."""
    return (log_probs.view(*scores.shape, -1) + scores[:, :, None]).flatten(1).topk(count)


@contextmanager
def search_with(by_groups: bool = True, drops_finished: bool = True) -> Generator[None]:
    """Within the block, searches use the shortcuts or not: choosing by groups, and dropping finished sources."""
    with pytest.MonkeyPatch.context() as patch:
        if not by_groups:
            patch.setattr(search_module, "top_continuations", sorted_continuations)
        if not drops_finished:
            settings_of = generation_module.search_settings
            patch.setattr(generation_module, "search_settings", lambda *given: settings_of(*given[:4], False))
        yield


@contextmanager
def record_row_counts(model: VaswaniTransformerForConditionalGeneration) -> Generator[list[int]]:
    """Record the number of target rows of each call of the decoder, in order."""
    rows = []

    def count(module: nn.Module, arguments: Any, inputs: dict[str, Any]) -> None:
        rows.append(inputs["input_ids"].shape[0])

    hook = model.model.decoder.register_forward_pre_hook(count, with_kwargs=True)
    yield rows
    hook.remove()


SEARCHES = st.fixed_dictionaries(
    {
        "num_beams": st.integers(2, 5),
        "num_return_sequences": st.integers(1, 2),
        "length_penalty": st.sampled_from([-1.0, 0.0, 0.6, 1.5]),
        "length_penalty_type": st.sampled_from(["gnmt", "power"]),
        "early_stopping": st.sampled_from([False, True, "never"]),
        "max_source_relative_length": st.sampled_from([None, 0, 5]),
        "max_new_tokens": st.integers(1, 9),
        "eos_token_id": st.sampled_from([END, END, [END, 7], [END, 7, 9, 11], None]),
    }
)


def draw_prefixes(draw: Callable[[st.SearchStrategy[Any]], Any], rows: int) -> Batch:
    """Draw a prefix of each target, some of its first tokens padding."""
    length = draw(st.integers(1, 3))
    mask = torch.ones(rows, length + 1, dtype=torch.long)
    if draw(st.booleans()):
        mask[0, 0] = 0
    tokens = torch.randint(3, 22, (rows, length + 1))
    return {"decoder_input_ids": tokens, "decoder_attention_mask": mask}


@settings(max_examples=200)
@given(
    st.integers(0, 10_000),
    st.integers(1, 7),
    st.integers(1, 12),
    st.integers(2, 400),
    st.integers(1, 30),
    st.booleans(),
    st.booleans(),
)
def test_top_continuations_are_those_of_the_sorted_vocabulary(
    seed: int, num_sources: int, k: int, width: int, count: int, has_ties: bool, has_holes: bool
) -> None:
    torch.manual_seed(seed)
    log_probs, scores, count = torch.randn(num_sources * k, width), torch.randn(num_sources, k), min(count, k * width)
    log_probs, scores = (log_probs.round(), scores.round()) if has_ties else (log_probs, scores)
    log_probs = log_probs.masked_fill(torch.rand(log_probs.shape) < 0.5, -torch.inf) if has_holes else log_probs
    values, indices = top_continuations(log_probs, scores, count)
    every = (log_probs.view(num_sources, k, -1) + scores[:, :, None]).flatten(1)
    assert torch.equal(values, every.topk(count).values)
    assert torch.equal(every.gather(1, indices), values)
    assert all(len(set(row)) == count for row in indices.tolist())


@pytest.mark.slow
@settings(max_examples=100)
@given(
    data=st.data(),
    seed=st.integers(0, 10_000),
    options=SEARCHES,
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    vocab_size=st.sampled_from([22, 97, 500, 1003]),
    eagerness=st.sampled_from([1.0, 3.0, 5.0]),
)
def test_beam_search_by_groups_that_drops_finished_sources_finds_what_a_sorted_vocabulary_gives(
    data: st.DataObject, seed: int, options: dict[str, Any], lengths: list[int], vocab_size: int, eagerness: float
) -> None:
    model = ending_model(seed, vocab_size, eagerness)
    options = options | sources(lengths, vocab_size)
    options |= draw_prefixes(data.draw, len(lengths)) if data.draw(st.booleans()) else {}
    with search_with(by_groups=False, drops_finished=False), record_row_counts(model) as all_rows:
        expected = model.generate(**options)
    with search_with(by_groups=data.draw(st.booleans())), record_row_counts(model) as rows:
        assert torch.equal(model.generate(**options), expected)
    assert len(rows) <= len(all_rows)
    assert rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("way", WAYS)
def test_finished_sources_are_not_decoded(way: str) -> None:
    falls = 0
    for seed in range(4):
        model = ending_model(seed)
        with record_row_counts(model) as rows:
            model.generate(**call_arguments(way))
        k = max(WAYS[way]["num_beams"], WAYS[way].get("num_return_sequences", 1))
        assert rows[0] == k * len(BATCH)
        assert all(count % k == 0 and count > 0 for count in rows)
        falls += rows[-1] < rows[0]
    assert falls >= 3


class WordOfEachSource(LogitsProcessor):
    """Raises the score of another word for each source; follows the sources that a search keeps."""

    words = torch.arange(10, 10 + len(BATCH))

    def keep(self, sources: Tensor) -> None:
        self.words = self.words[sources]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        words = self.words.repeat_interleave(len(scores) // len(self.words))[:, None]
        return scores.scatter_add(1, words, torch.ones_like(scores))


# Further arguments of a call: those that change no target, and others.
NEUTRAL: list[dict[str, Any]] = [
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"return_dict_in_generate": True},
    {"encoder_outputs": True},
    {"past_key_values": True},
]
FURTHER: list[dict[str, Any]] = [
    {"decoder_input_ids": torch.full((5, 2), 7), "decoder_attention_mask": torch.tensor([[0, 1], *[[1, 1]] * 4])},
    {"repetition_penalty": 1.5},
    {"encoder_repetition_penalty": 1.5},
    {"logits_processor": LogitsProcessorList([WordOfEachSource()])},
    {"prefix_allowed_tokens_fn": lambda source, tokens: [END, 4 + source, 5 + len(tokens) % 7, 13]},
]


@pytest.mark.parametrize("more", [{}, *NEUTRAL, *FURTHER], ids=lambda more: next(iter(more), "plain"))
@pytest.mark.parametrize("way", WAYS)
def test_shortcuts_change_nothing_with_other_arguments(way: str, more: dict[str, Any]) -> None:
    for seed in range(2):
        model = ending_model(seed)
        with search_with(by_groups=False, drops_finished=False):
            expected = model.generate(**call_arguments(way, **{} if more in NEUTRAL else more))
        call = call_arguments(way, **more)
        if "encoder_outputs" in more:
            call["encoder_outputs"] = model.get_encoder()(call["input_ids"], attention_mask=call["attention_mask"])
        if "past_key_values" in more:
            call["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        generated = model.generate(**call)
        assert torch.equal(generated.sequences if "return_dict_in_generate" in more else generated, expected)


def test_greedy_search_without_an_end_token_drops_no_row() -> None:
    """Transformers' loop then continues after a row's limit, and writes no padding."""
    model = ending_model(0)
    options = call_arguments("greedy", eos_token_id=None)
    with search_with(drops_finished=False):
        expected = model.generate(**options)
    with record_row_counts(model) as rows:
        assert torch.equal(model.generate(**options), expected)
    assert set(rows) == {len(BATCH)}


def test_finished_sources_are_dropped_with_stacks_of_different_depths() -> None:
    """Transformers makes a cache with the number of layers of the encoder."""
    model = ending_model(0, encoder_layers=3)
    with search_with(drops_finished=False):
        expected = model.generate(**call_arguments("power"))
    with record_row_counts(model) as rows:
        assert torch.equal(model.generate(**call_arguments("power")), expected)
    assert rows[-1] < rows[0]


@pytest.mark.parametrize("way", WAYS)
def test_returned_cache_has_every_row_and_every_token(way: str) -> None:
    k = max(WAYS[way]["num_beams"], WAYS[way].get("num_return_sequences", 1))
    rows = k * len(BATCH)
    model, given = ending_model(1), EncoderDecoderCache(DynamicCache(), DynamicCache())
    given_back = model.generate(**call_arguments(way, return_dict_in_generate=True)).past_key_values
    model.generate(**call_arguments(way, past_key_values=given))
    caches: list[Any] = [given_back, given]
    for cache in caches:
        for part in (cache.self_attention_cache, cache.cross_attention_cache):
            assert {layer.keys.shape[0] for layer in part.layers} == {rows}
            assert {layer.values.shape[0] for layer in part.layers} == {rows}
    assert given_back.get_seq_length() == given.get_seq_length()


def test_search_goes_on_while_an_open_beam_can_enter_the_n_best() -> None:
    """The finished scores are -1 and -2, and the open beam can still reach -1.5: second of two, but not first."""
    settings = SearchSettings(torch.tensor([9]), torch.tensor([2]), 1, num_beams=3, num_returned=2, alpha=0.0)
    state = SearchState.start(torch.zeros(3, 1, dtype=torch.long), settings)
    state.hypothesis_scores[0, :2] = torch.tensor([-1.0, -2.0])
    for score, expected in ((-0.5, True), (-1.5, True), (-2.5, False), (float("nan"), True)):
        state.scores[0, 0] = score
        assert can_improve(state, 4, replace(settings, length_penalty_type="gnmt")).tolist() == [expected]
