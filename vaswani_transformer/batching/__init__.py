"""Batches of pairs of similar length under a token budget (5.1)."""

from .pairs import PairCollator, PairTokens
from .sampler import TokenBudgetBatchSampler

__all__ = ["PairCollator", "PairTokens", "TokenBudgetBatchSampler"]
