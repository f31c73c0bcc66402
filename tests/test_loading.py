"""Every way of saving and loading gives the same logits, reads no pickle and needs no network."""

import importlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

import vaswani_transformer
from tests.helpers import TINY, load_tokenizer, random_batch, run_python, save, tiny_config, tiny_model
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
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def small_tokenizer() -> VaswaniTransformerTokenizer:
    return VaswaniTransformerTokenizer.train_from_iterator(["hello world", "hola mundo"] * 9, vocab_size=280)


def weights_on_disk(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors in the safetensors files of a folder."""
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def without_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make everything fail that would read or write a pickle."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read or written")

    for module, names in {
        pickle: ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"),
        torch: ("load", "save"),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, fail)


def load_plain(folder: Path) -> VaswaniTransformerForConditionalGeneration:
    return VaswaniTransformerForConditionalGeneration.from_pretrained(folder)


def load_by_auto_class(folder: Path) -> VaswaniTransformerForConditionalGeneration:
    return AutoModelForSeq2SeqLM.from_pretrained(folder)


def load_to_the_cpu(folder: Path) -> VaswaniTransformerForConditionalGeneration:
    return AutoModelForSeq2SeqLM.from_pretrained(folder, device_map="cpu")


def load_where_there_is_room(folder: Path) -> VaswaniTransformerForConditionalGeneration:
    return AutoModelForSeq2SeqLM.from_pretrained(folder, device_map="auto")


def load_from_the_meta_device(folder: Path) -> VaswaniTransformerForConditionalGeneration:
    state = load_plain(folder).state_dict()
    with torch.device("meta"):
        model = VaswaniTransformerForConditionalGeneration(VaswaniTransformerConfig.from_pretrained(folder))
    model.to_empty(device="cpu").load_state_dict(state)
    return model.eval()


LOADERS = [
    load_plain,
    load_by_auto_class,
    load_to_the_cpu,
    load_where_there_is_room,
    load_from_the_meta_device,
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("load", LOADERS)
def test_logits_are_the_same_for_every_way_of_loading(load: Callable, variant: str, tmp_path: Path) -> None:
    model, batch = tiny_model(**VARIANTS[variant]), random_batch()
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert type(again) is VaswaniTransformerForConditionalGeneration
    assert not again.training
    assert torch.equal(again(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", DTYPES)
def test_loading_in_a_dtype_equals_converting_afterwards(name: str, variant: str, tmp_path: Path) -> None:
    model, batch, dtype = tiny_model(**VARIANTS[variant]), random_batch(), DTYPES[name]
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}
    assert torch.equal(again(**batch).logits, model.to(dtype)(**batch).logits)


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_is_saved_and_restored(name: str, tmp_path: Path) -> None:
    model, batch = tiny_model().to(DTYPES[name]), random_batch()
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert again.dtype == DTYPES[name]
    assert torch.equal(again(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("load", [load_by_auto_class, load_where_there_is_room])
def test_sharded_checkpoint_loads_like_a_single_file(load: Callable, variant: str, tmp_path: Path) -> None:
    model, batch = tiny_model(**VARIANTS[variant]), random_batch()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(load(tmp_path)(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_weight_is_missing_or_unexpected(variant: str, tmp_path: Path) -> None:
    tiny_model(**VARIANTS[variant]).save_pretrained(tmp_path)
    _, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_weights_are_tied_after_loading(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    for load in LOADERS:
        model = load(tmp_path)
        model.tie_weights()  # to_empty gives every module its own matrix
        shared = model.model.shared.weight
        assert model.lm_head.weight is shared
        assert model.model.encoder.embed_tokens.weight is shared
        assert model.model.decoder.embed_tokens.weight is shared


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
@pytest.mark.parametrize("tied", [True, False])
def test_tied_matrix_is_stored_once(tied: bool, sharded: bool, tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if sharded else {}))
    stored = weights_on_disk(tmp_path)
    matrices = {name for name, shape in stored.items() if shape == (99, 32)}
    assert matrices == ({"model.shared.weight"} if tied else {"model.shared.weight", "lm_head.weight"})
    assert stored == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_saving_writes_only_json_and_safetensors(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    tiny_model().save_pretrained(tmp_path, max_shard_size="20KB")
    assert {path.suffix for path in tmp_path.rglob("*")} == {".json", ".safetensors"}


def test_no_pickle_is_read_or_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_pickle(monkeypatch)
    with pytest.raises(AssertionError, match="a pickle"):
        torch.load(tmp_path / "anything")
    model, tokenizer, batch = tiny_model(), small_tokenizer(), random_batch()
    save(tmp_path, model, tokenizer)
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


IMPORT_WITHOUT_A_NETWORK = """
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

config = transformers.AutoConfig.for_model("vaswani_transformer", vocab_size=9, d_model=8, num_heads=2, d_ff=8)
assert type(transformers.AutoModel.from_config(config)).__module__ == "vaswani_transformer.model"
assert type(transformers.AutoModelForSeq2SeqLM.from_config(config)).__module__ == "vaswani_transformer.model"
"""


@pytest.mark.slow
def test_import_registers_the_package_and_does_nothing_else(tmp_path: Path) -> None:
    home: dict[str, Any] = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    assert run_python(IMPORT_WITHOUT_A_NETWORK, **home) == ""
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


LOAD_WITHOUT_THE_PACKAGE = """
import json, sys

sys.modules["vaswani_transformer"] = None  # even if it is installed

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

folder, text = sys.argv[1:]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
body = AutoModel.from_pretrained(folder, trust_remote_code=True)
assert all("transformers_modules" in type(each).__module__ for each in (config, tokenizer, model, body))
batch = tokenizer([text, "hola"], text_target=["hola mundo", text], padding=True, return_tensors="pt")
outputs = model(**batch)
generated = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], num_beams=2, max_new_tokens=5)
print(json.dumps([batch["input_ids"].tolist(), outputs.logits.tolist(), generated.tolist()]))
"""


@pytest.mark.slow
def test_saved_folder_contains_the_code_that_loads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for component, auto_class in [
        (VaswaniTransformerConfig, "AutoConfig"),
        (VaswaniTransformerForConditionalGeneration, "AutoModelForSeq2SeqLM"),
        (VaswaniTransformerTokenizer, "AutoTokenizer"),
    ]:
        monkeypatch.setattr(component, "_auto_class", None)  # restored after the test
        component.register_for_auto_class(auto_class)
    folder, elsewhere = tmp_path / "published", tmp_path / "elsewhere"
    elsewhere.mkdir()
    tokenizer = small_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    save(folder, model, tokenizer)
    assert json.loads((folder / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "config.VaswaniTransformerConfig",
        "AutoModel": "model.VaswaniTransformerModel",
        "AutoModelForSeq2SeqLM": "model.VaswaniTransformerForConditionalGeneration",
    }
    assert json.loads((folder / "tokenizer_config.json").read_text())["auto_map"] == {
        "AutoTokenizer": ["tokenizer.VaswaniTransformerTokenizer", None]
    }

    text = "hello world, ¿qué tal? </s>"
    output = run_python(LOAD_WITHOUT_THE_PACKAGE, str(folder), text, folder=elsewhere, HF_HOME=str(tmp_path / "home"))
    batch = tokenizer([text, "hola"], text_target=["hola mundo", text], padding=True, return_tensors="pt")
    source: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")}
    tokens, logits, generated = json.loads(output)
    assert tokens == batch["input_ids"].tolist()
    torch.testing.assert_close(torch.tensor(logits), model(**batch).logits.detach())
    assert generated == model.generate(**source, num_beams=2, max_new_tokens=5).tolist()
