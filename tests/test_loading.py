"""Every way of saving and loading gives the same logits, reads no pickle and needs no network."""

import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

import vaswani_transformer
from tests.helpers import TINY, assert_matrix_shared, load_tokenizer, random_batch, save, tiny_config, tiny_model
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


def small_tokenizer() -> VaswaniTransformerTokenizer:
    return VaswaniTransformerTokenizer.train_from_iterator(["hello world", "hola mundo"] * 9, vocab_size=280)


def load_from_the_meta_device(folder: Path) -> VaswaniTransformerForConditionalGeneration:
    state = VaswaniTransformerForConditionalGeneration.from_pretrained(folder).state_dict()
    with torch.device("meta"):
        model = VaswaniTransformerForConditionalGeneration(VaswaniTransformerConfig.from_pretrained(folder))
    model.to_empty(device="cpu").load_state_dict(state)
    return model.eval()


LOADERS: dict[str, Callable[[Path], Any]] = {
    "class": VaswaniTransformerForConditionalGeneration.from_pretrained,
    "Auto class": AutoModelForSeq2SeqLM.from_pretrained,
    "to the CPU": lambda folder: AutoModelForSeq2SeqLM.from_pretrained(folder, device_map="cpu"),
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
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == shards
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
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


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_weight_is_stored_and_a_tied_matrix_once(variant: str, sharded: bool, tmp_path: Path) -> None:
    model = tiny_model(**VARIANTS[variant])
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    files = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    stored = {name: tuple(weight.shape) for file in files for name, weight in file.items()}
    matrices = {name for name, shape in stored.items() if shape == (99, 32)}
    assert matrices == {"model.shared.weight"} | ({"lm_head.weight"} if variant == "untied" else set())
    assert stored == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_last_saved_weights_are_loaded_whatever_their_files(variant: str | None, tmp_path: Path) -> None:
    for size in ("1GB", "20KB", "40KB", "1GB"):
        model = VaswaniTransformerForConditionalGeneration(tiny_config())
        model.save_pretrained(tmp_path, max_shard_size=size, variant=variant)
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, variant=variant)
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_no_pickle_is_read_or_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    functions = {pickle: ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"), torch: ("load", "save")}
    for module, names in functions.items():
        for name in names:
            monkeypatch.setattr(module, name, Mock(side_effect=AssertionError("a pickle was read or written")))
    with pytest.raises(AssertionError, match="a pickle"):
        torch.load(tmp_path / "anything")
    model, tokenizer, batch = tiny_model(), small_tokenizer(), random_batch()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    save(tmp_path, model, tokenizer)
    assert {path.suffix for path in tmp_path.rglob("*")} == {".json", ".safetensors"}
    assert torch.equal(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)(**batch).logits, model(**batch).logits)
    assert load_tokenizer(tmp_path)("hello").input_ids == tokenizer("hello").input_ids


def assert_auto_classes_know_the_package() -> None:
    config = AutoConfig.for_model("vaswani_transformer", **TINY)
    assert type(config) is VaswaniTransformerConfig
    assert type(AutoModel.from_config(config)) is VaswaniTransformerModel
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is VaswaniTransformerForConditionalGeneration


def test_auto_classes_know_the_package_after_repeated_registration(tmp_path: Path) -> None:
    assert_auto_classes_know_the_package()
    for _ in range(3):
        register()
    importlib.reload(vaswani_transformer)
    assert_auto_classes_know_the_package()
    tiny_config().save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is VaswaniTransformerConfig
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is VaswaniTransformerTokenizer
