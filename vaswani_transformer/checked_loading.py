"""Folders of models: loaded with one line for what is wrong with them, and written whole or not at all."""

import contextlib
import logging
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .translate.output import LineError, reason, writing

MARKER = "config.json"
"""The file that makes a folder one of a model: no other is replaced."""


def refuse_missing_folder(model: str) -> None:
    """Refuse a file, a folder without a model, and what is spelt as a folder and is none, before the Hub is asked.

    Raises:
        LineError: naming it.
    """
    path = Path(model)
    if not model:
        raise LineError("The model has no name; give a folder with a model, or a model on the Hub.")
    if path.is_file():
        raise LineError(f"{model}: a file; name the folder of a model, or a model on the Hub.")
    if path.is_dir() and not any((path / name).is_file() for name in (MARKER, "adapter_config.json")):
        raise LineError(f"{model}: holds no model, for it has no {MARKER}; name a folder with a model.")
    if model.startswith((".", "/", "~")) and not path.is_dir():
        raise LineError(f"{model}: there is no such folder; name one with a model, or a model on the Hub.")


@contextlib.contextmanager
def loading(name: str) -> Generator[None]:
    """Whatever a broken folder or the network makes the libraries raise becomes a LineError with the model's name."""
    try:
        yield
    except Exception as error:
        raise LineError(f"{name}: cannot be loaded: {reason(error)}") from error


def is_no_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


@contextlib.contextmanager
def without_load_report() -> Generator[None]:
    """No table of missing and unexpected weights from Transformers: `load_model` raises for each of them."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_no_load_report)
    try:
        yield
    finally:
        logger.removeFilter(is_no_load_report)


def listed(names: list[str], limit: int = 2) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def check_fit(name: str, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
    """Check that the weights of a folder are those that its config.json asks for.

    Raises:
        LineError: naming the weights that are not.
    """
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    if found := "; ".join(f"{problem}: {listed(sorted(names))}" for problem, names in problems.items() if names):
        raise LineError(
            f"{name}: its weights do not fit its config.json; {found}. Restore the config.json that was saved with the "
            "weights, or save the model again."
        )


def check_finite(name: str, weights: dict[str, torch.Tensor]) -> None:
    """Check that all weights are finite numbers.

    Raises:
        LineError: naming those that hold NaN or an infinity.
    """
    broken = [
        key
        for key, weight in weights.items()
        if weight.is_floating_point() and not weight.is_meta and not torch.isfinite(weight).all()
    ]
    if broken:
        dtype = str(weights[broken[0]].dtype).removeprefix("torch.")
        raise LineError(
            f"{name}: NaN or infinite numbers in {listed(broken)} ({dtype}); give a checkpoint from before training "
            "diverged, or another copy of the file."
        )


def load_model(name: str, model_class: Any = AutoModelForSeq2SeqLM, **settings: Any) -> PreTrainedModel:
    """The model of a folder or the Hub, whose weights are all there, of the right shapes and finite.

    Args:
        name: the folder, or the name on the Hub.
        model_class: the class, or Auto class, to load it with.
        **settings: arguments of `from_pretrained`.

    Raises:
        LineError: it cannot be loaded, or weights are missing, unexpected, misshapen or not finite.
    """
    refuse_missing_folder(name)
    with loading(name), without_load_report():
        model, info = model_class.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
    misshapen = [f"{key} {tuple(shape)}, expected {tuple(own)}" for key, shape, own in info["mismatched_keys"]]
    check_fit(name, list(info["missing_keys"]), list(info["unexpected_keys"]), misshapen)
    check_finite(name, model.state_dict())
    return model


TOKENIZER_FILES = ("tokenizer*", "*vocab*", "*.model", "*.spm", "merges.txt")


def load_tokenizer(name: str, **settings: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or the Hub.

    Args:
        name: the folder, or the name on the Hub.
        **settings: arguments of `from_pretrained`.

    Raises:
        LineError: there is none, or it cannot be loaded.
    """
    refuse_missing_folder(name)
    folder = Path(name)
    if folder.is_dir() and not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise LineError(f"{name}: holds no tokenizer; save the model's tokenizer there with save_pretrained.")
    with loading(f"{name}: its tokenizer"):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(name, **settings))


def refuse_other_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer whose tokens the model has no embeddings for.

    Raises:
        LineError: naming both sizes.
    """
    if len(tokenizer) > (entries := cast(Any, model.get_input_embeddings()).weight.shape[0]):
        raise LineError(
            f"{name}: its tokenizer has {len(tokenizer)} entries and the model {entries}; give a model with its own."
        )


def refuse_folder(path: Path, force: bool) -> None:
    """Refuse a folder that is in use or cannot be made, and a file.

    Raises:
        ValueError: something stands at `path` that may not be replaced, or in its way.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: a file; name a folder.")
    parent = next(each for each in path.absolute().parents if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{path}: {parent} is no folder that may be written to; name a place in another.")
    if not path.exists() or not any(path.iterdir()):
        return
    if not force:
        raise ValueError(f"{path}: the folder is in use; name another, or replace the model in it with --force.")
    if not (path / MARKER).is_file():
        raise ValueError(f"{path}: the folder holds no {MARKER}, so no model that could be replaced; name another.")


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], force: bool = False) -> Generator[Path]:
    """A folder to write in, which stands at `path` at the end; an error on the way leaves what stood there before.

    Args:
        path: where to; its parents are made.
        force: whether a model that stands there is replaced.

    Raises:
        ValueError: the folder is in use and may not be replaced.
    """
    target = Path(path).absolute()
    refuse_folder(target, force)
    with writing(str(path), "name another folder"):
        target.parent.mkdir(parents=True, exist_ok=True)
    fresh, former = (target.with_name(f".{target.name}.{kind}-{os.getpid()}") for kind in ("new", "old"))
    try:
        with writing(str(path), "name another folder"):
            fresh.mkdir()
        yield fresh
        if target.exists():
            target.rename(former)
        fresh.rename(target)
    except BaseException:
        if former.exists() and not target.exists():
            former.rename(target)
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


__all__ = [
    "check_finite",
    "load_model",
    "load_tokenizer",
    "loading",
    "new_folder",
    "refuse_folder",
    "refuse_missing_folder",
    "refuse_other_tokenizer",
]
