"""The operations of a step depend on its pairs only, and the peak rate is the device's; test_families counts them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import tiny_config
from training.recipe.flops import peak_teraflops, training_flops


def test_flops_of_a_window_grow_linearly_with_the_source() -> None:
    """From 2 r + 1 tokens on, every further token costs the same; below that a window saves nothing."""
    config, target = tiny_config(attention_window=3), torch.tensor([5])
    costs = [training_flops(config, torch.tensor([length]), target) for length in range(7, 12)]
    assert len({after - before for before, after in itertools.pairwise(costs)}) == 1
    assert costs[0] == training_flops(tiny_config(), torch.tensor([7]), target)
    assert costs[1] < training_flops(tiny_config(), torch.tensor([8]), target)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=5))
def test_flops_of_a_pair_do_not_depend_on_its_batch(pairs: list[tuple[int, int]]) -> None:
    config = tiny_config()
    together = training_flops(config, *(torch.tensor(side) for side in zip(*pairs, strict=True)))
    assert together == sum(training_flops(config, torch.tensor([s]), torch.tensor([t])) for s, t in pairs)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "tf32", 495),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla P100-SXM2-16GB", "fp32", 10.6),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA H100 80GB HBM3", "fp8", None),
        ("", "fp32", None),
    ],
)
def test_peak_rate_is_that_of_the_device_and_precision_or_unknown(
    name: str, precision: str, peak: float | None
) -> None:
    assert peak_teraflops(name, precision) == peak
