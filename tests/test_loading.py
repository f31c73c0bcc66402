"""Every way of saving and loading gives the same logits and needs no network."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

import vaswani_transformer
from tests.helpers import TINY, assert_matrix_shared, random_batch, tiny_config, tiny_model
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerModel,
    VaswaniTransformerTokenizer,
)
from vaswani_transformer.registration import register

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "learned": {"position_embedding": "learned", "attention_bias": True, "d_v": 5},
}


def load_from_the_meta_device(folder: Path) -> VaswaniTransformerForConditionalGeneration:
    state = VaswaniTransformerForConditionalGeneration.from_pretrained(folder).state_dict()
    with torch.device("meta"):
        model = VaswaniTransformerForConditionalGeneration(VaswaniTransformerConfig.from_pretrained(folder))
    model.to_empty(device="cpu").load_state_dict(state)
    return model.eval()


LOADERS: dict[str, Callable[[Path], Any]] = {
    "class": VaswaniTransformerForConditionalGeneration.from_pretrained,
    "Auto class": AutoModelForSeq2SeqLM.from_pretrained,
    "from the meta device": load_from_the_meta_device,
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("load", LOADERS)
def test_logits_and_ties_are_the_same_for_every_way_of_saving_and_loading(
    load: str, shards: bool, variant: str, tmp_path: Path
) -> None:
    model, batch = tiny_model(**VARIANTS[variant]), random_batch()
    model.save_pretrained(tmp_path, max_shard_size="20KB" if shards else "1GB")
    stored = [name for path in tmp_path.glob("*.safetensors") for name in load_file(path)]
    assert sorted(stored) == sorted(name for name, _ in model.named_parameters())
    again = LOADERS[load](tmp_path)
    assert type(again) is VaswaniTransformerForConditionalGeneration
    assert not again.training
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    again.tie_weights()  # to_empty gives every module its own matrix
    assert_matrix_shared(again, variant != "untied")


def test_body_and_complete_model_load_from_each_other(tmp_path: Path) -> None:
    model, batch = tiny_model(), random_batch()
    model.save_pretrained(tmp_path / "whole")
    body = AutoModel.from_pretrained(tmp_path / "whole")
    assert type(body) is VaswaniTransformerModel
    states = body(**batch).last_hidden_state
    assert torch.equal(states, model.model(**batch).last_hidden_state)
    body.save_pretrained(tmp_path / "body")
    complete = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "body")
    assert torch.equal(complete(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards_replace_an_earlier_file(variant: str | None, tmp_path: Path) -> None:
    for size in ("1GB", "20KB", "1GB"):
        model = VaswaniTransformerForConditionalGeneration(tiny_config())
        model.save_pretrained(tmp_path, max_shard_size=size, variant=variant)
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, variant=variant)
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_auto_classes_know_the_package_after_repeated_registration(saved: Path) -> None:
    register()
    importlib.reload(vaswani_transformer)
    config = AutoConfig.for_model("vaswani_transformer", **TINY)
    assert type(config) is type(AutoConfig.from_pretrained(saved)) is VaswaniTransformerConfig
    assert type(AutoModel.from_config(config)) is VaswaniTransformerModel
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is VaswaniTransformerForConditionalGeneration
    assert type(AutoTokenizer.from_pretrained(saved)) is VaswaniTransformerTokenizer
