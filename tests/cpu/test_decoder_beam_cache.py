"""A cache that keeps the beams of a source in one row: each beam attends to its own tokens only."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from tests.builders import KINDS, random_model
from tests.helpers import source_batch
from vaswani_transformer import prepare_for_inference
from vaswani_transformer.cpu.decoder import BeamCache, DecoderStep
from vaswani_transformer.cpu.layers import GROWTH

LAYERS, HEADS, WIDTHS = 2, 3, (4, 5)  # of keys and of values


def new_token(rows: int) -> list[tuple[Tensor, Tensor]]:
    keys, values = WIDTHS
    return [(torch.randn(rows, HEADS, 1, keys), torch.randn(rows, HEADS, 1, values)) for _ in range(LAYERS)]


def attended(kept: Tensor, mask: Tensor, targets: int) -> Tensor:
    """Return the entries (k B, H, T, d) that each beam attends to, in order, among all stored ones (B, H, T k, d)."""
    sources, heads, length, _ = kept.shape
    every = (mask.expand(sources * heads, targets, length) == 0).unflatten(0, (sources, heads))
    assert torch.equal(every, every[:, :1].expand_as(every))
    every = every[:, 0]  # (B, k, T k)
    rows = [kept[source][:, is_seen] for source, of_source in enumerate(every) for is_seen in of_source]
    return torch.stack(rows)


@settings(max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_beam_attends_to_what_a_cache_with_a_row_per_beam_holds(
    seed: int, sources: int, targets: int, steps: int
) -> None:
    torch.manual_seed(seed)
    plain, cache = DynamicCache(), BeamCache(LAYERS, sources, HEADS, targets, *WIDTHS)
    for _ in range(steps):
        cache.append_slot()
        for index, (key, value) in enumerate(new_token(sources * targets)):
            by_source = torch.cat((key, value), dim=-1).unflatten(0, (sources, targets))[:, :, :, 0].transpose(1, 2)
            true, (keys, values) = plain.update(key, value, index), cache.write(index, by_source)
            for true_part, cached_part in zip(true, (keys.transpose(1, 2), values), strict=True):
                cached_heads = cached_part.unflatten(0, (sources, HEADS))
                assert torch.equal(attended(cached_heads, cache.mask, targets), true_part)
        assert cache.length == plain.get_seq_length()
        beams: Any = (torch.randint(targets, (sources, targets)) + torch.arange(sources)[:, None] * targets).flatten()
        plain.reorder_cache(beams)
        cache.reorder(beams)
        if sources > 1 and torch.rand(()) < 0.3:
            stay = torch.randperm(sources)[: torch.randint(1, sources, ())].sort().values
            plain.batch_select_indices((stay[:, None] * targets + torch.arange(targets)).flatten())
            cache.keep(stay)
            sources = len(stay)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.integers(0, 1000),
    st.sampled_from(list(KINDS)),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from(
        [{}, {"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True}, {"num_beams": 2}]
    ),
)
def test_prepared_model_finds_the_same_tokens_with_the_beam_cache(
    seed: int, kind: str, lengths: list[int], way: dict[str, Any]
) -> None:
    """The search writes more tokens than the first slots hold, and drops sources that end early."""
    model = random_model(seed, **KINDS[kind])
    model.use_paper_decoding()
    call = source_batch(lengths, max_new_tokens=2 * GROWTH + 5, num_beams=1) | way
    generated = []
    for side in (model, prepare_for_inference(model)):
        torch.manual_seed(seed)
        generated.append(side.generate(**call))
    assert torch.equal(*generated)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 5),
        ({"num_beams": 2}, 5),
        ({"return_dict_in_generate": True}, 0),
        ({"use_cache": False}, 0),
        ({"num_beams": 2, "cache_implementation": "static"}, 0),
        ({"decoder_attention_mask": torch.ones(2, 1)}, 0),
        ({"output_attentions": True}, 0),
    ],
    ids=str,
)
def test_fast_path_is_taken_unless_the_call_needs_more(
    options: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, step = [], DecoderStep.__call__
    monkeypatch.setattr(DecoderStep, "__call__", lambda *args: taken.append(args) or step(*args))
    model = random_model()
    call = source_batch([5, 3], max_new_tokens=5, min_new_tokens=5, num_beams=1) | options
    generated, true = prepare_for_inference(model).generate(**call), model.generate(**call)
    assert len(taken) == steps
    assert torch.equal(*(side if torch.is_tensor(side) else side.sequences for side in (generated, true)))


@pytest.mark.parametrize("beams", [1, 3])
def test_prepared_model_fills_the_cache_of_its_caller(beams: int) -> None:
    """The caller gets the keys and values of each beam, which the fast path does not have."""
    model = random_model()
    call = source_batch([5, 3], max_new_tokens=5, min_new_tokens=5, num_beams=beams)
    generated, lengths = [], []
    for side in (model, prepare_for_inference(model)):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        generated.append(side.generate(past_key_values=cache, **call))
        lengths.append(cache.get_seq_length())
    assert torch.equal(*generated)
    assert lengths == [5, 5]
