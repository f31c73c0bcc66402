"""Models that predict all words at once as two ONNX graphs, which ONNX Runtime runs as `generate()` does.

B batch, S source, T target, V vocabulary.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from tests.helpers import padded_batch, tiny_model, user_error
from tests.nar_models import END, FAMILY, MASK
from vaswani_transformer import to_onnx
from vaswani_transformer.convert import onnx_exporter

Arrays = dict[str, np.ndarray]


class Graphs:
    """The two graphs of a folder in ONNX Runtime."""

    def __init__(self, folder: Any, config: Any) -> None:
        self.config = config
        self.encoder: Any
        self.decoder: Any
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(folder / f"{stack}.onnx", providers=["CPUExecutionProvider"])
            for stack in ("encoder", "decoder")
        )

    def lengths(self, source: Arrays, length_logits: np.ndarray) -> np.ndarray:
        """Return the likeliest length (B,) of each target."""
        best = length_logits.argmax(1)
        if self.config.model_type == "vaswani_cmlm":
            return best
        return np.maximum(1, source["attention_mask"].sum(1) + best + self.config.min_length_difference)

    def words(self, logits: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the likeliest words (B, T) of logits (B, T, V), with the end last, and their log-probabilities."""
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        allowed = log_probs.copy()
        allowed[:, :, [0, 1, END, *([MASK] if self.config.model_type == "vaswani_cmlm" else [])]] = -np.inf
        tokens = allowed.argmax(-1)
        tokens[np.arange(len(tokens)), lengths - 1] = END
        return tokens, np.take_along_axis(log_probs, tokens[:, :, None], 2)[:, :, 0]

    def generate(self, source: Arrays, rounds: int) -> np.ndarray:
        """Return targets (B, T) by Mask-Predict over the likeliest length; one-pass models need one round."""
        states, length_logits = self.encoder.run(None, source)
        lengths = self.lengths(source, length_logits)
        canvas = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)  # (B, T)
        given = {"encoder_states": states, "attention_mask": source["attention_mask"], "decoder_attention_mask": canvas}
        takes_tokens = "decoder_input_ids" in [spec.name for spec in self.decoder.get_inputs()]
        tokens, scores, is_masked = np.where(canvas == 1, MASK, 1), np.zeros(canvas.shape), canvas == 1
        for step in range(rounds):
            if step:
                counts = np.maximum(1, lengths * (rounds - step) // rounds)
                ranks = np.where(canvas == 1, scores, np.inf).argsort(1, kind="stable").argsort(1)
                is_masked = ranks < counts[:, None]
            shown = {"decoder_input_ids": np.where(is_masked, MASK, tokens)} if takes_tokens else {}
            words, word_scores = self.words(self.decoder.run(None, given | shown)[0], lengths)
            tokens, scores = np.where(is_masked, words, tokens), np.where(is_masked, word_scores, scores)
        return np.where(canvas == 1, tokens, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("family", [family for family in FAMILY if family != "flowseq"])
def test_onnx_runtime_decodes_as_generate_does(family: str, tmp_path: Path) -> None:
    """Batches and lengths differ from those of the export, with padding on either side; a CMLM has three passes."""
    model, rounds = FAMILY[family](), 3 if family == "cmlm" else 1
    graphs = Graphs(to_onnx(model, tmp_path / "onnx"), model.config)
    for side, lengths in [("right", [4, 9, 1]), ("left", [2, 7]), ("right", [6])]:
        tokens, mask = padded_batch(lengths, side)
        words = graphs.generate({"input_ids": tokens.numpy(), "attention_mask": mask.numpy()}, rounds)
        expected = model.generate(tokens, attention_mask=mask, num_iterations=rounds)
        assert torch.equal(torch.tensor(words), expected[:, 1:])


def test_autoregressive_model_is_an_error_that_names_the_exporter_of_transformers(tmp_path: Path) -> None:
    with user_error(r"writes one token after the other; .* transformers\.exporters\.OnnxExporter"):
        to_onnx(tiny_model(), tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_model_with_a_flow_is_an_error_of_one_line(tmp_path: Path) -> None:
    with user_error(r"^VaswaniFlowSeqFor\w+: inverts matrices of its flow, for which ONNX has no"):
        to_onnx(FAMILY["flowseq"](), tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_model_on_another_device_and_a_missing_package_are_errors_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with user_error(r"is on meta, expected cpu\. Move it by \.to\('cpu'\)\.$"):
        to_onnx(FAMILY["nat"]().to("meta"), tmp_path / "onnx")
    monkeypatch.setattr(onnx_exporter, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs onnx and onnxscript, .* pip install \"vaswani-transformer\[onnx\]"):
        to_onnx(FAMILY["nat"](), tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()
