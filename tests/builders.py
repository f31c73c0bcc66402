"""Models and inputs that several test modules share, beyond the tiny ones of `helpers`.

B batch, S source, T target.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel
from transformers.generation import GenerationMixin

from tests.helpers import PAIRS, TINY, random_tokens, tiny_model
from vaswani_transformer import (
    VaswaniCmlmForConditionalGeneration,
    VaswaniCtcForConditionalGeneration,
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerModel,
    VaswaniTransformerPreTrainedModel,
    VaswaniTransformerTokenizer,
)

# Configurations that differ in what a prepared model packs.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True},
    "own projection": {"tie_word_embeddings": False},
    "learned positions": {"position_embedding": "learned"},
    "wide values": {"d_k": 8, "d_v": 12},
    "dropout": {"attention_dropout": 0.1, "activation_dropout": 0.1},
}

END, MASK = 2, 3


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


def random_model(seed: int = 0, **overrides: Any) -> VaswaniTransformerForConditionalGeneration:
    """Return a tiny model with large random weights, norms and biases too, so that searches differ."""
    model = tiny_model(**overrides)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = noise * (0.4 if weight.dim() > 1 else 0.3) + name.endswith("norm.weight")
    return model


def small_model(seed: int, vocab_size: int = 6, **overrides: Any) -> VaswaniTransformerForConditionalGeneration:
    """Return a model of a few words with uneven probabilities, so that searches differ."""
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "d_ff": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    model = tiny_model(vocab_size=vocab_size, **sizes | overrides)
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


def tiny(model_class: Any, **fields: Any) -> Any:
    """Return a tiny random model in evaluation mode, with its flow started if it has one, the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = model_class(model_class.config_class(**{**TINY, **fields})).eval()
        if model_class is VaswaniFlowSeqForConditionalGeneration:
            model.start_flow(random_tokens(3, 6), targets(6, 4, 1))
        return model


tiny_nat = partial(tiny, VaswaniNatForConditionalGeneration)
tiny_cmlm = partial(tiny, VaswaniCmlmForConditionalGeneration, mask_token_id=MASK, max_target_length=20)
tiny_ctc = partial(tiny, VaswaniCtcForConditionalGeneration)
tiny_iterative_vae = partial(tiny, VaswaniIterativeVaeForConditionalGeneration)
tiny_flowseq = partial(tiny, VaswaniFlowSeqForConditionalGeneration, flow_steps=1)

FAMILY: dict[str, Callable[..., Any]] = {
    "nat": tiny_nat,
    "ctc": tiny_ctc,
    "iterative_vae": tiny_iterative_vae,
    "flowseq": tiny_flowseq,
    "cmlm": tiny_cmlm,
}
LENGTH_FAMILY = {name: make for name, make in FAMILY.items() if name != "ctc"}
"""The families that predict a length."""
EVERY_FAMILY = {"autoregressive": tiny_model, **FAMILY}


def family_of_pairs(family: str, **overrides: Any) -> tuple[Any, VaswaniTransformerTokenizer]:
    """Return a tiny model of a family, and a tokenizer of the six sentence pairs that has `<mask>`."""
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([*PAIRS, *PAIRS.values()], vocab_size=300)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    mask_field = {"mask_token_id": tokenizer.mask_token_id} if family == "cmlm" else {}
    return EVERY_FAMILY[family](vocab_size=len(tokenizer), **mask_field, **overrides), tokenizer


def targets(*lengths: int) -> Tensor:
    """Return labels (B, T) of these lengths, each with its end, padded on the right by -100."""
    labels = torch.full((len(lengths), max(lengths)), -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = torch.cat([random_tokens(length - 1), torch.tensor([END])])
    return labels
