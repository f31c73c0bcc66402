"""Attention by other roads: loops over equation (1), and the functions of the flash-attn package for a CPU."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import modeling_flash_attention_utils


def equation_1(query: np.ndarray, key: np.ndarray, value: np.ndarray, visible: Tensor) -> np.ndarray:
    """softmax(Q K^T / sqrt(d_k)) V for one head, one query and key at a time, in float64."""
    attended = np.zeros((len(query), value.shape[1]))
    for i, row in enumerate(visible):
        seen = row.nonzero().flatten().tolist()
        exponentials = np.exp([query[i] @ key[j] / math.sqrt(key.shape[1]) for j in seen])
        attended[i] = sum(weight * value[j] for weight, j in zip(exponentials / exponentials.sum(), seen, strict=True))
    return attended


def multi_head(attention: Any, states: Tensor, memory: Tensor, visible: Tensor) -> np.ndarray:
    """MultiHead(Q, K, V) of 3.2.2 for one text, one head at a time, in float64; `visible` (Q, K)."""

    def project(projection: nn.Linear, rows: Tensor) -> np.ndarray:
        bias = 0 if projection.bias is None else projection.bias.detach().double().numpy()
        return rows.double().numpy() @ projection.weight.detach().double().numpy().T + bias

    query = project(attention.q_proj, states)
    key, value = project(attention.k_proj, memory), project(attention.v_proj, memory)
    by_head = zip(*(np.split(rows, attention.config.num_heads, axis=1) for rows in (query, key, value)), strict=True)
    heads = [equation_1(*of_head, visible) for of_head in by_head]
    return project(attention.o_proj, torch.from_numpy(np.concatenate(heads, axis=1)))


def additive(visible: Tensor) -> Tensor:
    """Return a mask that is added to scores."""
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


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
        # the last query is at the last key
        distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
        hidden = (distance > 0) & causal
        if window_size[0] >= 0:
            hidden |= (distance < -window_size[0]) | (distance > window_size[1])
        scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale).masked_fill(hidden, -math.inf)
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
