"""What a prepared model packs: configurations that differ in it, and the dtypes that this CPU supports."""

import copy
from typing import Any

import pytest
import torch

from tests.batches import Batch, source_batch

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


def decided_call(model: Any, lengths: list[int], **arguments: Any) -> Batch:
    """Return random sources for which small changes of all weights do not change what `generate()` finds.

    The changes are a hundred times the rounding of float32, so other kernels find the same tokens.
    """
    moved = copy.deepcopy(model)
    for weight in moved.parameters():
        weight.data *= 1 + 1e-5 * torch.randn_like(weight)
    for _ in range(20):
        call = source_batch(lengths, **arguments)
        tokens, others = (each.generate(**call, return_dict_in_generate=False) for each in (model, moved))
        if tokens.shape == others.shape and tokens.eq(others).all():
            return call
    raise AssertionError("each of 20 random batches is near a tie")
