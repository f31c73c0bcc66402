"""Equation (3), the paper's Adam and the batches by token budget."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vaswani_transformer.optimization import (
    TokenBudgetBatchSampler,
    learning_rate,
    paper_adam,
    paper_schedule,
)

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=8, max_size=200)


def sampler(pairs, rank=0, **options):
    sources, targets = zip(*pairs, strict=True)
    return TokenBudgetBatchSampler(sources, targets, 60, 60, rank=rank, **options)


@given(LENGTHS, st.integers(1, 3), st.integers(1, 2), st.integers(0, 5))
def test_no_pair_is_lost_or_seen_twice_on_any_number_of_ranks(pairs, num_processes, accumulation, epoch):
    seen = []
    for rank in range(num_processes):
        own = sampler(pairs, rank, num_processes=num_processes, accumulation=accumulation)
        own.set_epoch(epoch)
        batches = list(own)
        assert len(batches) == len(own)
        assert all(batches)
        seen += [index for batch in batches for index in batch]
    assert sorted(seen) == list(range(len(pairs)))


@given(LENGTHS)
def test_every_batch_keeps_to_both_budgets(pairs):
    for batch in sampler(pairs):
        assert len(batch) * max(pairs[index][0] for index in batch) <= 60
        assert len(batch) * max(pairs[index][1] for index in batch) <= 60


def test_a_step_is_the_same_on_any_number_of_processes_and_in_any_number_of_parts():
    """Where it has a pair for every part, as each of these has."""
    generator = random.Random(0)
    pairs = [(generator.randint(1, 9), generator.randint(1, 9)) for _ in range(302)]
    whole = [sorted(batch) for batch in sampler(pairs)]
    assert min(map(len, whole)) >= 4
    for num_processes, accumulation in ((2, 1), (1, 3), (2, 2)):
        ranks = [
            list(sampler(pairs, rank, num_processes=num_processes, accumulation=accumulation))
            for rank in range(num_processes)
        ]
        steps = [
            sorted(index for rank in ranks for part in rank[step : step + accumulation] for index in part)
            for step in range(0, len(ranks[0]), accumulation)
        ]
        assert steps == whole


@given(LENGTHS, st.integers(1, 3), st.integers(1, 2))
def test_every_epoch_and_every_rank_has_the_same_number_of_batches(pairs, num_processes, accumulation):
    counts = set()
    for rank in range(num_processes):
        own = sampler(pairs, rank, num_processes=num_processes, accumulation=accumulation)
        for epoch in range(3):
            own.set_epoch(epoch)
            counts.add(len(list(own)))
    assert len(counts) == 1


def test_epochs_differ_and_the_seed_settles_each():
    generator = random.Random(0)
    pairs = [(generator.randint(3, 12), generator.randint(3, 12)) for _ in range(500)]
    own, other = sampler(pairs, seed=1), sampler(pairs, seed=1)
    first = list(own)
    own.set_epoch(1)
    assert list(own) != first
    assert list(other) == first
    assert list(sampler(pairs, seed=2)) != first
    assert sorted(map(sorted, own)) != sorted(map(sorted, first))  # pairs meet other pairs, not only in another order


def test_the_epoch_can_be_read_from_elsewhere():
    pairs = [(length % 9 + 1, length % 7 + 1) for length in range(200)]
    now = 0
    told, asked = sampler(pairs), sampler(pairs, epoch=lambda: now)
    for now in range(3):
        told.set_epoch(now)
        assert list(asked) == list(told)


def test_padding_is_below_three_percent_where_the_set_is_large():
    generator = random.Random(0)
    sources = [max(2, round(generator.lognormvariate(math.log(25), 0.5))) for _ in range(60_000)]
    targets = [max(2, round(length * generator.uniform(0.9, 1.2))) for length in sources]
    assert TokenBudgetBatchSampler(sources, targets, 4096, 4096).padding_share < 0.03


def test_a_pair_beyond_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"Pair 1 has 3 source and 61 target tokens.*60.*raise the budget"):
        sampler([(3, 3), (3, 61)])


def test_too_few_pairs_for_the_parts_of_a_step_are_refused():
    with pytest.raises(ValueError, match=r"2 pairs cannot be split over 4 parts"):
        sampler([(3, 3), (3, 3)], num_processes=2, accumulation=2)


def test_the_learning_rate_is_equation_three():
    assert learning_rate(1, 512) == pytest.approx(4000**-1.5 * 512**-0.5)
    assert learning_rate(4000, 512) == pytest.approx(512**-0.5 * 4000**-0.5)  # the peak, about 7.0e-4
    assert learning_rate(100_000, 512) == pytest.approx(512**-0.5 * 100_000**-0.5)


def test_the_schedule_gives_step_n_the_rate_of_step_n():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = paper_adam([weight])
    schedule = paper_schedule(optimizer, d_model=64, warmup_steps=3, scale=2.0)
    for step in range(1, 8):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2 * learning_rate(step, 64, 3))
        weight.grad = torch.ones(1)
        optimizer.step()
        schedule.step()


def test_adam_has_the_papers_settings():
    optimizer = paper_adam([torch.nn.Parameter(torch.zeros(2))])
    settings = optimizer.param_groups[0]
    assert (settings["betas"], settings["eps"], settings["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)


def test_a_step_of_adam_is_its_definition():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = paper_adam([weight])
    paper_schedule(optimizer, d_model=16, warmup_steps=2)
    gradient = torch.tensor([0.3, -0.7], dtype=torch.float64)
    weight.grad = gradient.clone()
    optimizer.step()
    rate = learning_rate(1, 16, 2)  # in the first step both moments, corrected, are the gradient and its square
    expected = torch.tensor([1.0, -2.0], dtype=torch.float64) - rate * gradient / (gradient.abs() + 1e-9)
    torch.testing.assert_close(weight.detach(), expected)
