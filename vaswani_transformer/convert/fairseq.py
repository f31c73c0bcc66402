"""Models of other tools read into this one: fairseq's `transformer_wmt_en_de` family, Transformers' FSMT and Marian.

All three are the paper's post-norm model with biases on the attention projections, sines and cosines in two halves
instead of side by side, and layer norms with an epsilon of 1e-5. The halves become a table of learned positions. What
has no place here is refused by its name. V vocabulary, P rows of a table of positions.
"""

import argparse
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    FSMTTokenizer,
    GenerationConfig,
    MarianMTModel,
    MarianTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import ACT2FN

from ..checked_loading import check_finite, load_model, loading
from ..config import VaswaniTransformerConfig
from ..model import VaswaniTransformerForConditionalGeneration
from ..tokenizer import VaswaniTransformerTokenizer

PARTS = {
    "self_attn.out_proj": "self_attn.o_proj",
    "encoder_attn.q_proj": "cross_attn.q_proj",
    "encoder_attn.k_proj": "cross_attn.k_proj",
    "encoder_attn.v_proj": "cross_attn.v_proj",
    "encoder_attn.out_proj": "cross_attn.o_proj",
    "self_attn_layer_norm": "self_attn_add_norm.norm",
    "encoder_attn_layer_norm": "cross_attn_add_norm.norm",
    "final_layer_norm": "feed_forward_add_norm.norm",
    "fc1": "feed_forward.fc1",
    "fc2": "feed_forward.fc2",
} | {f"self_attn.{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}
"""What a layer's parts are called there, and here."""

NOT_WEIGHTS = re.compile(r"(en|de)coder\.(version|embed_positions\._float_tensor)")
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
OUTPUTS = ("lm_head.weight", "decoder.output_projection.weight")
TABLES = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # 0 to 3 in every vocabulary of fairseq
LAYER_NORM_EPS = 1e-5

# What fairseq and Marian call what the paper's model has not. Each is refused where it is set.
FOREIGN = {
    "encoder_normalize_before": "pre-norm",
    "decoder_normalize_before": "pre-norm",
    "normalize_before": "pre-norm",
    "add_final_layer_norm": "a norm behind the last layer",
    "normalize_embedding": "a norm of the embeddings",
    "layernorm_embedding": "a norm of the embeddings",
    "no_token_positional_embeddings": "no positions",
    "adaptive_softmax_cutoff": "an adaptive softmax",
    "cross_self_attention": "attention over source and target together",
    "no_cross_attention": "no attention over the source",
    "tie_adaptive_weights": "an adaptive softmax",
    "encoder_layers_to_keep": "layers left out",
    "decoder_layers_to_keep": "layers left out",
}


@dataclass
class Original:
    """What was read of a model.

    settings: fields of the configuration.
    state: its weights, by fairseq's names.
    tables: the positions (P, d_model) of encoder and decoder.
    bias: what is added to the logits (V,), or None.
    """

    settings: dict[str, Any]
    state: dict[str, Tensor]
    tables: tuple[Tensor, Tensor]
    bias: Tensor | None = None


def refuse_foreign(settings: dict[str, Any], name: str) -> None:
    """Refuse a model with a part that this package's has not.

    Raises:
        ValueError: naming the setting.
    """
    for key, meaning in FOREIGN.items():
        if settings.get(key):
            raise ValueError(f"{name}: {key} is {settings[key]!r}, {meaning}, which the paper's model has not.")


def the_same(settings: dict[str, Any], name: str, first: str, second: str) -> Any:
    """A setting that encoder and decoder have each for themselves, and here together.

    Raises:
        ValueError: they differ.
    """
    if settings[first] != settings[second]:
        raise ValueError(
            f"{name}: {first} ({settings[first]}) and {second} ({settings[second]}) differ; here they are one."
        )
    return settings[first]


def half_and_half(positions: int, d_model: int, padding_idx: int) -> Tensor:
    """fairseq's table (P, d_model): sines in the first half and cosines in the second.

    The frequencies are 10000^(-i / (d_model / 2 - 1)), and the first position has the number padding_idx + 1. In
    float32, as it was trained.
    """
    half = d_model // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    numbers = torch.arange(padding_idx + 1, padding_idx + 1 + positions, dtype=torch.float32)
    angles = numbers[:, None] * frequencies  # (P, d_model / 2)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def own_activation(function: str, name: str) -> str:
    """What an activation function is called here.

    Raises:
        ValueError: there is none of that name.
    """
    if function not in ACT2FN:
        raise ValueError(f"{name}: {function!r} is not an activation function here; those are {', '.join(ACT2FN)}.")
    return "silu" if function == "swish" else function


def split_fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights by fairseq's newer names, which keep queries, keys and values apart."""
    found = {}
    for key, value in state.items():
        if match := re.fullmatch(r"(.*attn\.)in_proj_(weight|bias)", key):
            for name, part in zip("qkv", value.chunk(3), strict=True):
                found[f"{match[1]}{name}_proj.{match[2]}"] = part
        else:
            key = key.replace("layer_norms.0.", "self_attn_layer_norm.").replace("layer_norms.1.", "final_layer_norm.")
            found[key] = value
    return found


def own_name(key: str, name: str) -> str:
    """What a layer's weight is called here.

    Raises:
        ValueError: the model has no such weight.
    """
    match = re.fullmatch(r"((?:en|de)coder\.layers\.\d+)\.(.+)\.(weight|bias)", key)
    if match is None or match[2] not in PARTS:
        raise ValueError(f"{name}: has a weight {key}, for which the paper's model has no place.")
    return f"model.{match[1]}.{PARTS[match[2]]}.{match[3]}"


def one_embedding(state: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """The embeddings (V, d_model) of source and target, which have to be the same, and the output projection.

    Raises:
        ValueError: they are not.
    """
    found = [state.pop(key) for key in EMBEDDINGS if key in state]
    if any(other.shape != found[0].shape or not torch.equal(other, found[0]) for other in found):
        raise ValueError(f"{name}: has separate embeddings of source and target; here they share one matrix.")
    outputs = [state.pop(key) for key in OUTPUTS if key in state]
    return found[0], outputs[0] if outputs else found[0]


def fold_bias(model: VaswaniTransformerForConditionalGeneration, bias: Tensor, name: str) -> None:
    """Let the output projection E, which has no bias here, add `bias` b (V,) to the logits all the same, exactly.

    The last norm gives h = g x + c, with the x of a position summing to 0 whatever it is. So with c' = c + s g, s being
    1 or -1, the row vector u = 1 / g has u (h + s g) = sum(c / g) + s d_model = k, a constant, and the projection
    E + (b - s E g) u / k of h + s g is E h + b. That s is taken which makes k large.

    Raises:
        ValueError: an element of g is so small that rounding would show.
    """
    norm = cast(Any, model.model.decoder.layers[-1]).feed_forward_add_norm.norm
    gain, shift = norm.weight.double(), norm.bias.double()  # g, c
    weight = model.lm_head.weight.double()  # (V, d_model)
    total = (shift / gain).sum()
    sign = 1.0 if total >= 0 else -1.0
    constant = total + sign * gain.numel()  # k
    if not ((shift / gain).abs().sum() / constant.abs() < 1e3):
        raise ValueError(f"{name}: final_logits_bias cannot be represented: the last norm has gains as good as 0.")
    norm.bias.copy_(shift + sign * gain)
    model.lm_head.weight.copy_(weight + torch.outer(bias.double() - sign * weight @ gain, 1 / gain) / constant)


def load_weights(model: VaswaniTransformerForConditionalGeneration, weights: dict[str, Tensor], name: str) -> None:
    """Load weights, each of which has its place, and every place its weight.

    Raises:
        ValueError: one is missing, has no place, or is of another shape.
    """
    places = model.state_dict()
    if missing := sorted(places.keys() - weights.keys()):
        raise ValueError(f"{name}: lacks {missing[0]} and {len(missing) - 1} more weights.")
    for key, weight in weights.items():
        if key not in places:
            raise ValueError(f"{name}: has {key}, for which a model with its other weights has no place.")
        if weight.shape != places[key].shape:
            raise ValueError(
                f"{name}: {key} has the shape {tuple(weight.shape)}, and by its other weights and settings the model "
                f"{tuple(places[key].shape)}; here all layers are alike."
            )
    model.load_state_dict(weights)


def configured(name: str, **settings: Any) -> VaswaniTransformerConfig:
    """The configuration with these settings, a table of learned positions among them.

    Raises:
        ValueError: they make no model.
    """
    try:
        return VaswaniTransformerConfig(position_embedding="learned", layer_norm_eps=LAYER_NORM_EPS, **settings)
    except StrictDataclassError as error:
        raise ValueError(f"{name}: its settings make no model: {' '.join(str(error).split())}") from error


@torch.no_grad()
def assemble(original: Original, name: str) -> VaswaniTransformerForConditionalGeneration:
    """The model of this package that computes the same.

    Raises:
        ValueError: a weight is missing, has no place, or is shared otherwise, or the settings make no model.
    """
    state = {key: value.float() for key, value in split_fused(original.state).items() if not NOT_WEIGHTS.match(key)}
    embedding, output = one_embedding(state, name)
    bias = original.bias if original.bias is not None and not torch.all(original.bias == original.bias[0]) else None
    sizes = {len(table) for table in original.tables}
    if len(sizes) > 1:
        raise ValueError(
            f"{name}: has positions for {sorted(sizes)} tokens of source and target; here both have as many."
        )
    config = configured(
        name,
        **original.settings,
        max_position_embeddings=sizes.pop(),
        vocab_size=embedding.shape[0],
        d_model=embedding.shape[1],
        attention_bias="encoder.layers.0.self_attn.q_proj.bias" in state,
        tie_word_embeddings=bias is None and torch.equal(output, embedding),
    )
    model = VaswaniTransformerForConditionalGeneration(config).eval()
    own = {own_name(key, name): value for key, value in state.items()}
    for stack, table in zip(("encoder", "decoder"), original.tables, strict=True):
        own[f"model.{stack}.input_embedding.positions.table.weight"] = table
        own[f"model.{stack}.embed_tokens.weight"] = embedding
    own |= {"model.shared.weight": embedding, "lm_head.weight": output}
    load_weights(model, own, name)
    if bias is not None:
        fold_bias(model, bias, name)
    return model


@torch.no_grad()
def largest_difference(
    ours: PreTrainedModel, theirs: PreTrainedModel, sentences: int = 8, longest: int = 24
) -> tuple[float, float]:
    """The largest difference of two models' logits on random sentences, padded, and the largest logit of all.

    The models may add the same number to all logits of a position: the logits compared are log-probabilities.
    """
    config, generator = cast(VaswaniTransformerConfig, ours.config), torch.Generator().manual_seed(0)
    longest = min(longest, config.max_position_embeddings)
    lengths = torch.randint(1, longest + 1, (sentences, 1), generator=generator)
    mask = (torch.arange(longest) < lengths).long()  # (B, S)
    pad = cast(int, config.pad_token_id)
    special = {pad, config.bos_token_id, config.eos_token_id, config.target_start_token_id}
    ordinary = torch.tensor([index for index in range(config.vocab_size) if index not in special])
    tokens = ordinary[torch.randint(len(ordinary), (2, *mask.shape), generator=generator)]
    sources, targets = tokens[0].masked_fill(mask == 0, pad), tokens[1]
    targets[:, 0] = cast(int, config.target_start_token_id)
    inputs = {"input_ids": sources, "attention_mask": mask, "decoder_input_ids": targets, "use_cache": False}
    found = [cast(Any, model.eval())(**inputs).logits.float().log_softmax(-1) for model in (ours, theirs)]
    return (found[0] - found[1]).abs().max().item(), found[1].abs().max().item()


def read_transformers_model(original: PreTrainedModel, name: str) -> Original:
    """What a FSMT or Marian model of Transformers holds.

    Raises:
        ValueError: it has a part that the paper's model has not.
    """
    settings = original.config.to_dict()
    refuse_foreign(settings, name)
    inner = cast(Any, original).model
    offset = inner.encoder.padding_idx + 1 if isinstance(original, FSMTForConditionalGeneration) else 0
    size = settings["max_position_embeddings"]
    tables = tuple(
        stack.embed_positions.weight.detach()[offset : offset + size] for stack in (inner.encoder, inner.decoder)
    )
    state = {key.removeprefix("model."): value for key, value in original.state_dict().items()}
    bias = state.pop("final_logits_bias", None)
    for key in TABLES:
        state.pop(key, None)
    return Original(
        {
            "encoder_layers": settings["encoder_layers"],
            "decoder_layers": settings["decoder_layers"],
            "num_heads": the_same(settings, name, "encoder_attention_heads", "decoder_attention_heads"),
            "d_ff": the_same(settings, name, "encoder_ffn_dim", "decoder_ffn_dim"),
            "dropout": settings["dropout"],
            "attention_dropout": settings["attention_dropout"],
            "activation_dropout": settings["activation_dropout"],
            "activation_function": own_activation(settings["activation_function"], name),
            "scale_embedding": settings["scale_embedding"],
        }
        | {key: getattr(original.config, key) for key in ("bos_token_id", "pad_token_id", "eos_token_id")}
        | {"decoder_start_token_id": original.config.decoder_start_token_id},
        state,
        cast(tuple[Tensor, Tensor], tables),
        None if bias is None else bias[0].float(),
    )


@dataclass
class Import:
    """What an import gives.

    model: the model of this package.
    tokenizer: its tokenizer: the original's own where no `tokenizer.json` can do the same; None where there is none.
    difference: the largest difference of log-probabilities from the original, or None where there is none to ask.
    largest: the largest log-probability's size.
    """

    model: VaswaniTransformerForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase | None
    difference: float | None
    largest: float | None


def compared(
    model: VaswaniTransformerForConditionalGeneration, original: PreTrainedModel, name: str
) -> tuple[float, float]:
    """The largest difference from the original, and the largest log-probability's size.

    Raises:
        ValueError: the two are not the same model.
    """
    difference, largest = largest_difference(model, original)
    if not difference <= 1e-3 * max(1.0, largest):
        raise ValueError(f"{name}: logits differ by up to {difference:.2g} from the original's, so nothing is written.")
    return difference, largest


def import_transformers_model(
    folder: str, kind: type[PreTrainedModel], tokenizer_kind: type[PreTrainedTokenizerBase] | None
) -> Import:
    """A FSMT or Marian model of Transformers, from a folder or the Hub.

    Its tokenizer comes along as it is: Marian's are two sentencepiece models over a third vocabulary, FSMT's call the
    scripts of Moses, and neither is a `tokenizer.json`.

    Raises:
        ValueError: it cannot be represented.
    """
    original = load_model(folder, kind, dtype=torch.float32).eval()
    with loading(f"{folder}: its tokenizer"):
        tokenizer = None if tokenizer_kind is None else cast(Any, tokenizer_kind).from_pretrained(folder)
    model = assemble(read_transformers_model(original, folder), folder)
    difference, largest = compared(model, original, folder)
    model.generation_config = cast(GenerationConfig, original.generation_config)
    return Import(model, tokenizer, difference, largest)


def from_marian(folder: str, with_tokenizer: bool = True) -> Import:
    """A Marian model of Transformers, such as those of OPUS-MT; see `import_transformers_model`."""
    return import_transformers_model(folder, MarianMTModel, MarianTokenizer if with_tokenizer else None)


def from_fsmt(folder: str, with_tokenizer: bool = True) -> Import:
    """A FSMT model of Transformers whose source and target share their embeddings; see `import_transformers_model`."""
    return import_transformers_model(folder, FSMTForConditionalGeneration, FSMTTokenizer if with_tokenizer else None)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and the settings in a fairseq checkpoint.

    No code in it is run: it may hold tensors, plain containers and `argparse.Namespace`, of which the fields are read
    and no more.

    Raises:
        ValueError: it holds anything else, or is no checkpoint.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # broken bytes make the unpickler stumble anywhere
        if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise ValueError(
                f"{path}: holds {match[1]}, which is not read, as it could run code; save a checkpoint with its "
                '"model" and "args" alone.'
            ) from error
        raise ValueError(f"{path}: no checkpoint that torch reads.") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError(f'{path}: no fairseq checkpoint: it has no "model".')
    for key, value in content["model"].items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{path}: {key} is of type {type(value).__name__} and no weight; save the checkpoint again."
            )
    given = content.get("args") or (content.get("cfg") or {}).get("model")
    return content["model"], dict(vars(given) if isinstance(given, argparse.Namespace) else given or {})


def read_settings(path: Path) -> dict[str, Any]:
    """Settings by fairseq's names.

    Raises:
        ValueError: the file is no JSON object.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON that can be read ({error}); mend it.") from error
    if not isinstance(settings, dict):
        raise ValueError(f'{path}: of type {type(settings).__name__}, not an object such as {{"dropout": 0.3}}.')
    return settings


def lines_of(path: Path) -> list[str]:
    """The lines of a text.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); give the file that fairseq reads.") from error


