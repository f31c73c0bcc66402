"""Scaled embeddings and positions follow section 3.5's formula and claims, and positions count only tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batches import random_tokens
from tests.models import tiny_config, tiny_model
from vaswani_transformer.embeddings import (
    Dropout,
    InputEmbedding,
    ScaledEmbedding,
    SinusoidalPositions,
    count_positions,
    read_table,
    sinusoids,
)


def positional_encoding(positions: np.ndarray, d_model: int) -> np.ndarray:
    """Section 3.5 written out in float64: PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) the cosine."""
    encoding = np.zeros((len(positions), d_model))
    for i in range(d_model // 2):
        angles = positions.astype(np.float64) / 10000.0 ** (2 * i / d_model)
        encoding[:, 2 * i] = np.sin(angles)
        encoding[:, 2 * i + 1] = np.cos(angles)
    return encoding


@given(st.lists(st.lists(st.sampled_from([0, 1]), min_size=6, max_size=6), min_size=1, max_size=4))
def test_positions_count_only_tokens(rows: list[list[int]]) -> None:
    counted = count_positions(torch.tensor(rows)).tolist()
    for row, positions in zip(rows, counted, strict=True):
        assert [position for position, token in zip(positions, row, strict=True) if token] == list(range(sum(row)))
        assert min(positions) >= 0
        assert max(positions) < max(sum(row), 1)


@pytest.mark.parametrize("position_type", ["sinusoidal", "learned"])
def test_embeddings_and_positions_are_added_in_the_embeddings_dtype(position_type: str) -> None:
    embedding = InputEmbedding(tiny_config(position_embedding=position_type)).eval().to(torch.bfloat16)
    embeds = torch.randn(2, 300, 32)
    positions = torch.arange(300)[None]
    exact = embeds.to(torch.bfloat16).float() + embedding.positions(positions).float()
    added = embedding(embeds.to(torch.bfloat16), positions)
    assert added.dtype == torch.bfloat16
    # One rounding: bfloat16 keeps 8 bits, so half a unit in the last place is 2^-9 of the value.
    torch.testing.assert_close(added.float(), exact, rtol=2**-8, atol=1e-6)


def test_positions_are_exact_in_half_precision() -> None:
    positions = SinusoidalPositions(tiny_config()).to(torch.bfloat16)(torch.arange(1000)[None])
    assert positions.dtype == torch.float32
    np.testing.assert_allclose(positions[0].numpy(), positional_encoding(np.arange(1000), 32), atol=1e-4)


@pytest.mark.parametrize("d_model", [2, 32, 512, 1024])
def test_sinusoids_equal_the_formula_to_1e_4(d_model: int) -> None:
    """To position 1,000: float32 holds an angle of 1,000 to 6e-5."""
    positions = np.arange(1001)
    error = sinusoids(torch.from_numpy(positions), d_model).double().numpy() - positional_encoding(positions, d_model)
    assert abs(error).max() < 1e-4


def test_embeddings_are_scaled_by_the_root_of_d_model() -> None:
    tokens = random_tokens(2, 3)
    embedding = ScaledEmbedding(tiny_config())
    torch.testing.assert_close(embedding(tokens), embedding.weight[tokens] * math.sqrt(32))
    plain = ScaledEmbedding(tiny_config(scale_embedding=False))
    assert torch.equal(plain(tokens), plain.weight[tokens])


def test_table_may_be_no_parameter() -> None:
    """FSDP1 replaces parameters during a pass by views of one tensor for many."""
    embedding = ScaledEmbedding(tiny_config())
    table = embedding.weight.detach()
    del embedding.weight
    embedding.weight = table
    assert read_table(embedding, len(table), table.device, embedding.embed_scale) is table


def test_dropout_applies_to_the_sum_of_embedding_and_position() -> None:
    embedding = InputEmbedding(tiny_config(dropout=0.5)).train()
    embeds, positions = torch.full((1, 200, 32), 3.0), torch.arange(200)[None]
    dropped = embedding(embeds, positions)
    complete = embeds + sinusoids(positions, 32)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * complete[kept])
    assert 0.45 < kept.float().mean() < 0.55  # five standard deviations of 6,400 fair coins are 0.03


@pytest.mark.parametrize("is_source", [True, False])
def test_text_longer_than_the_learned_positions_is_an_error(is_source: bool) -> None:
    model = tiny_model(position_embedding="learned", max_position_embeddings=8)
    lengths = (9, 4) if is_source else (4, 9)
    with pytest.raises(ValueError, match=r"9 tokens .* 8 learned positions; .*max_position_embeddings"):
        model(input_ids=random_tokens(2, lengths[0]), decoder_input_ids=random_tokens(2, lengths[1]))


def test_cached_step_beyond_the_learned_positions_is_an_error() -> None:
    decoder = tiny_model(position_embedding="learned", max_position_embeddings=4).get_decoder()
    cache = decoder(random_tokens(1, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"5 tokens .* 4 learned positions"):
        decoder(random_tokens(1, 1), past_key_values=cache)


probabilities = st.floats(0, 1, exclude_max=True, allow_nan=False)
shapes = st.lists(st.integers(0, 7), max_size=3)


@settings(deadline=None)
@given(probabilities, shapes, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.booleans())
def test_elements_and_gradients_are_dropped_or_scaled(
    p: float, shape: list[int], dtype: torch.dtype, is_transposed: bool
) -> None:
    """The scale is 1 / (1 - p), p rounded to 1/65536 and below 1; bfloat16 rounds the factor to 8 bits."""
    input = torch.ones(shape, dtype=dtype)
    input = (input.T.contiguous().T if is_transposed and len(shape) == 2 else input).requires_grad_()
    with torch.device("meta"):  # another default device changes nothing
        output = Dropout(p).train()(input)
    output.sum().backward()
    share = min(round(p * 65536), 65535) / 65536
    kept = output[output != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - share)))
    assert input.grad is not None
    assert torch.equal(input.grad, output)
    assert output.shape == input.shape
    assert output.dtype == dtype


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_dropped_share_is_the_probability(p: float) -> None:
    """Of 2^20 elements within five standard deviations, so the mean of the output is that of the input."""
    torch.manual_seed(0)
    output = Dropout(p).train()(torch.ones(2**20))
    deviation = (p * (1 - p) / 2**20) ** 0.5
    assert abs(float((output == 0).double().mean()) - p) < 5 * deviation
    assert abs(float(output.double().mean()) - 1) < 5 * deviation / (1 - p)


def test_elements_of_one_draw_are_dropped_independently() -> None:
    """At p = 1/2 all 16 patterns of four neighbors are equally frequent: chi-squared of 15 degrees, 99.99% below 45."""
    torch.manual_seed(0)
    kept = Dropout(0.5).train()(torch.ones(2**16, 4)).ne(0)
    counts = (kept.long() @ torch.tensor([1, 2, 4, 8])).bincount(minlength=16)
    assert float(((counts - 2**12) ** 2 / 2**12).sum()) < 45
