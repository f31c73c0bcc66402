"""The test suite that Transformers runs on each of its models, run on ours.

Its tests of `generate()` decode from left to right, and apply to the autoregressive model only.
"""

import unittest
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedConfig, initialization
from transformers.models.auto import modeling_auto

from tests.models import TINY, tiny_config
from tests.transformers_suite import TinyModels, is_there, load
from vaswani_transformer import (
    VaswaniCmlmConfig,
    VaswaniCmlmForConditionalGeneration,
    VaswaniCtcConfig,
    VaswaniCtcForConditionalGeneration,
    VaswaniDagConfig,
    VaswaniDagForConditionalGeneration,
    VaswaniFlowSeqConfig,
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeConfig,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatConfig,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerModel,
)
from vaswani_transformer.flowseq import Flow

if not is_there():
    pytest.skip(
        "Transformers' tests are not there; run with a network, or set TRANSFORMERS_SOURCE.", allow_module_level=True
    )

suite = load()
MODELS_WITH_LABELS = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

# A single length class. The suite compares eager and sdpa in bfloat16, also without a mask that gives the length, and
# random weights could then predict two lengths.
NAR: dict[str, Any] = {**TINY, "min_length_difference": 0, "max_length_difference": 0, "max_position_embeddings": 50}


class Suite(suite.ModelTesterMixin):
    """The suite for one family."""

    config: PreTrainedConfig
    all_generative_model_classes: tuple[type, ...] = ()
    is_encoder_decoder = True

    @classmethod
    def setUpClass(cls) -> None:
        """Register the names by which the suite finds the body, and the model that takes labels."""
        for model_class in cls.all_model_classes:
            is_body = model_class is VaswaniTransformerModel
            mapping = modeling_auto.MODEL_MAPPING_NAMES if is_body else MODELS_WITH_LABELS
            names = patch.dict(mapping, {cls.config.model_type: model_class.__name__})
            names.start()
            cls.addClassCleanup(names.stop)

    def setUp(self) -> None:
        reads_targets = VaswaniTransformerModel in self.all_model_classes
        self.model_tester = TinyModels(self.config, reads_targets)
        self.config_tester = suite.ConfigTester(self, config_class=type(self.config))

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def test_bc_torch_dtype(self) -> None:
        """Compare all weights to the bit, but neither print nor report every pair, which takes four times as long."""

        def assert_equal(one: torch.Tensor, other: torch.Tensor, msg: str) -> None:
            assert torch.equal(one, other), msg

        shape = patch.object(torch.Tensor, "__format__", lambda tensor, _: str(tuple(tensor.shape)))
        equal = patch.object(torch.testing, "assert_close", assert_equal)
        with shape, equal, patch.object(self, "subTest", lambda _: nullcontext()):
            super().test_bc_torch_dtype()


class TestTransformerSuite(*(base for base in (Suite, suite.GenerationTesterMixin, unittest.TestCase) if base)):
    config = tiny_config(max_position_embeddings=50)
    all_model_classes = (VaswaniTransformerModel, VaswaniTransformerForConditionalGeneration)
    all_generative_model_classes = (VaswaniTransformerForConditionalGeneration,)

    @pytest.mark.skipif(
        suite.GenerationTesterMixin is None,
        reason="PyPI's source distribution lacks GenerationTesterMixin; set TRANSFORMERS_SOURCE to a full checkout.",
    )
    def test_generation_tester_mixin_inheritance(self) -> None:
        super().test_generation_tester_mixin_inheritance()


class TestNatSuite(Suite, unittest.TestCase):
    config = VaswaniNatConfig(**NAR)
    all_model_classes = (VaswaniNatForConditionalGeneration,)


