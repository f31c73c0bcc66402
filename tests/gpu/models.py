"""The models, pairs and batches of all parts.

B batch, S source, T target, V vocabulary.
"""

import math
import random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel

from tests.gpu.runner import Setting
from vaswani_transformer import VaswaniTransformerConfig, VaswaniTransformerForConditionalGeneration

TINY = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_heads": 4, "d_ff": 64}
MEAN_LENGTH = 25  # tokens of a side
Pairs = list[dict[str, list[int]]]


def config_of(name: str, setting: Setting, **overrides: Any) -> VaswaniTransformerConfig:
    """Return the config of the paper's model `name`, or a tiny one if the setting is tiny."""
    if setting.is_tiny:
        return VaswaniTransformerConfig(**{**TINY, **overrides})
    return VaswaniTransformerConfig.from_paper(name, **overrides)


def make_model(name: str, setting: Setting, **overrides: Any) -> VaswaniTransformerForConditionalGeneration:
    """Return the model on the CPU, the same one at each call."""
    torch.manual_seed(1)
    return VaswaniTransformerForConditionalGeneration(config_of(name, setting, **overrides))


def make_marian(name: str, setting: Setting) -> nn.Module:
    """Return Transformers' MarianMTModel of the same shape."""
    config = config_of(name, setting)
    sides = {
        f"{side}_{key}": value
        for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers))
        for key, value in (("attention_heads", config.num_heads), ("ffn_dim", config.d_ff), ("layers", layers))
    }
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "dropout": config.dropout,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 0,
        "forced_eos_token_id": None,
        "activation_function": "relu",
        "scale_embedding": True,
        "max_position_embeddings": 512,
    }
    return MarianMTModel(MarianConfig(**sides, **settings))


def make_pairs(count: int, vocab_size: int) -> Pairs:
    """Return pairs of random tokens; lengths are log-normal with mean 25, and so is a target's ratio to its source."""
    generator, sigma, ratio_sigma, pairs = random.Random(0), 0.6, 0.2, []
    for _ in range(count):
        source = max(3, round(generator.lognormvariate(math.log(MEAN_LENGTH) - sigma**2 / 2, sigma)))
        target = max(3, round(source * generator.lognormvariate(-(ratio_sigma**2) / 2, ratio_sigma)))
        sides = [[generator.randrange(4, vocab_size) for _ in range(size - 1)] + [2] for size in (source, target)]
        pairs.append({"input_ids": sides[0], "labels": sides[1]})
    return pairs


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Return rows as (B, longest), padded with `value`."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def collate(pairs: Pairs) -> dict[str, Tensor]:
    """Return sources, their mask and labels, (B, S), (B, S) and (B, T)."""
    source = pad([pair["input_ids"] for pair in pairs], 1)
    return {
        "input_ids": source,
        "attention_mask": source.ne(1).long(),
        "labels": pad([pair["labels"] for pair in pairs], -100),
    }


def collate_for_marian(pairs: Pairs) -> dict[str, Tensor]:
    """Return the same with `decoder_input_ids`: the Trainer's label smoother removes the labels."""
    batch = collate(pairs)
    shifted = nn.functional.pad(batch["labels"][:, :-1], (1, 0), value=0)
    return batch | {"decoder_input_ids": shifted.masked_fill(shifted == -100, 1)}


def sources(count: int, vocab_size: int, device: torch.device) -> dict[str, Tensor]:
    """Return `count` random sources of 22 to 28 tokens and their mask."""
    generator = random.Random(count)
    rows = [[generator.randrange(4, vocab_size) for _ in range(generator.randint(22, 28))] for _ in range(count)]
    tokens = pad(rows, 1)
    return {"input_ids": tokens.to(device), "attention_mask": tokens.ne(1).long().to(device)}
