"""The attention weights of a model on one sentence, and the tokens that they connect.

N layers, H heads, S source, T target, Q queries, K keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..config import as_token_ids
from ..support.modes import eager_attention, eval_mode, is_non_autoregressive
from ..tokenizer import text_encoder
from .tokens import display_tokens

STACKS = {
    "encoder": ("source_tokens", "source_tokens"),
    "decoder": ("output_tokens", "input_tokens"),
    "cross": ("output_tokens", "source_tokens"),
}
"""The three uses of attention (3.2.3), each with its queries and its keys."""


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The attention weights of a model on one sentence.

    A decoder position reads one target token and predicts the next, so the target appears twice.
    """

    source: str
    """The source text."""
    target: str
    """The target text."""
    source_tokens: list[str]
    """The S tokens of the source, `</s>` the last."""
    input_tokens: list[str]
    """The T tokens that the decoder reads, its start token the first."""
    output_tokens: list[str]
    """The T tokens that the decoder predicts: the input tokens shifted left."""
    encoder: np.ndarray
    """(N, H, S, S), float32: the weight with which each source token attends to each."""
    decoder: np.ndarray
    """(N, H, T, T): the weight with which each target position attends to each input token; 0 for later ones."""
    cross: np.ndarray
    """(N, H, T, S): the weight with which each target position attends to each source token."""

    def queries(self, stack: str) -> list[str]:
        """Return the Q tokens that attend; for the decoder those that it predicts."""
        return getattr(self, STACKS[stack][0])

    def keys(self, stack: str) -> list[str]:
        """Return the K tokens that are attended to."""
        return getattr(self, STACKS[stack][1])

    def weights(self, stack: str) -> np.ndarray:
        """Return the (N, H, Q, K) weights of "encoder", "decoder" or "cross" attention.

        Raises:
            ValueError: the model has no attention of that name.
        """
        if stack not in STACKS:
            raise ValueError(f"stack: no such attention; got {stack!r}, expected one of {', '.join(STACKS)}.")
        return getattr(self, stack)


def generate_target(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the (1, T) tokens that the model generates for one source, up to the first `</s>`."""
    generator = cast(Any, model)
    sequences = generator.generate(**batch, num_return_sequences=1, return_dict_in_generate=False)  # (1, 1 + T)
    generated = sequences[:, 1:]
    ends = as_token_ids(generator.generation_config.eos_token_id)
    length = next((index + 1 for index, token in enumerate(generated[0].tolist()) if token in ends), None)
    return generated[:, :length]


def stack_layers(layers: Sequence[torch.Tensor | None] | None) -> np.ndarray:
    """Return the weights (1, H, Q, K) of N layers as (N, H, Q, K)."""
    tensors = [layer for layer in layers or () if layer is not None]
    if not tensors:
        raise ValueError("The model returned no attention weights; give an encoder-decoder that has eager attention.")
    return torch.cat(tensors).float().cpu().numpy()


@torch.no_grad()
def attention_maps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, target: str | None = None
) -> AttentionMaps:
    """Return the attention weights of one sentence, computed without dropout; the model does not change.

    Args:
        model: an encoder-decoder with a projection to the vocabulary.
        tokenizer: its tokenizer.
        source: the sentence.
        target: its translation; None: the one that `model.generate` returns under the model's settings.

    Raises:
        ValueError: the model generates no text, or all words at once, or returns no attention weights.
    """
    if is_non_autoregressive(model):
        raise ValueError(f"{type(model).__name__} predicts all words at once; give an autoregressive model.")
    if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise ValueError(f"{type(model).__name__} generates no text; load the model with AutoModelForSeq2SeqLM.")
    encode = text_encoder(tokenizer)
    batch = {name: tensor.to(model.device) for name, tensor in encode(source, return_tensors="pt").items()}
    with eval_mode(model):
        if target is None:
            labels = generate_target(model, batch)  # (1, T)
        else:
            labels = encode(text_target=target, return_tensors="pt")["input_ids"].to(model.device)  # (1, T)
        inputs = cast(Any, model).prepare_decoder_input_ids_from_labels(labels)  # (1, T)
        with eager_attention(model):
            outputs = model(
                **batch, decoder_input_ids=inputs, output_attentions=True, use_cache=False, return_dict=True
            )
    label_ids = labels[0].tolist()
    return AttentionMaps(
        source=source,
        target=cast(str, tokenizer.decode(label_ids, skip_special_tokens=True)) if target is None else target,
        source_tokens=display_tokens(tokenizer, batch["input_ids"][0].tolist()),
        input_tokens=display_tokens(tokenizer, inputs[0].tolist()),
        output_tokens=display_tokens(tokenizer, label_ids),
        encoder=stack_layers(outputs.encoder_attentions),
        decoder=stack_layers(outputs.decoder_attentions),
        cross=stack_layers(outputs.cross_attentions),
    )
