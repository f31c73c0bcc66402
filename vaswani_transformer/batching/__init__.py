"""Batches of pairs of similar length under a token budget (5.1)."""

from .sampler import TokenBudgetBatchSampler
from .stream import TokenBudgetBatches

__all__ = ["TokenBudgetBatchSampler", "TokenBudgetBatches"]
