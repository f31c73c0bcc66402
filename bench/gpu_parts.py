"""The parts of `bench.gpu`: checks, then timings, and last those that compile, which takes minutes."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_checks import distributed_part, loss_part, model_part, parallel_part, search_part, training_part
from bench.gpu_models import SHORT, Setting
from bench.gpu_timings import chunks_part, decoding_part, parallel_decoding_part, train_part, waits_part
from bench.measuring import Row

ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True)
class Part:
    """A check or measurement.

    Attributes:
        name: its name in the results; the words before the colon are its table.
        run: yields rows; the part fails if a row's `difference` is above its `bound`.
        limit: seconds until its process is ended; `CPU_PATIENCE` times longer on a CPU.
        is_slow: whether it compiles kernels first, which takes minutes; such parts come last.
    """

    name: str
    run: Callable[[Setting], Iterator[Row]]
    limit: float = 90.0
    is_slow: bool = False


def all_parts() -> list[Part]:
    """Return the parts in the order in which they run."""
    both = (torch.float32, torch.bfloat16)
    parts: list[Part] = []

    def add(name: str, run: Any, limit: float = 90, is_slow: bool = False, **settings: Any) -> None:
        parts.append(Part(name, functools.partial(run, **settings), limit, is_slow))

    # Checks.
    for attention, dtype in itertools.product(ATTENTIONS, both):
        if "flash" in attention and dtype == torch.float32:  # its kernels have 16 bits
            continue
        is_flex = attention == "flex_attention"
        limit = 180 if is_flex else 90
        add(f"correct: {attention}, {SHORT[dtype]}", model_part, limit, is_flex, attention=attention, dtype=dtype)
    for dtype in both:
        add(f"correct: compiled, {SHORT[dtype]}", model_part, 120, True, attention="sdpa", dtype=dtype)
        add(f"correct: non-autoregressive models, {SHORT[dtype]}", parallel_part, dtype=dtype)
    add("correct: search", search_part)
    add("correct: search, static cache and CUDA graphs", search_part, 120, True, compiles=True)
    add("correct: loss in place", loss_part)
    add("correct: training", training_part)
    for kind in ("ddp", "fsdp2"):
        add(f"correct: {kind}", distributed_part, kind=kind)

    # Timings.
    for shape, arm in itertools.product(("base", "big"), ("ours", "marian, same batches", "marian, random batches")):
        add(f"train: {shape}, {arm}", train_part, arm=arm, shape=shape)
    add("train: base, ours, flash_attention_2", train_part, arm="ours", shape="base", attention="flash_attention_2")
    add("train: base, ours, compiled", train_part, 300, True, arm="ours", shape="base", compiles=True)
    add("waits: training steps", waits_part)
    add("loss: chunks", chunks_part)
    for arm, dtype in itertools.product(("ours", "marian", "ctranslate2", "ours, CUDA graphs"), both):
        is_compiled = "graphs" in arm
        limit = 150 if is_compiled else 90
        add(f"decode: {arm}, {SHORT[dtype]}", decoding_part, limit, is_compiled, arm=arm, dtype=dtype)
    for dtype in both:
        add(f"decode in parallel: {SHORT[dtype]}", parallel_decoding_part, dtype=dtype)
    return sorted(parts, key=lambda part: part.is_slow)
