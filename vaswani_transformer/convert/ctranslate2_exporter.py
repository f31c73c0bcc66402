"""Export to CTranslate2, which needs the extra `ctranslate2`.

H heads, P rows of the table of positions, V vocabulary.
"""

import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..cpu.model import check_plain_layers
from ..layers import (
    AddAndNorm,
    LearnedPositions,
    MultiHeadAttention,
    VaswaniTransformerDecoderLayer,
    VaswaniTransformerEncoderLayer,
    sinusoids,
)
from ..model import VaswaniTransformerForConditionalGeneration
from ..stacks import VaswaniTransformerDecoder, VaswaniTransformerEncoder
from ..support.command import UserError, one_line
from ..support.files import atomic_folder, write_errors
from ..tokenizer import check_vocabulary

QUANTIZATIONS = (
    "float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16",
)  # fmt: skip

# By CTranslate2's names; its "GELU" is the exact one, with the error function.
ACTIVATIONS = {
    "relu": "RELU", "gelu": "GELU", "gelu_new": "GELUTanh", "gelu_pytorch_tanh": "GELUTanh",
    "quick_gelu": "GELUSigmoid", "silu": "SWISH", "swish": "SWISH", "tanh": "Tanh", "sigmoid": "Sigmoid",
}  # fmt: skip


def ctranslate2_specs() -> Any:
    """Return the module `ctranslate2.specs`; raise ImportError that names the extra."""
    try:
        from ctranslate2 import specs
    except ImportError as error:
        fix = 'run pip install "vaswani-transformer[ctranslate2]"'
        raise ImportError(f"CTranslate2: cannot be imported ({one_line(error)}); {fix}.") from error
    return specs


def start_token_id(model: VaswaniTransformerForConditionalGeneration) -> int | None:
    """Return the id of the first token of every target."""
    saved = model.generation_config
    candidates = (saved.decoder_start_token_id, saved.bos_token_id, model.config.target_start_token_id)
    return next((token for token in candidates if token is not None), None)


def check_convertible(model: nn.Module) -> None:
    """Check that CTranslate2 can represent a model, before its weights are copied."""
    if not isinstance(model, VaswaniTransformerForConditionalGeneration):
        raise UserError(
            f"A {type(model).__name__} is not a VaswaniTransformerForConditionalGeneration, the only model that "
            "CTranslate2 runs; merge an adapter by merge_and_unload()."
        )
    config = model.config
    if config.attention_window is not None:
        raise UserError(
            "attention_window: CTranslate2 does not support restricted self-attention; got "
            f"{config.attention_window}, expected None. Decode with prepare_for_inference instead."
        )
    if config.activation_function not in ACTIVATIONS:
        raise UserError(
            "activation_function: not supported by CTranslate2; got "
            f"{config.activation_function!r}, expected one of {', '.join(ACTIVATIONS)}."
        )
    for name, value in (("eos_token_id", config.eos_token_id), ("bos_token_id", start_token_id(model))):
        if not isinstance(value, int):
            raise UserError(f"{name}: CTranslate2 needs a single token; got {value}. Set one in the configuration.")
    check_plain_layers(model)


def to_cpu_float32(weight: Tensor) -> Tensor:
    """Return a float32 copy of a weight on the CPU, since CTranslate2 quantizes in place."""
    return weight.detach().to("cpu", torch.float32, copy=True).contiguous()


def set_norm(spec: Any, add_norm: AddAndNorm) -> None:
    spec.gamma = to_cpu_float32(add_norm.norm.weight)
    spec.beta = to_cpu_float32(add_norm.norm.bias)


def set_linear(spec: Any, linear: nn.Linear) -> None:
    spec.weight = to_cpu_float32(linear.weight)
    if linear.bias is not None:
        spec.bias = to_cpu_float32(linear.bias)


def set_attention(spec: Any, attention: MultiHeadAttention, is_self_attention: bool) -> None:
    """Set an attention; CTranslate2 needs d_k = d_v, so each head of the narrower one is padded with zeros."""
    num_heads = attention.config.num_heads
    width = max(attention.head_dim, attention.value_head_dim)

    def pad_heads(rows: Tensor) -> Tensor:
        by_head = rows.unflatten(0, (num_heads, -1))  # (H, d_k or d_v, ...)
        missing = by_head.new_zeros(num_heads, width - by_head.shape[1], *by_head.shape[2:])
        return torch.cat((by_head, missing), dim=1).flatten(0, 1)

    # CTranslate2 projects what has the same input with one matrix.
    query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
    groups = [[query, key, value]] if is_self_attention else [[query], [key, value]]
    for linear_spec, group in zip(spec.linear, groups, strict=False):
        linear_spec.weight = to_cpu_float32(torch.cat([pad_heads(linear.weight) for linear in group]))
        if attention.config.attention_bias:
            linear_spec.bias = to_cpu_float32(torch.cat([pad_heads(linear.bias) for linear in group]))

    # The columns of the output projection are padded like the values that it reads.
    set_linear(spec.linear[-1], attention.o_proj)
    spec.linear[-1].weight = to_cpu_float32(pad_heads(attention.o_proj.weight.T).T)  # (d_model, H width)
    spec.queries_scale = attention.scaling


