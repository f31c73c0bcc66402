"""Lengths of pairs, and a sampler of small batches, for the tests of batching."""

from typing import Any

from hypothesis import strategies as st

from vaswani_transformer.batching import TokenBudgetBatchSampler

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=8, max_size=200)


def sampler(pairs: list[tuple[int, int]], rank: int = 0, **options: Any) -> TokenBudgetBatchSampler:
    sources, targets = zip(*pairs, strict=True)
    return TokenBudgetBatchSampler(sources, targets, 60, 60, rank=rank, **options)
