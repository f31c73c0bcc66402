"""English-to-Spanish sentences that a small grammar makes, so that a first training run needs no download."""

from training.toy_task.grammar import make_splits

__all__ = ["make_splits"]
