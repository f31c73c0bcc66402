"""What a prepared model packs: configurations that differ in it, and the dtypes that this CPU supports."""

from typing import Any

import pytest
import torch

# Configurations that differ in what a prepared model packs.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True},
    "own projection": {"tie_word_embeddings": False},
    "learned positions": {"position_embedding": "learned"},
    "wide values": {"d_k": 8, "d_v": 12},
    "dropout": {"attention_dropout": 0.1, "activation_dropout": 0.1},
}


def cpu_dtypes() -> list[str]:
    """Return the dtypes of packed layers that torch reports for this CPU and this build."""
    if not torch.backends.mkldnn.is_available():
        return []
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    has_int8 = "onednn" in torch.backends.quantized.supported_engines
    return ["float32"] + ["bfloat16"] * has_bfloat16 + ["int8"] * has_int8


DTYPES = cpu_dtypes()


def needs(dtype: str) -> Any:
    """Return a parameter of a test that runs where the CPU and torch have packed layers of this dtype."""
    is_missing = dtype not in DTYPES
    return pytest.param(dtype, marks=pytest.mark.skipif(is_missing, reason=f"this CPU or torch has no {dtype}"))
