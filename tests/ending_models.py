"""Random models that end their targets early, and the calls of `generate()` that tests compare on them."""

from typing import Any

import torch

from tests.builders import small_model
from tests.helpers import Batch, padded_batch
from vaswani_transformer import VaswaniTransformerForConditionalGeneration

END = 2


def ending_model(
    seed: int, vocab_size: int = 40, eagerness: float = 3.0, **overrides: Any
) -> VaswaniTransformerForConditionalGeneration:
    """Return a random model with a raised logit of the end token, in float64 so that rounding decides nothing."""
    model = small_model(seed, vocab_size, **overrides).double()
    norm: Any = model.model.decoder.layers[-1].feed_forward_add_norm.norm
    end = model.lm_head.weight[END]
    norm.weight.data.fill_(1.0)
    norm.bias.data += eagerness * end / end.square().sum()
    return model.requires_grad_(False)


def sources(lengths: list[int], vocab_size: int = 40) -> Batch:
    """Return random sources of these lengths, without special tokens, and their mask."""
    tokens, mask = padded_batch(lengths)
    return {"input_ids": (tokens % (vocab_size - 3) + 3).masked_fill(mask == 0, 1), "attention_mask": mask}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "sampling": {"num_beams": 1, "do_sample": True, "num_return_sequences": 2},
    "beam": {"num_beams": 3},
    "many": {"num_beams": 4, "num_return_sequences": 3},
    "full": {"num_beams": 3, "early_stopping": True},
    "power": {"num_beams": 3, "length_penalty_type": "power"},
}
BATCH = [4, 2, 6, 1, 3]


def call_arguments(way: str, **more: Any) -> Batch:
    """Return the arguments of a call in one of `WAYS`, and seed what it draws."""
    torch.manual_seed(3)
    return sources(BATCH) | {"max_source_relative_length": 8} | WAYS[way] | more
