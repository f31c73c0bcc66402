"""Every name that `vaswani_transformer` exports exists, is documented, and costs nothing before its first use."""

import inspect
from pathlib import Path

import pytest

import vaswani_transformer
from tests.commands import run_python
from tests.models import model_of_pairs, save

FRESH_IMPORT = """
import random, socket, sys, threading

def fail(*arguments, **keywords):
    raise AssertionError("the network was asked")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = fail

import torch, transformers  # their own connections do not count

state, threads, before = torch.get_rng_state(), torch.get_num_threads(), random.getstate()
import vaswani_transformer
assert torch.equal(torch.get_rng_state(), state) and random.getstate() == before
assert torch.get_num_threads() == threads and torch.get_default_dtype() == torch.float32
assert threading.active_count() == 1
optional = {"matplotlib", "ctranslate2"} | {f"vaswani_transformer.{room}" for room in ("figures", "convert", "parsing")}
assert not optional & sys.modules.keys()

config = transformers.AutoConfig.for_model("vaswani_transformer", vocab_size=9, d_model=8, num_heads=2, d_ff=8)
assert type(transformers.AutoModel.from_config(config)).__module__ == "vaswani_transformer.model"
assert type(transformers.AutoModelForSeq2SeqLM.from_config(config)).__module__ == "vaswani_transformer.model"

from vaswani_transformer import *
assert (translate.__name__, attention_maps.__name__, to_ctranslate2.__name__) == (
    "translate", "attention_maps", "to_ctranslate2"
)
import vaswani_transformer.convert.command
assert not {"ctranslate2", "matplotlib"} & sys.modules.keys()
vaswani_transformer.figures.style.new_figure(4, 3)
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules  # it opens no window
"""

FIRST_SENTENCE = """
import sys
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel, PreTrainedTokenizerFast
from transformers.pipelines import PIPELINE_REGISTRY

def libraries():
    parts = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.export", "torch.onnx"}
    return {name for name in sys.modules if "." not in name or name in parts}

before = libraries()
from vaswani_transformer import prepare_for_inference, translate
assert libraries() - before == {"vaswani_transformer"}

model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
for translator in (model, prepare_for_inference(model)):
    assert list(translate(translator, tokenizer, ["the dogs sleep."]))
unneeded = {"datasets", "evaluate", "matplotlib", "sacrebleu", "sklearn", "pandas", "ctranslate2", "onnxruntime"}
assert not unneeded & sys.modules.keys()
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("vaswani_transformer.")}
assert not {"convert", "demo", "figures", "parsing"} & rooms
"""

IMPORT_EVERYTHING = """
import importlib, logging, os, pkgutil, signal, sys, warnings
import ctranslate2, matplotlib, onnxruntime, torch  # what they change does not count
from transformers import GenerationMixin, PreTrainedModel, pipeline

def process():
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    log = logging.root.level, logging.root.handlers[:]
    return handlers, log, warnings.filters[:], dict(os.environ), sys.path[:], sys.excepthook

sys.argv = ["vaswani-notes"]  # a user's script
before = process()
import vaswani_transformer
for module in pkgutil.walk_packages(vaswani_transformer.__path__, "vaswani_transformer."):
    importlib.import_module(module.name)
assert process() == before
"""


@pytest.mark.parametrize("name", sorted(set(vaswani_transformer.__all__) - {"translate"}))
def test_public_name_is_importable_and_documented(name: str) -> None:
    assert inspect.getdoc(getattr(vaswani_transformer, name))


@pytest.mark.slow
def test_import_registers_the_package_and_does_nothing_else(tmp_path: Path) -> None:
    """Optional packages are imported only at their first use."""
    assert run_python(FRESH_IMPORT, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0") == ""
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_first_translation_imports_no_library_that_transformers_does_not(tmp_path: Path) -> None:
    folder = save(tmp_path, *model_of_pairs())
    assert run_python(FIRST_SENTENCE, str(folder)) == ""


@pytest.mark.slow
def test_import_of_every_module_changes_nothing_in_the_process() -> None:
    assert run_python(IMPORT_EVERYTHING) == ""


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(vaswani_transformer, "no_such_name")
    assert set(vaswani_transformer.__all__) <= set(dir(vaswani_transformer))
