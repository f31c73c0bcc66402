"""The arms of the comparison of families: each model under each of its searches, and its inputs."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from vaswani_transformer import prepare_for_inference
from vaswani_transformer.support.checked_loading import check_tokenizer_fits, load_model, load_tokenizer
from vaswani_transformer.support.errors import UserError
from vaswani_transformer.support.modes import is_non_autoregressive
from vaswani_transformer.tokenizer import text_encoder
from vaswani_transformer.translation.engine import pad_rows

BATCH = 32


@dataclass
class Arm:
    """One model under one search.

    model_name, name: of the model, and with its search.
    passes: of the decoder over a target; "m" for one a token.
    settings: arguments of `generate()`.
    texts: its translations of the complete test set.
    seconds: by number of threads, of each sentence at batch 1; of each batch of 32.
    """

    model_name: str
    name: str
    model: Any
    tokenizer: Any
    passes: str
    settings: dict[str, Any]
    is_distilled: bool
    texts: list[str] = field(default_factory=list)
    single: dict[int, list[float]] = field(default_factory=dict)
    batched: dict[int, list[float]] = field(default_factory=dict)

    def generate(self, inputs: dict[str, Tensor], **settings: Any) -> Any:
        return self.model.generate(**inputs, **self.settings, **settings)

    def decode(self, tokens: Tensor) -> list[str]:
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)


def load_arms(options: argparse.Namespace) -> list[Arm]:
    """Return the arms of every model.

    Raises:
        UserError: a model cannot be loaded, or two have one name.
    """
    arms: list[Arm] = []
    for name, _, folder in (pair.partition("=") for pair in options.model):
        if not folder or any(arm.model_name == name for arm in arms):
            raise UserError(f"--model={name}: expected NAME=FOLDER with a new name. Name each model once.")
        model, tokenizer = load_model(folder), load_tokenizer(folder)
        check_tokenizer_fits(model, tokenizer, folder)
        if options.dtype != "plain":
            model = prepare_for_inference(model, options.dtype)
        for search, passes, settings in searches(model.eval(), options):
            distilled = name in options.distilled
            arms.append(Arm(name, f"{name}, {search}", model, tokenizer, passes, settings, distilled))
    if unknown := set(options.distilled) - {arm.model_name for arm in arms}:
        raise UserError(f"--distilled: no model is named {', '.join(sorted(unknown))}. Give names of --model.")
    return arms


def searches(model: Any, options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, the passes and the settings of each search of a model."""
    if is_non_autoregressive(model):
        for length_beam in options.lengths:
            for iterations in options.iterations if model.refines else [1]:
                settings = {"num_iterations": iterations, "length_beam_size": length_beam}
                yield f"l = {length_beam}", str(iterations), settings
        return
    names = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")
    tokens = {name: getattr(model.config, name) for name in names}
    for beams in options.beams:  # the paper's search (6.1)
        penalty = {"length_penalty": 0.6 if beams > 1 else 1.0, "length_penalty_type": "gnmt"}
        config = GenerationConfig(**tokens, num_beams=beams, max_source_relative_length=50, **penalty)
        yield f"beam {beams}", "m", {"generation_config": config}


def encode(arms: list[Arm], sources: list[str]) -> list[list[int]]:
    """Return the token ids of the sources, which every model must share.

    Raises:
        UserError: two models have different token ids.
    """
    encoded = None
    for arm in {arm.model_name: arm for arm in arms}.values():
        ids = text_encoder(arm.tokenizer)(sources)["input_ids"]
        if encoded is not None and ids != encoded:
            raise UserError(
                f"--model={arm.model_name}: its tokenizer gives other tokens than that of {arms[0].model_name}. Give "
                "models that share a vocabulary."
            )
        encoded = ids
    return encoded or []


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """Return the inputs of a batch."""
    cpu = torch.device("cpu")
    return {"input_ids": pad_rows(rows, 1, cpu), "attention_mask": pad_rows([[1] * len(row) for row in rows], 0, cpu)}
