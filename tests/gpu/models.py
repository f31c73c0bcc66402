"""The models and batches of all parts.

B batch, S source, T target, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.gpu.runner import Setting
from tests.helpers import TINY
from tests.measuring import Pairs, marian_like
from vaswani_transformer import (
    MaskingCollator,
    VaswaniCmlmForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
)

PARALLEL: dict[str, Any] = {
    "NAT": VaswaniNatForConditionalGeneration,
    "CMLM": VaswaniCmlmForConditionalGeneration,
    "IterativeVAE": VaswaniIterativeVaeForConditionalGeneration,
}
MASK = 3  # CMLM's token


def config_of(name: str, setting: Setting, **overrides: Any) -> VaswaniTransformerConfig:
    """Return the config of the paper's model `name`, or a tiny one if the setting is tiny."""
    if setting.is_tiny:
        return VaswaniTransformerConfig(**{**TINY, **overrides})
    return VaswaniTransformerConfig.from_paper(name, **overrides)


def make_model(name: str, setting: Setting, **overrides: Any) -> VaswaniTransformerForConditionalGeneration:
    """Return the model on the CPU, the same one at each call."""
    torch.manual_seed(1)
    return VaswaniTransformerForConditionalGeneration(config_of(name, setting, **overrides))


def make_nar(name: str, setting: Setting, **overrides: Any) -> Any:
    """Return a model that predicts all words at once, of the base model's shape, on the CPU; NAT trains by glancing."""
    kind = PARALLEL[name]
    mask = {"mask_token_id": MASK} if name == "CMLM" else {}
    torch.manual_seed(1)
    model = kind(kind.config_class(**{**(TINY if setting.is_tiny else {}), **mask, **overrides}))
    if name == "NAT":
        model.glancing_ratio = 0.5
    return model


def collate_for_nar(name: str, pairs: Pairs) -> dict[str, Tensor]:
    """Return a training batch whose random choices are made: CMLM's masks, and the draws of glancing."""
    if name == "CMLM":
        return MaskingCollator(collate, MASK, 1)(pairs)
    batch = collate(pairs)
    if name == "NAT":
        generator = torch.Generator().manual_seed(0)
        batch["glancing_draws"] = torch.rand(batch["labels"].shape, generator=generator)
    return batch


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


STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}  # `compile_steps` compiles


def make_marian(name: str, setting: Setting) -> nn.Module:
    """Return Transformers' MarianMTModel of the same shape, the same one at each call."""
    torch.manual_seed(1)
    return marian_like(config_of(name, setting))


def pad(rows: Sequence[Tensor], value: int) -> Tensor:
    """Return rows as (B, longest), padded with `value`."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def collate(pairs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return sources, their mask and labels, (B, S), (B, S) and (B, T)."""
    source = pad([pair["input_ids"] for pair in pairs], 1)
    return {
        "input_ids": source,
        "attention_mask": source.ne(1).long(),
        "labels": pad([pair["labels"] for pair in pairs], -100),
    }


def collate_for_marian(pairs: Pairs) -> dict[str, Tensor]:
    """Return the same with `decoder_input_ids`: the Trainer's label smoother removes the labels."""
    batch = collate(pairs)
    shifted = nn.functional.pad(batch["labels"][:, :-1], (1, 0), value=0)
    return batch | {"decoder_input_ids": shifted.masked_fill(shifted == -100, 1)}
