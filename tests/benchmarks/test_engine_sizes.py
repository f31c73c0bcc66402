"""The benchmark of sizes writes every form of a tiny model, and narrower weights take less room."""

import json

import pytest
from transformers.utils import logging

from tests.benchmarks.engine_sizes import main


def test_narrower_weights_take_less_room(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ctranslate2", reason="the ctranslate2 extra is not installed")
    verbosity = logging.get_verbosity()
    main(["--tiny"])
    logging.set_verbosity(verbosity)
    (sizes,) = json.loads(capsys.readouterr().out).values()
    assert sizes["safetensors bfloat16"] < sizes["safetensors float32"]
    assert sizes["CTranslate2 int8"] < sizes["CTranslate2 float32"]
