"""The test suite that Transformers runs on each of its models, run on ours."""

import unittest
from pathlib import Path
from unittest.mock import patch

import pytest
from transformers.models.auto import modeling_auto

from tests import transformers_suite
from tests.helpers import tiny_config
from tests.transformers_suite import TinyModels, fetch_once, is_there, load, suite_folder, why_missing
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerModel,
)

if not is_there(suite_folder()):
    pytest.skip(why_missing(), allow_module_level=True)

suite = load()
needs_generation_tests = pytest.mark.skipif(
    suite.GenerationTesterMixin is None,
    reason="PyPI's source distribution lacks GenerationTesterMixin; set TRANSFORMERS_SOURCE to a full checkout.",
)
bases = (suite.ModelTesterMixin, suite.GenerationTesterMixin, unittest.TestCase)


class TestTransformersSuite(*(base for base in bases if base is not None)):
    all_model_classes = (VaswaniTransformerModel, VaswaniTransformerForConditionalGeneration)
    is_encoder_decoder = True

    @classmethod
    def setUpClass(cls) -> None:
        """The suite finds the model that takes labels, and the body, by these names."""
        for mapping, model_class in [
            (modeling_auto.MODEL_MAPPING_NAMES, VaswaniTransformerModel),
            (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, VaswaniTransformerForConditionalGeneration),
        ]:
            names = patch.dict(mapping, {VaswaniTransformerConfig.model_type: model_class.__name__})
            names.start()
            cls.addClassCleanup(names.stop)

    def setUp(self) -> None:
        self.model_tester = TinyModels(tiny_config(max_position_embeddings=50), reads_targets=True)
        self.config_tester = suite.ConfigTester(self, config_class=VaswaniTransformerConfig)

    @needs_generation_tests
    def test_generation_tester_mixin_inheritance(self) -> None:
        super().test_generation_tester_mixin_inheritance()

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


@needs_generation_tests
def test_suite_has_the_tests_of_generate() -> None:
    names = {name for name in dir(suite.GenerationTesterMixin) if name.startswith("test_")}
    assert "test_beam_search_generate" in names
    assert names <= set(dir(TestTransformersSuite))


def test_suite_that_cannot_be_fetched_is_skipped_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRANSFORMERS_SOURCE", raising=False)
    monkeypatch.setattr(transformers_suite, "UNPACKED", tmp_path / "transformers-0")
    monkeypatch.setattr(transformers_suite, "VERSION", "0.0.0.dev0")
    monkeypatch.setattr(transformers_suite, "failures", [])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    fetch_once()
    assert not is_there(suite_folder())
    assert "pip cannot download transformers==0.0.0.dev0: ERROR: " in why_missing()
    assert "set TRANSFORMERS_SOURCE" in why_missing()
