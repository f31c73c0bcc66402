"""Temporary modes of a model: evaluation, and attention with weights."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeGuard

from transformers import PreTrainedModel

from ..nar import NarHead


def is_non_autoregressive(model: object) -> TypeGuard[NarHead]:
    """Return whether a model is non-autoregressive."""
    return not getattr(model, "is_autoregressive", True)


def has_likelihood(model: object) -> bool:
    """Return whether a model's loss is the negative log-likelihood of a target, so that it has a perplexity."""
    return getattr(model, "has_likelihood", not is_non_autoregressive(model))


@contextmanager
def eval_mode(model: PreTrainedModel) -> Generator[None]:
    """Switch a model to evaluation mode inside the context, and restore every module's mode after it."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def eager_attention(model: PreTrainedModel) -> Generator[None]:
    """Use "eager" attention, which returns weights, inside the context, and restore the configurations after it."""
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config in configs:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
