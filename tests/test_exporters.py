"""Transformers' exporters turn the model into encoder and decoder steps that decode without it.

B batch, T target, V vocabulary.
"""

import dataclasses
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig
from transformers.exporters.configs import DynamoConfig, OnnxConfig
from transformers.exporters.exporter_dynamo import DynamoExporter
from transformers.exporters.exporter_onnx import OnnxExporter

from tests.helpers import FLOAT32, PAIRS, model_of_pairs, random_tokens, source_batch, tiny_model
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.pretrained import CACHE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]

START, PAD, END = 0, 1, 2


def exported(
    model: VaswaniTransformerForConditionalGeneration, batch: dict[str, Tensor], backend: str
) -> dict[str, Any]:
    """Return the encoder, the decoder's first step and its later ones, traced on `batch`, for any batch and lengths.

    The target starts with two tokens, because torch treats a length of one as constant.
    """
    exporter = OnnxExporter() if backend == "onnx" else DynamoExporter()
    settings = OnnxConfig(dynamic=True) if backend == "onnx" else DynamoConfig(dynamic=True)
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


def test_onnx_runtime_computes_the_steps_of_a_model_with_other_settings() -> None:
    """Exported on two sentences, for other numbers and lengths; the search of the paper has four rows per source."""
    model = tiny_model(position_embedding="learned", attention_bias=True, d_v=5, tie_word_embeddings=False)
    model.use_paper_decoding()
    graphs = opened(exported(model, source_batch([5, 3]), "onnx"))
    for side, lengths in [("right", [4, 9, 1]), ("left", [2, 7]), ("right", [6])]:
        batch, targets = source_batch(lengths, side), random_tokens(len(lengths), 8)
        expected = model(**batch, decoder_input_ids=targets).logits
        torch.testing.assert_close(step_logits(graphs, batch, targets), expected, **FLOAT32)


def test_torch_export_programs_translate_as_generate_does() -> None:
    """They have the model's inputs and outputs: the complete encoder output, and a cache."""
    model, tokenizer = model_of_pairs()
    few, batch = (dict(tokenizer(texts, padding=True, return_tensors="pt")) for texts in (list(PAIRS)[:2], list(PAIRS)))
    encoder, first, later = (program.module() for program in exported(model, few, "dynamo").values())
    known = {"attention_mask": batch["attention_mask"], "encoder_outputs": encoder(**batch)}
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    expected = model.generate(**batch, num_beams=1, max_new_tokens=20)
    outputs = first(**known, decoder_input_ids=expected[:, :1], **{CACHE: cache})
    for position in range(1, expected.shape[1]):
        token = expected[:, position : position + 1]  # (B, 1)
        assert torch.equal(outputs.logits[:, -1:].argmax(-1)[token != PAD], token[token != PAD])
        outputs = later(**known, decoder_input_ids=token, **{CACHE: outputs[CACHE]})
