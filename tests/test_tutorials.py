"""The tutorials for readers with their own data or models: their commands and scripts run in their smallest form."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from tests.command_parsers import blocks_of, commands_of
from tests.helpers import ROOT, run_python
from tests.hub import Hub, client_environment, serving
from training.recipe import RECIPES, load_recipe
from training.train import run

DOCS = ROOT / "docs"
BOOKS = """
import datasets

rows = [{"id": str(n), "translation": {"en": f"book {n}", "it": f"libro {n}"}} for n in range(60)]
datasets.load_dataset = lambda *_, **__: datasets.Dataset.from_list(rows)
"""
SMALLER = {  # what the script of own-script.md has, and what its test has instead
    "vocab_size=8000": "vocab_size=300", "test_size=1000": "test_size=4", "=4096": "=40",
    "max_steps=10_000": "max_steps=4", "eval_steps=1000": "eval_steps=2", "save_steps=1000": "save_steps=2",
    "d_model=128": "d_model=16",
}  # fmt: skip
SMALL = [
    *("--tokenizer.vocab_size=300", "--data.validation=3", "--data.test=3", "--training.steps=2"),
    *("--training.evaluation_steps=2", "--model.d_model=16", "--model.d_ff=16", "--training.precision=fp32"),
]


@pytest.mark.slow
def test_own_pairs_become_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = [words[3:] for words in commands_of(DOCS / "own-data.md") if "training.train" in words]
    (recipe, *arguments), (_, *with_languages) = trainings[:2]
    monkeypatch.chdir(tmp_path)
    Path("pairs").mkdir()
    lines = [f"{n} trees and {m} dogs" for n in range(6) for m in range(6)]
    for source, target in (("source", "target"), ("en", "it")):
        Path(f"pairs/{source}.txt").write_text("\n".join(lines), encoding="utf-8")
        Path(f"pairs/{target}.txt").write_text("\n".join(line[::-1] for line in lines), encoding="utf-8")
    for given in (arguments, with_languages):
        run(load_recipe(ROOT / recipe, [*given, *SMALL]))
    results = json.loads(Path("runs/own/results.json").read_text(encoding="utf-8"))
    assert [results["data"][split]["pairs"] for split in ("train", "validation", "test")] == [30, 3, 3]
    assert Path("runs/en-it/model.safetensors").exists()


def test_options_for_other_files_are_those_of_a_recipe() -> None:
    text = (DOCS / "own-data.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| `(--data.*)` \|$", text, flags=re.MULTILINE)
    kinds = [load_recipe(RECIPES / "own.yaml", ["--data.path=pairs", *shlex.split(row)]).data.kind for row in rows]
    assert kinds == ["text", "csv", "csv", "json", "parquet"]


@pytest.mark.slow
def test_seq2seq_trainer_goes_from_a_data_set_to_the_hub_and_back(tmp_path: Path) -> None:
    """The script runs a few steps of a tiny model, on pairs that are not downloaded."""
    script, loading, *_ = blocks_of(DOCS / "own-script.md", "python")
    for large, small in SMALLER.items():
        assert large in script
        script = script.replace(large, small)
    with serving(Hub()) as url:
        environment = client_environment(url, tmp_path / "home") | {"PYTHONPATH": str(ROOT)}
        output = run_python(BOOKS + script, folder=tmp_path, **environment)
        loaded = run_python(
            f"import sys; sys.modules['vaswani_transformer'] = None\n{loading}", folder=tmp_path, **environment
        )
    assert output.count("'eval_bleu'") == 2
    first, _ = ast.literal_eval(output.splitlines()[-1])
    assert ast.literal_eval(loaded.splitlines()[-1]) == [first]
