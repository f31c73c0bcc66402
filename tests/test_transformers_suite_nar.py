"""The test suite that Transformers runs on each of its models, run on NAT, IterativeVAE, FlowSeq and CMLM.

Those of `generate()` decode from left to right and cannot apply.
"""

import unittest
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedConfig, initialization
from transformers.models.auto import modeling_auto

from tests.helpers import TINY
from tests.transformers_suite import TinyModels, is_there, load, suite_folder, why_missing
from vaswani_transformer import (
    VaswaniCmlmConfig,
    VaswaniCmlmForConditionalGeneration,
    VaswaniFlowSeqConfig,
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeConfig,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatConfig,
    VaswaniNatForConditionalGeneration,
    flowseq,
)
from vaswani_transformer.flowseq import Flow, init_flow

if not is_there(suite_folder()):
    pytest.skip(why_missing(), allow_module_level=True)

suite = load()

# A single length class. The suite compares eager and sdpa in bfloat16, also without a mask that gives the length, and
# random weights could then predict two lengths.
ONE_LENGTH: dict[str, Any] = {"min_length_difference": 0, "max_length_difference": 0}


class NarSuite(suite.ModelTesterMixin):
    """The suite for one model, whose name marks it as the one that takes labels."""

    config: PreTrainedConfig
    all_generative_model_classes = ()
    is_encoder_decoder = True

    @classmethod
    def setUpClass(cls) -> None:
        names = patch.dict(
            modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            {cls.config.model_type: cls.all_model_classes[0].__name__},
        )
        names.start()
        cls.addClassCleanup(names.stop)

    def setUp(self) -> None:
        self.model_tester = TinyModels(self.config, reads_targets=False)
        self.config_tester = suite.ConfigTester(self, config_class=type(self.config))

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


class TestNatSuite(NarSuite, unittest.TestCase):
    config = VaswaniNatConfig(**TINY, **ONE_LENGTH, max_position_embeddings=50)
    all_model_classes = (VaswaniNatForConditionalGeneration,)


class TestIterativeVaeSuite(NarSuite, unittest.TestCase):
    config = VaswaniIterativeVaeConfig(**TINY, **ONE_LENGTH, max_position_embeddings=50)
    all_model_classes = (VaswaniIterativeVaeForConditionalGeneration,)


def init_started_flow(module: torch.nn.Module) -> None:
    """Initialize a module of a flow, with a start."""
    init_flow(module)
    if isinstance(module, Flow):
        initialization.ones_(module.started)


class TestFlowSeqSuite(NarSuite, unittest.TestCase):
    """The suite trains models that it has just made, so their flows have a start from the beginning."""

    config = VaswaniFlowSeqConfig(**TINY, **ONE_LENGTH, flow_steps=1, max_position_embeddings=50)
    all_model_classes = (VaswaniFlowSeqForConditionalGeneration,)

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        started = patch.object(flowseq, "init_flow", init_started_flow)
        started.start()
        cls.addClassCleanup(started.stop)

    def test_init_weights_can_init_buffers(self) -> None:
        with patch.object(flowseq, "init_flow", init_flow):  # a new flow has no start
            super().test_init_weights_can_init_buffers()


class TestCmlmSuite(NarSuite, unittest.TestCase):
    config = VaswaniCmlmConfig(**TINY, max_position_embeddings=50, mask_token_id=3, max_target_length=1)
    all_model_classes = (VaswaniCmlmForConditionalGeneration,)

    def assert_shapes_of_states(self) -> None:
        """Assert that the encoder's states have a row for the length token before those of the source."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config._attn_implementation = "eager"
        model = self.all_model_classes[0](config).eval()
        outputs = model(**inputs, output_attentions=True, output_hidden_states=True)
        assert [tuple(states.shape) for states in outputs.encoder_hidden_states] == [(13, 8, 32)] * 3
        assert [tuple(states.shape) for states in outputs.decoder_hidden_states] == [(13, 7, 32)] * 3
        assert [tuple(weights.shape) for weights in outputs.encoder_attentions] == [(13, 4, 8, 8)] * 2
        assert [tuple(weights.shape) for weights in outputs.decoder_attentions] == [(13, 4, 7, 7)] * 2
        assert [tuple(weights.shape) for weights in outputs.cross_attentions] == [(13, 4, 7, 7)] * 2

    def test_attention_outputs(self) -> None:
        self.assert_shapes_of_states()

    def test_hidden_states_output(self) -> None:
        self.assert_shapes_of_states()


del NarSuite
