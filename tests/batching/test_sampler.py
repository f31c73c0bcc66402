"""Batches of a data set in memory under a token budget: each pair once, the same steps on all ranks.

The oracle of the steps is the same rule pair by pair in plain Python.
"""

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaswani_transformer.batching import TokenBudgetBatchSampler
from vaswani_transformer.batching.sampler import step_bounds

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=8, max_size=200)


def sampler(pairs: list[tuple[int, int]], rank: int = 0, **options: Any) -> TokenBudgetBatchSampler:
    sources, targets = zip(*pairs, strict=True)
    return TokenBudgetBatchSampler(sources, targets, 60, 60, rank=rank, **options)


@given(LENGTHS, st.integers(1, 3), st.integers(1, 2))
def test_ranks_together_get_every_pair_exactly_once_in_as_many_batches_each_and_in_every_epoch(
    pairs: list[tuple[int, int]], num_processes: int, accumulation: int
) -> None:
    counts = set()
    for epoch in range(3):
        seen = []
        for rank in range(num_processes):
            rank_sampler = sampler(pairs, rank, num_processes=num_processes, accumulation=accumulation)
            rank_sampler.set_epoch(epoch)
            batches = list(rank_sampler)
            assert len(batches) == len(rank_sampler)
            assert all(batches)
            counts.add(len(batches))
            seen += [index for batch in batches for index in batch]
        assert sorted(seen) == list(range(len(pairs)))
    assert len(counts) == 1


def test_rank_is_by_default_the_one_that_accelerate_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = SimpleNamespace(num_processes=2, process_index=1)
    monkeypatch.setattr("vaswani_transformer.batching.sampler.PartialState", lambda **_: launch)
    by_default = TokenBudgetBatchSampler([3] * 50, [4] * 50, 60, 60)
    assert list(by_default) == list(sampler([(3, 4)] * 50, 1, num_processes=2))


@given(LENGTHS)
def test_batch_keeps_to_both_budgets(pairs: list[tuple[int, int]]) -> None:
    for batch in sampler(pairs):
        assert len(batch) * max(pairs[index][0] for index in batch) <= 60
        assert len(batch) * max(pairs[index][1] for index in batch) <= 60


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
    batches = TokenBudgetBatchSampler(sources, targets, source_tokens, target_tokens, **share)
    ordered = [pairs[index] for index in np.argsort(batches.keys, kind="stable")]
    assert batches.bounds.tolist() == bounds_pair_by_pair(ordered, (source_tokens, target_tokens), micro_batches)

    micro = [[pairs[index] for index in batch] for batch in batches]
    sides = [side for batch in micro for side in zip(*batch, strict=True)]
    positions = sum(len(side) * max(side) for side in sides)
    assert batches.padding_share == pytest.approx(1 - sum(map(sum, pairs)) / positions)


def test_pairs_of_one_token_fill_a_budget() -> None:
    ones = np.ones(10, dtype=np.int32)
    assert step_bounds(ones, ones, (5, 5), micro_batches=1).tolist() == [0, 5, 10]


def test_pair_of_a_step_has_the_same_index_for_any_number_of_processes_and_micro_batches() -> None:
    """Pair i is row i // (n a) of micro-batch i % (n a), and those are dealt to the n ranks in turns, a to each.

    So the ranks' micro-batches have similar lengths, and random choices by index do not depend on their number.
    """
    generator = random.Random(0)
    pairs = [(generator.randint(1, 9), generator.randint(1, 9)) for _ in range(310)]
    one_process = list(sampler(pairs))
    assert min(map(len, one_process)) >= 4
    for num_processes, accumulation in ((2, 1), (1, 3), (2, 2)):
        ranks = [
            list(sampler(pairs, rank, num_processes=num_processes, accumulation=accumulation))
            for rank in range(num_processes)
        ]
        for number, step in enumerate(one_process):
            for rank, batches in enumerate(ranks):
                for place, batch in enumerate(batches[number * accumulation : (number + 1) * accumulation]):
                    assert batch == step[rank + num_processes * place :: num_processes * accumulation]


def test_epochs_differ_and_the_seed_determines_each() -> None:
    generator = random.Random(0)
    pairs = [(generator.randint(3, 12), generator.randint(3, 12)) for _ in range(500)]
    sampled, other = sampler(pairs, seed=1), sampler(pairs, seed=1)
    first = list(sampled)
    sampled.set_epoch(1)
    assert list(sampled) != first
    assert list(other) == first
    assert list(sampler(pairs, seed=2)) != first
    assert list(sampler(pairs)) == list(sampler(pairs, seed=0))
    # Pairs are in other batches, not only in another order.
    assert sorted(map(sorted, sampled)) != sorted(map(sorted, first))


def test_padding_share_of_a_large_set_is_below_three_percent() -> None:
    generator = random.Random(0)
    sources = [max(2, round(generator.lognormvariate(math.log(25), 0.5))) for _ in range(60_000)]
    targets = [max(2, round(length * generator.uniform(0.9, 1.2))) for length in sources]
    assert TokenBudgetBatchSampler(sources, targets, 4096, 4096).padding_share < 0.03


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ([(3, 3), (3, 61)], {}, r"Pair 1 has 3 source and 61 target tokens.*60.*raise the budget"),
        ([(3, 3)] * 2, {"num_processes": 2, "accumulation": 2}, "2 pairs cannot be split over the 4 micro-batches"),
        ([(3, 3)] * 2, {"num_processes": 1, "accumulation": 0}, r"num_processes, rank or .*got 1, 0 and 0, expected"),
        ([(3, 3)] * 2, {"num_processes": 1, "rank": 1}, r"num_processes, rank or .*got 1, 1 and 1, expected"),
    ],
)
def test_pairs_or_ranks_that_cannot_be_batched_are_an_error(
    pairs: list[tuple[int, int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(pairs, **options)