def set_layer(spec: Any, layer: VaswaniTransformerEncoderLayer | VaswaniTransformerDecoderLayer) -> None:
    set_attention(spec.self_attention, layer.self_attn, is_self_attention=True)
    set_norm(spec.self_attention.layer_norm, layer.self_attn_add_norm)
    if isinstance(layer, VaswaniTransformerDecoderLayer):
        set_attention(spec.attention, layer.cross_attn, is_self_attention=False)
        set_norm(spec.attention.layer_norm, layer.cross_attn_add_norm)
    set_linear(spec.ffn.linear_0, layer.feed_forward.fc1)
    set_linear(spec.ffn.linear_1, layer.feed_forward.fc2)
    set_norm(spec.ffn.layer_norm, layer.feed_forward_add_norm)


def set_stack(spec: Any, stack: VaswaniTransformerEncoder | VaswaniTransformerDecoder, positions: int) -> None:
    """Set a stack with its embeddings and its table of positions (P, d_model)."""
    embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
    embeddings.weight = to_cpu_float32(stack.embed_tokens.weight)
    spec.scale_embeddings = stack.config.scale_embedding

    encoding = stack.input_embedding.positions
    if isinstance(encoding, LearnedPositions):
        table = encoding.table.weight
    else:
        table = sinusoids(torch.arange(positions), stack.config.d_model)
    spec.position_encodings.encodings = to_cpu_float32(table)

    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        set_layer(layer_spec, cast(VaswaniTransformerEncoderLayer, layer))


def specification(model: VaswaniTransformerForConditionalGeneration, positions: int) -> Any:
    """Return the model as CTranslate2's `TransformerSpec`."""
    specs = ctranslate2_specs()
    config = model.config
    width = max(config.head_dim, config.value_head_dim)
    shape: dict[str, Any] = {
        "num_heads": config.num_heads,
        "pre_norm": False,
        "activation": getattr(specs.common_spec.Activation, ACTIVATIONS[config.activation_function]),
        "head_dim": None if width * config.num_heads == config.d_model else width,
    }
    encoder = specs.transformer_spec.TransformerEncoderSpec(config.encoder_layers, **shape)
    decoder = specs.transformer_spec.TransformerDecoderSpec(config.decoder_layers, **shape)
    spec = specs.TransformerSpec(encoder, decoder)
    set_stack(encoder, model.model.encoder, positions)
    set_stack(decoder, model.model.decoder, positions)
    set_linear(decoder.projection, model.lm_head)
    return spec


def set_vocabulary(
    spec: Any, model: VaswaniTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Set the V strings of the vocabulary, which without a tokenizer are their ids, and the special tokens.

    The tokenizer adds `</s>` to sources. CTranslate2 requires an `unk_token`; without `<unk>` it is the padding token.
    """
    config = model.config
    unknown = None if tokenizer is None else tokenizer.unk_token_id
    strings = [str(index) for index in range(config.vocab_size)]
    if tokenizer is not None:
        check_vocabulary(model, tokenizer)
        known = set(tokenizer.get_vocab().values())
        for index in range(config.vocab_size):
            if index in known:
                strings[index] = str(tokenizer.convert_ids_to_tokens(index))
            else:
                strings[index] = f"<no token {index}>"
    spec.register_source_vocabulary(strings)
    spec.register_target_vocabulary(strings)

    # CTranslate2 names special tokens by their strings.
    start = cast(int, start_token_id(model))  # not None after `check_convertible`
    bos = start if config.bos_token_id is None else config.bos_token_id
    if unknown is None:
        unknown = start if config.pad_token_id is None else config.pad_token_id
    spec.config.bos_token = strings[bos]
    spec.config.eos_token = strings[config.token_id("eos_token_id")]
    spec.config.unk_token = strings[unknown]
    spec.config.decoder_start_token = strings[start]
    spec.config.add_source_bos = False
    spec.config.add_source_eos = False


def to_ctranslate2(
    model: VaswaniTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase | None,
    output_dir: str | os.PathLike[str],
    quantization: str | None = None,
    *,
    positions: int = 1024,
    force: bool = False,
) -> Path:
    """Export a model to CTranslate2, with its tokenizer and its generation config.

    The input of `ctranslate2.Translator(output_dir)` are the tokenizer's tokens, including `</s>`:
    `tokenizer.convert_ids_to_tokens(tokenizer("a text").input_ids)`.

    Args:
        model: the model, on any device; it is not changed.
        tokenizer: its tokenizer; None to name the tokens "0", "1" and so on.
        output_dir: the folder to write, completely or not at all.
        quantization: the type of stored weights, one of `QUANTIZATIONS`; None for float32. CTranslate2 computes in the
            nearest type that the device supports.
        positions: largest number of tokens of a source or target; with learned positions, the size of their table.
        force: whether to replace a model in `output_dir`.

    Returns:
        The folder.

    Raises:
        ImportError: CTranslate2 is not installed.
        UserError: CTranslate2 cannot represent the model, the tokenizer does not fit, or the folder cannot be written.
    """
    check_convertible(model)
    with atomic_folder(output_dir, force) as folder, torch.no_grad():
        spec = specification(model, positions)
        set_vocabulary(spec, model, tokenizer)
        spec.config.layer_norm_epsilon = float(model.config.layer_norm_eps)
        spec.validate()
        spec.optimize(None if quantization == "float32" else quantization)
        with write_errors(output_dir, "make room, or choose a different folder"):
            spec.save(str(folder))
            model.generation_config.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    return Path(output_dir)
