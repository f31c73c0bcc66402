"""Dropout follows its definition: which elements are dropped, how many, and with which gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vaswani_transformer.dropout import Dropout

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


def test_seed_determines_what_is_dropped() -> None:
    dropout, input, outputs = Dropout(0.5).train(), torch.ones(99), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(dropout(input))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("dropout", [Dropout(0.0).train(), Dropout(0.5).eval()])
def test_nothing_is_dropped_at_probability_0_or_in_evaluation(dropout: Dropout) -> None:
    input, state = torch.randn(5), torch.get_rng_state()
    assert torch.equal(dropout(input), input)
    assert torch.equal(torch.get_rng_state(), state)
