"""The functions of the flash-attn package for a CPU."""

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import modeling_flash_attention_utils


class FlashKernels:
    """Plain versions of these functions, for texts of one length and for concatenated texts."""

    @staticmethod
    def fixed(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert softmax_scale is not None
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
        if causal:  # the last query attends to the last key
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
            scores = scores.masked_fill(hidden, -math.inf)
        if window_size[0] >= 0:
            distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
            is_far = (distance < -window_size[0]) | (distance > window_size[1])
            scores = scores.masked_fill(is_far, -math.inf)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)

    @staticmethod
    def varying(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        assert int(cu_seqlens_q[-1]) == len(q)
        assert int(cu_seqlens_k[-1]) == len(k)
        queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        settings = (softmax_scale, causal, window_size)
        texts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
        return torch.cat([FlashKernels.fixed(*(x[None] for x in t), 0.0, *settings)[0] for t in texts])

    @staticmethod
    def unpad(states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
        lengths = mask.sum(-1, dtype=torch.int32)
        indices = mask.flatten().nonzero().flatten()
        ends = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return states.flatten(0, 1)[indices], indices, ends, int(lengths.max()), lengths

    @staticmethod
    def pad(states: Tensor, indices: Tensor, batch: int, length: int) -> Tensor:
        padded = states.new_zeros(batch * length, *states.shape[1:])
        padded[indices] = states
        return padded.unflatten(0, (batch, length))

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make Transformers call these functions as those of the package."""
        kernels = (cls.fixed, cls.varying, None, cls.pad, cls.unpad)
        monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: kernels)
        monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
