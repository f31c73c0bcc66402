"""Import checkpoints of fairseq's `transformer_wmt_en_de` family."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import FSMTConfig, FSMTForConditionalGeneration, PreTrainedModel

from ..config import VaswaniTransformerConfig
from ..support.checked_loading import check_finite, load_errors
from ..support.errors import UserError
from .fairseq_tokenizer import SPECIAL_TOKENS, fairseq_tokenizer
from .foreign import (
    IGNORED_KEYS,
    TABLES,
    ForeignModel,
    ImportResult,
    activation_name,
    build_model,
    check_equivalence,
    check_supported,
    concatenated_sinusoids,
    require_equal,
)

LONGEST = 1_000_000  # positions of a source or target


def numpy_globals() -> list[Any]:
    """Return what pickled NumPy numbers and arrays name, by the module names of NumPy 1 and 2."""
    dtypes = (getattr(np.dtypes, name) for name in np.dtypes.__all__)
    makers: tuple[Any, ...] = (np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0])
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    named = [(maker, f"{module}.{maker.__name__}") for maker in makers for module in modules]
    return [np.ndarray, np.dtype, *dtypes, *named]


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights and the settings of a fairseq checkpoint.

    No code in it runs: it may contain only tensors, NumPy's numbers and arrays, plain containers and
    `argparse.Namespace`, whose fields are read.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace, *numpy_globals()]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file; give the .pt file that fairseq saved.") from error
    except Exception as error:  # broken bytes can fail anywhere in the unpickler
        if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserError(
                f"{path}: contains {match[1]}, which could run code; save a checkpoint that has only its "
                '"model" and "args".'
            ) from error
        raise UserError(
            f"{path}: is not a checkpoint that torch can read; give the .pt file that fairseq saved."
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise UserError(f'{path}: has no "model", so it is not a fairseq checkpoint; give one.')
    for key, value in content["model"].items():
        if not (isinstance(key, str) and isinstance(value, Tensor) and value.layout == torch.strided):
            raise UserError(
                f"{path}: {key} is of type {type(value).__name__}, not a weight; save the checkpoint again."
            )
    given = content.get("args") or (content.get("cfg") or {}).get("model")
    return content["model"], dict(vars(given) if isinstance(given, argparse.Namespace) else given or {})


def split_fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by fairseq's newer names, which separate queries, keys and values."""
    split = {}
    for key, value in state.items():
        if match := re.fullmatch(r"(.*attn\.)in_proj_(weight|bias)", key):
            for name, weight in zip("qkv", value.chunk(3), strict=True):
                split[f"{match[1]}{name}_proj.{match[2]}"] = weight
        else:
            key = key.replace("layer_norms.0.", "self_attn_layer_norm.").replace("layer_norms.1.", "final_layer_norm.")
            split[key] = value
    return split


def read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); correct it.") from error
    if not isinstance(settings, dict):
        raise UserError(f'{path}: got a {type(settings).__name__}, expected an object such as {{"dropout": 0.3}}.')
    return settings


def count_layers(state: dict[str, Tensor], stack: str, name: str) -> int:
    """Return the number of layers of a stack, which are numbered from 0."""
    numbers = {key.split(".")[2] for key in state if key.startswith(f"{stack}.layers.")}
    if gaps := sorted(numbers.difference(map(str, range(len(numbers))))):
        raise UserError(f"{name}: has a layer {stack}.layers.{gaps[0]} and not all before it; save it again.")
    return len(numbers)


def check_complete(state: dict[str, Tensor], settings: dict[str, Any], name: str) -> None:
    if "encoder_attention_heads" not in settings or "decoder_attention_heads" not in settings:
        raise UserError(
            f"{name}: has no number of heads; give a JSON file with encoder_attention_heads, decoder_attention_heads "
            "and every other setting that was not fairseq's default, as --config."
        )
    weights = ("decoder.embed_tokens.weight", "encoder.layers.0.fc1.weight", "decoder.layers.0.fc1.weight")
    if not state.keys() >= set(weights):
        raise UserError(f"{name}: has no encoder and decoder of fairseq's Transformer.")


