"""Layers of a prepared model: the error of each layout, and the choice of layouts by their times."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.batches import FLOAT32
from tests.commands import run_python
from tests.cpu.packed import DTYPES
from vaswani_transformer.cpu import linear as cpu_linear
from vaswani_transformer.cpu.linear import (
    LAYOUTS,
    ROUNDING,
    TIMED_ROWS,
    LinearPacker,
    PreparedLinear,
    int8_sum_overflows,
    is_supported,
    transpose,
)

EVERY_LAYOUT = [(dtype, name) for dtype in DTYPES for name in LAYOUTS[dtype]]
EACH = pytest.mark.parametrize(("dtype", "name"), EVERY_LAYOUT)


def test_every_dtype_of_this_cpu_has_a_layout() -> None:
    assert all(is_supported(LAYOUTS[dtype][name], ROUNDING[dtype]) for dtype, name in EVERY_LAYOUT)


@EACH
@pytest.mark.parametrize("rows", [(1,), (2, 3, 4), (40,), (0,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_is_as_close_to_the_plain_one_as_its_dtype_allows(
    dtype: str, name: str, bias: bool, rows: tuple[int, ...]
) -> None:
    """The error bound is that of a product of 48 pairs of numbers, each near 1.

    bfloat16 has 8 bits, so each number, and the output, has a relative error of at most 2^-9; int8 splits the
    range of a row's weights and of x into 127 and 255 steps (63 and 127 where it is reduced) with an error of half a
    step.
    """
    linear = nn.Linear(48, 24, bias=bias).requires_grad_(False)
    hidden_states = torch.randn(*rows, 48)
    layer = LAYOUTS[dtype][name](linear.weight, linear.bias)
    packed, true = layer(hidden_states), linear(hidden_states)
    assert (packed.shape, packed.dtype) == (true.shape, torch.float32)
    if not true.numel():
        return
    flat = hidden_states.flatten(0, -2)
    given = flat.clone()
    assert torch.equal(layer.product(flat), packed.flatten(0, -2))
    assert torch.equal(flat, given)
    size = hidden_states.abs() @ linear.weight.abs().T + (linear.bias.abs() if bias else 0)
    largest = linear.weight.abs().amax(1)
    span = (hidden_states.amax().clamp(min=0) - hidden_states.amin().clamp(max=0)) / (
        127 if int8_sum_overflows() else 255
    )
    of_weights = hidden_states.abs().sum(-1, keepdim=True) * largest / 127 / 2
    of_inputs = span / 2 * (linear.weight.abs().sum(1) + 48 * largest / 127)
    bound = {"bfloat16": 3.1 * 2**-9 * size, "int8": of_weights + 2 * of_inputs}.get(dtype, 48 * 2**-24 * size)
    assert ((packed - true).abs() <= bound + 1e-6).all()


@pytest.mark.parametrize("name", [name for dtype, name in EVERY_LAYOUT if dtype == "int8"])
def test_row_of_zero_weights_in_int8_gives_its_bias(name: str) -> None:
    linear = nn.Linear(8, 4).requires_grad_(False)
    linear.weight[1] = 0
    layer = LAYOUTS["int8"][name](linear.weight, linear.bias)
    torch.testing.assert_close(layer(torch.randn(3, 8))[:, 1], linear.bias[1].expand(3))
    torch.testing.assert_close(layer(torch.zeros(2, 8)), linear.bias.expand(2, 4))


SUMS = """
import torch
torch.backends.quantized.engine = "onednn"
from vaswani_transformer.cpu.linear import int8_sum_overflows, quantize
torch.manual_seed(0)
linear = torch.nn.Linear(64, 32).requires_grad_(False)
torch.nn.init.uniform_(linear.weight, 0.5, 1.0)
hidden_states = torch.rand(8, 64) + 0.5
true = linear(hidden_states)
error = (quantize(linear.weight, linear.bias)(hidden_states) - true).abs().max() / true.abs().max()
print(int8_sum_overflows(), float(error))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "onednn" not in torch.backends.quantized.supported_engines
    or not torch.backends.cpu.get_cpu_capability().startswith("AVX"),
    reason="oneDNN's older instructions are those of x86",
)
def test_int8_layer_uses_one_bit_less_if_its_sums_overflow() -> None:
    """oneDNN is limited to instructions without sums of four products, which older CPUs lack."""
    is_over, error = run_python(SUMS, ONEDNN_MAX_CPU_ISA="AVX2").split()
    assert is_over == "True"
    assert float(error) < 0.02


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_layout_whose_weights_are_wrong_is_not_used(error: float) -> None:
    def wrong(weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        return PreparedLinear(transpose(weight, bias).product, lambda: (weight + error, bias))

    assert is_supported(wrong) == (error == 0.0)


several = pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if len(LAYOUTS[dtype]) > 1])


