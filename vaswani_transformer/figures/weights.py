"""Attention weights of a model for one sentence, with the tokens.

N layers, H heads, S source, T target, Q queries, K keys.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..nar import NarHead
from ..support.loading import eager_attention, eval_mode, is_non_autoregressive
from ..tokenizer import source_encoder, text_encoder
from .tokens import display_tokens

STACKS = {
    "encoder": ("source_tokens", "source_tokens"),
    "decoder": ("output_tokens", "input_tokens"),
    "cross": ("output_tokens", "source_tokens"),
}
"""Queries and keys of the three uses of attention (3.2.3)."""


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Attention weights of a model for one sentence.

    A decoder position reads a target token and predicts the next one, so the target appears twice. In a
    non-autoregressive model a position predicts its own token, and the weights are those of the last pass.
    """

    source: str
    """Source text."""
    target: str
    """Target text."""
    source_tokens: list[str]
    """S tokens of the source, including `</s>`."""
    input_tokens: list[str]
    """T tokens that the decoder reads, such as `<mask>` in a CMLM; the predicted tokens if it reads vectors."""
    output_tokens: list[str]
    """T tokens that the decoder predicts."""
    encoder: np.ndarray
    """(N, H, S, S), float32: encoder weights. The length token of a CMLM is omitted, so rows may sum to less than 1."""
    decoder: np.ndarray
    """(N, H, T, T): decoder weights of each target position over the input tokens."""
    cross: np.ndarray
    """(N, H, T, S): cross-attention weights of each target position over the source tokens."""
    is_autoregressive: bool = True
    """False for a non-autoregressive model."""

    def queries(self, stack: str) -> list[str]:
        """Return the Q tokens of the queries; for the decoder the predicted tokens."""
        return getattr(self, STACKS[stack][0])

    def keys(self, stack: str) -> list[str]:
        """Return the K tokens of the keys."""
        return getattr(self, STACKS[stack][1])

    def weights(self, stack: str) -> np.ndarray:
        """Return the (N, H, Q, K) weights of "encoder", "decoder" or "cross" attention."""
        return {"encoder": self.encoder, "decoder": self.decoder, "cross": self.cross}[stack]


class Pass(NamedTuple):
    """One pass of a model: T input and predicted tokens, N weights (1, H, Q, K) of each of `STACKS`, and the target.

    The predicted tokens of a CTC or DAG model are those of its slots, of which the target is made.
    """

    inputs: list[int]
    labels: list[int]
    weights: list[Sequence[Tensor]]
    target: list[int]


def pass_of_target(model: Any, batch: dict[str, Tensor], labels: Tensor) -> Pass:
    """Run an autoregressive model on a source and its target (1, T)."""
    inputs = model.prepare_decoder_input_ids_from_labels(labels)  # (1, T)
    with eager_attention(model):
        outputs = model(**batch, decoder_input_ids=inputs, output_attentions=True, use_cache=False, return_dict=True)
    weights = [outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions]
    return Pass(inputs[0].tolist(), labels[0].tolist(), weights, labels[0].tolist())


@contextmanager
def record_calls(stack: nn.Module) -> Generator[list[tuple[dict[str, Any], Any]]]:
    """Yield a list of the arguments and outputs of each call of a stack, which returns its attention weights."""
    calls: list[tuple[dict[str, Any], Any]] = []
    request = stack.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "output_attentions": True}), with_kwargs=True
    )
    keep = stack.register_forward_hook(lambda _, args, kwargs, output: calls.append((kwargs, output)), with_kwargs=True)
    with request, keep:
        yield calls


