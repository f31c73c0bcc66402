"""Import of models of other tools: Marian and FSMT of Transformers, and what the importer of fairseq shares with them.

All three are post-norm Transformers with biases on the attention projections, and layer norms with an epsilon of 1e-5.
Their positions, with sines and cosines in two halves, become a table of learned positions. Unsupported settings are
errors, or change the log-probabilities, which are compared. V vocabulary, P rows of a table of positions.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    FSMTForConditionalGeneration,
    FSMTTokenizer,
    MarianMTModel,
    MarianTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..config import VaswaniTransformerConfig, as_token_ids
from ..model import VaswaniTransformerForConditionalGeneration
from ..support.errors import UserError
from ..support.loading import load_config, load_errors, load_model, load_tokenizer

NAMES = {
    "encoder_attn.": "cross_attn.",
    ".out_proj.": ".o_proj.",
    "self_attn_layer_norm.": "self_attn_add_norm.norm.",
    "encoder_attn_layer_norm.": "cross_attn_add_norm.norm.",
    "final_layer_norm.": "feed_forward_add_norm.norm.",
    ".fc1.": ".feed_forward.fc1.",
    ".fc2.": ".feed_forward.fc2.",
}
"""Parts of weight names in the other tools, and in this package."""

EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
OUTPUTS = ("lm_head.weight", "decoder.output_projection.weight")
TABLES = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")


@dataclass
class ForeignModel:
    """Model of another tool."""

    settings: dict[str, Any]  # fields of this package's configuration
    state: dict[str, Tensor]  # other weights, in float32, by fairseq's names
    tables: list[Tensor]  # position tables (P, d_model) of encoder and decoder
    bias: Tensor | None = None  # bias (V,) of the logits


@dataclass
class ImportResult:
    """Imported model.

    model: the model of this package.
    tokenizer: its tokenizer, that of the original if it cannot be a `tokenizer.json`, or None.
    difference: largest difference of log-probabilities from the original, or None if the original cannot run.
    """

    model: VaswaniTransformerForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase | None
    difference: float | None


def concatenated_sinusoids(positions: int, d_model: int, padding_idx: int) -> Tensor:
    """Return fairseq's float32 table (P, d_model): sines in the first half and cosines in the second.

    The frequencies are 10000^(-i / (d_model / 2 - 1)), and positions start at padding_idx + 1.
    """
    half = d_model // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    numbers = torch.arange(padding_idx + 1, padding_idx + 1 + positions, dtype=torch.float32)
    angles = numbers[:, None] * frequencies  # (P, d_model / 2)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def fold_bias(model: VaswaniTransformerForConditionalGeneration, bias: Tensor) -> None:
    """Fold a bias b (V,) of the logits exactly into the output projection E, which has no bias.

    The last norm returns h = g x + c, where the elements of x sum to 0. Replace c by c + s g with s = 1 or -1. With the
    row vector u = 1 / g, u (h + s g) = sum(c / g) + s d_model = k is constant, so (E + (b - s E g) u / k) (h + s g) =
    E h + b. The s with the larger |k| is used.
    """
    last = model.model.decoder.layers[-1]
    norm_weight, norm_bias = (last.get_parameter(f"feed_forward_add_norm.norm.{name}") for name in ("weight", "bias"))
    gain, shift = norm_weight.double(), norm_bias.double()  # g, c
    weight = model.lm_head.weight.double()  # (V, d_model)
    total = (shift / gain).sum()
    sign = 1.0 if total >= 0 else -1.0
    constant = total + sign * gain.numel()  # k
    norm_bias.copy_(shift + sign * gain)
    model.lm_head.weight.copy_(weight + torch.outer(bias.double() - sign * weight @ gain, 1 / gain) / constant)


@torch.no_grad()
def build_model(original: ForeignModel, name: str) -> VaswaniTransformerForConditionalGeneration:
    """Return the equivalent model of this package."""
    state = dict(original.state)
    embedding, *others = [state.pop(key) for key in EMBEDDINGS if key in state]  # (V, d_model)
    if not all(torch.equal(other, embedding) for other in others):
        raise UserError(f"{name}: has separate embeddings of source and target; here they share one matrix.")
    output, *_ = [*(state.pop(key) for key in OUTPUTS if key in state), embedding]
    bias = original.bias if original.bias is not None and not torch.all(original.bias == original.bias[0]) else None
    config = VaswaniTransformerConfig(
        **original.settings,
        position_embedding="learned",
        layer_norm_eps=1e-5,
        max_position_embeddings=len(original.tables[0]),
        vocab_size=embedding.shape[0],
        d_model=embedding.shape[1],
        attention_bias="encoder.layers.0.self_attn.q_proj.bias" in state,
        tie_word_embeddings=bias is None and torch.equal(output, embedding),
    )
    model = VaswaniTransformerForConditionalGeneration(config).eval()
    weights = {}
    for key, value in state.items():
        for theirs, ours in NAMES.items():
            key = key.replace(theirs, ours)
        weights[f"model.{key}"] = value
    for stack, table in zip(("encoder", "decoder"), original.tables, strict=True):
        weights[f"model.{stack}.input_embedding.positions.table.weight"] = table
        weights[f"model.{stack}.embed_tokens.weight"] = embedding
    model.load_state_dict(weights | {"model.shared.weight": embedding, "lm_head.weight": output})
    if bias is not None:
        fold_bias(model, bias)
    return model


@torch.no_grad()
def check_equivalence(ours: VaswaniTransformerForConditionalGeneration, theirs: PreTrainedModel, name: str) -> float:
    """Check that two models agree on random sentences; return the largest difference of log-probabilities.

    Logits may differ by a constant at each position.
    """
    config, generator = ours.config, torch.Generator().manual_seed(0)
    longest = min(24, config.max_position_embeddings)
    lengths = torch.randint(1, longest + 1, (8, 1), generator=generator)
    mask = (torch.arange(longest) < lengths).long()  # (B, S)
    pad, start = config.token_id("pad_token_id"), config.token_id("target_start_token_id")
    special = {pad, config.bos_token_id, start, *as_token_ids(config.eos_token_id)}
    ordinary = torch.tensor([index for index in range(config.vocab_size) if index not in special])
    tokens = ordinary[torch.randint(len(ordinary), (2, *mask.shape), generator=generator)]
    sources, targets = tokens[0].masked_fill(mask == 0, pad), tokens[1]
    targets[:, 0] = start
    inputs = {"input_ids": sources, "attention_mask": mask, "decoder_input_ids": targets, "use_cache": False}
    log_probs = [model.eval()(**inputs).logits.float().log_softmax(-1) for model in (ours, theirs)]
    difference, largest = (log_probs[0] - log_probs[1]).abs().max().item(), log_probs[1].abs().max().item()
    if not difference <= 1e-3 * max(1.0, largest):
        raise UserError(f"{name}: logits differ by up to {difference:.2g} from the original's, so no file is written.")
    return difference


def check_type(name: str, model_type: str, **settings: Any) -> None:
    if (got := load_config(name, **settings).model_type) != model_type:
        raise UserError(
            f"{name}: is a model of another type; got {got!r}, expected {model_type!r}. Name a model of that type."
        )


def read_transformers_model(original: PreTrainedModel) -> ForeignModel:
    settings = original.config.to_dict()
    inner = original.model
    offset = inner.encoder.padding_idx + 1 if isinstance(original, FSMTForConditionalGeneration) else 0
    rows = slice(offset, offset + settings["max_position_embeddings"])
    state = {key.removeprefix("model."): value for key, value in original.state_dict().items()}
    bias = state.pop("final_logits_bias", None)
    same = ("dropout", "attention_dropout", "activation_dropout", "scale_embedding", "encoder_layers", "decoder_layers")
    tokens = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")
    activation = settings["activation_function"]
    fields = {
        "num_heads": settings["encoder_attention_heads"],
        "d_ff": settings["encoder_ffn_dim"],
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
    """Import an FSMT or Marian model, with its own tokenizer, since neither can be converted to a `tokenizer.json`."""
    original = load_model(folder, model_class, dtype=torch.float32).eval()
    tokenizer = None if tokenizer_class is None else load_tokenizer(folder, tokenizer_class)
    with load_errors(folder):
        model = build_model(read_transformers_model(original), folder)
    difference = check_equivalence(model, original, folder)
    model.generation_config = original.generation_config
    if tokenizer is not None:  # a padded vocabulary has further entries
        spare = range(len(tokenizer), model.config.vocab_size)
        tokenizer.add_tokens([f"<spare {index}>" for index in spare], special_tokens=True)
    return ImportResult(model, tokenizer, difference)


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
    """Import an FSMT model of Transformers whose source and target share their embeddings; see `from_marian`."""
    check_type(folder, "fsmt")
    return import_transformers_model(folder, FSMTForConditionalGeneration, FSMTTokenizer if with_tokenizer else None)
