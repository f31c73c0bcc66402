"""Push and pull with huggingface_hub's client over HTTP, against the small Hub of `hub_server`."""

import getpass
import json
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from tests.helpers import (
    PAIRS,
    ROOT,
    load_tokenizer,
    model_of_pairs,
    paper_model_of_pairs,
    run_python,
    save,
    tiny_model,
)
from tests.hub_server import client_environment, serving
from tests.hub_state import Hub
from tests.published import PUBLISHED_FILES
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerModel,
    VaswaniTransformerTokenizer,
)

TOKEN = "hf_of_somebody"
PLAIN = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
CODE = PUBLISHED_FILES["transformer"]
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
    model, tokenizer = model_of_pairs()
    for component in (model, tokenizer):
        component.with_remote_code().save_pretrained(tmp_path / "published")
        component.save_pretrained(tmp_path / "plain")
    assert names(tmp_path / "published") == PLAIN | CODE
    assert names(tmp_path / "plain") == PLAIN
    assert is_unregistered(model, model.config, tokenizer)
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" in json.loads((tmp_path / "published" / name).read_text())
        assert "auto_map" not in json.loads((tmp_path / "plain" / name).read_text())


def test_model_loaded_from_a_published_folder_saves_without_code(tmp_path: Path) -> None:
    for component in model_of_pairs():
        component.with_remote_code().save_pretrained(tmp_path / "published")
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "published").save_pretrained(tmp_path / "again")
    load_tokenizer(tmp_path / "published").save_pretrained(tmp_path / "again")
    assert names(tmp_path / "again") == PLAIN
    assert "auto_map" not in (tmp_path / "again" / "config.json").read_text()
    assert "auto_map" not in (tmp_path / "again" / "tokenizer_config.json").read_text()


def test_published_folder_names_the_body_too(tmp_path: Path) -> None:
    model = tiny_model()
    model.with_remote_code().save_pretrained(tmp_path / "whole")
    model.model.with_remote_code().save_pretrained(tmp_path / "body")
    maps = [json.loads((tmp_path / name / "config.json").read_text())["auto_map"] for name in ("whole", "body")]
    body = {"AutoConfig": "config.VaswaniTransformerConfig", "AutoModel": "model.VaswaniTransformerModel"}
    assert maps == [body | {"AutoModelForSeq2SeqLM": "model.VaswaniTransformerForConditionalGeneration"}, body]


def test_copy_with_code_shares_weights_and_logits() -> None:
    model, tokenizer = model_of_pairs()
    published, batch = model.with_remote_code(), tokenizer(list(PAIRS), padding=True, return_tensors="pt")
    assert all(parameter is other for parameter, other in zip(model.parameters(), published.parameters(), strict=True))
    targets = batch["input_ids"]
    assert torch.equal(
        published(**batch, decoder_input_ids=targets).logits, model(**batch, decoder_input_ids=targets).logits
    )


def test_failed_push_changes_nothing(tmp_path: Path) -> None:
    """Tests run offline, so every push fails at its first request."""
    model, tokenizer = model_of_pairs()
    for component in (model, tokenizer):
        with pytest.raises(OSError, match="offline"):
            component.push_to_hub("somebody/nowhere")
        component.save_pretrained(tmp_path)
    assert is_unregistered(model, model.config, tokenizer)
    assert names(tmp_path) == PLAIN


def test_models_save_without_code_while_another_is_published(tmp_path: Path) -> None:
    published, other = tiny_model(), tiny_model()
    is_done = threading.Event()

    def publish() -> None:
        while not is_done.is_set():
            published.with_remote_code().save_pretrained(tmp_path / "published")

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        for turn in range(5):
            other.save_pretrained(tmp_path / str(turn))
            assert not list((tmp_path / str(turn)).glob("*.py"))
            assert "auto_map" not in (tmp_path / str(turn) / "config.json").read_text()
    finally:
        is_done.set()
        thread.join()
    assert list((tmp_path / "published").glob("*.py"))


PUSH = """
import sys

import vaswani_transformer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

folder = sys.argv[1]
model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
for name, private in (("somebody/open", False), ("somebody/secret", True)):
    model.push_to_hub(name, private=private, commit_message="the model")
    tokenizer.push_to_hub(name, commit_message="the tokenizer")
model.save_pretrained(f"{folder}/at-once", push_to_hub=True, repo_id="somebody/at-once")
tokenizer.save_pretrained(f"{folder}/at-once", push_to_hub=True, repo_id="somebody/at-once")
model.lm_head.weight.data *= 2
model.push_to_hub("somebody/open", revision="later", commit_message="another model")
"""

STOCK = """
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from tests.helpers import model_of_pairs

model, tokenizer = model_of_pairs()
arguments = Seq2SeqTrainingArguments("stock", hub_model_id="somebody/stock", report_to="none", use_cpu=True)
trainer = Seq2SeqTrainer(model, arguments, processing_class=tokenizer)
trainer.push_to_hub("plain")
for component in (model, tokenizer):
    type(component).register_for_auto_class()
trainer.push_to_hub("registered")
"""

PULL = """
import json, sys

has_package, revisions, texts = json.loads(sys.argv[1])
trust = {} if has_package else {"trust_remote_code": True}
if has_package:
    import vaswani_transformer
else:  # only torch, Transformers and what they need
    for name in ("vaswani_transformer", "accelerate", "datasets", "evaluate", "sacrebleu", "peft"):
        sys.modules[name] = None

from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

results = []
for name, revision in revisions:
    at = trust | {"revision": revision}
    tokenizer = AutoTokenizer.from_pretrained(name, **at)
    model = AutoModelForSeq2SeqLM.from_pretrained(name, **at)
    components = (tokenizer, model, AutoModel.from_pretrained(name, **at))
    assert {type(component).__module__.split(".")[0] for component in components} == (
        {"vaswani_transformer"} if has_package else {"transformers_modules"}
    )
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    logits = model(**batch, decoder_input_ids=batch["input_ids"]).logits
    generated = model.generate(**batch)
    translator = pipeline("vaswani-translation", model=name, device="cpu", **at)
    written = [record["translation_text"] for record in translator(texts, batch_size=len(texts))]
    assert written == tokenizer.batch_decode(generated, skip_special_tokens=True)
    results.append([batch["input_ids"].tolist(), logits.tolist(), generated.tolist()])
print(json.dumps(results))
"""


