"""Tiny non-autoregressive models, and targets with their ends."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.helpers import PAIRS, TINY, random_tokens, tiny_model
from vaswani_transformer import (
    VaswaniCmlmForConditionalGeneration,
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerTokenizer,
)

NarModel = (
    VaswaniNatForConditionalGeneration
    | VaswaniIterativeVaeForConditionalGeneration
    | VaswaniFlowSeqForConditionalGeneration
    | VaswaniCmlmForConditionalGeneration
)

END, MASK = 2, 3


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
tiny_iterative_vae = partial(tiny, VaswaniIterativeVaeForConditionalGeneration)
tiny_flowseq = partial(tiny, VaswaniFlowSeqForConditionalGeneration, flow_steps=1)

FAMILY: dict[str, Callable[..., Any]] = {
    "nat": tiny_nat,
    "iterative_vae": tiny_iterative_vae,
    "flowseq": tiny_flowseq,
    "cmlm": tiny_cmlm,
}
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
