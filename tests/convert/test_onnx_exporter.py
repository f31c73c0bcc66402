"""Models that cannot be exported to two ONNX graphs are errors of one line, and leave no folder."""

from pathlib import Path

import pytest

from tests.helpers import tiny_model, user_error
from tests.nar_models import FAMILY
from vaswani_transformer import to_onnx
from vaswani_transformer.convert import onnx_exporter


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
