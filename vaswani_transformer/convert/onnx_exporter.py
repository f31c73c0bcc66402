"""Export to ONNX, in the layout that transformers.js loads; needs the extra `onnx`.

B batch, H heads, S source, T new target tokens, P earlier ones, V vocabulary. E is the number of source tokens whose
keys and values are cached: 0 in the first step of a search, S in the others. So one decoder does all steps.
"""

import contextlib
import copy
import json
import logging
import os
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..cpu.model import check_plain_layers
from ..model import VaswaniTransformerForConditionalGeneration
from ..support.command import UserError, one_line
from ..support.files import atomic_folder, write_errors
from ..tokenizer import check_vocabulary
from .ctranslate2_exporter import start_token_id
from .foreign import random_sentences

FOLDER = "onnx"  # of the graphs, in a model's folder
ENCODER, DECODER = "encoder_model", "decoder_model_merged"
INT8 = "_quantized"  # ends the names of the graphs in int8
BATCH = "batch_size"  # the first dimension, which transformers.js finds by this name
LIMIT = 256  # tokens of a translation
TOLERANCE = 1e-4  # of logits, relative to the largest one

CacheTensors = list[tuple[Tensor, Tensor, Tensor, Tensor]]
"""Keys and values of each layer's target (B, H, P, d_k or d_v) and source (B, H, E, d_k or d_v)."""


@dataclass
class OnnxExport:
    """Exported model.

    folder: the written folder.
    difference: largest difference of logits from the original on random tokens.
    equal_tokens: share of the most probable next tokens of the original that the int8 graphs find, on the same tokens.
    """

    folder: Path
    difference: float
    equal_tokens: float