def last_pass(model: NarHead, batch: dict[str, Tensor], generate_kwargs: dict[str, Any]) -> Pass:
    """Return the last pass of `generate()` for one source and the best length; FlowSeq draws a single sample."""
    settings = {**generate_kwargs, "num_return_sequences": 1}
    settings.update(return_dict_in_generate=True, return_history=True)
    if "num_latent_samples" in model.family_settings:
        settings["num_latent_samples"] = 1
    body = cast(Any, model).model
    with eager_attention(model), record_calls(body.encoder) as encoded, record_calls(body.decoder) as passes:
        output = cast(Any, model).generate(**batch, **settings)

    # The pass that wrote the target: the last iteration, or the first pass, since FlowSeq's later ones rank targets.
    is_refined = "num_iterations" in model.family_settings
    inputs, decoded = passes[len(output.history) - 1 if is_refined else 0]
    target = output.sequences[0, 1 : 1 + int(output.lengths[0])].tolist()
    labels = output.path[0].tolist() if "path" in output else target

    # The row of the best length among the candidate lengths, without padding.
    length = len(labels)
    row = inputs["attention_mask"].sum(1).tolist().index(length)
    input_tokens = labels
    if inputs.get("input_ids") is not None:
        input_tokens = inputs["input_ids"][row, :length].tolist()
    source_length = batch["input_ids"].shape[1]
    (_, encoder_output), *_ = encoded
    weights = [
        [layer[..., -source_length:, -source_length:] for layer in encoder_output.attentions],  # no length token
        [layer[row : row + 1, :, :length, :length] for layer in decoded.attentions],
        [layer[row : row + 1, :, :length] for layer in decoded.cross_attentions],
    ]
    return Pass(input_tokens, labels, weights, target)


def shown_pass(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: dict[str, Tensor],
    target: str | None,
    generate_kwargs: dict[str, Any],
) -> Pass:
    """Return the pass of a model to show for one source, and for `target` if it is known."""
    if is_non_autoregressive(model):
        return last_pass(model, batch, generate_kwargs)
    if target is None:
        settings = {**generate_kwargs, "num_return_sequences": 1, "return_dict_in_generate": False}
        labels = cast(Any, model).generate(**batch, **settings)[:, 1:]  # (1, T)
    else:
        targets = text_encoder(tokenizer)(text_target=target, return_tensors="pt")
        labels = targets["input_ids"].to(model.device)  # (1, T)
    return pass_of_target(model, batch, labels)


@torch.no_grad()
def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | None = None,
    **generate_kwargs: Any,
) -> AttentionMaps:
    """Return the attention weights for one sentence, computed in evaluation mode.

    Args:
        model: an encoder-decoder with an output projection.
        tokenizer: its tokenizer.
        source: the sentence.
        target: its translation; None for that of `model.generate`, as non-autoregressive models require.
        **generate_kwargs: arguments of `model.generate`, which override the model's settings.

    Raises:
        ValueError: a target is given for a non-autoregressive model.
    """
    is_autoregressive = not is_non_autoregressive(model)
    if target is not None and not is_autoregressive:
        raise ValueError(
            f"target: not supported by {type(model).__name__}, which predicts all words at once; got {target!r}, "
            "expected None. Leave it out."
        )
    encoded = source_encoder(tokenizer)(source, return_tensors="pt")
    batch = {name: tensor.to(model.device) for name, tensor in encoded.items()}
    with eval_mode(model):
        shown = shown_pass(model, tokenizer, batch, target, generate_kwargs)

    # Stack the layers.
    weights = {}
    for stack, layers in zip(STACKS, shown.weights, strict=True):
        weights[stack] = torch.cat(list(layers)).float().cpu().numpy()  # (N, H, Q, K)
    if target is None:
        target = cast(str, tokenizer.decode(shown.target, skip_special_tokens=True))
    return AttentionMaps(
        source=source,
        target=target,
        source_tokens=display_tokens(tokenizer, batch["input_ids"][0].tolist()),
        input_tokens=display_tokens(tokenizer, shown.inputs),
        output_tokens=display_tokens(tokenizer, shown.labels),
        is_autoregressive=is_autoregressive,
        **weights,
    )