class TestCtcSuite(Suite, unittest.TestCase):
    config = VaswaniCtcConfig(**TINY, max_position_embeddings=50, upsampling=1)
    all_model_classes = (VaswaniCtcForConditionalGeneration,)

    def test_encoder_decoder_loss_no_double_shift(self) -> None:
        """The loss is a function of the logits, but not a cross-entropy: its gradient is softmax minus posterior."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        labels = torch.arange(4, 9).repeat(len(inputs["input_ids"]), 1)
        outputs = VaswaniCtcForConditionalGeneration(config).eval()(**inputs, labels=labels)
        (gradient,) = torch.autograd.grad(outputs.loss, outputs.logits)
        posterior = outputs.logits.softmax(-1) - gradient * labels.numel()
        assert posterior.min().item() > -1e-5
        torch.testing.assert_close(posterior.sum(-1), torch.ones(posterior.shape[:2]))
        torch.testing.assert_close(posterior[..., [1, *range(4, 9)]].sum(-1), torch.ones(posterior.shape[:2]))


class TestDagSuite(Suite, unittest.TestCase):
    config = VaswaniDagConfig(**TINY, max_position_embeddings=50, upsampling=1)
    all_model_classes = (VaswaniDagForConditionalGeneration,)

    def test_encoder_decoder_loss_no_double_shift(self) -> None:
        """The loss is a function of the logits, but not a cross-entropy: softmax minus gradient is a posterior."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        labels = torch.arange(4, 9).repeat(len(inputs["input_ids"]), 1)
        outputs = VaswaniDagForConditionalGeneration(config).eval()(**inputs, labels=labels)
        (gradient,) = torch.autograd.grad(outputs.loss, outputs.logits)
        torch.testing.assert_close(gradient.sum(-1), torch.zeros(gradient.shape[:2]))
        words = gradient.clamp(max=0).sum() * labels.numel()  # a share of the posteriors, of 5 words in each row
        assert -labels.numel() <= words.item() < 0


class TestIterativeVaeSuite(Suite, unittest.TestCase):
    config = VaswaniIterativeVaeConfig(**NAR)
    all_model_classes = (VaswaniIterativeVaeForConditionalGeneration,)


init_weights = VaswaniFlowSeqForConditionalGeneration._init_weights


def init_with_start(model: Any, module: torch.nn.Module) -> None:
    """Initialize a module of a FlowSeq, whose flow has a start."""
    init_weights(model, module)
    if isinstance(module, Flow):
        initialization.ones_(module.started)


class TestFlowSeqSuite(Suite, unittest.TestCase):
    """The suite trains models that it has just made, so their flows have a start from the beginning."""

    config = VaswaniFlowSeqConfig(**NAR, flow_steps=1)
    all_model_classes = (VaswaniFlowSeqForConditionalGeneration,)

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        started = patch.object(VaswaniFlowSeqForConditionalGeneration, "_init_weights", init_with_start)
        started.start()
        cls.addClassCleanup(started.stop)

    def test_init_weights_can_init_buffers(self) -> None:
        # a new flow has no start
        with patch.object(VaswaniFlowSeqForConditionalGeneration, "_init_weights", init_weights):
            super().test_init_weights_can_init_buffers()


class TestCmlmSuite(Suite, unittest.TestCase):
    config = VaswaniCmlmConfig(**TINY, max_position_embeddings=50, mask_token_id=3, max_target_length=1)
    all_model_classes = (VaswaniCmlmForConditionalGeneration,)

    def test_attention_outputs(self) -> None:
        """The encoder's states have a row for the length token before those of the source."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config._attn_implementation = "eager"
        model = self.all_model_classes[0](config).eval()
        outputs = model(**inputs, output_attentions=True, output_hidden_states=True)
        assert [tuple(states.shape) for states in outputs.encoder_hidden_states] == [(13, 8, 32)] * 3
        assert [tuple(states.shape) for states in outputs.decoder_hidden_states] == [(13, 7, 32)] * 3
        assert [tuple(weights.shape) for weights in outputs.encoder_attentions] == [(13, 4, 8, 8)] * 2
        assert [tuple(weights.shape) for weights in outputs.decoder_attentions] == [(13, 4, 7, 7)] * 2
        assert [tuple(weights.shape) for weights in outputs.cross_attentions] == [(13, 4, 7, 7)] * 2

    test_hidden_states_output = test_attention_outputs


del Suite
