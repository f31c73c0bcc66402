"""The section "Add a model of your own": its family trains by a recipe, loads by the Auto class and translates."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSeq2SeqLM

from tests import ROOT
from tests.command_parsers import blocks_of
from tests.models import load_tokenizer
from tests.training import runs
from vaswani_transformer.registration import FAMILIES

(BLOCK,) = blocks_of(ROOT / "docs" / "architecture.md", "python")


@pytest.mark.slow
def test_family_of_the_page_trains_loads_and_translates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "own_family"}
    before = dict(FAMILIES)
    exec(BLOCK, names)
    added = FAMILIES.pop("mirror")
    assert before == FAMILIES
    monkeypatch.setitem(FAMILIES, "mirror", added)

    results = runs.train_in(
        runs.make_arguments(tmp_path), tmp_path / "run", "--model.kind=mirror", "--training.steps=3"
    )
    assert results["steps"] == 3
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    assert type(model) is names["MirrorForConditionalGeneration"]
    batch = load_tokenizer(tmp_path / "run")(["one tree"], return_tensors="pt")
    assert model.generate(**batch).shape[0] == 1
