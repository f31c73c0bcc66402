"""Load the model that a command translates with, and make its translator."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cpu.model import prepare_for_inference
from ..support.checked_loading import (
    check_model_name,
    check_tokenizer_fits,
    load_config,
    load_errors,
    load_model,
    load_tokenizer,
    own_model_types,
)
from ..support.errors import UserError, one_line
from ..support.files import digest_of_model
from ..support.modes import is_non_autoregressive
from .engine import Constraint
from .translator import Translator, make_translator


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """A model, and where and how it runs.

    Attributes:
        model: a folder, or a name on the Hub.
        device: None for the accelerator if there is one, else the CPU.
        dtype: of products with weights, or "auto".
        revision: of a model on the Hub; None for its main branch.
        trust_remote_code: whether to run the code that comes with the model.
    """

    model: str
    device: str | None = None
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Return them from the options of a command, which have the same names."""
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})

    @property
    def hub_settings(self) -> dict[str, Any]:
        """The arguments of `from_pretrained` for the Hub."""
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}

    def digest(self) -> str:
        """Return what identifies the model in a record: a digest of its folder's files or, on the Hub, its commit."""
        if (folder := Path(self.model)).is_dir():
            return digest_of_model(folder)
        return f"{self.model}@{getattr(load_config(self.model, **self.hub_settings), '_commit_hash', None)}"


def resolve_device(name: str | None) -> torch.device:
    """Return the device of `--device`, or else the accelerator or the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        return torch.zeros(1, device=name or accelerator or "cpu").device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device={name}: the model cannot run there: {one_line(error)}") from error


def should_prepare(options: LoadOptions, model_type: str, device: torch.device) -> bool:
    """Return whether to prepare a model for the device: one of this package on a CPU, except in float16."""
    is_own_type, is_on_cpu = model_type in own_model_types(), device.type == "cpu"
    if options.dtype == "int8" and not (is_own_type and is_on_cpu):
        raise UserError(
            f"--dtype=int8: is for models of this package on a CPU; got {options.model} of type {model_type!r} on "
            f"{device}. Give {'another --dtype' if is_on_cpu else '--device=cpu, or another --dtype'}."
        )
    return is_own_type and is_on_cpu and options.dtype != "float16"


def load_model_and_tokenizer(options: LoadOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model on its device and its tokenizer; on a CPU a copy that `prepare_for_inference` made."""
    check_model_name(options.model)
    if all(Path(options.model, name).is_file() for name in ("model.bin", "shared_vocabulary.json")):
        raise UserError(
            f"{options.model}: is a model of CTranslate2, which its package runs; give the one it was converted from."
        )
    device = resolve_device(options.device)
    shared = options.hub_settings
    is_prepared = should_prepare(options, load_config(options.model, **shared).model_type, device)
    if device.type == "meta":
        raise UserError("--device=meta: weights have no values there; give a device that computes.")
    tokenizer = load_tokenizer(options.model, **shared)
    is_float32 = is_prepared or (options.dtype == "auto" and device.type == "cpu")
    model = load_model(options.model, dtype="float32" if is_float32 else options.dtype, **shared)
    with load_errors(options.model):
        model.to(device)
    check_tokenizer_fits(model, tokenizer, options.model)
    if is_prepared:
        model = prepare_for_inference(model, "float32" if options.dtype == "auto" else options.dtype)
    return model, tokenizer


def check_search(options: argparse.Namespace, model: PreTrainedModel) -> None:
    """Check that the model's way of decoding has the options that are given."""
    name = options.model
    if not is_non_autoregressive(model):
        for option in ("iterations", "length_beam"):
            if getattr(options, option) is not None:
                raise UserError(
                    f"--{option}: {name} writes one token after the other; it is an option of models that "
                    "predict all words at once. Leave it out, or give --beams."
                )
        return
    if options.beams is not None:
        raise UserError(
            f"--beams: {name} predicts all words at once and has no beams. Leave it out, or give --length_beam."
        )
    if (options.iterations or 1) > 1 and not model.refines:
        raise UserError(f"--iterations={options.iterations}: {name} has one pass. Leave it out, or give a CMLM.")
    if (options.length_beam or 1) > model.num_length_classes:
        raise UserError(
            f"--length_beam={options.length_beam}: {name} has {model.num_length_classes} length classes. Give at most "
            "as many."
        )


def generate_settings(options: argparse.Namespace, model: PreTrainedModel) -> dict[str, Any]:
    check_search(options, model)
    option, field = ("length_beam", "length_beam_size") if is_non_autoregressive(model) else ("beams", "num_beams")
    beams = getattr(options, option) or getattr(model.generation_config, field, None) or 1
    if options.nbest is not None and options.nbest > beams:
        what = "lengths of the length beam" if is_non_autoregressive(model) else "beams"
        raise UserError(
            f"--nbest={options.nbest}: more than the {beams} {what}; give --{option}={options.nbest} as well."
        )
    settings = {
        "num_beams": options.beams,
        "length_penalty": options.length_penalty,
        "num_iterations": options.iterations,
        "length_beam_size": options.length_beam,
        "max_new_tokens": options.max_length,
        "num_return_sequences": options.nbest or 1,
    }
    return {name: value for name, value in settings.items() if value is not None}


def load_translator(
    options: argparse.Namespace,
    check: Callable[[PreTrainedTokenizerBase, str], None] = lambda tokenizer, name: None,
    make_constraint: Callable[[PreTrainedModel, PreTrainedTokenizerBase], Constraint | None] = lambda *_: None,
) -> Translator:
    """Return the translator of a command's options.

    `check` raises an error for a model that is not of the command's task, by its tokenizer.
    """
    texts = {"batch_tokens": options.batch_tokens, "sort_lines": options.sort_lines, "too_long": options.too_long}
    model, tokenizer = load_model_and_tokenizer(LoadOptions.of(options))
    check(tokenizer, options.model)
    return make_translator(
        model,
        tokenizer,
        max_source_tokens=options.max_source_tokens,
        scores=options.scores,
        constraint=make_constraint(model, tokenizer),
        **texts,
        **generate_settings(options, model),
    )
