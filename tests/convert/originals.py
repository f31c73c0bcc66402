"""The models of other tools that the tests import, their random weights, and the comparison with the original."""

import argparse
import math
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel

Model = TypeVar("Model", bound=nn.Module)

# vocabulary, d_model, heads, d_ff, layers, padding and end token
V, D, HEADS, FF, LAYERS, PAD, END = 40, 16, 4, 24, 2, 1, 2
SHAPE: dict[str, Any] = {
    "d_model": D, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": FF, "decoder_ffn_dim": FF, "max_position_embeddings": 32,
}  # fmt: skip


def randomize_weights(model: Model) -> Model:
    """Set random weights, none of them 0 or 1, norms and biases too; the tables of positions stay."""
    for name, weight in model.named_parameters():
        if "embed_positions" not in name:
            weight.data = 0.3 * torch.randn_like(weight) + name.endswith("norm.weight")
    return model.eval()


def marian(**overrides: Any) -> MarianMTModel:
    ids = {"pad_token_id": V - 1, "decoder_start_token_id": V - 1, "eos_token_id": 0, "forced_eos_token_id": 0}
    settings: dict[str, Any] = {"vocab_size": V, **SHAPE, **ids, **overrides}
    model = randomize_weights(MarianMTModel(MarianConfig(**settings)))
    model.generation_config.bad_words_ids = [[V - 1]]
    return model


def logits_of(model: nn.Module, input_ids: Tensor, decoder_input_ids: Tensor, pad: int) -> Tensor:
    mask = input_ids.ne(pad).long()
    with torch.no_grad():
        return model(
            input_ids=input_ids, attention_mask=mask, decoder_input_ids=decoder_input_ids, use_cache=False
        ).logits


def assert_alike(ours: nn.Module, theirs: nn.Module, pad: int) -> None:
    sources, targets = torch.randint(4, V - 1, (3, 9)), torch.randint(4, V - 1, (3, 7))
    sources[1, 6:] = sources[2, 2:] = pad
    actual = logits_of(ours, sources, targets, pad)
    torch.testing.assert_close(actual, logits_of(theirs, sources, targets, pad), rtol=1e-4, atol=2e-5)


def positions_of_fairseq(count: int) -> Tensor:
    """Return the table by its formula: position p has the number p + 2, and frequency i is 10000^(-i / (d / 2 - 1))."""
    rows = []
    for position in range(count):
        angles = [(position + PAD + 1) * math.exp(-i * math.log(10000) / (D // 2 - 1)) for i in range(D // 2)]
        rows.append([*map(math.sin, angles), *map(math.cos, angles)])
    return torch.tensor(rows)


class FairseqLayer(nn.Module):
    """A post-norm layer of plain torch modules with fairseq's weight names."""

    def __init__(self, has_memory: bool) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.self_attn_layer_norm = nn.LayerNorm(D)
        if has_memory:
            self.encoder_attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
            self.encoder_attn_layer_norm = nn.LayerNorm(D)
        self.fc1, self.fc2 = nn.Linear(D, FF), nn.Linear(FF, D)
        self.final_layer_norm = nn.LayerNorm(D)

    def forward(
        self, x: Tensor, is_padding: Tensor, mask: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        key_padding = is_padding if memory is None else None
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, x, key_padding_mask=key_padding, attn_mask=mask)[0])
        if memory is not None:
            seen = self.encoder_attn(x, memory, memory, key_padding_mask=is_padding)[0]
            x = self.encoder_attn_layer_norm(x + seen)
        return self.final_layer_norm(x + self.fc2(self.fc1(x).relu()))


class FairseqTransformer(nn.Module):
    """The oracle: fairseq's transformer_wmt_en_de with torch's own attention."""

    encoder: Any
    decoder: Any

    def __init__(self, scale: bool = True) -> None:
        super().__init__()
        for name in ("encoder", "decoder"):
            stack = nn.Module()
            stack.embed_tokens = nn.Embedding(V, D)
            stack.layers = nn.ModuleList(FairseqLayer(name == "decoder") for _ in range(LAYERS))
            setattr(self, name, stack)
        randomize_weights(self)
        self.decoder.embed_tokens.weight = self.encoder.embed_tokens.weight
        self.scale = D**0.5 if scale else 1.0
        self.positions = [positions_of_fairseq(64)] * 2

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, **ignored: Any) -> argparse.Namespace:
        is_padding, length = input_ids.eq(PAD), decoder_input_ids.shape[1]
        x = self.encoder.embed_tokens(input_ids) * self.scale + self.positions[0][: input_ids.shape[1]]
        for layer in self.encoder.layers:
            x = layer(x, is_padding)
        y = self.decoder.embed_tokens(decoder_input_ids) * self.scale + self.positions[1][:length]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        for layer in self.decoder.layers:
            y = layer(y, is_padding, mask, memory=x)
        return argparse.Namespace(logits=y @ self.decoder.embed_tokens.weight.T)


def split(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state by the names of newer versions, with separate queries, keys and values."""
    split_state = {}
    for key, value in state.items():
        if "in_proj" in key:
            split_state |= {
                key.replace("in_proj_", f"{n}_proj."): v for n, v in zip("qkv", value.chunk(3), strict=True)
            }
        else:
            split_state[key] = value
    return split_state


ARGUMENTS: dict[str, Any] = {
    "arch": "transformer_wmt_en_de", "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "max_source_positions": 64, "max_target_positions": 48, "encoder_normalize_before": False,
    "share_all_embeddings": True, "activation_fn": "relu", "dropout": 0.3,
}  # fmt: skip


SIDES = ("encoder", "decoder")


def save_checkpoint(path: Path, state: dict[str, Tensor], newer: bool = True, **arguments: Any) -> Path:
    arguments = {**ARGUMENTS, **arguments}
    extra = {"encoder.version": torch.tensor([3.0]), "decoder.version": torch.tensor([3.0])}
    for stack in SIDES:
        extra[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
    if newer:
        state = split(state) | {"decoder.output_projection.weight": state["decoder.embed_tokens.weight"]}
        settings = {"args": None, "cfg": {"model": argparse.Namespace(**arguments)}}
    else:
        settings = {"args": argparse.Namespace(**arguments)}
    torch.save(settings | {"model": state | extra, "last_optimizer_state": None}, path)
    return path


WORDS = [
    *("l@@", "o@@", "w@@", "e@@", "r@@", "s@@", "t", "r", "w", "lo@@", "low", "low@@", "es@@", "est", "er"),
    "madeupword0000",
]
CODES = "#version: 0.2\nl o\nlo w\nlo w</w>\ne s\nes t</w>\ne r</w>\n"
