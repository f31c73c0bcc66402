"""Temporary modes of a model: evaluation, and attention with weights."""

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeGuard

from transformers import PreTrainedModel

from ..nar import NarHead


def is_non_autoregressive(model: object) -> TypeGuard[NarHead]:
    """Return whether a model is non-autoregressive."""
    return not getattr(model, "is_autoregressive", True)


def has_likelihood(model: object) -> bool:
    """Return whether a model's loss is the negative log-likelihood of a target, so that it has a perplexity."""
    return getattr(model, "has_likelihood", not is_non_autoregressive(model))


Mode = Callable[[PreTrainedModel], Callable[[], None]]
"""Function that switches a model to a mode, and returns the function that restores it."""
LOCK = threading.Lock()
USERS: dict[tuple[int, Mode], tuple[int, Callable[[], None]]] = {}
"""Number of contexts, of all threads, that use a model in a mode, and the function that restores it after the last."""


@contextmanager
def temporary_mode(model: PreTrainedModel, switch: Mode) -> Generator[None]:
    """Switch a model to a mode inside the context; the last of several threads restores the state before the first."""
    key = (id(model), switch)
    with LOCK:
        count, restore = USERS.get(key) or (0, switch(model))
        USERS[key] = count + 1, restore
    try:
        yield
    finally:
        with LOCK:
            count, restore = USERS.pop(key)
            if count > 1:
                USERS[key] = count - 1, restore
            else:
                restore()


def switch_to_evaluation(model: PreTrainedModel) -> Callable[[], None]:
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False

    def restore() -> None:
        for module in trained:
            module.training = True

    return restore


def eval_mode(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Switch a model to evaluation mode inside the context, and restore every module's mode after it."""
    if getattr(model, "stays_in_evaluation", False):  # prepared for inference
        return nullcontext()
    return temporary_mode(model, switch_to_evaluation)


def switch_to_eager(model: PreTrainedModel) -> Callable[[], None]:
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    before = [(config, config._attn_implementation) for config in configs]
    for config in configs:
        config._attn_implementation = "eager"

    def restore() -> None:
        for config, implementation in before:
            config._attn_implementation = implementation

    return restore


def eager_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Use "eager" attention, which returns weights, inside the context, and restore the configurations after it."""
    return temporary_mode(model, switch_to_eager)