def count_layers(state: dict[str, Tensor], stack: str) -> int:
    return 1 + max(int(key.split(".")[2]) for key in state if key.startswith(f"{stack}.layers."))


def read_fairseq(path: Path, config: Path | None) -> Original:
    """What a fairseq checkpoint holds.

    Raises:
        ValueError: it has a part that the paper's model has not, or lacks a setting.
    """
    state, settings = read_checkpoint(path)
    settings |= {} if config is None else read_settings(config)
    name = str(path)
    refuse_foreign(settings, name)
    if "encoder_attention_heads" not in settings or "decoder_attention_heads" not in settings:
        raise ValueError(
            f"{path}: does not say how many heads the model has; give a JSON file with encoder_attention_heads and "
            "decoder_attention_heads, and whatever else was not fairseq's default, as --config."
        )
    state = split_fused(state)
    if not state.keys() >= {
        "decoder.embed_tokens.weight",
        "encoder.layers.0.fc1.weight",
        "decoder.layers.0.fc1.weight",
    }:
        raise ValueError(f"{path}: holds no encoder and decoder of fairseq's Transformer.")
    d_model = state["decoder.embed_tokens.weight"].shape[1]
    padding_idx = SPECIAL_TOKENS.index("<pad>")
    longest = max(settings.get("max_source_positions", 1024), settings.get("max_target_positions", 1024))
    own = half_and_half(longest, d_model, padding_idx)
    tables = [state.pop(key)[padding_idx + 1 :] if key in state else own for key in TABLES]
    return Original(
        {
            "encoder_layers": count_layers(state, "encoder"),
            "decoder_layers": count_layers(state, "decoder"),
            "num_heads": the_same(settings, name, "encoder_attention_heads", "decoder_attention_heads"),
            "d_ff": state["encoder.layers.0.fc1.weight"].shape[0],
            "dropout": settings.get("dropout", 0.1),
            "attention_dropout": settings.get("attention_dropout", 0.0),
            "activation_dropout": settings.get("activation_dropout", settings.get("relu_dropout", 0.0)),
            "activation_function": own_activation(settings.get("activation_fn", "relu"), name),
            "scale_embedding": not settings.get("no_scale_embedding", False),
            "decoder_start_token_id": SPECIAL_TOKENS.index("</s>"),
        },
        state,
        (tables[0], tables[1]),
    )


