"""The files of code that a published repository of each model family has, and what a model computes by them alone."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

from tests.commands import run_python
from tests.models import load_tokenizer

COMMON_FILES = {
    "config.py",
    "generation.py",
    "layers.py",
    "loss.py",
    "model.py",
    "pipeline.py",
    "pretrained.py",
    "restricted.py",
    "search.py",
    "settings.py",
    "stacks.py",
    "tokenizer.py",
}
PARALLEL_FILES = COMMON_FILES | {"nar.py", "nar_decoder.py"}  # of models that predict all words at once
LENGTH_FILES = PARALLEL_FILES | {"lengths.py"}  # of those that predict a length first
PUBLISHED_FILES = {
    "autoregressive": COMMON_FILES,
    "nat": LENGTH_FILES | {"nat.py"},
    "ctc": PARALLEL_FILES | {"slots.py", "prefix_search.py", "ctc.py"},
    "dag": PARALLEL_FILES | {"slots.py", "dag.py"},
    "iterative_vae": LENGTH_FILES | {"discrete.py", "iterative_vae.py", "nat.py"},
    "flowseq": LENGTH_FILES | {"flowseq.py", "nat.py"},
    "cmlm": LENGTH_FILES | {"cmlm.py"},
}
TEXTS = ["<2es> what is your name", "the cat is black", "hola"]

LOAD = """
import json, sys

for name in ("vaswani_transformer", "accelerate", "datasets", "evaluate", "sacrebleu", "peft"):
    sys.modules[name] = None  # only torch, Transformers and what they need, even if more is installed

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

revisions, texts = json.loads(sys.argv[1])
results = []
for name, revision in revisions:
    at = {"revision": revision, "trust_remote_code": True}
    auto_classes = (AutoConfig, AutoTokenizer, AutoModelForSeq2SeqLM, AutoModel)
    components = config, tokenizer, model, body = [each.from_pretrained(name, **at) for each in auto_classes]
    translators = [pipeline(task, model=name, device="cpu", **at) for task in ("vaswani-translation", None)]
    modules = [type(each).__module__.split(".") for each in (*components, *translators)]
    assert {module[0] for module in modules} == {"transformers_modules"}
    assert len({module[1] for module in modules}) == 1  # all from the code of this repository
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    logits = model(**batch, decoder_input_ids=batch["input_ids"]).logits
    generated = model.generate(**batch, max_new_tokens=12)
    written = tokenizer.batch_decode(generated, skip_special_tokens=True)
    for translate in translators:
        records = translate(texts, batch_size=len(texts), max_new_tokens=12)
        assert [record["translation_text"] for record in records] == written
    names = [type(each).__name__ for each in components]
    results.append([logits.tolist(), names, batch["input_ids"].tolist(), generated.tolist()])
    if [f"{name}-again", revision] in revisions:
        for each in (model, tokenizer):
            each.save_pretrained(f"{name}-again")
print(json.dumps(results))
"""


def load_without_the_package(home: Path, *revisions: tuple[str, str], **environment: Any) -> list:
    """Return the results of models, given by name and revision, that another process computes with their own code."""
    (elsewhere := home / "elsewhere").mkdir(parents=True)
    arguments = json.dumps([revisions, TEXTS])
    return json.loads(run_python(LOAD, arguments, folder=elsewhere, **{"HF_HOME": str(home)} | environment))


def assert_same_results(results: list, folder: Path) -> None:
    """Compare results with those of the package for a saved model: logits, names of classes, ids and translations."""
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    logits = model(**batch, decoder_input_ids=batch["input_ids"]).logits.detach()
    classes = [type(each).__name__ for each in (model.config, tokenizer, model)] + [model.body_class.__name__]
    assert results[1:] == [classes, batch["input_ids"].tolist(), model.generate(**batch, max_new_tokens=12).tolist()]
    torch.testing.assert_close(torch.tensor(results[0]), logits)
