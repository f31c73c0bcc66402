"""Steps under a token budget against the same rule pair by pair in plain Python."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batching.samplers import LENGTHS
from vaswani_transformer import TokenBudgetBatchSampler
from vaswani_transformer.batching.steps import step_bounds


def bounds_pair_by_pair(ordered: list[tuple[int, int]], budgets: tuple[int, int], micro_batches: int) -> list[int]:
    bounds = [0]
    for end in range(1, len(ordered) + 1):
        step = ordered[bounds[-1] : end]
        is_full = any(
            len(step) * max(side) > budget for side, budget in zip(zip(*step, strict=True), budgets, strict=True)
        )
        if is_full and len(step) > micro_batches:
            bounds.append(end - 1)
    bounds.append(len(ordered))
    if bounds[-1] - bounds[-2] < micro_batches:
        middle = bounds[-1] - micro_batches
        bounds[-2:] = [middle, bounds[-1]] if middle - bounds[-3] >= micro_batches else [bounds[-1]]
    return bounds


@given(LENGTHS, st.integers(30, 300), st.integers(30, 300), st.integers(1, 8))
def test_steps_end_where_the_next_pair_would_exceed_a_budget(
    pairs: list[tuple[int, int]], source_tokens: int, target_tokens: int, micro_batches: int
) -> None:
    sources, targets = np.array(pairs, dtype=np.int32).T
    share: Any = {"num_processes": 1, "rank": 0, "accumulation": micro_batches}
    sampler = TokenBudgetBatchSampler(sources, targets, source_tokens, target_tokens, **share)
    ordered = [pairs[index] for index in np.argsort(sampler.keys, kind="stable")]
    assert sampler.bounds.tolist() == bounds_pair_by_pair(ordered, (source_tokens, target_tokens), micro_batches)

    micro = [[pairs[index] for index in batch] for batch in sampler]
    sides = [side for batch in micro for side in zip(*batch, strict=True)]
    positions = sum(len(side) * max(side) for side in sides)
    assert sampler.padding_share == pytest.approx(1 - sum(map(sum, pairs)) / positions)


def test_pairs_of_one_token_fill_a_budget() -> None:
    ones = np.ones(10, dtype=np.int32)
    assert step_bounds(ones, ones, (5, 5), micro_batches=1).tolist() == [0, 5, 10]
