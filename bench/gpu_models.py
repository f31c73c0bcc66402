"""The models, batches and steps that the checks and timings of `bench.gpu` share.

B batch, S source, T target.
"""

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.measuring import Pairs, collate, lengths_of, marian_like
from vaswani_transformer import (
    MaskingCollator,
    TokenBudgetBatchSampler,
    VaswaniCmlmForConditionalGeneration,
    VaswaniCtcForConditionalGeneration,
    VaswaniDagForConditionalGeneration,
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
)

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}
TINY: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "num_heads": 4,
    "d_ff": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
}
PARALLEL: dict[str, Any] = {
    "NAT": VaswaniNatForConditionalGeneration,
    "CTC": VaswaniCtcForConditionalGeneration,
    "DAG": VaswaniDagForConditionalGeneration,
    "CMLM": VaswaniCmlmForConditionalGeneration,
    "IterativeVAE": VaswaniIterativeVaeForConditionalGeneration,
    "FlowSeq": VaswaniFlowSeqForConditionalGeneration,
}
MASK = 3  # CMLM's token
STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}  # `compile_steps` compiles
Batch = dict[str, Tensor]


class SkipPart(Exception):  # noqa: N818 - not an error
    """Raised in a part that cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """The device, size and empty folder that a part runs with."""

    device: torch.device
    is_tiny: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def compiler(self) -> str:
        """The backend of torch.compile; a CPU checks only that there is one graph and that it is right."""
        return "eager" if self.device.type == "cpu" else "inductor"

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def config_of(name: str, setting: Setting, **overrides: Any) -> VaswaniTransformerConfig:
    """Return the config of the paper's model `name`, or a tiny one."""
    if setting.is_tiny:
        return VaswaniTransformerConfig(**{**TINY, **overrides})
    return VaswaniTransformerConfig.from_paper(name, **overrides)


def make_model(name: str, setting: Setting, **overrides: Any) -> Any:
    """Return a model on the CPU, the same one at each call: of the paper, or of PARALLEL; NAT, CTC and DAG glance."""
    torch.manual_seed(1)
    if name not in PARALLEL:
        return VaswaniTransformerForConditionalGeneration(config_of(name, setting, **overrides))
    fields = dict(TINY) if setting.is_tiny else {}
    if name == "CMLM":
        fields["mask_token_id"] = MASK
    fields.update(overrides)
    model_class = PARALLEL[name]
    model = model_class(model_class.config_class(**fields))
    if name in ("NAT", "CTC", "DAG"):
        model.glancing_ratio = 0.5
    return model


def make_marian(name: str, setting: Setting) -> Any:
    torch.manual_seed(1)
    return marian_like(config_of(name, setting))


def batch_for(name: str, pairs: Pairs) -> Batch:
    """Return a training batch whose random choices are made: CMLM's masks, and the draws of glancing and revealing."""
    if name == "CMLM":
        return MaskingCollator(collate, MASK, 1)(pairs)
    batch = collate(pairs)
    rows, length = batch["labels"].shape
    generator = torch.Generator().manual_seed(0)
    if name == "NAT":
        batch["glancing_draws"] = torch.rand(rows, length, generator=generator)
    elif name in ("CTC", "DAG"):
        slots = PARALLEL[name].config_class().upsampling * batch["input_ids"].shape[1]
        batch["glancing_draws"] = torch.rand(rows, slots, generator=generator)
    elif name == "IterativeVAE":
        batch["reveal_draws"] = torch.rand(rows, length, generator=generator)
    return batch


def to(device: torch.device, batch: Batch) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def set_attention(model: Any, attention: str, setting: Setting) -> None:
    """Set the attention of a model.

    Raises:
        SkipPart: this machine does not have it.
    """
    if "flash" in attention and not setting.is_cuda:
        raise SkipPart("flash attention needs CUDA")
    if attention == "flex_attention" and setting.device.type == "cpu":
        raise SkipPart("flex_attention does not support the backward pass on a CPU")
    try:
        model.set_attn_implementation(attention)
    except (ImportError, ValueError, OSError) as error:  # the last where a kernel would come from the Hub
        raise SkipPart(f"{attention}: {str(error).splitlines()[0]}") from error


def compile_steps(model: Any, setting: Setting) -> None:
    """Compile `forward`, with CUDA graphs on CUDA, for all steps of a search but the first.

    The first step makes the tensors of the static cache. Made within a graph they have no fixed address, and then CUDA
    graphs are left out or fail. Transformers compiles no first step either.
    """
    mode: dict[str, Any] = {"mode": "reduce-overhead"} if setting.is_cuda else {}
    plain = model.forward
    compiled = torch.compile(plain, fullgraph=True, dynamic=False, backend=setting.compiler, **mode)

    @functools.wraps(plain)
    def forward(*args: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        is_first = past_key_values is None or not past_key_values.self_attention_cache.layers[0].is_initialized
        return (plain if is_first else compiled)(*args, past_key_values=past_key_values, **inputs)

    model.forward = forward


def sampled(pairs: Pairs, tokens: int, accumulation: int = 1) -> TokenBudgetBatchSampler:
    """Return batches of `tokens` source and target tokens."""
    return TokenBudgetBatchSampler(*lengths_of(pairs), tokens, tokens, accumulation=accumulation)


def autocast(setting: Setting, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    return torch.autocast(setting.device.type, dtype, enabled=dtype != torch.float32)
