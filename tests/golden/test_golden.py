"""Checkpoints of earlier versions load, and give what they gave: configuration, tokens, logits, translations."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.batches import FLOAT32
from tests.golden import FOLDER, first_pairs, load, numbers, translations
from tests.models import load_tokenizer
from vaswani_transformer.registration import FAMILIES

FOLDERS = [path.parent for path in sorted(FOLDER.glob("*/*/expected.json"))]
OF_THE_FOLDER = {"auto_map", "custom_pipelines", "dtype", "model_type", "transformers_version"}  # no fields
EACH = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")


def test_each_family_has_a_golden_checkpoint() -> None:
    saved = {json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] for folder in FOLDERS}
    assert saved == {family.model_class.config_class.model_type for family in FAMILIES.values()}


@EACH
def test_golden_checkpoint_keeps_its_configuration_and_search(folder: Path) -> None:
    """A field that the configuration lacks would be kept as an attribute that nothing reads."""
    model, _ = load(folder, torch.float32)
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fields = {name: value for name, value in fields.items() if name not in OF_THE_FOLDER}
    assert fields.keys() <= {field.name for field in dataclasses.fields(model.config)}
    assert {name: getattr(model.config, name) for name in fields} == fields
    search = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    search = {name: value for name, value in search.items() if name not in OF_THE_FOLDER}
    assert {name: getattr(model.generation_config, name) for name in search} == search


@EACH
def test_golden_tokenizer_gives_the_same_token_ids(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(folder)
    assert {text: tokenizer(text)["input_ids"] for text in expected["tokens"]} == expected["tokens"]


@EACH
def test_golden_model_computes_the_same_numbers(folder: Path) -> None:
    """They were computed in float64, so that a difference has only the rounding of float32."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    computed = numbers(*load(folder, torch.float32), first_pairs(expected))
    torch.testing.assert_close(computed, load_file(folder / "expected.safetensors"), **FLOAT32)


@EACH
def test_golden_model_translates_the_same(folder: Path) -> None:
    """The margins are large: no token and no length has a probability below 0.9."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    model, tokenizer = load(folder, torch.float32)
    assert translations(model, tokenizer, list(expected["targets"])) == list(expected["targets"].values())
