"""Lengths, soft copy and random positions, each against a list.

B batch, S source, T target.
"""

import pytest
import torch

from tests.nar_models import tiny_nat
from vaswani_transformer.lengths import LengthDifference, choose_positions, soft_copy
from vaswani_transformer.nar_head import EncodedSource


@pytest.mark.parametrize("side", ["right", "left"])
def test_soft_copy_equals_a_list_at_every_pair_of_lengths(side: str) -> None:
    """Row i of a target is real row floor(i n / m), for all n, m up to 40."""
    lengths = torch.arange(1, 41)
    for n in range(1, 41):
        rows = torch.arange(40.0).view(1, 40, 1)
        first = 0 if side == "right" else 40 - n
        is_real = (torch.arange(40) >= first) & (torch.arange(40) < first + n)
        copied = soft_copy(rows, is_real[None], lengths, 40)  # (40, 40, 1)
        for m in range(1, 41):
            assert copied[m - 1, :m, 0].tolist() == [first + i * n // m for i in range(m)]


def test_soft_copy_of_several_targets_reads_its_own_source() -> None:
    memory = torch.randn(2, 5, 3)
    is_real = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
    lengths = torch.tensor([2, 4, 3, 7])
    actual = soft_copy(memory, is_real, lengths, 7)
    assert torch.equal(actual[:2], soft_copy(memory[:1], is_real[:1], lengths[:2], 7))
    assert torch.equal(actual[2:], soft_copy(memory[1:], is_real[1:], lengths[2:], 7))


def test_soft_copy_passes_the_gradient_to_the_memory() -> None:
    memory = torch.randn(1, 4, 2, requires_grad=True)
    soft_copy(memory, torch.ones(1, 4).bool(), torch.tensor([6]), 6).sum().backward()
    assert memory.grad is not None
    assert memory.grad[0, :, 0].tolist() == [2.0, 1.0, 2.0, 1.0]  # floor(i 4 / 6) = 0 0 1 2 2 3


def test_length_candidates_equal_lists() -> None:
    """max(1, n + class - 20) for all n up to 40 and all classes."""
    head, logits = tiny_nat(), -torch.arange(41.0)[None]
    for n in range(1, 41):
        source = EncodedSource(torch.zeros(1, n, 1), None, torch.ones(1, n).bool(), logits)
        assert head.best_lengths(source, 41).tolist() == [[max(1, n + label - 20) for label in range(41)]]
        classes = head.length_classes(source, torch.arange(1, 81))
        assert classes.tolist() == [min(20, max(-20, m - n)) + 20 for m in range(1, 81)]


def test_length_pools_real_rows_only() -> None:
    head, memory = LengthDifference(8, 7), torch.randn(2, 5, 8)
    is_real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    changed = memory.clone()
    changed[0, 3:] = 1e6
    assert torch.equal(head(memory, is_real), head(changed, is_real))


def test_random_choice_has_its_size_and_stays_among_the_candidates() -> None:
    is_candidate = torch.rand(200, 9) < 0.6
    counts = torch.minimum(torch.randint(0, 9, (200,)), is_candidate.sum(1))
    chosen = choose_positions(is_candidate, counts)
    assert torch.equal(chosen.sum(1), counts)
    assert not bool((chosen & ~is_candidate).any())
