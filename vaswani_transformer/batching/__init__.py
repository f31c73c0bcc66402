"""Batches of pairs of similar length under a token budget (5.1)."""

from .sampler import TokenBudgetBatchSampler
from .tokens import PairCollator, PairTokens

__all__ = ["PairCollator", "PairTokens", "TokenBudgetBatchSampler"]