def answer(monkeypatch: pytest.MonkeyPatch, times: Callable[[int], list[float]]) -> list[int]:
    """Let the timer answer with `times` of a number of rows; return the list of the numbers that it is asked for."""
    asked: list[int] = []
    monkeypatch.setattr(cpu_linear, "best_times", lambda _, rows: asked.append(len(rows)) or times(len(rows)))
    return asked


@several
@pytest.mark.parametrize(
    ("times", "choice"),
    [
        ((0.91, 0.91, 0.91, 0.91), (0, 0, 0, 0)),
        ((0.89, 0.99, 1.1, 1.1), (1, 1, 1, 1)),
        ((0.91, 0.91, 0.89, 1.2), (0, 0, 1, 0)),
        ((0.5, 2.0, 0.91, 0.91), (1, 0, 0, 0)),
        ((2.0, 2.0, 2.0, 0.5), (0, 0, 0, 1)),
    ],
)
def test_layout_must_win_by_a_tenth_over_that_of_fewer_rows(
    dtype: str,
    times: tuple[float, ...],
    choice: tuple[int, ...],
    no_layouts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each shape is timed once, and the layer computes as its layouts, which take 1 and `times`."""
    asked = answer(monkeypatch, lambda rows: [1.0, times[TIMED_ROWS.index(rows)]])
    packer = LinearPacker(dtype, {})
    linear, rows = nn.Linear(48, 24).requires_grad_(False), torch.randn(TIMED_ROWS[-1], 48)
    layer: Any = packer(linear)
    names = list(LAYOUTS[dtype])
    expected = [names[index] for index in choice]
    assert list(packer.used.values()) == expected
    for name, count in zip(expected, TIMED_ROWS, strict=True):
        batch = rows[:count]
        expected_rows = LAYOUTS[dtype][name](linear.weight, linear.bias)(batch)
        torch.testing.assert_close(layer(batch), expected_rows, **FLOAT32)
    weight, bias = layer.unpacked()
    torch.testing.assert_close(weight, linear.weight, rtol=0, atol=1 / 127)
    assert torch.equal(bias, linear.bias)
    LinearPacker(dtype, {})(nn.Linear(48, 24))
    assert asked == list(TIMED_ROWS)
    packer(nn.Linear(24, 48))
    assert len(asked) == 2 * len(TIMED_ROWS)


@several
def test_layouts_of_a_record_are_not_timed_again_unless_this_cpu_lacks_them(
    dtype: str, no_layouts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(monkeypatch, lambda rows: [2.0, 1.0])
    timing = LinearPacker(dtype, {})
    timing(nn.Linear(48, 24))
    first, second = LAYOUTS[dtype]
    assert set(timing.used.values()) == {second}
    recorded = dict.fromkeys(timing.used, first)
    resuming = LinearPacker(dtype, recorded)
    resuming(nn.Linear(48, 24))
    assert (resuming.used, len(asked)) == (recorded, len(TIMED_ROWS))
    elsewhere = LinearPacker(dtype, dict.fromkeys(recorded, "of another CPU"))
    elsewhere(nn.Linear(48, 24))
    assert elsewhere.used == timing.used
