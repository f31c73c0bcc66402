"""Import of checkpoints of fairseq's `transformer_wmt_en_de` family."""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import FSMTConfig, FSMTForConditionalGeneration, PreTrainedModel

from ..config import VaswaniTransformerConfig
from ..support.command import UserError
from ..support.loading import check_content, check_finite, load_errors
from .fairseq_tokenizer import SPECIAL_TOKENS, fairseq_tokenizer
from .foreign import TABLES, ForeignModel, ImportResult, build_model, check_equivalence, concatenated_sinusoids

LONGEST = 1_000_000  # largest plausible number of positions
UNSUPPORTED_SETTINGS = (
    "encoder_normalize_before",
    "decoder_normalize_before",
    "no_token_positional_embeddings",
    "cross_self_attention",
    "encoder_layers_to_keep",
    "decoder_layers_to_keep",
)
NUMBERED_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
"""The layer norms of a layer, in the order of the numbers that old checkpoints have in place of names."""
IGNORED_KEYS = re.compile(r"(en|de)coder\.(version|embed_positions\._float_tensor)")


def numpy_globals() -> list[Any]:
    """Return the globals that pickled NumPy numbers and arrays need, with the names of NumPy 1 and 2."""
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    make_number: Any = np.float64(0).__reduce__()[0]
    make_array: Any = np.zeros(0).__reduce__()[0]
    renamed = []
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        for maker in (make_number, make_array):
            renamed.append((maker, f"{module}.{maker.__name__}"))
    return [np.ndarray, np.dtype, *dtypes, *renamed]


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights and settings of a fairseq checkpoint, without running code in it.

    It may contain only tensors, NumPy numbers and arrays, plain containers and `argparse.Namespace`.
    """
    check_content(path, "weights")
    with torch.serialization.safe_globals([argparse.Namespace, *numpy_globals()]):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if "model" not in content:
        raise UserError(f'{path}: is not a fairseq checkpoint; its "model" is missing. Choose the .pt file of a model.')

    # Older versions store the settings as "args", newer ones in "cfg".
    settings = content.get("args") or (content.get("cfg") or {}).get("model") or {}
    if isinstance(settings, argparse.Namespace):
        settings = vars(settings)
    return content["model"], dict(settings)


def split_fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split fused query, key and value projections, and name the norms, as newer versions of fairseq do."""
    split = {}
    for key, weight in state.items():
        if match := re.fullmatch(r"(.*attn\.)in_proj_(weight|bias)", key):
            prefix, parameter = match.groups()
            for name, projection in zip("qkv", weight.chunk(3), strict=True):
                split[f"{prefix}{name}_proj.{parameter}"] = projection
        else:
            for index, name in enumerate(NUMBERED_NORMS.get(key.partition(".")[0], ())):
                key = key.replace(f".layer_norms.{index}.", f".{name}.")
            split[key] = weight
    return split


def check_settings(name: str, settings: dict[str, Any]) -> None:
    """Check that the paper's model can have a checkpoint's settings; `name` is the checkpoint's."""
    if unsupported := [key for key in UNSUPPORTED_SETTINGS if settings.get(key)]:
        raise UserError(f"{name}: has {', '.join(unsupported)}, which the paper's model does not support.")
    encoder_heads = settings.get("encoder_attention_heads")
    decoder_heads = settings.get("decoder_attention_heads")
    if encoder_heads is None or encoder_heads != decoder_heads:
        raise UserError(
            f"{name}: needs equal encoder_attention_heads and decoder_attention_heads; got {encoder_heads} and "
            f"{decoder_heads}. Write them, and all settings that differ from fairseq's defaults, into a JSON file and "
            "pass it as --config."
        )


def count_layers(state: dict[str, Tensor]) -> Counter[str]:
    """Return the number of layers in "encoder" and "decoder"."""
    layers = {tuple(key.split(".")[:3]) for key in state if ".layers." in key}  # such as ("encoder", "layers", "0")
    return Counter(stack for stack, *_ in layers)


def position_tables(name: str, settings: dict[str, Any], state: dict[str, Tensor]) -> list[Tensor]:
    """Return the tables (P, d_model) of encoder and decoder; fairseq does not save sinusoids, so they are computed."""
    longest = max(settings.get(f"max_{side}_positions", 1024) for side in ("source", "target"))
    if longest > LONGEST:  # a table of that size may not fit in memory
        raise UserError(
            f"{name}: has {longest:,} positions, expected at most {LONGEST:,}. Write the right max_source_positions "
            "and max_target_positions into a JSON file and pass it as --config."
        )
    padding_idx = SPECIAL_TOKENS.index("<pad>")
    d_model = state["decoder.embed_tokens.weight"].shape[1]
    sinusoids = concatenated_sinusoids(longest, d_model, padding_idx)
    return [state[key][padding_idx + 1 :] if key in state else sinusoids for key in TABLES]


