"""The shortcuts of the search, choosing tokens by groups and dropping finished sources, change no result."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from tests.ending_models import BATCH, END, WAYS, call_arguments, ending_model, sources
from tests.helpers import FLOAT32, WITH_SCORES, Batch, tiny_model
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer import generation as generation_module
from vaswani_transformer import search as search_module
from vaswani_transformer.search import next_log_probs, top_continuations


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


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
SEEDS = st.integers(0, 10_000)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "num_beams": st.integers(2, 5),
    "length_penalty": st.sampled_from([-1.0, 0.0, 0.6, 1.5]),
    "length_penalty_type": st.sampled_from(["gnmt", "power"]),
    "early_stopping": st.sampled_from([False, True, "never"]),
    "max_source_relative_length": st.sampled_from([None, 0, 5]),
}


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the settings of a beam search with one end token, several or none."""
    drawn = {name: draw(values) for name, values in SETTINGS.items()}
    drawn |= {"max_new_tokens": draw(st.integers(1, 9)), "num_return_sequences": draw(st.integers(1, 2))}
    ends = draw(st.sampled_from([END, END, [END, 7], [END, 7, 9, 11], None]))
    return drawn | ({} if ends == END else {"eos_token_id": ends})


def draw_prefixes(draw: Callable[[st.SearchStrategy[Any]], Any], rows: int) -> Batch:
    """Draw a prefix of each target, some of its first tokens padding."""
    length = draw(st.integers(1, 3))
    mask = torch.ones(rows, length + 1, dtype=torch.long)
    if draw(st.booleans()):
        mask[0, 0] = 0
    tokens = torch.randint(3, 22, (rows, length + 1))
    return {"decoder_input_ids": tokens, "decoder_attention_mask": mask}


@settings(max_examples=500)
@given(
    SEEDS, st.integers(1, 7), st.integers(1, 12), st.integers(2, 400), st.integers(1, 30), st.booleans(), st.booleans()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_log_probabilities_are_in_float32_and_only_logits_given_away_are_overwritten(dtype: torch.dtype) -> None:
    logits = (10 * torch.randn(8, 500)).to(dtype)
    before, expected = logits.clone(), logits.float().log_softmax(1)
    decoder: Any = SimpleNamespace(step=lambda _: logits)
    assert torch.equal(next_log_probs(decoder, torch.zeros(8, 1)), expected)
    assert torch.equal(logits, before)
    if dtype == torch.float32:  # that of a prepared decoder
        decoder.gives_logits_away = True
        assert next_log_probs(decoder, torch.zeros(8, 1)) is logits
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("vocab_size", [40, 1003])
def test_search_never_selects_more_continuations_of_a_beam_than_tokens(vocab_size: int) -> None:
    """A beam search may need (1 + end tokens) x beams tokens of one beam, more than exist."""
    ends = list(range(3, 3 + vocab_size // 2))
    model = ending_model(0, vocab_size)
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 3, **sources([2])}
    options |= {"eos_token_id": ends}
    with search_with(by_groups=False):
        expected = model.generate(**options)
    with search_with(by_groups=True):
        assert torch.equal(model.generate(**options), expected)


@pytest.mark.parametrize("kind", ["nan", "-inf", "peaked"])
def test_search_by_groups_handles_nan_infinite_and_peaked_logits_as_a_sort_does(kind: str) -> None:
    model = ending_model(0, 60)

    def change(module: nn.Module, arguments: Any, logits: Tensor) -> Tensor:
        if kind == "nan":
            return torch.full_like(logits, torch.nan)
        if kind == "-inf":
            return logits.masked_fill(torch.arange(60) % 7 > 0, -torch.inf)
        return logits * 1e4

    model.lm_head.register_forward_hook(change)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 4, **sources([3, 2])}
    with search_with(by_groups=False, drops_finished=False):
        expected = model.generate(**options)
    with search_with():
        generated = model.generate(**options)
    assert kind == "nan" or torch.equal(generated, expected)
    assert generated.shape == expected.shape


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data(), SEEDS, searches(), LENGTHS, st.sampled_from([22, 97, 500, 1003]), st.sampled_from([1.0, 3.0, 5.0]))
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


