"""Models prepared for fast decoding on a CPU. This folder is not published with a model."""
