"""Modes that a model has for a while: evaluation, attention with weights."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeGuard

from transformers import PreTrainedModel

from ..nar import NarHead


def is_non_autoregressive(model: object) -> TypeGuard[NarHead]:
    """Return whether a model predicts all tokens of a target in parallel, as NAT and CMLM do."""
    return not getattr(model, "is_autoregressive", True)


@contextmanager
def eval_mode(model: PreTrainedModel) -> Generator[None]:
    """Switch dropout off inside the context; afterwards every module has its former mode."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def eager_attention(model: PreTrainedModel) -> Generator[None]:
    """Compute equation (1) step by step, the only way that returns weights; afterwards configurations are restored."""
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config in configs:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
