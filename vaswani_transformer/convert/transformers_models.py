"""Import of FSMT and Marian models of Transformers."""

from typing import Any

import torch
from transformers import (
    FSMTForConditionalGeneration,
    FSMTTokenizer,
    MarianMTModel,
    MarianTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..support.checked_loading import load_config, load_errors, load_model, load_tokenizer
from ..support.errors import UserError
from .foreign import TABLES, ForeignModel, ImportResult, build_model, check_equivalence, check_supported, require_equal


def check_type(name: str, model_type: str, **settings: Any) -> None:
    if (got := load_config(name, **settings).model_type) != model_type:
        raise UserError(
            f"{name}: is a model of another type; got {got!r}, expected {model_type!r}. Name a model of that type."
        )


def read_transformers_model(original: PreTrainedModel, name: str) -> ForeignModel:
    settings = original.config.to_dict()
    check_supported(settings, name)
    inner = original.model
    offset = inner.encoder.padding_idx + 1 if isinstance(original, FSMTForConditionalGeneration) else 0
    rows = slice(offset, offset + settings["max_position_embeddings"])
    state = {key.removeprefix("model."): value for key, value in original.state_dict().items()}
    bias = state.pop("final_logits_bias", None)
    same = ("dropout", "attention_dropout", "activation_dropout", "scale_embedding", "encoder_layers", "decoder_layers")
    tokens = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")
    activation = settings["activation_function"]
    fields = {
        "num_heads": require_equal(settings, name, "encoder_attention_heads", "decoder_attention_heads"),
        "d_ff": require_equal(settings, name, "encoder_ffn_dim", "decoder_ffn_dim"),
        "activation_function": "silu" if activation == "swish" else activation,
        **{key: settings[key] for key in same},
        **{key: getattr(original.config, key) for key in tokens},
    }
    return ForeignModel(
        fields,
        {key: value for key, value in state.items() if key not in TABLES},
        [stack.embed_positions.weight.detach()[rows] for stack in (inner.encoder, inner.decoder)],
        None if bias is None else bias[0].float(),
    )


def import_transformers_model(
    folder: str, model_class: type[PreTrainedModel], tokenizer_class: type[PreTrainedTokenizerBase] | None
) -> ImportResult:
    """Import an FSMT or Marian model of Transformers, from a folder or the Hub.

    The tokenizer remains that of the original, since neither can be converted to a `tokenizer.json`.
    """
    original = load_model(folder, model_class, dtype=torch.float32).eval()
    tokenizer = None if tokenizer_class is None else load_tokenizer(folder, tokenizer_class)
    with load_errors(folder):
        model = build_model(read_transformers_model(original, folder), folder)
    difference, largest = check_equivalence(model, original, folder)
    model.generation_config = original.generation_config
    if tokenizer is not None:  # a padded vocabulary has further entries
        spare = range(len(tokenizer), model.config.vocab_size)
        tokenizer.add_tokens([f"<spare {index}>" for index in spare], special_tokens=True)
    return ImportResult(model, tokenizer, difference, largest)


def from_marian(folder: str, with_tokenizer: bool = True) -> ImportResult:
    """Import a Marian model of Transformers, such as those of OPUS-MT.

    Args:
        folder: a folder with the model and its tokenizer, or its name on the Hub.
        with_tokenizer: whether to load the tokenizer, which remains Marian's.

    Raises:
        UserError: the model cannot be loaded, has another type, or has an unsupported setting.
    """
    check_type(folder, "marian")
    return import_transformers_model(folder, MarianMTModel, MarianTokenizer if with_tokenizer else None)


def from_fsmt(folder: str, with_tokenizer: bool = True) -> ImportResult:
    """Import an FSMT model of Transformers whose source and target share their embeddings.

    Args:
        folder: a folder with the model and its tokenizer, or its name on the Hub.
        with_tokenizer: whether to load the tokenizer, which remains FSMT's.

    Raises:
        UserError: the model cannot be loaded, has another type, or has an unsupported setting.
    """
    check_type(folder, "fsmt")
    return import_transformers_model(folder, FSMTForConditionalGeneration, FSMTTokenizer if with_tokenizer else None)
