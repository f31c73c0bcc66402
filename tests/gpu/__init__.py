"""Everything that a GPU has to show: `python -m tests.gpu`, see docs/gpu.md."""
