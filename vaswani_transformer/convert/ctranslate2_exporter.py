"""The model in CTranslate2: writing it in that engine's format, and decoding with what was written.

H heads, P rows of the table of positions, V vocabulary. Needs the package `ctranslate2`, the extra of that name.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from ..attention import MultiHeadAttention
from ..body import is_unwrapped_linear
from ..checked_loading import load_tokenizer, new_folder
from ..config import VaswaniTransformerConfig
from ..decoder import VaswaniTransformerDecoder
from ..embeddings import LearnedPositions, sinusoids
from ..encoder import VaswaniTransformerEncoder
from ..layers import AddAndNorm, VaswaniTransformerDecoderLayer, VaswaniTransformerEncoderLayer
from ..model import VaswaniTransformerForConditionalGeneration
from ..search import LENGTH_PENALTY_TYPES, length_penalty
from ..tokenizer import text_encoder

logger = logging.get_logger(__name__)

QUANTIZATIONS = (
    "float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16",
)  # fmt: skip

LONGER_THAN_SOURCE = 50  # tokens, as in the paper (6.1)
LEFT_OUT = (
    "begin_suppress_tokens", "do_sample", "encoder_no_repeat_ngram_size", "forced_bos_token_id", "min_length",
    "min_new_tokens", "no_repeat_ngram_size", "repetition_penalty", "sequence_bias", "suppress_tokens",
)  # fmt: skip
"""Saved settings that change what `generate()` finds, and that this search has not."""

TABLE = "max_position_embeddings"  # P, which CTranslate2 keeps nowhere else

# Its names of what Transformers calls otherwise, by the formula. "GELU" is the one with the error function.
ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_python": "GELU",
    "gelu_new": "GELUTanh",
    "gelu_fast": "GELUTanh",
    "gelu_pytorch_tanh": "GELUTanh",
    "gelu_python_tanh": "GELUTanh",
    "gelu_accurate": "GELUTanh",
    "quick_gelu": "GELUSigmoid",
    "silu": "SWISH",
    "swish": "SWISH",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}


def ctranslate2() -> Any:
    """The package of that name.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import ctranslate2 as package
    except ImportError as error:
        raise ImportError('CTranslate2 is not installed; "pip install ctranslate2" installs it.') from error
    return package


def refuse_model(model: nn.Module, quantization: str | None, positions: int) -> None:
    """Refuse what CTranslate2 cannot represent.

    Raises:
        ValueError: naming it.
    """
    if not isinstance(model, VaswaniTransformerForConditionalGeneration):
        raise ValueError(
            f"A {type(model).__name__} is no VaswaniTransformerForConditionalGeneration; convert a model of another "
            "kind into one first, and merge adapters with merge_and_unload()."
        )
    config = model.config
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization is {quantization!r}; choose one of {', '.join(QUANTIZATIONS)}.")
    if positions < 1:
        raise ValueError(f"positions ({positions}) is not positive; give the longest text's number of tokens.")
    if config.activation_function not in ACTIVATIONS:
        raise ValueError(
            f"CTranslate2 has no activation function {config.activation_function!r}; those of both are "
            f"{', '.join(ACTIVATIONS)}."
        )
    for name, value in (("eos_token_id", config.eos_token_id), ("bos_token_id", config.target_start_token_id)):
        if not isinstance(value, int):
            raise ValueError(f"CTranslate2 takes one token as {name}, and the configuration has {value}; set one.")
    for name, module in model.named_modules():
        has_kind = name.endswith(("_proj", "lm_head", "fc1", "fc2"))
        if has_kind and (not is_unwrapped_linear(module) or cast(nn.Linear, module).weight.is_meta):
            raise ValueError(
                f"{name} is a {type(module).__name__} that is more than its weight, or not here; merge adapters with "
                "merge_and_unload(), and load the model whole, without device_map or preparation for inference."
            )


