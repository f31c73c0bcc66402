"""Load models and tokenizers, with one line for any fault of theirs."""

import contextlib
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .errors import UserError, one_line
from .files import MODEL_MARKER
from .tokenizer import check_vocabulary

Model = TypeVar("Model", bound=PreTrainedModel)
TOKENIZER_FILES = ("tokenizer*", "*vocab*", "*.model", "*.spm", "merges.txt")


def check_model_name(model: str) -> None:
    """Check a model's name before any request to the Hub: no file, no folder without a model, no missing folder.

    Raises:
        UserError: naming it.
    """
    path = Path(model)
    if not model:
        raise UserError("The model has no name; give a folder with a model, or a model on the Hub.")
    if path.is_file():
        raise UserError(f"{model}: is a file; name the folder of a model, or a model on the Hub.")
    if path.is_dir() and not any((path / name).is_file() for name in (MODEL_MARKER, "adapter_config.json")):
        raise UserError(f"{model}: has no {MODEL_MARKER}, so it holds no model; name a folder with a model.")
    if model.startswith((".", "/", "~")) and not path.is_dir():
        raise UserError(f"{model}: there is no such folder; name one with a model, or a model on the Hub.")


@contextlib.contextmanager
def load_errors(name: str) -> Generator[None]:
    """Turn any error of the libraries, for a broken folder or the network, into a UserError with the model's name."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{name}: cannot be loaded: {one_line(error)}") from error


def load_config(name: str, model_type: str, field: str | None = None, revision: str = "main") -> PreTrainedConfig:
    """Return the configuration of a model that has to be of a type, without loading its weights.

    Args:
        name: the folder, or the name on the Hub.
        model_type: the type, such as "vaswani_transformer".
        field: the field of a recipe that names the model, for the message.
        revision: of a model on the Hub.

    Raises:
        UserError: it cannot be loaded, or is of another type.
    """
    check_model_name(name)
    with load_errors(name):
        config = AutoConfig.from_pretrained(name, revision=revision)
    if config.model_type != model_type:
        raise UserError(
            f"{name if field is None else f'{field}: {name}'}: is a model of another type; got {config.model_type!r}, "
            f"expected {model_type!r}. Name a model of that type."
        )
    return config


def is_not_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


@contextlib.contextmanager
def without_load_report() -> Generator[None]:
    """Silence Transformers' table of missing and unexpected weights: `load_model` raises for each of them."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_not_load_report)
    try:
        yield
    finally:
        logger.removeFilter(is_not_load_report)


def list_names(names: list[str], limit: int = 2) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def check_weights_fit(
    name: str,
    missing: list[str],
    unexpected: list[str],
    misshapen: list[str],
    required_by: str = "its config.json",
    fix: str = "Restore the config.json that was saved with the weights, or save the model again.",
) -> None:
    """Check that a folder has exactly the weights that a model requires.

    Args:
        name: the folder, as the message names it.
        missing, unexpected, misshapen: the weights that differ.
        required_by: what requires them, as the message names it.
        fix: the end of the message.

    Raises:
        UserError: naming the weights that differ.
    """
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    if differences := "; ".join(
        f"{problem}: {list_names(sorted(names))}" for problem, names in problems.items() if names
    ):
        raise UserError(f"{name}: its weights do not fit {required_by}; {differences}. {fix}")


def check_finite(
    name: str,
    weights: dict[str, torch.Tensor],
    fix: str = "give a checkpoint from before training diverged, or another copy of the file.",
) -> None:
    """Check that all weights are finite numbers; `fix` ends the message.

    Raises:
        UserError: naming those that contain NaN or an infinity.
    """
    broken = [
        key
        for key, weight in weights.items()
        if weight.is_floating_point() and not weight.is_meta and not torch.isfinite(weight).all()
    ]
    if broken:
        dtype = str(weights[broken[0]].dtype).removeprefix("torch.")
        raise UserError(f"{name}: NaN or infinite numbers in {list_names(broken)} ({dtype}); {fix}")


@overload
def load_model(name: str, model_class: type[Model], **settings: Any) -> Model: ...


@overload
def load_model(name: str, model_class: Any = AutoModelForSeq2SeqLM, **settings: Any) -> PreTrainedModel: ...


def load_model(name: str, model_class: Any = AutoModelForSeq2SeqLM, **settings: Any) -> PreTrainedModel:
    """Return the model of a folder or the Hub, with all weights present, of the right shapes and finite.

    Args:
        name: the folder, or the name on the Hub.
        model_class: the class, or Auto class, that loads it.
        **settings: arguments of `from_pretrained`.

    Raises:
        UserError: it cannot be loaded, or weights are missing, unexpected, misshapen or not finite.
    """
    check_model_name(name)
    with load_errors(name), without_load_report():
        model, info = model_class.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
    misshapen = [
        f"{key} {tuple(shape)}, expected {tuple(expected)}" for key, shape, expected in info["mismatched_keys"]
    ]
    check_weights_fit(name, list(info["missing_keys"]), list(info["unexpected_keys"]), misshapen)
    check_finite(name, model.state_dict())
    return model


def load_tokenizer(name: str, **settings: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or the Hub.

    Args:
        name: the folder, or the name on the Hub.
        **settings: arguments of `from_pretrained`.

    Raises:
        UserError: the tokenizer is missing or cannot be loaded.
    """
    check_model_name(name)
    folder = Path(name)
    if folder.is_dir() and not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise UserError(f"{name}: has no tokenizer; save the model's tokenizer there with save_pretrained.")
    with load_errors(f"{name}: its tokenizer"):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(name, **settings))


def check_tokenizer_fits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Check that the model has an embedding for every token, and a model that fills in masks the tokenizer's `<mask>`.

    Raises:
        UserError: naming both sizes, or both ids.
    """
    entries = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    try:
        check_vocabulary(tokenizer, entries, getattr(model.config, "mask_token_id", None), name)
    except ValueError as error:
        raise UserError(str(error)) from None


__all__ = [
    "check_finite",
    "check_model_name",
    "check_tokenizer_fits",
    "check_weights_fit",
    "load_config",
    "load_errors",
    "load_model",
    "load_tokenizer",
]
