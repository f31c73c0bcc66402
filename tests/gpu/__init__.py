"""The checks and measurements on a GPU: `python -m tests.gpu`, see docs/gpu.md."""