class EncoderGraph(nn.Module):
    """The encoder, from tensors to a tensor."""

    def __init__(self, model: VaswaniTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the memory (B, S, d_model) of sources (B, S)."""
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class DecoderGraph(nn.Module):
    """The decoder and the output projection, with the cache as tensors."""

    def __init__(self, model: VaswaniTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.decoder = model.model.decoder
        self.lm_head = model.lm_head

    def read_cache(self, memory: Tensor, past: CacheTensors) -> EncoderDecoderCache:
        """Return the cache of all layers, with the keys and values of source tokens that it lacks."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for index, (key, value, source_key, source_value) in enumerate(past):
            layer: Any = self.decoder.layers[index]
            missing = memory[:, source_key.shape[2] :]  # all tokens in the first step, then none
            new_key, new_value = layer.cross_attn.project_key_values(missing)  # (B, H, S - E, d_k or d_v)
            source_key = torch.cat((source_key, new_key), dim=2)  # (B, H, S, d_k)
            source_value = torch.cat((source_value, new_value), dim=2)  # (B, H, S, d_v)
            cache.self_attention_cache.update(key, value, index)
            cache.cross_attention_cache.update(source_key, source_value, index)
            cache.is_updated[index] = True
        return cache

    def forward(
        self, encoder_attention_mask: Tensor, input_ids: Tensor, encoder_hidden_states: Tensor, past: CacheTensors
    ) -> list[Tensor]:
        """Return the logits (B, T, V) of the next tokens (B, T), and the cache after them as `past` has it."""
        cache = self.read_cache(encoder_hidden_states, past)
        states = self.decoder(
            input_ids=input_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state  # (B, T, d_model)
        present: list[Tensor] = []
        layers: Any = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
        for target, source in layers:
            present += [target.keys, target.values, source.keys, source.values]
        return [self.lm_head(states), *present]


def onnx_runtime() -> Any:
    """Return the module `onnxruntime`; raise ImportError that names the extra if a package of it is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        fix = 'run pip install "vaswani-transformer[onnx]"'
        raise ImportError(f"ONNX: cannot be exported ({one_line(error)}); {fix}.") from error
    return onnxruntime


def check_exportable(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check that a model and its tokenizer can be exported."""
    if not isinstance(model, VaswaniTransformerForConditionalGeneration):
        raise UserError(
            f"A {type(model).__name__} is not a VaswaniTransformerForConditionalGeneration, the only model that is "
            "exported to ONNX; merge an adapter by merge_and_unload()."
        )
    if model.config.attention_window is not None:
        raise UserError(
            "attention_window: cannot be exported to ONNX; got "
            f"{model.config.attention_window}, expected None. Decode with prepare_for_inference instead."
        )
    check_plain_layers(model)
    if tokenizer is None:
        return
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"A {type(tokenizer).__name__} has no tokenizer.json, which JavaScript needs; pass tokenizer=None to "
            "to_onnx, and encode texts yourself."
        )
    check_vocabulary(model, tokenizer)


@contextlib.contextmanager
def silenced() -> Generator[None]:
    """Silence what the libraries report about their own way of converting."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def cache_names(layers: int) -> list[str]:
    """Return the names of the tensors of a cache, in the order of `CacheTensors`."""
    stacks = [f"{index}.{stack}" for index in range(layers) for stack in ("decoder", "encoder")]
    return [f"{stack}.{name}" for stack in stacks for name in ("key", "value")]


def example_inputs(model: VaswaniTransformerForConditionalGeneration) -> tuple[Tensor, Tensor, Tensor, CacheTensors]:
    """Return inputs of a `DecoderGraph`; sizes differ, and exceed 1, which torch treats as constant."""
    config = model.config
    batch, source, target, past, cached = 2, 6, 3, 4, 5

    def heads(length: int) -> tuple[Tensor, Tensor]:
        shapes = [(batch, config.num_heads, length, width) for width in (config.head_dim, config.value_head_dim)]
        return torch.zeros(shapes[0]), torch.zeros(shapes[1])

    mask = torch.ones(batch, source, dtype=torch.long)
    tokens = torch.zeros(batch, target, dtype=torch.long)
    memory = torch.zeros(batch, source, config.d_model)
    return mask, tokens, memory, [(*heads(past), *heads(cached)) for _ in range(config.decoder_layers)]


def export_graph(
    graph: nn.Module, path: Path, inputs: dict[str, tuple[Any, Any]], input_names: list[str], output_names: list[str]
) -> None:
    """Write a graph; `inputs` are its arguments by name, each with the names of its dimensions that vary."""
    torch.onnx.export(
        graph.eval(),
        tuple(value for value, _ in inputs.values()),
        path,
        input_names=input_names,
        output_names=output_names,
        dynamic_shapes=tuple(shapes for _, shapes in inputs.values()),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def write_graphs(model: VaswaniTransformerForConditionalGeneration, folder: Path) -> None:
    """Write encoder and decoder, for any batch and lengths."""
    # The dimensions that vary.
    config = model.config
    longest = config.max_position_embeddings if config.position_embedding == "learned" else None
    source = torch.export.Dim("source_length", max=longest)
    names = (BATCH, "target_length", "past_target_length", "past_source_length")
    batch, target, past, cached = (torch.export.Dim(name) for name in names)
    of_source, of_target = {0: batch, 1: source}, {0: batch, 1: target}
    of_layer = (*({0: batch, 2: past},) * 2, *({0: batch, 2: cached},) * 2)

    mask, tokens, memory, cache = example_inputs(model)
    inputs = {"input_ids": (torch.zeros_like(mask), of_source), "attention_mask": (mask, of_source)}
    export_graph(EncoderGraph(model), folder / f"{ENCODER}.onnx", inputs, [*inputs], ["last_hidden_state"])

    inputs = {
        "encoder_attention_mask": (mask, of_source),
        "input_ids": (tokens, of_target),
        "encoder_hidden_states": (memory, of_source),
    }
    tensors = cache_names(config.decoder_layers)
    export_graph(
        DecoderGraph(model),
        folder / f"{DECODER}.onnx",
        {**inputs, "past": (cache, [of_layer] * len(cache))},
        [*inputs, *(f"past_key_values.{name}" for name in tensors)],
        ["logits", *(f"present.{name}" for name in tensors)],
    )


def tidy(folder: Path) -> None:
    """Name the first dimension of inputs and outputs as transformers.js expects, and remove torch's notes.

    The notes have lines of code and paths of this machine; torch may replace the names of dimensions.
    """
    import onnx

    for name in (ENCODER, DECODER):
        path = folder / f"{name}.onnx"
        model = onnx.load(path)
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_param = BATCH
        for node in model.graph.node:
            del node.metadata_props[:]
        onnx.save(model, path)


def quantize(folder: Path) -> None:
    """Write the graphs with weights in int8 next to those in float32."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for name in (ENCODER, DECODER):
        paths = (folder / f"{name}.onnx", folder / f"{name}{INT8}.onnx")
        quantize_dynamic(*paths, weight_type=QuantType.QInt8)


class Graphs:
    """The graphs in a folder, in onnxruntime."""

    def __init__(self, folder: Path, suffix: str = "") -> None:
        runtime = onnx_runtime()
        self.encoder, self.decoder = (
            runtime.InferenceSession(folder / f"{name}{suffix}.onnx", providers=["CPUExecutionProvider"])
            for name in (ENCODER, DECODER)
        )

    def steps(self, sources: Tensor, mask: Tensor, targets: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the logits (B, T, V) after each of `targets` (B, T), which continue each other."""
        source = {"input_ids": sources.numpy(), "attention_mask": mask.numpy()}
        (memory,) = self.encoder.run(None, source)
        known = {"encoder_attention_mask": source["attention_mask"], "encoder_hidden_states": memory}
        inputs = [spec for spec in self.decoder.get_inputs() if spec.name.startswith("past")]
        names = [spec.name for spec in inputs]
        cache = [torch.zeros(len(sources), spec.shape[1], 0, spec.shape[3]).numpy() for spec in inputs]
        for tokens in targets:
            step = known | {"input_ids": tokens.numpy()} | dict(zip(names, cache, strict=True))
            logits, *cache = self.decoder.run(None, step)
            yield torch.from_numpy(logits)


@torch.no_grad()
def check_graphs(model: VaswaniTransformerForConditionalGeneration, folder: Path, name: str) -> tuple[float, float]:
    """Check the graphs on random tokens; return the difference of logits, and the share of equal tokens in int8."""
    batch = random_sentences(model.config)
    expected = model(**batch, use_cache=False).logits  # (B, T, V)
    logits = {}
    for suffix in ("", INT8):
        steps = iter(batch["decoder_input_ids"].split(1, dim=1))
        results = Graphs(folder, suffix).steps(batch["input_ids"], batch["attention_mask"], steps)
        logits[suffix] = torch.cat(list(results), dim=1)
    difference = (logits[""] - expected).abs().max().item()
    if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):  # NaN fails too
        raise UserError(f"{name}: logits differ by up to {difference:.2g} from the model's, so no file is written.")
    if not logits[INT8].isfinite().all():
        raise UserError(f"{name}: the logits in int8 are not finite, so no file is written.")
    is_equal = logits[INT8].argmax(-1) == expected.argmax(-1)
    return difference, is_equal.float().mean().item()


def write_json(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_settings(model: VaswaniTransformerForConditionalGeneration, folder: Path) -> None:
    """Write config.json, of a type that transformers.js knows, and generation_config.json for its greedy search."""
    config = model.config
    ids = {name: getattr(config, name) for name in ("bos_token_id", "pad_token_id", "eos_token_id")}
    ids["decoder_start_token_id"] = start_token_id(model)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), config.num_heads)
    layers = {"encoder_layers": config.encoder_layers, "decoder_layers": config.decoder_layers}
    sizes = {"d_model": config.d_model, "vocab_size": config.vocab_size}
    kind = {"model_type": "marian", "architectures": ["MarianMTModel"], "is_encoder_decoder": True}
    write_json(folder / "config.json", kind | sizes | layers | heads | ids)
    limits = [LIMIT, model.generation_config.max_new_tokens]
    if config.position_embedding == "learned":
        limits.append(config.max_position_embeddings)
    longest = min(limit for limit in limits if limit is not None)
    search = model.generation_config.to_diff_dict() | {"num_beams": 1, "max_new_tokens": longest}
    write_json(folder / "generation_config.json", ids | search)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer, with the class of which transformers.js makes one of a tokenizer.json without a warning."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, settings | {"tokenizer_class": "PreTrainedTokenizer"})


def to_onnx(
    model: VaswaniTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase | None,
    output_dir: str | os.PathLike[str],
    *,
    force: bool = False,
) -> OnnxExport:
    """Export a model to ONNX in float32 and int8, with its tokenizer, for transformers.js and onnxruntime.

    In `onnx/`, `encoder_model.onnx` encodes sources and `decoder_model_merged.onnx` does a step of a search, from an
    empty cache on; the names of those in int8 end in `_quantized`. The result is compared with the model.

    Args:
        model: the model, on any device and of any dtype; it is not changed.
        tokenizer: its tokenizer; None to write none.
        output_dir: the folder to write, completely or not at all.
        force: whether to replace a model in `output_dir`.

    Raises:
        ImportError: a package of the extra is missing.
        UserError: the model or tokenizer cannot be exported, the logits differ, or the folder cannot be written.
    """
    check_exportable(model, tokenizer)
    onnx_runtime()
    model = copy.deepcopy(model).to("cpu", torch.float32).requires_grad_(False).eval()
    model.set_attn_implementation("eager")
    with atomic_folder(output_dir, force) as folder:
        graphs = folder / FOLDER
        graphs.mkdir()
        with write_errors(output_dir, "make room, or choose a different folder"):
            write_settings(model, folder)
            if tokenizer is not None:
                save_tokenizer(tokenizer, folder)
            with silenced():
                write_graphs(model, graphs)
                tidy(graphs)
                quantize(graphs)
        difference, equal_tokens = check_graphs(model, graphs, str(output_dir))
    return OnnxExport(Path(output_dir), difference, equal_tokens)
