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

from ..config import VaswaniTransformerConfig
from ..model import VaswaniTransformerForConditionalGeneration
from ..support.command import UserError
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
    """Model of a different tool."""

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
    norm_bias = last.get_parameter("feed_forward_add_norm.norm.bias")
    gain = last.get_parameter("feed_forward_add_norm.norm.weight").double()  # g
    shift = norm_bias.double()  # c
    weight = model.lm_head.weight.double()  # E (V, d_model)
    total = (shift / gain).sum()
    sign = 1.0 if total >= 0 else -1.0
    constant = total + sign * gain.numel()  # k
    norm_bias.copy_(shift + sign * gain)
    correction = torch.outer(bias.double() - sign * weight @ gain, 1 / gain) / constant
    model.lm_head.weight.copy_(weight + correction)


@torch.no_grad()
def build_model(original: ForeignModel, name: str) -> VaswaniTransformerForConditionalGeneration:
    """Return the equivalent model of this package."""
    # Other tools store one matrix under several names.
    state = dict(original.state)
    embedding, *copies = [state.pop(key) for key in EMBEDDINGS if key in state]  # (V, d_model)
    if not all(torch.equal(copy, embedding) for copy in copies):
        raise UserError(f"{name}: source and target embeddings differ, but this model needs a shared matrix.")
    outputs = [state.pop(key) for key in OUTPUTS if key in state]
    output = outputs[0] if outputs else embedding

    # An equal bias of all tokens cancels in the softmax.
    bias = original.bias
    if bias is not None and torch.all(bias == bias[0]):
        bias = None
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

    # Rename the weights.
    weights = {"model.shared.weight": embedding, "lm_head.weight": output}
    for key, weight in state.items():
        for their_name, our_name in NAMES.items():
            key = key.replace(their_name, our_name)
        weights[f"model.{key}"] = weight
    for stack, table in zip(("encoder", "decoder"), original.tables, strict=True):
        weights[f"model.{stack}.input_embedding.positions.table.weight"] = table
        weights[f"model.{stack}.embed_tokens.weight"] = embedding
    model.load_state_dict(weights)
    if bias is not None:
        fold_bias(model, bias)
    return model


def random_sentences(config: VaswaniTransformerConfig) -> dict[str, Tensor]:
    """Return eight sources of at most 24 random tokens with their mask, and the start of their targets (B, T)."""
    generator = torch.Generator().manual_seed(0)
    longest = min(24, config.max_position_embeddings)
    lengths = torch.randint(1, longest + 1, (8, 1), generator=generator)
    mask = (torch.arange(longest) < lengths).long()  # (B, S)

    # Only ordinary tokens are drawn; FSMT, for instance, masks padding in targets.
    pad = config.token_id("pad_token_id")
    start = config.token_id("target_start_token_id")
    special = {pad, config.bos_token_id, start, *config.end_token_ids}
    ordinary = torch.tensor([index for index in range(config.vocab_size) if index not in special])
    sources, targets = ordinary[torch.randint(len(ordinary), (2, *mask.shape), generator=generator)]
    sources = sources.masked_fill(mask == 0, pad)
    targets[:, 0] = start
    return {"input_ids": sources, "attention_mask": mask, "decoder_input_ids": targets}


@torch.no_grad()
def check_equivalence(ours: VaswaniTransformerForConditionalGeneration, theirs: PreTrainedModel, name: str) -> float:
    """Check that two models agree on random sentences; return the largest difference of log-probabilities.

    Logits may differ by a constant at each position.
    """
    inputs = random_sentences(ours.config) | {"use_cache": False}
    our_log_probs = ours.eval()(**inputs).logits.float().log_softmax(-1)
    their_log_probs = theirs.eval()(**inputs).logits.float().log_softmax(-1)
    difference = (our_log_probs - their_log_probs).abs().max().item()
    largest = their_log_probs.abs().max().item()
    if not difference <= 1e-3 * max(1.0, largest):  # NaN fails too
        raise UserError(f"{name}: logits differ by up to {difference:.2g} from the original's, so no file is written.")
    return difference


def check_type(name: str, model_type: str, revision: str = "main") -> None:
    if (got := load_config(name, revision=revision).model_type) != model_type:
        raise UserError(f"{name}: wrong model type; got {got!r}, expected {model_type!r}. Choose a different model.")


def read_transformers_model(original: PreTrainedModel) -> ForeignModel:
    config = original.config
    fields = {
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "num_heads": config.encoder_attention_heads,
        "d_ff": config.encoder_ffn_dim,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "activation_function": "silu" if config.activation_function == "swish" else config.activation_function,
        "scale_embedding": config.scale_embedding,
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
    }

    # FSMT's first positions are those of padding.
    stacks = (original.model.encoder, original.model.decoder)
    offset = stacks[0].padding_idx + 1 if isinstance(original, FSMTForConditionalGeneration) else 0
    rows = slice(offset, offset + config.max_position_embeddings)
    tables = [stack.embed_positions.weight.detach()[rows] for stack in stacks]

    state = {key.removeprefix("model."): weight for key, weight in original.state_dict().items()}
    bias = state.pop("final_logits_bias", None)
    state = {key: weight for key, weight in state.items() if key not in TABLES}
    return ForeignModel(fields, state, tables, None if bias is None else bias[0].float())


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
    if tokenizer is not None:  # a padded vocabulary has more entries than the tokenizer
        spare = range(len(tokenizer), model.config.vocab_size)
        tokenizer.add_tokens([f"<spare {index}>" for index in spare], special_tokens=True)
    return ImportResult(model, tokenizer, difference)


def from_marian(folder: str, with_tokenizer: bool = True) -> ImportResult:
    """Import a Marian model of Transformers, such as those of OPUS-MT.

    Args:
        folder: a folder with the model and its tokenizer, or its name on the Hub.
        with_tokenizer: whether to load the tokenizer, which remains Marian's.

    Raises:
        UserError: the model cannot be loaded, has a different type, or has an unsupported setting.
    """
    check_type(folder, "marian")
    return import_transformers_model(folder, MarianMTModel, MarianTokenizer if with_tokenizer else None)


def from_fsmt(folder: str, with_tokenizer: bool = True) -> ImportResult:
    """Import an FSMT model of Transformers whose source and target share their embeddings; see `from_marian`."""
    check_type(folder, "fsmt")
    return import_transformers_model(folder, FSMTForConditionalGeneration, FSMTTokenizer if with_tokenizer else None)