@pytest.mark.slow
@settings(max_examples=140)
@given(st.data(), SEEDS, LENGTHS, st.integers(1, 3), st.booleans(), st.sampled_from([END, [END, 7, 8], None]))
def test_dropping_finished_sources_changes_nothing_in_greedy_search_and_sampling(
    data: st.DataObject, seed: int, lengths: list[int], returned: int, samples: bool, ends: int | list[int] | None
) -> None:
    """Sampling may have beams too."""
    model, num_beams = ending_model(seed), data.draw(st.sampled_from([1, 1, returned, 3])) if samples else 1
    options: dict[str, Any] = sources(lengths) | {"max_new_tokens": 10, "num_beams": num_beams, "eos_token_id": ends}
    options |= {"max_source_relative_length": data.draw(SETTINGS["max_source_relative_length"])}
    options |= {"do_sample": samples, "num_return_sequences": returned if samples else 1}
    options |= draw_prefixes(data.draw, len(lengths)) if data.draw(st.booleans()) else {}
    with search_with(drops_finished=False), record_row_counts(model) as all_rows:
        torch.manual_seed(seed)
        expected = model.generate(**options)
    with search_with(), record_row_counts(model) as rows:
        torch.manual_seed(seed)
        assert torch.equal(model.generate(**options), expected)
    assert num_beams > 1 or len(rows) == len(all_rows)
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "more",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"return_dict_in_generate": True},
        {"encoder_outputs": True},
        {"past_key_values": True},
    ],
    ids=str,
)
def test_dropping_finished_sources_changes_nothing_with_other_arguments(way: str, more: dict[str, Any]) -> None:
    for seed in range(3):
        model = ending_model(seed)
        with search_with(drops_finished=False):
            expected = model.generate(**call_arguments(way))
        given = dict(more)
        if "encoder_outputs" in given:
            batch = call_arguments(way)
            given["encoder_outputs"] = model.get_encoder()(batch["input_ids"], attention_mask=batch["attention_mask"])
        if "past_key_values" in given:
            given["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        generated = model.generate(**call_arguments(way, **given))
        assert torch.equal(generated.sequences if "return_dict_in_generate" in given else generated, expected)


def test_dropping_finished_sources_keeps_which_row_each_token_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[search_module.Hypotheses] = []

    def record(*given: Any) -> search_module.Hypotheses:
        searched.append(search_module.beam_search(*given))
        return searched[-1]

    monkeypatch.setattr(generation_module, "beam_search", record)
    for seed in range(4):
        for drops_finished in (False, True):
            with search_with(drops_finished=drops_finished):
                ending_model(seed).generate(**call_arguments("many"))
        assert torch.equal(searched[-2].beam_indices, searched[-1].beam_indices)


@pytest.mark.parametrize("way", ["greedy", "beam"])
@pytest.mark.parametrize("ends", [torch.tensor(END), torch.tensor([END])], ids=["number", "list"])
def test_end_token_may_be_a_tensor(way: str, ends: Tensor) -> None:
    model = ending_model(0)
    expected = model.generate(**call_arguments(way, eos_token_id=END))
    assert torch.equal(model.generate(**call_arguments(way, eos_token_id=ends)), expected)


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
    model = tiny_model(vocab_size=40, encoder_layers=3, decoder_layers=1, tie_word_embeddings=False)
    norm: Any = model.model.decoder.layers[-1].feed_forward_add_norm.norm
    end = model.lm_head.weight[END]
    norm.bias.data += 2 * end / end.square().sum()
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


PROCESSORS = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.5},
    {"bad_words_ids": [[5], [6, 7]]},
    {"min_length": 5},
    {"min_new_tokens": 4},
    {"forced_bos_token_id": 9},
    {"forced_eos_token_id": END, "max_new_tokens": 6, "max_source_relative_length": None},
    {"suppress_tokens": [4, 5]},
    {"exponential_decay_length_penalty": (2, 1.3)},
    {"prefix_allowed_tokens_fn": lambda source, tokens: [END, 4 + source, 5 + len(tokens) % 7, 13]},
    {"renormalize_logits": True},
]


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: next(iter(processor)))
@pytest.mark.parametrize("way", ["greedy", "sampling", "many", "power"])
def test_logits_processors_give_the_same_when_finished_sources_are_dropped(way: str, processor: dict[str, Any]) -> None:
    for seed in range(2):
        model = ending_model(seed)
        with search_with(by_groups=False, drops_finished=False):
            expected = model.generate(**call_arguments(way, **processor))
        with search_with():
            assert torch.equal(model.generate(**call_arguments(way, **processor)), expected)


def test_returned_scores_are_the_log_softmax_of_the_returned_logits() -> None:
    """If scores are requested, the loop uses the complete vocabulary, and returns a row of that width for each beam."""
    model = ending_model(1, 97)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 5, **sources([3, 2], 97)}
    with search_with():
        generated = model.generate(**options, **WITH_SCORES, output_logits=True)
    assert {step.shape for step in (*generated.scores, *generated.logits)} == {torch.Size([6, 97])}
    for scores, logits in zip(generated.scores, generated.logits, strict=True):
        torch.testing.assert_close(scores, logits.log_softmax(-1), **FLOAT32)