def read_fairseq(path: Path, config: Path | None) -> ForeignModel:
    state, settings = read_checkpoint(path)
    settings |= {} if config is None else read_settings(config)
    name = str(path)
    check_supported(settings, name)
    state = split_fused(state)
    check_complete(state, settings, name)
    d_model = state["decoder.embed_tokens.weight"].shape[1]
    padding_idx = SPECIAL_TOKENS.index("<pad>")
    longest = max(settings.get(f"max_{side}_positions", 1024) for side in ("source", "target"))
    if longest > LONGEST:
        raise UserError(f"{name}: has {longest:,} positions, expected at most {LONGEST:,}; save the checkpoint again.")
    sinusoids = concatenated_sinusoids(longest, d_model, padding_idx)
    tables = [state.pop(key)[padding_idx + 1 :] if key in state else sinusoids for key in TABLES]
    return ForeignModel(
        {
            "encoder_layers": count_layers(state, "encoder", name),
            "decoder_layers": count_layers(state, "decoder", name),
            "num_heads": require_equal(settings, name, "encoder_attention_heads", "decoder_attention_heads"),
            "d_ff": state["encoder.layers.0.fc1.weight"].shape[0],
            "dropout": settings.get("dropout", 0.1),
            "attention_dropout": settings.get("attention_dropout", 0.0),
            "activation_dropout": settings.get("activation_dropout") or settings.get("relu_dropout", 0.0),
            "activation_function": activation_name(settings.get("activation_fn", "relu"), name),
            "scale_embedding": not settings.get("no_scale_embedding", False),
            "decoder_start_token_id": SPECIAL_TOKENS.index("</s>"),
        },
        state,
        (tables[0], tables[1]),
    )


def as_fsmt(original: ForeignModel, config: VaswaniTransformerConfig) -> PreTrainedModel | None:
    """Return the weights in Transformers' FSMT, which has the same architecture; None with learned positions."""
    sinusoids = concatenated_sinusoids(len(original.tables[0]), config.d_model, config.token_id("pad_token_id"))
    if not torch.equal(original.tables[0], sinusoids):
        return None
    fsmt = FSMTForConditionalGeneration(
        FSMTConfig(
            src_vocab_size=config.vocab_size,
            tgt_vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            activation_function=config.activation_function,
            scale_embedding=config.scale_embedding,
            max_position_embeddings=config.max_position_embeddings,
        )
    )
    named = {f"model.{key}": value.float() for key, value in original.state.items() if not IGNORED_KEYS.match(key)}
    named.setdefault("model.decoder.output_projection.weight", named["model.decoder.embed_tokens.weight"])
    missing = fsmt.load_state_dict(named, strict=False).missing_keys
    return None if any(".layers." in key for key in missing) else fsmt.eval()


def from_fairseq(
    checkpoint: Path, dictionary: Path | None = None, codes: Path | None = None, config: Path | None = None
) -> ImportResult:
    """Import a model of fairseq's `transformer_wmt_en_de` family with one vocabulary (`--share-all-embeddings`).

    Transformers' FSMT with the same weights checks it, since fairseq itself would run a checkpoint's code.

    Args:
        checkpoint: the file; no code in it runs.
        dictionary: `dict.txt`; None: without a tokenizer.
        codes: the merges, or the SentencePiece model, named `*.model`; None: texts must be split by them beforehand.
        config: a JSON file with settings by fairseq's names, which override the checkpoint's.

    Raises:
        UserError: it cannot be represented, a weight is not finite, or the vocabulary is of another model.
    """
    name = str(checkpoint)
    with load_errors(name):  # weights of other shapes can fail anywhere
        original = read_fairseq(checkpoint, config)
        check_finite(name, original.state)
        model = build_model(original, name)
    tokenizer = None if dictionary is None else fairseq_tokenizer(dictionary, codes)
    if tokenizer is not None and (entries := len(tokenizer.get_vocab())) != model.config.vocab_size:
        raise UserError(
            f"{dictionary}: has {entries} entries with the special ones, and the model "
            f"{model.config.vocab_size}; give the model's own dict.txt."
        )
    reference = as_fsmt(original, model.config)
    difference, largest = (None, None) if reference is None else check_equivalence(model, reference, name)
    model.generation_config = model.config.make_generation_config(num_beams=5, max_source_relative_length=50)
    return ImportResult(model, tokenizer, difference, largest)
