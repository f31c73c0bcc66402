"""Published folders, and push and pull with huggingface_hub's client, against the small Hub of `hub`."""

import getpass
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel, AutoModelForSeq2SeqLM, pipeline
from transformers.generation import GenerationMixin

from tests import ROOT
from tests.commands import run_python
from tests.hub import Hub, client_environment, serving
from tests.models import family_of_pairs, load_tokenizer, model_of_pairs, paper_model_of_pairs, save, tiny_model
from tests.published import PUBLISHED_FILES, assert_same_results, load_without_the_package
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerModel,
    VaswaniTransformerTokenizer,
)
from vaswani_transformer.pipeline import TASK
from vaswani_transformer.registration import FAMILIES

PLAIN = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
CODE = PUBLISHED_FILES["autoregressive"]
CLASSES = (
    VaswaniTransformerConfig,
    VaswaniTransformerModel,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def is_unregistered(*components: Any) -> bool:
    """Return whether neither the classes nor these objects are registered for saving code."""
    return all(component._auto_class is None for component in (*CLASSES, *components))


def test_plain_save_has_no_code_after_a_save_with_code(tmp_path: Path) -> None:
    """A copy over the same weights and a pipeline have code; the objects, and those loaded from such a folder, none."""
    model, tokenizer = model_of_pairs()
    published = model.with_remote_code()
    assert all(weight is other for weight, other in zip(model.parameters(), published.parameters(), strict=True))
    save(tmp_path / "published", published, tokenizer.with_remote_code())
    pipeline(TASK, model=model, tokenizer=tokenizer, device="cpu").save_pretrained(tmp_path / "pipeline")
    for folder in (tmp_path / "published", tmp_path / "pipeline"):
        assert names(folder) == PLAIN | CODE
        loaded = AutoModelForSeq2SeqLM.from_pretrained(folder), load_tokenizer(folder)
        for number, components in enumerate(((model, tokenizer), loaded)):
            plain = save(folder / str(number), *components)
            assert names(plain) == PLAIN
            for name in ("config.json", "tokenizer_config.json"):
                assert "auto_map" in json.loads((folder / name).read_text())
                assert not {"auto_map", "custom_pipelines"} & json.loads((plain / name).read_text()).keys()
    assert is_unregistered(model, model.config, tokenizer)


def test_published_folder_names_the_body_too(tmp_path: Path) -> None:
    tiny_model().with_remote_code().save_pretrained(tmp_path / "whole")
    AutoModel.from_pretrained(tmp_path / "whole").with_remote_code().save_pretrained(tmp_path / "body")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("whole", "body")]
    body = {"AutoConfig": "config.VaswaniTransformerConfig", "AutoModel": "model.VaswaniTransformerModel"}
    assert ["custom_pipelines" in config for config in configs] == [True, False]
    assert [config["auto_map"] for config in configs] == [
        body | {"AutoModelForSeq2SeqLM": "model.VaswaniTransformerForConditionalGeneration"},
        body,
    ]


def test_every_head_names_generation_mixin_among_its_bases() -> None:
    """Else Transformers makes a new class at each load of published code, whose models cannot be pickled."""
    assert all(GenerationMixin in head.__bases__ for head in (family.model_class for family in FAMILIES.values()))


def test_failed_push_changes_nothing(tmp_path: Path) -> None:
    """Tests run offline, so every push fails at its first request."""
    model, tokenizer = model_of_pairs()
    for component in (model, tokenizer):
        with pytest.raises(OSError, match="offline"):
            component.push_to_hub("somebody/nowhere")
        component.save_pretrained(tmp_path)
    assert is_unregistered(model, model.config, tokenizer)
    assert names(tmp_path) == PLAIN


PUSH = """
import sys

import vaswani_transformer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

folder = sys.argv[1]
model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
model.push_to_hub("somebody/open", commit_message="the model")
tokenizer.push_to_hub("somebody/open", commit_message="the tokenizer")
model.save_pretrained(f"{folder}/at-once", push_to_hub=True, repo_id="somebody/at-once")
tokenizer.save_pretrained(f"{folder}/at-once", push_to_hub=True, repo_id="somebody/at-once")
"""


@pytest.mark.slow
def test_published_folders_load_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are saved with code by registered classes, by a pipeline, and again by their own code."""
    model, tokenizer = family_of_pairs("autoregressive")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<2es>"]})
    model.resize_token_embeddings(len(tokenizer))
    pipeline(TASK, model=model, tokenizer=tokenizer, device="cpu").save_pretrained(tmp_path / "pipeline")
    for component in (type(model.config), type(model), type(tokenizer)):
        monkeypatch.setattr(component, "_auto_class", None)  # restored after the test
        component.register_for_auto_class()
    save(tmp_path / "registered", model, tokenizer)
    folders = [tmp_path / name for name in ("pipeline", "registered", "registered-again")]
    loaded = load_without_the_package(tmp_path / "home", *((str(folder), "main") for folder in folders))
    for results, folder in zip(loaded, folders, strict=True):
        assert_same_results(results, folder)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Hub]:
    """Return a folder with a model and its tokenizer, and the Hub that they were pushed to."""
    folder, hub = tmp_path_factory.mktemp("made-on-this-machine"), Hub()
    save(folder, *paper_model_of_pairs())
    with serving(hub) as url:
        run_python(PUSH, str(folder), **client_environment(url, folder / "home"))
    return folder, hub


@pytest.mark.slow
def test_push_is_one_commit_with_code_and_auto_map(pushed: tuple[Path, Hub]) -> None:
    _, hub = pushed
    assert hub.messages("somebody/open") == ["the model", "the tokenizer"]
    for name in ("somebody/open", "somebody/at-once"):
        assert set(hub.at(name).files) == PLAIN | CODE | {"README.md"}


@pytest.mark.slow
def test_push_has_no_pickle_and_no_trace_of_its_machine(pushed: tuple[Path, Hub]) -> None:
    folder, hub = pushed
    traces = [str(folder), folder.name, str(Path.home()), str(ROOT), "hf_of_somebody"]
    people = re.compile(rf"\b({re.escape(socket.gethostname())}|{re.escape(getpass.getuser())})\b".encode())
    for repository in hub.branches:
        for name, content in hub.at(repository).files.items():
            assert Path(name).suffix in {".json", ".md", ".py", ".safetensors"}
            assert not [trace for trace in traces if trace.encode() in content]
            assert Path(name).suffix not in {".json", ".md"} or not people.search(content)


@pytest.mark.slow
def test_pull_without_the_package_gives_the_pushed_model(pushed: tuple[Path, Hub], tmp_path: Path) -> None:
    folder, hub = pushed
    commit = ("somebody/open", hub.at("somebody/open").sha)
    with serving(hub) as url:
        (results,) = load_without_the_package(tmp_path, commit, **client_environment(url, tmp_path))
    assert_same_results(results, folder)
