"""Small models of every family: with random weights, or trained on six pairs of sentences."""

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, MarianConfig, MarianMTModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMixin

from tests.batches import MASK, random_tokens, targets
from vaswani_transformer import (
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerModel,
    VaswaniTransformerPreTrainedModel,
    VaswaniTransformerTokenizer,
)
from vaswani_transformer.lengths import LengthHead
from vaswani_transformer.registration import FAMILIES
from vaswani_transformer.slots import SlotHead

ModelAndTokenizer = tuple[VaswaniTransformerForConditionalGeneration, VaswaniTransformerTokenizer]
TINY: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_heads": 4,
    "d_ff": 64,
}
PAIRS = {
    "hello world": "hola mundo",
    "i love you": "te amo",
    "the cat is black": "el gato es negro",
    "good morning": "buenos dias",
    "this is a book": "este es un libro",
    "what is your name": "como te llamas",
}
SOURCES = list(PAIRS)
TARGETS = list(PAIRS.values())
WITH_SCORES: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}  # arguments of `generate()`


def tiny_config(**overrides: Any) -> VaswaniTransformerConfig:
    """Return a config of two layers of 32 and four heads; `overrides` replace fields."""
    return VaswaniTransformerConfig(**{**TINY, **overrides})


def tiny_model(**overrides: Any) -> VaswaniTransformerForConditionalGeneration:
    """Return a tiny model with random weights, in evaluation mode, the same at each call."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        return VaswaniTransformerForConditionalGeneration(tiny_config(**overrides)).eval()


def tiny(model_class: Any, **fields: Any) -> Any:
    """Return a tiny random model in evaluation mode, with its flow started if it has one, the same at each call."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        model = model_class(model_class.config_class(**{**TINY, **fields})).eval()
        if model_class is VaswaniFlowSeqForConditionalGeneration:
            model.start_flow(random_tokens(3, 6), targets(6, 4, 1))
        return model


TINY_FIELDS: dict[str, dict[str, Any]] = {
    "cmlm": {"mask_token_id": MASK, "max_target_length": 20},
    "flowseq": {"flow_steps": 1},
}
"""Further fields of a family's tiny model."""
EVERY_FAMILY: dict[str, Callable[..., Any]] = {
    kind: partial(tiny, family.model_class, **TINY_FIELDS.get(kind, {})) for kind, family in FAMILIES.items()
}
FAMILY = {kind: make for kind, make in EVERY_FAMILY.items() if not FAMILIES[kind].model_class.is_autoregressive}
"""The non-autoregressive families."""
LENGTH_FAMILY = {kind: make for kind, make in FAMILY.items() if issubclass(FAMILIES[kind].model_class, LengthHead)}
"""The families that predict a length."""
SLOT_FAMILY = {kind: make for kind, make in FAMILY.items() if issubclass(FAMILIES[kind].model_class, SlotHead)}
"""The families with slots, which sum over paths."""
tiny_nat = FAMILY["nat"]
tiny_cmlm = FAMILY["cmlm"]
tiny_ctc = FAMILY["ctc"]
tiny_dag = FAMILY["dag"]
tiny_iterative_vae = FAMILY["iterative_vae"]
tiny_flowseq = FAMILY["flowseq"]


def random_model(seed: int = 0, **overrides: Any) -> VaswaniTransformerForConditionalGeneration:
    """Return a tiny model with large random weights, norms and biases too, so that searches differ."""
    model = tiny_model(**overrides)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = noise * (0.4 if weight.dim() > 1 else 0.3) + name.endswith("norm.weight")
    return model


def with_normal_weights(model: Any, seed: int) -> Any:
    """Return the model with weights from the standard normal distribution: probabilities far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for weight in model.parameters():
            weight.data.normal_()
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


def family_of_pairs(family: str, **overrides: Any) -> tuple[Any, VaswaniTransformerTokenizer]:
    """Return a tiny model of a family, and a tokenizer of the six sentence pairs that has `<mask>`."""
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([*PAIRS, *PAIRS.values()], vocab_size=300)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    mask_field = {"mask_token_id": tokenizer.mask_token_id} if family == "cmlm" else {}
    return EVERY_FAMILY[family](vocab_size=len(tokenizer), **mask_field, **overrides), tokenizer


def memorizing_model(
    tokenizer: VaswaniTransformerTokenizer, pairs: dict[str, str], steps: int
) -> VaswaniTransformerForConditionalGeneration:
    """Return a tiny model that learned pairs of texts by heart.

    It learns in float64, where rounding is too small to change the float32 weights from one machine to another.
    """
    model = tiny_model(vocab_size=len(tokenizer), d_model=64, d_ff=128).double().train()
    batch = tokenizer(list(pairs), text_target=list(pairs.values()), padding=True, return_tensors="pt")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return model.eval().requires_grad_(False).float()


@functools.cache
def model_of_pairs() -> ModelAndTokenizer:
    """Return a model that memorized the six sentence pairs, and its tokenizer; change neither."""
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([*PAIRS, *PAIRS.values()], vocab_size=300)
    return memorizing_model(tokenizer, PAIRS, steps=120), tokenizer


def paper_model_of_pairs() -> ModelAndTokenizer:
    """Return a copy of the model of pairs with the paper's search, and its tokenizer."""
    trained, tokenizer = model_of_pairs()
    model = VaswaniTransformerForConditionalGeneration(trained.config).eval()
    model.load_state_dict(trained.state_dict())
    model.use_paper_decoding()
    return model, tokenizer


def save(folder: Path, *parts: PreTrainedModel | PreTrainedTokenizerBase) -> Path:
    """Save a model and its tokenizer into a folder, and return it."""
    for part in parts:
        part.save_pretrained(folder)
    return folder


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Return a saved tokenizer by its Auto class, whose type in Transformers is a union with None."""
    return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder))


def assert_matrix_shared(model: Any, tied: bool) -> None:
    """Assert that both stacks have the shared matrix, and the projection too if it is tied."""
    shared = model.model.shared.weight
    assert model.get_input_embeddings().weight is shared
    assert (model.get_output_embeddings().weight is shared) == tied
    for module in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
        assert module.weight is shared
        assert module.num_embeddings == shared.shape[0] == model.config.vocab_size
        assert module.embed_scale == model.config.d_model**0.5


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation of either pass makes."""

    numel = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result
