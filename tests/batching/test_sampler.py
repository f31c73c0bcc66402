"""Batches of a data set in memory under a token budget: each pair once, the same steps on all ranks."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batching.samplers import LENGTHS, sampler
from vaswani_transformer.batching import TokenBudgetBatchSampler


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
    pairs = [(3, 4)] * 50
    lengths = [3] * 50, [4] * 50
    by_default, given = TokenBudgetBatchSampler(*lengths, 60, 60), sampler(pairs, 1, num_processes=2)
    assert list(by_default) == list(given) != list(sampler(pairs, 0, num_processes=1))


@given(LENGTHS)
def test_batch_keeps_to_both_budgets(pairs: list[tuple[int, int]]) -> None:
    for batch in sampler(pairs):
        assert len(batch) * max(pairs[index][0] for index in batch) <= 60
        assert len(batch) * max(pairs[index][1] for index in batch) <= 60


def test_step_is_the_same_for_any_number_of_processes_and_micro_batches() -> None:
    """Every step here has a pair for each micro-batch."""
    generator = random.Random(0)
    pairs = [(generator.randint(1, 9), generator.randint(1, 9)) for _ in range(310)]
    one_process = [sorted(batch) for batch in sampler(pairs)]
    assert min(map(len, one_process)) >= 4
    for num_processes, accumulation in ((2, 1), (1, 3), (2, 2)):
        ranks = [
            list(sampler(pairs, rank, num_processes=num_processes, accumulation=accumulation))
            for rank in range(num_processes)
        ]
        steps = [
            sorted(index for rank in ranks for part in rank[step : step + accumulation] for index in part)
            for step in range(0, len(ranks[0]), accumulation)
        ]
        assert steps == one_process


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
        *(
            (
                [(3, 3)] * 2,
                {"num_processes": processes, "rank": rank, "accumulation": accumulation},
                rf"num_processes, rank, accumulation: .*got {processes}, {rank} and {accumulation}, expected",
            )
            for processes, rank, accumulation in ((1, 0, 0), (1, 1, 1))
        ),
    ],
)
def test_pairs_or_ranks_that_cannot_be_batched_are_an_error(
    pairs: list[tuple[int, int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(pairs, **options)
