"""The models of other tools that the tests import, with random weights, and comparisons with originals and exports."""

import argparse
import re
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import FSMTConfig, FSMTForConditionalGeneration, MarianConfig, MarianMTModel

from tests.batches import random_tokens

Model = TypeVar("Model", bound=nn.Module)

# vocabulary, d_model, padding and end token
V, D, PAD, END = 40, 16, 1, 2
SHAPE: dict[str, Any] = {
    "d_model": D, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
}  # fmt: skip


def randomize_weights(model: Model) -> Model:
    """Set random weights, none of them 0 or 1, norms and biases too; the tables of positions stay."""
    for name, weight in model.named_parameters():
        if "embed_positions" not in name:
            weight.data = 0.3 * torch.randn_like(weight) + name.endswith("norm.weight")
    return model.eval()


def fsmt(**overrides: Any) -> FSMTForConditionalGeneration:
    sizes = {"langs": ["en", "de"], "src_vocab_size": V, "tgt_vocab_size": V, "tie_word_embeddings": True}
    settings: dict[str, Any] = {**SHAPE, **sizes, **overrides}
    return randomize_weights(FSMTForConditionalGeneration(FSMTConfig(**settings)))


def marian(**overrides: Any) -> MarianMTModel:
    ids = {"pad_token_id": V - 1, "decoder_start_token_id": V - 1, "eos_token_id": 0, "forced_eos_token_id": 0}
    settings: dict[str, Any] = {"vocab_size": V, **SHAPE, **ids, **overrides}
    model = randomize_weights(MarianMTModel(MarianConfig(**settings)))
    model.generation_config.bad_words_ids = [[V - 1]]
    return model


def assert_alike(ours: nn.Module, theirs: nn.Module, pad: int) -> None:
    sources, targets = torch.randint(4, V - 1, (3, 9)), torch.randint(4, V - 1, (3, 7))
    sources[1, 6:] = sources[2, 2:] = pad
    batch = {"input_ids": sources, "attention_mask": sources.ne(pad).long(), "decoder_input_ids": targets}
    with torch.no_grad():
        actual, expected = (model(**batch, use_cache=False).logits for model in (ours, theirs))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


def assert_same_probabilities(model: nn.Module, folder: Path) -> None:
    """Assert that CTranslate2 has the model's log P of each target token, for sources of unequal length.

    Its kernels against torch's: a few more roundings than between two orders of a sum in torch.
    """
    import ctranslate2

    rows = [random_tokens(length) for length in (5, 2, 9, 1)]
    sources = nn.utils.rnn.pad_sequence([torch.cat((row, torch.tensor([END]))) for row in rows], True, PAD)
    targets = random_tokens(len(rows), 6)
    starts = torch.zeros(len(rows), 1, dtype=torch.long)
    ends = torch.full((len(rows), 1), END)
    batch = {"input_ids": sources, "attention_mask": sources.ne(PAD).long()}
    with torch.no_grad():
        logits = model(**batch, decoder_input_ids=torch.cat((starts, targets), dim=1)).logits
    ours = logits.float().log_softmax(-1).gather(2, torch.cat((targets, ends), dim=1)[..., None])[..., 0]
    assert ours.std() > 0.5  # not all alike
    translator = ctranslate2.Translator(str(folder), intra_threads=1)
    texts = [[str(index) for index in [*row.tolist(), END]] for row in rows]
    scored = translator.score_batch(texts, [list(map(str, target.tolist())) for target in targets])
    torch.testing.assert_close(torch.tensor([each.log_probs for each in scored]), ours, rtol=1e-4, atol=1e-4)


def fairseq_state(model: FSMTForConditionalGeneration) -> dict[str, Tensor]:
    """Return the weights of an FSMT model, whose names are fairseq's, without its tables of positions."""
    state = {key.removeprefix("model."): value for key, value in model.state_dict().items()}
    return {key: value for key, value in state.items() if "embed_positions" not in key}


NUMBERED_NORMS = [
    ("encoder", "self_attn", 0),
    ("encoder", "final", 1),
    ("decoder", "self_attn", 0),
    ("decoder", "encoder_attn", 1),
    ("decoder", "final", 2),
]
"""Stack and name of each layer norm, and its number in the oldest versions."""


def numbered_norm(key: str) -> str:
    """Return the name of a weight with the number of its layer norm, if it is in one."""
    for stack, name, number in NUMBERED_NORMS:
        if key.startswith(f"{stack}."):
            key = key.replace(f".{name}_layer_norm.", f".layer_norms.{number}.")
    return key


def fuse(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by the names of older versions, with fused queries, keys and values, and one embedding."""
    kept = {key: value for key, value in state.items() if not re.search(r"[qkv]_proj|output_projection", key)}
    fused = {numbered_norm(key): value for key, value in kept.items()}
    for key in (key for key in state if "q_proj" in key):
        rows = [state[key.replace("q_proj", f"{name}_proj")] for name in "qkv"]
        fused[key.replace("q_proj.", "in_proj_")] = torch.cat(rows)
    return fused


ARGUMENTS: dict[str, Any] = {
    "arch": "transformer_wmt_en_de", "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "max_source_positions": 64, "max_target_positions": 48, "encoder_normalize_before": False,
    "share_all_embeddings": True, "activation_fn": "relu", "dropout": 0.3,
}  # fmt: skip


def save_checkpoint(path: Path, state: dict[str, Tensor], newer: bool = True, **arguments: Any) -> Path:
    arguments = {**ARGUMENTS, **arguments}
    extra = {"encoder.version": torch.tensor([3.0]), "decoder.version": torch.tensor([3.0])}
    for stack in ("encoder", "decoder"):
        extra[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
    if newer:
        settings = {"args": None, "cfg": {"model": argparse.Namespace(**arguments)}}
    else:
        state, settings = fuse(state), {"args": argparse.Namespace(**arguments)}
    torch.save(settings | {"model": state | extra, "last_optimizer_state": None}, path)
    return path


WORDS = [
    *("l@@", "o@@", "w@@", "e@@", "r@@", "s@@", "t", "r", "w", "lo@@", "low", "low@@", "es@@", "est", "er"),
    "madeupword0000",
]
CODES = "#version: 0.2\nl o\nlo w\nlo w</w>\ne s\nes t</w>\ne r</w>\n"