def vocabulary(config: VaswaniTransformerConfig, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """A string for each entry (V): the tokenizer's, or else its number.

    Raises:
        ValueError: the tokenizer has more entries than the model.
    """
    if tokenizer is None:
        return [str(index) for index in range(config.vocab_size)]
    strings = {index: token for token, index in tokenizer.get_vocab().items()}
    if (needed := max(strings) + 1) > config.vocab_size:
        raise ValueError(
            f"The tokenizer has ids up to {needed - 1} and the model a vocabulary of {config.vocab_size} entries; they "
            "do not belong together: give the model's own tokenizer."
        )
    return [strings.get(index, f"<no token {index}>") for index in range(config.vocab_size)]


def plain(weight: Tensor) -> Tensor:
    """A copy of a weight in float32 on the CPU, since CTranslate2 quantises in place."""
    return weight.detach().to("cpu", torch.float32, copy=True).contiguous()


def set_norm(spec: Any, add_norm: AddAndNorm) -> None:
    spec.gamma, spec.beta = plain(add_norm.norm.weight), plain(add_norm.norm.bias)


def set_linear(spec: Any, *linears: nn.Linear) -> None:
    """One projection for several, their outputs side by side."""
    spec.weight = torch.cat([plain(linear.weight) for linear in linears])
    if linears[0].bias is not None:
        spec.bias = torch.cat([plain(linear.bias) for linear in linears])


def widen_heads(linear: nn.Linear, num_heads: int, width: int) -> nn.Linear:
    """The same projection with each head's output as wide as `width`, zeros behind it."""

    def widen(rows: Tensor) -> Tensor:
        heads = rows.detach().unflatten(0, (num_heads, -1))  # (H, d_k or d_v, ...)
        missing = heads.new_zeros(num_heads, width - heads.shape[1], *heads.shape[2:])
        return torch.cat((heads, missing), dim=1).flatten(0, 1)

    wide = nn.Linear(linear.in_features, num_heads * width, bias=linear.bias is not None, device="meta")
    wide.weight = nn.Parameter(widen(linear.weight))
    if linear.bias is not None:
        wide.bias = nn.Parameter(widen(linear.bias))
    return wide


def set_attention(spec: Any, attention: MultiHeadAttention, is_self_attention: bool) -> None:
    """An attention whose d_k and d_v, one width in CTranslate2, become the wider of the two."""
    heads, width = attention.config.num_heads, max(attention.head_dim, attention.value_head_dim)
    query, key, value = (
        widen_heads(projection, heads, width) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if is_self_attention:
        set_linear(spec.linear[0], query, key, value)
    else:
        set_linear(spec.linear[0], query)
        set_linear(spec.linear[1], key, value)
    set_linear(spec.linear[-1], attention.o_proj)
    by_head = attention.o_proj.weight.detach().unflatten(1, (heads, -1))  # (d_model, H, d_v)
    spec.linear[-1].weight = plain(nn.functional.pad(by_head, (0, width - attention.value_head_dim)).flatten(1))
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
    """A stack with its embeddings and its table of positions (P, d_model)."""
    embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
    embeddings.weight = plain(stack.embed_tokens.weight)
    spec.scale_embeddings = stack.config.scale_embedding
    table = stack.input_embedding.positions
    is_learned = isinstance(table, LearnedPositions)
    rows = table.table.weight if is_learned else sinusoids(torch.arange(positions), stack.config.d_model)
    spec.position_encodings.encodings = plain(rows)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        set_layer(layer_spec, cast(VaswaniTransformerEncoderLayer, layer))


def specification(model: VaswaniTransformerForConditionalGeneration, positions: int) -> Any:
    """The model as CTranslate2's TransformerSpec, post-norm."""
    specs = ctranslate2().specs
    config = model.config
    width = max(config.head_dim, config.value_head_dim)
    shape = {
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
    decoder.projection.weight = plain(model.lm_head.weight)
    return spec


def set_vocabulary(spec: Any, config: VaswaniTransformerConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """The strings of the tokens, and which of them begin and end a text.

    Sources come with their `</s>`, as the tokenizer makes them, so that none is added. CTranslate2 reads a string that
    it does not know as `unk_token`, and one that is in no vocabulary would lie behind the embeddings: without an
    `<unk>` the padding stands in for it.
    """
    strings = vocabulary(config, tokenizer)
    spec.register_source_vocabulary(strings)
    spec.register_target_vocabulary(strings)
    end, start = cast(int, config.eos_token_id), cast(int, config.target_start_token_id)
    unknown = None if tokenizer is None else tokenizer.unk_token_id
    unknown = unknown if unknown is not None else config.pad_token_id
    spec.config.bos_token = strings[start if config.bos_token_id is None else config.bos_token_id]
    spec.config.eos_token = strings[end]
    spec.config.unk_token = strings[start if unknown is None else unknown]
    spec.config.decoder_start_token = strings[start]
    spec.config.add_source_bos = spec.config.add_source_eos = False


def to_ctranslate2(
    model: VaswaniTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase | None,
    output_dir: str | os.PathLike[str],
    quantization: str | None = None,
    *,
    positions: int = 1024,
    force: bool = False,
) -> Path:
    """Write a model in CTranslate2's format, with its tokenizer and its generation config beside it.

    `ctranslate2.Translator(output_dir)` then takes the tokenizer's own tokens, `</s>` among them:
    `tokenizer.convert_ids_to_tokens(tokenizer("a text").input_ids)`.

    Args:
        model: the model, on any device; it is left as it is.
        tokenizer: its tokenizer; None: the tokens are called "0", "1" and so on.
        output_dir: a folder that is written whole or not at all.
        quantization: how weights are stored, one of `QUANTIZATIONS`; None: float32. CTranslate2 computes in the
            nearest type that the device has.
        positions: the tokens that a source and a target may have; learned positions have as many as their table.
        force: whether to replace a model that stands in `output_dir`.

    Returns:
        The folder.

    Raises:
        ImportError: CTranslate2 is not installed.
        ValueError: CTranslate2 cannot represent the model, the tokenizer is another model's, or the folder is in use.
    """
    refuse_model(model, quantization, positions)
    ctranslate2()
    with new_folder(output_dir, force) as folder, torch.no_grad():
        spec = specification(model, positions)
        set_vocabulary(spec, model.config, tokenizer)
        spec.config.layer_norm_epsilon = float(model.config.layer_norm_eps)
        spec.config.add_attribute(TABLE, spec.decoder.position_encodings.encodings.shape[0])
        spec.validate()
        spec.optimize(None if quantization == "float32" else quantization)
        spec.save(str(folder))
        model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return Path(output_dir)


class CTranslate2Search:
    """Beam search by CTranslate2 in a folder that `to_ctranslate2` wrote; settings not given are the saved ones.

    Under "power" a search with `patience` 1 finds what `generate()` finds with `early_stopping=True`, and one with so
    much that only the length limit ends it what "never" finds, token for token and with the same scores up to rounding.
    Under "gnmt", which CTranslate2 does not know, lp(Y) ranks the translations that it has finished. Saved settings
    that it does without, such as `no_repeat_ngram_size`, are named in a warning.

    Args:
        folder: the folder, with the tokenizer's files.
        scores: whether to give scores.
        num_beams: 1 for greedy search.
        length_penalty: alpha.
        length_penalty_type: "power" or "gnmt".
        patience: the search for a text ends at `num_beams` times so many finished translations. 1 is fast, but stops
            before longer translations that are better.
        max_new_tokens: of a translation, its end counted; it wins over a saved `max_source_relative_length`.
        max_source_relative_length: how many tokens longer than the longest source of a call a translation may become;
            50 where neither it nor `max_new_tokens` is given or saved. The table of positions limits all.
        num_return_sequences: n, the translations of each text, at most `num_beams`.
        batch_tokens: source tokens at once, padding counted, where a call has more; 0 for no limit.
        device: "cpu", "cuda" or "auto".
        compute_type: how CTranslate2 computes; "default": as the weights are stored, or the nearest that it can.
        threads: of the CPU; None: as many as torch uses.

    Raises:
        ImportError: CTranslate2 is not installed.
        ValueError: the folder holds no converted model, or a setting is out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        scores: bool = False,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        length_penalty_type: str | None = None,
        patience: float = 2.0,
        max_new_tokens: int | None = None,
        max_source_relative_length: int | None = None,
        num_return_sequences: int = 1,
        batch_tokens: int = 4096,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int | None = None,
    ) -> None:
        self.tokenizer, self.tokens, self.table, saved = read_folder(Path(folder))
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.scores, self.num_translations, self.batch_tokens = scores, num_return_sequences, batch_tokens
        self.num_beams = next(value for value in (num_beams, saved.num_beams, 1) if value is not None)
        self.patience = patience
        self.alpha = next(value for value in (length_penalty, saved.length_penalty, 1.0) if value is not None)
        self.penalty_type = length_penalty_type or getattr(saved, "length_penalty_type", "power")
        if max_source_relative_length is None and max_new_tokens is None:
            max_source_relative_length = getattr(saved, "max_source_relative_length", None)
            max_new_tokens = saved.max_new_tokens
        has_limit = max_source_relative_length is not None or max_new_tokens is not None
        self.relative = max_source_relative_length if has_limit else LONGER_THAN_SOURCE
        self.most = max_new_tokens
        self.suppressed = [[self.tokens[index] for index in sequence] for sequence in saved.bad_words_ids or []]
        self.refuse_settings()
        if left_out := sorted(saved.to_diff_dict().keys() & set(LEFT_OUT)):
            logger.warning("%s: CTranslate2 searches without the saved %s.", folder, ", ".join(left_out))
        engine = ctranslate2()
        threads = torch.get_num_threads() if threads is None else threads
        try:
            self.translator = engine.Translator(
                str(folder), device=device, compute_type=compute_type, intra_threads=threads
            )
        except (ValueError, RuntimeError) as error:
            said = " ".join(str(error).split()).removesuffix(".")
            raise ValueError(
                f"{folder}: CTranslate2 cannot load it on device {device!r} as {compute_type!r}: {said}; give another "
                "device or type, or convert the model again."
            ) from error

    def refuse_settings(self) -> None:
        """Refuse settings that are none."""
        if self.penalty_type not in LENGTH_PENALTY_TYPES:
            raise ValueError(f"length_penalty_type is {self.penalty_type!r}; choose one of {LENGTH_PENALTY_TYPES}.")
        for name, value in (("length_penalty", self.alpha), ("patience", self.patience)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} is {value!r}, expected a finite number; set it, or save it anew.")
        if not 1 <= self.num_translations <= self.num_beams:
            raise ValueError(
                f"num_return_sequences ({self.num_translations}) is not from 1 to num_beams ({self.num_beams}); raise "
                "num_beams or lower it."
            )
        if self.most is not None and not 1 <= self.most <= self.table:
            raise ValueError(
                f"max_new_tokens ({self.most}) is not from 1 to the table of {self.table} positions; lower it, or "
                "convert the model with more positions."
            )

    def longest_source(self) -> int:
        """The tokens of a text that there are positions for, with room for its translation."""
        return max(1, self.table - (self.relative or 0))

    def limit(self, longest: int) -> int:
        """The tokens that a translation may have beside a longest source of so many.

        Raises:
            ValueError: there are no positions for the source.
        """
        if longest > self.table:
            raise ValueError(
                f"A text of {longest} tokens is longer than the table of {self.table} positions; shorten it, or "
                "convert the model with more positions."
            )
        relative = self.table if self.relative is None else longest + self.relative
        return min(self.table, relative, self.most or self.table)

    def __call__(self, sources: Sequence[Sequence[int]]) -> list[list[tuple[list[int], float | None]]]:
        """For each text, given as its tokens, its n best targets: their tokens with their `</s>`, and their scores.

        Raises:
            ValueError: a text is longer than the table of positions.
        """
        found = self.translator.translate_batch(
            [[self.tokens[index] for index in source] for source in sources],
            beam_size=self.num_beams,
            patience=self.patience,
            num_hypotheses=self.num_beams if self.penalty_type == "gnmt" else self.num_translations,
            length_penalty=self.alpha,
            max_input_length=0,
            max_decoding_length=self.limit(max(map(len, sources), default=1)),
            min_decoding_length=0,
            suppress_sequences=self.suppressed,
            max_batch_size=self.batch_tokens,
            batch_type="tokens",
            return_scores=True,
            return_end_token=True,
        )
        return [self.rank(result.hypotheses, result.scores) for result in found]

    def rank(self, hypotheses: list[list[str]], scores: list[float]) -> list[tuple[list[int], float | None]]:
        """The n best, the best first."""
        if self.penalty_type == "gnmt":
            rescored = zip(hypotheses, map(self.score_by_lp, hypotheses, scores), strict=True)
            ranked = sorted(rescored, key=lambda pair: -pair[1])
        else:
            ranked = list(zip(hypotheses, scores, strict=True))
        return [
            ([self.ids[token] for token in tokens], score if self.scores else None)
            for tokens, score in ranked[: self.num_translations]
        ]

    def score_by_lp(self, hypothesis: list[str], score: float) -> float:
        """log P(Y | X) / lp(Y) from CTranslate2's log P(Y | X) / |Y|^alpha."""
        length = max(1, len(hypothesis))
        return score * length**self.alpha / cast(float, length_penalty(length, self.alpha))

    def translate(self, texts: Sequence[str]) -> list[str]:
        """The best translation of each text.

        Raises:
            TypeError: a single text is given, whose characters would be the texts.
            ValueError: the folder has no tokenizer, or a text is longer than the table of positions.
        """
        if isinstance(texts, str):
            raise TypeError(f"texts is the str {texts!r}; give a list of texts, for example [text].")
        if self.tokenizer is None:
            raise ValueError("The model was converted without its tokenizer; convert it with its tokenizer.")
        found = self(cast(Any, text_encoder(self.tokenizer))(list(texts), return_attention_mask=False)["input_ids"])
        return self.tokenizer.batch_decode([targets[0][0] for targets in found], skip_special_tokens=True)


def read_folder(folder: Path) -> tuple[PreTrainedTokenizerBase | None, list[str], int, GenerationConfig]:
    """The tokenizer, the strings of the tokens, P and the saved settings of a converted model.

    Raises:
        ValueError: the folder does not hold all of them, or its tokenizer cannot be loaded.
    """
    try:
        tokens = json.loads((folder / "shared_vocabulary.json").read_text(encoding="utf-8"))
        table = json.loads((folder / "config.json").read_text(encoding="utf-8"))[TABLE]
        saved = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f'{folder}: no model that "vaswani-convert ctranslate2" wrote; convert one to this folder first.'
        ) from error
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(str(folder)) if has_tokenizer else None
    return tokenizer, tokens, table, saved


__all__ = ["QUANTIZATIONS", "CTranslate2Search", "to_ctranslate2"]