def as_fsmt(original: Original, config: VaswaniTransformerConfig) -> PreTrainedModel | None:
    """The same weights in Transformers' FSMT, others' code for the same architecture; None with learned positions."""
    own = half_and_half(len(original.tables[0]), config.d_model, cast(int, config.pad_token_id))
    if not torch.equal(original.tables[0], own):
        return None
    fsmt = FSMTForConditionalGeneration(
        FSMTConfig(
            src_vocab_size=config.vocab_size,
            tgt_vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            activation_function=config.activation_function,
            scale_embedding=config.scale_embedding,
            max_position_embeddings=config.max_position_embeddings,
        )
    )
    named = {f"model.{key}": value.float() for key, value in original.state.items() if not NOT_WEIGHTS.match(key)}
    named.setdefault("model.decoder.output_projection.weight", named["model.decoder.embed_tokens.weight"])
    missing = fsmt.load_state_dict(named, strict=False).missing_keys
    return None if any(".layers." in key for key in missing) else fsmt.eval()


def read_dictionary(path: Path) -> list[str]:
    """The tokens of a `dict.txt` in the order of their ids, the four special ones before them.

    Raises:
        ValueError: a line is no token and its count.
    """
    tokens = list(SPECIAL_TOKENS)
    for number, line in enumerate(lines_of(path), start=1):
        token, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not token or not count.isdigit():
            raise ValueError(f"{path}, line {number}: no token and its count; give fairseq's dict.txt.")
        tokens.append(token)
    return tokens


