"""The tutorials for readers with their own data or models: their commands and scripts run in their smallest form."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.command_parsers import blocks_of, commands_of
from tests.helpers import ROOT
from training.recipe import RECIPES, load_recipe
from training.train import run

DOCS = ROOT / "docs"
SMALL = [
    *("--tokenizer.vocab_size=300", "--data.validation=3", "--data.test=3", "--training.steps=2"),
    *("--training.evaluation_steps=2", "--model.d_model=16", "--model.d_ff=16", "--training.precision=fp32"),
]


def training_commands(page: str) -> list[list[str]]:
    """Return the arguments of each command of a page that trains."""
    commands = [words for block in blocks_of(DOCS / page, "bash") for words in commands_of(block)]
    return [words[3:] for words in commands if words[:3] == ["python", "-m", "training.train"]]


@pytest.mark.slow
def test_own_pairs_become_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe, *arguments), (_, *with_languages) = training_commands("own-data.md")[:2]
    monkeypatch.chdir(tmp_path)
    Path("pairs").mkdir()
    lines = [f"{n} trees and {m} dogs" for n in range(6) for m in range(6)]
    for source, target in (("source", "target"), ("en", "it")):
        Path(f"pairs/{source}.txt").write_text("\n".join(lines), encoding="utf-8")
        Path(f"pairs/{target}.txt").write_text("\n".join(line[::-1] for line in lines), encoding="utf-8")
    for given in (arguments, with_languages):
        run(load_recipe(ROOT / recipe, [*given, *SMALL]))
    results = json.loads(Path("runs/own/results.json").read_text(encoding="utf-8"))
    assert {split: each["pairs"] for split, each in results["data"].items()} == {
        "train": 30,
        "validation": 3,
        "test": 3,
    }
    assert Path("runs/en-it/model.safetensors").exists()


def test_options_for_other_files_are_those_of_a_recipe() -> None:
    text = (DOCS / "own-data.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| `(--data.*)` \|$", text, flags=re.MULTILINE)
    kinds = [load_recipe(RECIPES / "own.yaml", ["--data.path=pairs", *shlex.split(row)]).data.kind for row in rows]
    assert kinds == ["text", "csv", "csv", "json", "parquet"]
