"""Models and inputs that several test modules share, beyond the tiny ones of `helpers`."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel
from transformers.generation import GenerationMixin

from tests.helpers import tiny_model
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerModel,
    VaswaniTransformerPreTrainedModel,
)
from vaswani_transformer.figures import AttentionMaps

# Configurations that differ in what a prepared model packs.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True},
    "own projection": {"tie_word_embeddings": False},
    "learned positions": {"position_embedding": "learned"},
    "wide values": {"d_k": 8, "d_v": 12},
    "dropout": {"attention_dropout": 0.1, "activation_dropout": 0.1},
}

LONG_SENTENCE = [
    *("the", "representation", "of", "institutionalised", "misunderstandings", "remains", ",", "however", ","),
    *("$", "5", "and", "$", "6", ".", "</s>"),
]


def cpu_dtypes() -> list[str]:
    """Return the dtypes of packed layers that torch reports for this CPU and this build."""
    if not torch.backends.mkldnn.is_available():
        return []
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    has_int8 = "onednn" in torch.backends.quantized.supported_engines
    return ["float32"] + ["bfloat16"] * has_bfloat16 + ["int8"] * has_int8


DTYPES = cpu_dtypes()


def needs(dtype: str) -> Any:
    """Return a parameter of a test that runs where the CPU and torch have packed layers of this dtype."""
    is_missing = dtype not in DTYPES
    return pytest.param(dtype, marks=pytest.mark.skipif(is_missing, reason=f"this CPU or torch has no {dtype}"))


def uneven_model(seed: int = 0, **overrides: Any) -> VaswaniTransformerForConditionalGeneration:
    """Return a tiny model with large random weights, norms and biases too, so that searches differ."""
    model = tiny_model(**overrides)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = noise * (0.4 if weight.dim() > 1 else 0.3) + name.endswith("norm.weight")
    return model


def random_model(seed: int = 0, **overrides: Any) -> VaswaniTransformerForConditionalGeneration:
    """Return a tiny model with large random weights and biases."""
    model = tiny_model(**overrides)
    torch.manual_seed(seed)
    for weight in model.parameters():
        weight.data = torch.randn_like(weight) * (0.3 if weight.dim() > 1 else 0.5)
    return model


def small_model(seed: int, vocab_size: int = 6, **overrides: Any) -> VaswaniTransformerForConditionalGeneration:
    """Return a model of a few words with uneven probabilities, so that searches differ."""
    torch.manual_seed(seed)
    model = tiny_model(
        vocab_size=vocab_size, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1, **overrides
    )
    for weight in model.parameters():
        weight.data = torch.randn_like(weight) * (0.6 if weight.dim() > 1 else 0.1)
    model.use_paper_decoding()
    return model


def source(*words: int) -> Tensor:
    """Return one source (1, S) of these words and the end token of `small_model`."""
    return torch.tensor([[*words, 2]])


def tiny_marian(**overrides: Any) -> MarianMTModel:
    """Return a Marian model of one layer with random weights, in evaluation mode."""
    sides = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim")}
    ids = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    settings: dict[str, Any] = {**sides, **ids, **sizes, **overrides}
    return MarianMTModel(MarianConfig(**settings)).eval()


class PlainSearch(VaswaniTransformerPreTrainedModel, GenerationMixin):
    """The same model under Transformers' own search, without any step of this package."""

    _tied_weights_keys = VaswaniTransformerForConditionalGeneration._tied_weights_keys

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config)
        self.model = VaswaniTransformerModel(config)
        self.lm_head = torch.nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    forward = VaswaniTransformerForConditionalGeneration.forward
    loss_and_logits = VaswaniTransformerForConditionalGeneration.loss_and_logits


def plain_search(model: VaswaniTransformerForConditionalGeneration) -> Any:
    """Return a model in float64 as a `PlainSearch`."""
    plain = PlainSearch(model.config).eval().double()
    plain.load_state_dict(model.state_dict())
    return plain


def random_attention_maps(
    heads: int = 8, layers: int = 2, source: list[str] = LONG_SENTENCE, target: tuple[str, ...] = ("el", "gato", "</s>")
) -> AttentionMaps:
    """Return random weights of a sentence with long words, a repeated word and signs of a formula."""
    generator = np.random.default_rng(0)

    def rows(queries: int, keys: int) -> np.ndarray:
        return generator.dirichlet(np.full(keys, 0.3), (layers, heads, queries)).astype(np.float32)

    size, length = len(source), len(target)
    return AttentionMaps(
        " ".join(source), " ".join(target), list(source), ["<s>", *target[:-1]], list(target),
        rows(size, size), np.tril(rows(length, length)), rows(length, size),
    )  # fmt: skip