def read_merges(path: Path) -> list[tuple[str, str]]:
    """The merges of subword-nmt (version 0.2) or fastBPE, in their order.

    Raises:
        ValueError: a line is none.
    """
    merges = []
    for number, line in enumerate(lines_of(path), start=1):
        parts = line.rstrip("\r").split(" ")
        if number == 1 and line.startswith("#version"):
            continue
        if len(parts) not in (2, 3) or "</w>" in parts[:2]:
            raise ValueError(f"{path}, line {number}: no merge of subword-nmt's version 0.2 or of fastBPE.")
        merges.append((parts[0], parts[1]))
    return merges


def word_tokenizer(tokens: list[str]) -> Tokenizer:
    """For texts that are split into sub-words already, "@@" behind each that goes on."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex(r"\z"), " "), decoders.Fuse(), decoders.Replace("@@ ", ""), decoders.Strip(" ", 0, 1)]
    )
    return tokenizer


def merging_tokenizer(tokens: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    """For texts that are split into words; a piece that ends a word is written "</w>" here and bare in `dict.txt`.

    Raises:
        ValueError: a merge has pieces that the vocabulary lacks.
    """
    ends = {token: token if token in SPECIAL_TOKENS else token + "</w>" for token in tokens}
    vocabulary = {
        token.removesuffix("@@") if token.endswith("@@") else ends[token]: index for index, token in enumerate(tokens)
    }
    if lost := [pair for pair in merges if not vocabulary.keys() >= {*pair, pair[0] + pair[1]}]:
        raise ValueError(
            f"{len(lost)} of {len(merges)} merges have pieces that the vocabulary lacks, the first "
            f"{' '.join(lost[0])!r}; no tokenizer.json can call those unknown: leave out --codes, and split the "
            "texts by them beforehand."
        )
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


def fairseq_tokenizer(dictionary: Path, codes: Path | None) -> VaswaniTransformerTokenizer:
    """A tokenizer of texts that are split into words, as by Moses, or without `codes` into sub-words."""
    tokens = read_dictionary(dictionary)
    tokenizer = word_tokenizer(tokens) if codes is None else merging_tokenizer(tokens, read_merges(codes))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", SPECIAL_TOKENS.index("</s>"))]
    )
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True))
    return VaswaniTransformerTokenizer(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


def from_fairseq(
    checkpoint: Path, dictionary: Path | None = None, codes: Path | None = None, config: Path | None = None
) -> Import:
    """A model of fairseq's `transformer_wmt_en_de` family with one vocabulary (`--share-all-embeddings`).

    It is compared with Transformers' FSMT under the same weights, since fairseq itself would run a checkpoint's code.

    Args:
        checkpoint: the file; nothing in it is run.
        dictionary: `dict.txt`; None: without a tokenizer.
        codes: the merges; None: texts are split by them beforehand.
        config: a JSON file with settings by fairseq's names, which win over the checkpoint's.

    Raises:
        ValueError: it cannot be represented, a weight is not finite, or the vocabulary is another model's.
    """
    original, name = read_fairseq(checkpoint, config), str(checkpoint)
    check_finite(name, original.state)
    model = assemble(original, name)
    tokenizer = None if dictionary is None else fairseq_tokenizer(dictionary, codes)
    if tokenizer is not None and len(tokenizer) != model.config.vocab_size:
        raise ValueError(
            f"{dictionary}: has {len(tokenizer)} entries with the special ones, and the model "
            f"{model.config.vocab_size}; give the model's own dict.txt."
        )
    reference = as_fsmt(original, model.config)
    difference, largest = (None, None) if reference is None else compared(model, reference, name)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        pad_token_id=model.config.pad_token_id,
        eos_token_id=model.config.eos_token_id,
        decoder_start_token_id=model.config.decoder_start_token_id,
        num_beams=5,
        max_source_relative_length=50,
    )
    return Import(model, tokenizer, difference, largest)


__all__ = ["Import", "from_fairseq", "from_fsmt", "from_marian", "largest_difference"]
