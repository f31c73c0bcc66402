"""What every family shares: sizes of Table 3, one tied matrix, tensor2tensor's initialization, and plans by name."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import assert_matrix_shared, random_batch, random_tokens, tiny_config, tiny_model
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerModel,
)
from vaswani_transformer.stacks import VaswaniTransformerDecoder, VaswaniTransformerEncoder

# Parameters in millions by the name of the model, as Table 3 prints them.
TABLE_3 = {
    "base": 65,
    "big": 213,
    "B-dk16": 58,
    "B-dk32": 60,
    "C-n2": 36,
    "C-n4": 50,
    "C-n8": 80,
    "C-dmodel256": 28,
    "C-dmodel1024": 168,
    "C-dff1024": 53,
    "C-dff4096": 90,
}


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_share_one_matrix_and_only_the_projection_can_be_untied(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    assert_matrix_shared(model, tied)
    names = [name for name, _ in model.named_parameters() if name.endswith(("shared.weight", "embed_tokens.weight"))]
    assert names == ["model.shared.weight"]
    assert model.lm_head.bias is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [50, 128])
def test_resizing_the_embeddings_keeps_ties(tied: bool, size: int, tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    kept = min(size, 99)
    before = model.model.shared.weight.detach()[:kept].clone()
    model.resize_token_embeddings(size)
    assert_matrix_shared(model, tied)
    assert torch.equal(model.model.shared.weight[:kept], before)
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == model.lm_head.out_features == size
    batch = {"input_ids": random_tokens(2, 4, vocab_size=size), "labels": random_tokens(2, 3, vocab_size=size)}
    logits = model(**batch).logits
    assert logits.shape == (2, 3, size)
    model.save_pretrained(tmp_path)
    again = VaswaniTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert_matrix_shared(again, tied)
    assert torch.equal(again(**batch).logits, logits)


def test_new_input_embeddings_reach_both_stacks() -> None:
    model, other = tiny_model(), tiny_model()
    embeddings: Any = tiny_model().get_input_embeddings()
    nn.init.normal_(embeddings.weight)
    model.set_input_embeddings(embeddings)
    model.tie_weights()
    assert_matrix_shared(model, True)
    batch = random_batch()
    assert not torch.equal(model(**batch).logits, other(**batch).logits)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_initialization_is_tensor2tensor_s(tied: bool) -> None:
    """Glorot-uniform projections, embeddings and learned positions of std d_model^-0.5, norms 1 and 0."""
    config = VaswaniTransformerConfig(
        vocab_size=1000,
        d_model=128,
        encoder_layers=1,
        decoder_layers=1,
        d_v=32,
        d_ff=256,
        position_embedding="learned",
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    model = VaswaniTransformerForConditionalGeneration(config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not (tied and name == "lm_head"):
            bound = math.sqrt(6 / (module.in_features + module.out_features))
            assert module.weight.abs().max() <= bound
            # The std of a uniform distribution is its bound over sqrt(3), known to 1 % from 16,384 numbers or more.
            assert float(module.weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
        elif isinstance(module, nn.Embedding):
            assert float(module.weight.std()) == pytest.approx(128**-0.5, rel=0.03)
            assert abs(float(module.weight.mean())) < 0.002  # the std of this mean is 0.00025 or less
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
        if isinstance(module, nn.Linear) and module.bias is not None:
            assert (module.bias == 0).all()


def matches(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), name) is not None


@pytest.mark.parametrize(
    "model_class",
    [
        VaswaniTransformerEncoder,
        VaswaniTransformerDecoder,
        VaswaniTransformerModel,
        VaswaniTransformerForConditionalGeneration,
    ],
)
def test_plans_name_every_matrix_and_nothing_else(model_class: type) -> None:
    model = model_class(tiny_config())
    modules = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    for name in modules:
        assert any(matches(pattern, name) for pattern in model.tp_plan)
    for pattern in model.tp_plan:
        assert any(matches(pattern, name) for name in modules)
    for pattern in model._fsdp_plan:
        assert any(matches(pattern, name) for name, _ in model.named_modules())


@pytest.mark.parametrize("name", TABLE_3)
def test_models_of_table_3_have_their_printed_sizes(name: str) -> None:
    """With a vocabulary of 41,100 all rows but one have the printed size."""
    config = VaswaniTransformerConfig.from_paper(name, vocab_size=36000 if name == "big" else 41100)
    with torch.device("meta"):
        model = VaswaniTransformerForConditionalGeneration(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == TABLE_3[name]


def test_projection_with_a_bias_is_not_saved(tmp_path: Path) -> None:
    """It would be lost when the model is loaded."""
    model = tiny_model()
    model.lm_head = nn.Linear(model.config.d_model, model.config.vocab_size)
    with pytest.raises(ValueError, match=r"^lm_head: its bias would be lost .* Save a projection without bias\.$"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
