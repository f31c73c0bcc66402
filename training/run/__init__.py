"""A run: its folder, checkpoints, initial weights, processes, and the checks before it begins."""
