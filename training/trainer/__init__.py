"""The trainer, its callbacks and evaluation, the reaction to divergence, and ENGINE's energy."""
