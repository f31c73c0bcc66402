"""A model distributed over memory and disk by Accelerate keeps complete layers, one shared matrix and its results."""

import ast
import logging
import re
from pathlib import Path

import pytest
import torch
from accelerate import infer_auto_device_map
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSeq2SeqLM

from tests import ROOT
from tests.batches import random_tokens, source_batch, targets
from tests.models import tiny_flowseq, tiny_model

# Bytes; the matrix of 99 by 32 float32 numbers has 12,672, a layer of the encoder about 34,000.
MAX_MEMORY = {"memory": None, "memory and disk": {"cpu": 200_000}, "disk": {"cpu": 20_000}}
EMBEDDINGS = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens")


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning")
@pytest.mark.parametrize("memory", MAX_MEMORY)
def test_shared_matrix_stays_tied_and_is_saved_once(memory: str, tmp_path: Path) -> None:
    model, call = tiny_model().double(), source_batch([5, 3], max_new_tokens=9)
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory=MAX_MEMORY[memory], offload_folder=tmp_path / "offloaded"
    )
    devices = {"memory": {"cpu"}, "memory and disk": {"cpu", "meta"}, "disk": {"meta"}}  # "meta" until it is needed
    assert {weight.device.type for weight in again.parameters()} == devices[memory]
    if memory != "disk":  # no weight stays in memory there
        assert {again.get_submodule(name).weight for name in (*EMBEDDINGS, "lm_head")} == {again.model.shared.weight}
    again.save_pretrained(tmp_path / "again")
    complete = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
    assert {complete.get_submodule(name).weight for name in (*EMBEDDINGS, "lm_head")} == {complete.model.shared.weight}
    assert torch.equal(complete.model.shared.weight, model.model.shared.weight)
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors")) for name in ("model", "again")
    ]
    assert sizes[0] == sizes[1]
    assert torch.equal(again.generate(**call), model.generate(**call))


@settings(max_examples=25)
@given(first=st.integers(0, 300_000), second=st.integers(0, 300_000), tied=st.booleans())
def test_device_map_splits_no_layer_and_no_tie(first: int, second: int, tied: bool) -> None:
    """Two accelerators of any size, which need not exist, and the CPU."""
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # a warning each time that they do not exist
    with torch.device("meta"):
        model = tiny_model(tie_word_embeddings=tied)
    model.tie_weights()
    memory: dict[int | str, int | str] = {0: first, 1: second, "cpu": 10**6}
    device_map = infer_auto_device_map(
        model, max_memory=memory, no_split_module_classes=list(model._no_split_modules or ())
    )

    def device_of(name: str) -> int | str:
        return next(
            device for prefix, device in device_map.items() if prefix == "" or f"{name}.".startswith(f"{prefix}.")
        )

    layers = [f"model.{stack}.layers.{number}" for stack in ("encoder", "decoder") for number in range(2)]
    assert not any(name.startswith(f"{layer}.") for layer in layers for name in device_map)
    assert len({device_of(name) for name in (*EMBEDDINGS, *(["lm_head"] if tied else []))}) == 1


MAKERS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}
ON_THE_CPU = {"iterative_vae.py: real_rows", "pipeline.py"}
"""Files and functions that make tensors which the caller moves."""


@pytest.mark.parametrize("path", sorted((ROOT / "vaswani_transformer").glob("*.py")), ids=lambda path: path.name)
def test_function_that_makes_a_tensor_names_its_device(path: Path) -> None:
    """Parameters are made by constructors, which the caller gives a device."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
            continue
        if {path.name, f"{path.name}: {function.name}"} & ON_THE_CPU:
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and re.fullmatch(rf"torch\.({'|'.join(MAKERS)})", ast.unparse(call.func)):
                assert {keyword.arg for keyword in call.keywords} & {"device", None}, f"line {call.lineno}"


def test_flow_that_is_offloaded_cannot_be_started(tmp_path: Path) -> None:
    tiny_flowseq().save_pretrained(tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": 20_000}, offload_folder=tmp_path / "offloaded"
    ).eval()
    with pytest.raises(ValueError, match=r"^flow: its weights are offloaded, .* Load the model without a device_map"):
        model.start_flow(random_tokens(3, 6), targets(6, 4, 1))
