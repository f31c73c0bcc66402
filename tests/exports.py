"""Models as other engines have them: programs of `torch.export`, graphs of ONNX, folders of CTranslate2.

B batch, T target, V vocabulary.
"""

import dataclasses
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import onnx_ir
import onnxruntime
import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.exporters.configs import OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter

from tests.helpers import random_tokens
from vaswani_transformer import VaswaniTransformerForConditionalGeneration

START, PAD, END = 0, 1, 2


def torch_exported(module: nn.Module, inputs: dict[str, Any], strict: bool = False) -> torch.export.ExportedProgram:
    """Return the program of a module for any number of rows and any lengths of source and target."""
    rows, source, target = (torch.export.Dim(name, min=2, max=64) for name in ("rows", "source", "target"))
    shapes = {
        name: {0: rows, 1: target if name.startswith("decoder") else source} if isinstance(value, Tensor) else None
        for name, value in inputs.items()
    }
    return torch.export.export(module, (), inputs, dynamic_shapes=shapes, strict=strict)


def exported_by_transformers(
    model: VaswaniTransformerForConditionalGeneration, batch: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the ONNX graphs of the encoder, the decoder's first step and its later ones, for any batch and lengths.

    The target starts with two tokens, because torch treats a length of one as constant.
    """
    exporter, settings = OnnxExporter(), OnnxConfig(dynamic=True)
    begun = torch.full((len(batch["input_ids"]), 2), START)
    encoder = exporter.export(model.get_encoder(), dict(batch), settings)
    steps = exporter.export_for_generation(
        model, batch | {"decoder_input_ids": begun}, settings, generation_config=GenerationConfig(num_beams=1)
    )
    if isinstance(steps, dict):  # Transformers 5.17 returns torch's result
        return {name: getattr(program, "model", program) for name, program in {"encoder": encoder, **steps}.items()}
    return {"encoder": encoder.program} | {name: step.program for name, step in steps.components.items()}


@dataclasses.dataclass
class Graph:
    """An exported graph in ONNX Runtime with its tensors by name; a cache has the same names as input and output."""

    session: onnxruntime.InferenceSession

    def __call__(self, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        inputs = {spec.name: tensors[spec.name.removeprefix("input.")] for spec in self.session.get_inputs()}
        names = [spec.name.removeprefix("output.") for spec in self.session.get_outputs()]
        outputs: Any = self.session.run(None, inputs)
        return dict(zip(names, outputs, strict=True))


def opened(models: dict[str, onnx_ir.Model]) -> dict[str, Graph]:
    providers = ["CPUExecutionProvider"]
    return {
        name: Graph(onnxruntime.InferenceSession(onnx_ir.to_proto(model).SerializeToString(), providers=providers))
        for name, model in models.items()
    }


def step_logits(graphs: dict[str, Graph], batch: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Return the logits (B, T, V) of the graphs, which read one token of the targets (B, T) after the other."""
    source = {name: tensor.numpy() for name, tensor in batch.items()}
    known = {"attention_mask": source["attention_mask"]}
    known["encoder_outputs.last_hidden_state"] = graphs["encoder"](source)["last_hidden_state"]
    step, logits = {}, []
    for token in targets.split(1, dim=1):
        step = graphs["decode" if logits else "prefill"](known | step | {"decoder_input_ids": token.numpy()})
        logits.append(torch.tensor(step["logits"][:, -1:]))
    return torch.cat(logits, dim=1)


def assert_same_probabilities(model: nn.Module, folder: Path) -> None:
    """Assert that CTranslate2 has the model's log P of each target token, for sources of unequal length.

    Its kernels against torch's: a few more roundings than between two orders of a sum in torch.
    """
    rows = [random_tokens(length) for length in (5, 2, 9, 1)]
    sources = nn.utils.rnn.pad_sequence([torch.cat((row, torch.tensor([END]))) for row in rows], True, PAD)
    targets = random_tokens(len(rows), 6)
    starts, ends = torch.full((len(rows), 1), START), torch.full((len(rows), 1), END)
    batch = {"input_ids": sources, "attention_mask": sources.ne(PAD).long()}
    with torch.no_grad():
        logits = model(**batch, decoder_input_ids=torch.cat((starts, targets), dim=1)).logits
    ours = logits.float().log_softmax(-1).gather(2, torch.cat((targets, ends), dim=1)[..., None])[..., 0]
    assert ours.std() > 0.5  # not all alike
    translator = ctranslate2.Translator(str(folder), intra_threads=1)
    texts = [[str(index) for index in [*row.tolist(), END]] for row in rows]
    scored = translator.score_batch(texts, [list(map(str, target.tolist())) for target in targets])
    torch.testing.assert_close(torch.tensor([each.log_probs for each in scored]), ours, rtol=1e-4, atol=1e-4)