def read_fairseq(path: Path, config: Path | None) -> ForeignModel:
    name = str(path)
    weights, settings = read_checkpoint(path)
    check_finite(name, weights)
    if config is not None:
        with load_errors(str(config)):
            settings.update(json.loads(config.read_text(encoding="utf-8")))
    check_settings(name, settings)

    # Translate the settings; what fairseq does not save has fairseq's default.
    state = {}
    for key, weight in split_fused(weights).items():
        if not IGNORED_KEYS.match(key):
            state[key] = weight.float()
    layers = count_layers(state)
    fields = {
        "encoder_layers": layers["encoder"],
        "decoder_layers": layers["decoder"],
        "num_heads": settings["encoder_attention_heads"],
        "d_ff": state["encoder.layers.0.fc1.weight"].shape[0],
        "dropout": settings.get("dropout", 0.1),
        "attention_dropout": settings.get("attention_dropout", 0.0),
        "activation_dropout": settings.get("activation_dropout") or settings.get("relu_dropout", 0.0),
        "activation_function": settings.get("activation_fn", "relu"),
        "scale_embedding": not settings.get("no_scale_embedding", False),
        "decoder_start_token_id": SPECIAL_TOKENS.index("</s>"),
    }

    # This package keeps the tables of positions apart from the other weights.
    tables = position_tables(name, settings, state)
    state = {key: weight for key, weight in state.items() if key not in TABLES}
    return ForeignModel(fields, state, tables)


def as_fsmt(original: ForeignModel, config: VaswaniTransformerConfig) -> PreTrainedModel | None:
    """Return the model as Transformers' FSMT; None if FSMT cannot represent it, as with learned positions."""
    sinusoids = concatenated_sinusoids(len(original.tables[0]), config.d_model, config.token_id("pad_token_id"))
    if not all(torch.equal(table, sinusoids) for table in original.tables):
        return None
    fsmt_config = FSMTConfig(
        d_model=config.d_model,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        activation_function=config.activation_function,
        scale_embedding=config.scale_embedding,
        max_position_embeddings=config.max_position_embeddings,
        src_vocab_size=config.vocab_size,
        tgt_vocab_size=config.vocab_size,
        encoder_attention_heads=config.num_heads,
        decoder_attention_heads=config.num_heads,
        encoder_ffn_dim=config.d_ff,
        decoder_ffn_dim=config.d_ff,
    )
    fsmt = FSMTForConditionalGeneration(fsmt_config)
    state = {f"model.{key}": weight for key, weight in original.state.items()}
    state.setdefault("model.decoder.output_projection.weight", state["model.decoder.embed_tokens.weight"])
    missing = fsmt.load_state_dict(state, strict=False).missing_keys
    if any(".layers." in key for key in missing):
        return None
    return fsmt.eval()


def from_fairseq(
    checkpoint: Path, dictionary: Path | None = None, codes: Path | None = None, config: Path | None = None
) -> ImportResult:
    """Import a model of fairseq's `transformer_wmt_en_de` family with one vocabulary (`--share-all-embeddings`).

    The result is compared with Transformers' FSMT, since fairseq would run a checkpoint's code.

    Args:
        checkpoint: the checkpoint file; no code in it runs.
        dictionary: `dict.txt`; None for no tokenizer.
        codes: the merges, or a SentencePiece model named `*.model`; None if texts are already split into sub-words.
        config: a JSON file with settings by fairseq's names, which override those of the checkpoint.

    Raises:
        UserError: the package cannot represent the model, a weight is not finite, or the vocabulary does not fit.
    """
    name = str(checkpoint)
    with load_errors(name):
        original = read_fairseq(checkpoint, config)
        model = build_model(original, name)
    tokenizer = None if dictionary is None else fairseq_tokenizer(dictionary, codes)
    if tokenizer is not None and (entries := len(tokenizer.get_vocab())) != model.config.vocab_size:
        raise UserError(
            f"{dictionary}: does not fit the model; got {entries} entries including the special tokens, expected "
            f"{model.config.vocab_size}. Choose the dict.txt that the model was trained with."
        )
    fsmt = as_fsmt(original, model.config)
    difference = None if fsmt is None else check_equivalence(model, fsmt, name)
    model.generation_config = model.config.make_generation_config(num_beams=5, max_source_relative_length=50)
    return ImportResult(model, tokenizer, difference)