def local_results(folder: Path, texts: list[str]) -> tuple[list, torch.Tensor, list]:
    """Return the expected ids, logits and translations of a pulled model."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), load_tokenizer(folder)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    logits = model(**batch, decoder_input_ids=batch["input_ids"]).logits.detach()
    return batch["input_ids"].tolist(), logits, model.generate(**batch).tolist()


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Hub]:
    """Return a folder with a model and its tokenizer, and the Hub that they were pushed to."""
    folder, hub = tmp_path_factory.mktemp("made-on-this-machine"), Hub()
    save(folder, *paper_model_of_pairs())
    with serving(hub) as url:
        run_python(PUSH, str(folder), **client_environment(url, folder / "home"))
    return folder, hub


def pull(hub: Hub, home: Path, has_package: bool, *revisions: tuple[str, str], token: str | None = TOKEN) -> list:
    elsewhere = home / "elsewhere"
    elsewhere.mkdir(parents=True)
    arguments = json.dumps([has_package, revisions, list(PAIRS)])
    path = {"PYTHONPATH": str(ROOT)} if has_package else {}
    with serving(hub) as url:
        environment = client_environment(url, home, token) | path
        return json.loads(run_python(PULL, arguments, folder=elsewhere, **environment))


@pytest.mark.slow
def test_push_is_one_commit_with_code_and_auto_map(pushed: tuple[Path, Hub]) -> None:
    _, hub = pushed
    for name in ("somebody/open", "somebody/secret"):
        assert hub.messages(name) == ["the model", "the tokenizer"]
        assert set(hub.files(name)) == PLAIN | CODE | {"README.md"}
    assert hub.messages("somebody/open", "later") == ["the model", "the tokenizer", "another model"]
    assert set(hub.files("somebody/at-once")) == PLAIN | CODE | {"README.md"}
    assert (hub.repositories["somebody/open"].private, hub.repositories["somebody/secret"].private) == (False, True)


@pytest.mark.slow
def test_push_has_no_pickle_and_no_trace_of_its_machine(pushed: tuple[Path, Hub]) -> None:
    folder, hub = pushed
    traces = [str(folder), folder.name, str(Path.home()), str(ROOT), TOKEN]
    people = re.compile(rf"\b({re.escape(socket.gethostname())}|{re.escape(getpass.getuser())})\b".encode())
    for repository in hub.repositories:
        for name, content in hub.files(repository).items():
            assert Path(name).suffix in {".json", ".md", ".py", ".safetensors"}
            assert not [trace for trace in traces if trace.encode() in content]
            assert Path(name).suffix not in {".json", ".md"} or not people.search(content)


@pytest.mark.slow
def test_pull_without_the_package_gives_the_pushed_model_at_every_revision(
    pushed: tuple[Path, Hub], tmp_path: Path
) -> None:
    folder, hub = pushed
    commit = hub.repositories["somebody/open"].branches["main"]
    revisions = [("somebody/open", "main"), ("somebody/open", commit), ("somebody/secret", "main")]
    *same, later = pull(hub, tmp_path, False, *revisions, ("somebody/open", "later"))
    tokens, logits, translations = local_results(folder, list(PAIRS))
    for results in same:
        assert (results[0], results[2]) == (tokens, translations)
        torch.testing.assert_close(torch.tensor(results[1]), logits)
    assert later[0] == tokens
    assert not torch.allclose(torch.tensor(later[1]), logits)


@pytest.mark.slow
def test_pull_with_the_package_needs_no_trust(pushed: tuple[Path, Hub], tmp_path: Path) -> None:
    folder, hub = pushed
    results = pull(hub, tmp_path, True, ("somebody/open", "main"), ("somebody/at-once", "main"))
    tokens, logits, translations = local_results(folder, list(PAIRS))
    for result_tokens, result_logits, result_translations in results:
        assert (result_tokens, result_translations) == (tokens, translations)
        torch.testing.assert_close(torch.tensor(result_logits), logits)


@pytest.mark.slow
def test_private_repository_needs_a_token(pushed: tuple[Path, Hub], tmp_path: Path) -> None:
    _, hub = pushed
    with pytest.raises(AssertionError, match=r"(?s)somebody/secret.*(private|not a valid model)"):
        pull(hub, tmp_path, False, ("somebody/secret", "main"), token=None)


@pytest.mark.slow
def test_stock_trainer_pushes_code_only_of_registered_classes(tmp_path: Path) -> None:
    hub = Hub()
    with serving(hub) as url:
        environment = client_environment(url, tmp_path / "home") | {"PYTHONPATH": str(ROOT)}
        run_python(STOCK, folder=tmp_path, **environment)
    assert hub.messages("somebody/stock") == ["plain", "registered"]
    repository = hub.repositories["somebody/stock"]
    before, after = (set(hub.files("somebody/stock", sha)) for sha in list(repository.commits)[1:])
    assert before == PLAIN | {"README.md", "training_args.bin"}
    assert after == before | CODE


def test_hub_server_answers_only_locally_and_stops() -> None:
    with serving(Hub()) as url:
        host, port = url.removeprefix("http://").split(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port)), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
