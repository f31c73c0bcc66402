"""Loading of the model and construction of the translator for a command."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cpu.model import prepare_for_inference
from ..support.checked_loading import (
    check_tokenizer_fits,
    load_config,
    load_errors,
    load_model,
    load_tokenizer,
    own_model_types,
)
from ..support.errors import UserError, one_line
from .options import LoadOptions, TranslationOptions
from .translator import Constraint, Translator


def load_model_and_tokenizer(options: LoadOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model on its device, and its tokenizer.

    On a CPU a model of this package is prepared with `prepare_for_inference`, except in float16.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        device = torch.zeros(1, device=options.device or accelerator or "cpu").device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device={options.device}: the model cannot run there: {one_line(error)}") from error
    name, dtype, is_on_cpu = options.model, options.dtype, device.type == "cpu"
    config = load_config(name, **options.hub_settings)
    is_prepared = config.model_type in own_model_types() and is_on_cpu and dtype != "float16"
    if dtype == "int8" and not is_prepared:
        raise UserError(
            f"--dtype=int8: is for models of this package on a CPU; got {name} of type {config.model_type!r} on "
            f"{device}. Give {'another --dtype' if is_on_cpu else '--device=cpu, or another --dtype'}."
        )
    tokenizer = load_tokenizer(name, config=config, **options.hub_settings)
    is_float32 = is_prepared or (dtype == "auto" and is_on_cpu)
    model = load_model(name, dtype="float32" if is_float32 else dtype, config=config, **options.hub_settings)
    with load_errors(name):
        model.to(device)
    check_tokenizer_fits(model, tokenizer, name)
    if is_prepared:
        model = prepare_for_inference(model, "float32" if dtype == "auto" else dtype)
    return model, tokenizer


def make_translator(
    options: TranslationOptions,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    constraint: Constraint | None = None,
) -> Translator:
    """Return the translator for a command's options."""
    search = {
        "num_beams": options.beams,
        "length_penalty": options.length_penalty,
        "num_iterations": options.iterations,
        "length_beam_size": options.length_beam,
        "max_new_tokens": options.max_length,
        "num_return_sequences": options.nbest or 1,
    }
    return Translator(
        model,
        tokenizer,
        batch_tokens=options.batch_tokens,
        sort_lines=options.sort_lines,
        max_source_tokens=options.max_source_tokens,
        too_long=options.too_long,
        scores=options.scores,
        constraint=constraint,
        **{name: value for name, value in search.items() if value is not None},
    )
