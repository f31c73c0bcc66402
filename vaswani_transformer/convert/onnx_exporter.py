"""Export a model that predicts all words at once to ONNX, as two graphs. Needs the extra `onnx`.

B batch, S source, T target, C length classes, V vocabulary. The target's length depends on the first graph's output, so
one graph cannot hold both stacks. Transformers' own exporter takes the models that write from left to right.
"""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..support.errors import UserError
from ..support.files import atomic_folder
from ..support.modes import eval_mode, is_non_autoregressive


class EncoderGraph(nn.Module):
    """The encoder with the prediction of the length."""

    inputs = ("input_ids", "attention_mask")
    outputs = ("encoder_states", "length_logits")

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder's output (B, S or S + 1, d_model), and the logits of the length classes (B, C)."""
        model: Any = self.model
        states = model.encode(input_ids, attention_mask).last_hidden_state
        return states, model.read_source(states, attention_mask).length_logits


class DecoderGraph(nn.Module):
    """One pass of the decoder over a canvas, whose tokens a model that refines takes as a further input."""

    outputs = ("logits",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        tokens = ("decoder_input_ids",) if model.refines else ()
        self.inputs = ("encoder_states", "attention_mask", "decoder_attention_mask", *tokens)

    def forward(
        self,
        encoder_states: Tensor,
        attention_mask: Tensor,
        decoder_attention_mask: Tensor,
        decoder_input_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the logits (B, T, V) at the positions of `decoder_attention_mask` (B, T)."""
        outputs = self.model(
            attention_mask=attention_mask,
            encoder_outputs=(encoder_states,),
            decoder_attention_mask=decoder_attention_mask,
            decoder_input_ids=decoder_input_ids,
        )
        return outputs.logits


def example_inputs() -> dict[str, Tensor]:
    """Return two sources of five tokens and two targets of four: torch would take a length of one as constant.

    Each is a separate tensor, since a graph has one input for one tensor.
    """
    source, target = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)
    return {
        "input_ids": source,
        "attention_mask": source.clone(),
        "decoder_attention_mask": target,
        "decoder_input_ids": target.clone(),
    }


def export_graph(graph: EncoderGraph | DecoderGraph, inputs: dict[str, Tensor], path: Path) -> None:
    """Write a graph for any batch and any lengths, traced on `inputs`."""
    dynamic: dict[int, Any] = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph,
            tuple(inputs[name] for name in graph.inputs),
            path,
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            dynamic_shapes=tuple(dynamic for _ in graph.inputs),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def check_exportable(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not is_non_autoregressive(model):
        raise UserError(
            f"{name}: writes one token after the other; to_onnx takes models that predict all words at once. Export it "
            "with transformers.exporters.OnnxExporter."
        )
    if model.has_latents:
        raise UserError(
            f"{name}: inverts matrices of its flow, for which ONNX has no operator. Export a NAT, CMLM or IterativeVAE."
        )
    if model.device.type != "cpu":
        raise UserError(f"{name}: is on {model.device}, expected cpu. Move it by .to('cpu').")
    if missing := [package for package in ("onnx", "onnxscript") if find_spec(package) is None]:
        raise ImportError(
            f'to_onnx: needs {" and ".join(missing)}, not installed here. Run pip install "vaswani-transformer[onnx]".'
        )


def to_onnx(model: PreTrainedModel, output_dir: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a model that predicts all words at once as `encoder.onnx` and `decoder.onnx`, with its config.json.

    The encoder takes `input_ids` and `attention_mask` (B, S) and returns `encoder_states` and `length_logits` (B, C).
    The decoder takes `encoder_states`, `attention_mask` and `decoder_attention_mask` (B, T), of a CMLM also
    `decoder_input_ids` (B, T), and returns `logits` (B, T, V). Masks and ids are int64.

    Args:
        model: a NAT, CMLM or IterativeVAE, on the CPU; it stays unchanged.
        output_dir: a folder that is written completely or not at all.
        force: whether to replace a model in `output_dir`.

    Returns:
        The folder.

    Raises:
        UserError: a model of another family or on another device, or the folder is in use.
        ImportError: ONNX is not installed.
    """
    check_exportable(model)
    with atomic_folder(output_dir, force) as folder, eval_mode(model), torch.no_grad():
        encoder, inputs = EncoderGraph(model), example_inputs()
        export_graph(encoder, inputs, folder / "encoder.onnx")
        inputs["encoder_states"] = encoder(inputs["input_ids"], inputs["attention_mask"])[0]
        export_graph(DecoderGraph(model), inputs, folder / "decoder.onnx")
        model.config.save_pretrained(folder)
    return Path(output_dir)
