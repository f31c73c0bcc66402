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
from ..support.errors import UserError
from ..support.loading import check_finite, load_errors
from .fairseq_tokenizer import SPECIAL_TOKENS, fairseq_tokenizer
from .foreign import TABLES, ForeignModel, ImportResult, build_model, check_equivalence, concatenated_sinusoids

LONGEST = 1_000_000  # largest plausible number of positions
UNSUPPORTED_SETTINGS = (
    *("encoder_normalize_before", "decoder_normalize_before", "no_token_positional_embeddings", "cross_self_attention"),
    *("encoder_layers_to_keep", "decoder_layers_to_keep"),
)
IGNORED_KEYS = re.compile(r"(en|de)coder\.(version|embed_positions\._float_tensor)")


def numpy_globals() -> list[Any]:
    """Return the globals that pickled NumPy numbers and arrays need, with the names of NumPy 1 and 2."""
    dtypes = (getattr(np.dtypes, name) for name in np.dtypes.__all__)
    makers: tuple[Any, ...] = (np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0])
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    named = [(maker, f"{module}.{maker.__name__}") for maker in makers for module in modules]
    return [np.ndarray, np.dtype, *dtypes, *named]


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights and settings of a fairseq checkpoint, without running code in it.

    It may contain only tensors, NumPy numbers and arrays, plain containers and `argparse.Namespace`.
    """
    with torch.serialization.safe_globals([argparse.Namespace, *numpy_globals()]):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if "model" not in content:
        raise UserError(f'{path}: has no "model", so it is not a fairseq checkpoint; give one.')
    given = content.get("args") or (content.get("cfg") or {}).get("model")
    return content["model"], dict(vars(given) if isinstance(given, argparse.Namespace) else given or {})


def split_fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split fused query, key and value projections, as newer versions of fairseq name them."""
    split = {}
    for key, value in state.items():
        if match := re.fullmatch(r"(.*attn\.)in_proj_(weight|bias)", key):
            for name, weight in zip("qkv", value.chunk(3), strict=True):
                split[f"{match[1]}{name}_proj.{match[2]}"] = weight
        else:
            key = key.replace("layer_norms.0.", "self_attn_layer_norm.").replace("layer_norms.1.", "final_layer_norm.")
            split[key] = value
    return split


def read_fairseq(path: Path, config: Path | None) -> ForeignModel:
    state, settings = read_checkpoint(path)
    name = str(path)
    check_finite(name, state)
    if config is not None:
        with load_errors(str(config)):
            settings |= json.loads(config.read_text(encoding="utf-8"))
    if unsupported := [key for key in UNSUPPORTED_SETTINGS if settings.get(key)]:
        raise UserError(f"{name}: has {', '.join(unsupported)}, which the paper's model does not have.")
    heads = {settings.get(f"{side}coder_attention_heads") for side in ("en", "de")}
    if len(heads) > 1 or None in heads:
        raise UserError(
            f"{name}: encoder_attention_heads and decoder_attention_heads must be given and equal; give a JSON file "
            "with them, and with every other setting that was not fairseq's default, as --config."
        )
    longest = max(settings.get(f"max_{side}_positions", 1024) for side in ("source", "target"))
    if longest > LONGEST:  # before their table takes memory
        raise UserError(
            f"{name}: has {longest:,} positions, expected at most {LONGEST:,}; give a JSON file with the right "
            "max_source_positions and max_target_positions as --config."
        )
    state = {key: value.float() for key, value in split_fused(state).items() if not IGNORED_KEYS.match(key)}
    layers = {tuple(key.split(".")[:3]) for key in state if ".layers." in key}  # such as ("encoder", "layers", "0")
    counts = Counter(stack for stack, *_ in layers)
    padding_idx = SPECIAL_TOKENS.index("<pad>")
    sinusoids = concatenated_sinusoids(longest, state["decoder.embed_tokens.weight"].shape[1], padding_idx)
    return ForeignModel(
        {
            "encoder_layers": counts["encoder"],
            "decoder_layers": counts["decoder"],
            "num_heads": settings["encoder_attention_heads"],
            "d_ff": state["encoder.layers.0.fc1.weight"].shape[0],
            "dropout": settings.get("dropout", 0.1),
            "attention_dropout": settings.get("attention_dropout", 0.0),
            "activation_dropout": settings.get("activation_dropout") or settings.get("relu_dropout", 0.0),
            "activation_function": settings.get("activation_fn", "relu"),
            "scale_embedding": not settings.get("no_scale_embedding", False),
            "decoder_start_token_id": SPECIAL_TOKENS.index("</s>"),
        },
        {key: value for key, value in state.items() if key not in TABLES},
        [state[key][padding_idx + 1 :] if key in state else sinusoids for key in TABLES],
    )


def as_fsmt(original: ForeignModel, config: VaswaniTransformerConfig) -> PreTrainedModel | None:
    """Return the model as Transformers' FSMT; None with learned positions, which FSMT does not support."""
    sinusoids = concatenated_sinusoids(len(original.tables[0]), config.d_model, config.token_id("pad_token_id"))
    if not torch.equal(original.tables[0], sinusoids):
        return None
    same = ("d_model", "encoder_layers", "decoder_layers", "activation_function", "scale_embedding")
    settings = {name: getattr(config, name) for name in (*same, "max_position_embeddings")}
    settings |= dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), config.vocab_size)
    settings |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), config.num_heads)
    settings |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), config.d_ff)
    fsmt = FSMTForConditionalGeneration(FSMTConfig(**settings))
    state = {f"model.{key}": value for key, value in original.state.items()}
    state.setdefault("model.decoder.output_projection.weight", state["model.decoder.embed_tokens.weight"])
    missing = fsmt.load_state_dict(state, strict=False).missing_keys
    return None if any(".layers." in key for key in missing) else fsmt.eval()


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
            f"{dictionary}: has {entries} entries with the special ones, and the model "
            f"{model.config.vocab_size}; give the model's own dict.txt."
        )
    reference = as_fsmt(original, model.config)
    difference = None if reference is None else check_equivalence(model, reference, name)
    model.generation_config = model.config.make_generation_config(num_beams=5, max_source_relative_length=50)
    return ImportResult(model, tokenizer, difference)
