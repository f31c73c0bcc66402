"""The report on sentence pairs that look wrong, and dropping them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.commands import user_error, write_pairs
from training import look
from training.data import DESCRIPTIONS, describe_pairs, find_rows, load_pairs, without
from training.recipe import Recipe, recipe_of
from training.texts import SIDES, whole_tables

PAIRS = [
    ("Press <b>OK</b>.", "OK dr\u00fccken."),
    ("Fish &amp; chips", "Fisch & Pommes"),
    ("n/a", "fehlt noch"),
    ("STOP HERE", "HALT"),
    ("Berlin", "Berlin"),
    ("A red house.", "Ein rotes Haus."),
    ("A red house.", "Ein rotes Haus."),
    ("A short text.", "Ein Text, der kein Ende findet, und noch einen Satz hat, und noch einen, und noch einen."),
    ("1 < 2 and 3 > 2, R&D", "1 < 2 und 3 > 2, R&D"),
    ("OK NO", "OK"),
    ("A red house.", "Ein Haus, rot."),
]
FOUND = {
    "markup": [0],
    "entities": [1],
    "placeholders": [2],
    "capitals": [3, 9],
    "copies": [4],
    "duplicates": [6],
    "ratios": [7],
}


def dataset(pairs: Iterable[tuple[str, str]]) -> datasets.Dataset:
    return datasets.Dataset.from_list([dict(zip(SIDES, pair, strict=True)) for pair in pairs])


def test_each_kind_is_found_where_it_is() -> None:
    found = {name: rows.tolist() for name, rows in find_rows(dataset(PAIRS)).items()}
    assert found == FOUND
    assert found.keys() == DESCRIPTIONS.keys()


def test_usual_ratio_is_that_of_the_data() -> None:
    """In some languages every target is longer."""
    pairs = [("ab" * number, "abcdefgh" * number) for number in range(10, 40)]
    assert not len(find_rows(dataset(pairs))["ratios"])
    assert find_rows(dataset([*pairs, ("a" * 99, "a" * 99)]))["ratios"].tolist() == [30]


def test_report_has_an_example_of_each_kind_that_occurs() -> None:
    lines = list(describe_pairs("train", dataset(PAIRS)))
    assert lines[0] == "train: 11 pairs, source 12 (median) to 20 characters, target 14 (median) to 88 characters"
    assert lines[1] == "  markup: 1 pair (markup such as <b>), first 'Press <b>OK</b>.' -> 'OK dr\u00fccken.'"
    assert len(lines) == 1 + len(FOUND)
    assert list(describe_pairs("train", dataset(PAIRS[5:6])))[1:] == []
    assert list(describe_pairs("train", dataset(PAIRS[:1]).select([]))) == []


def test_pairs_of_some_kinds_are_dropped_and_counted() -> None:
    left, counts = without(dataset(PAIRS), ["copies", "duplicates"])
    assert counts == {"copies": 1, "duplicates": 1}
    assert list(zip(left["source"], left["target"], strict=True)) == PAIRS[:4] + PAIRS[5:6] + PAIRS[7:]


def recipe_for(folder: Path, file: str = "a.jsonl", **data: Any) -> Recipe:
    """Return a recipe whose splits are one file, unless `data` names them."""
    splits = dict.fromkeys(("train", "validation", "test"), file)
    return recipe_of({"data": {"kind": "json", "path": str(folder)} | splits | data})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pairs(tmp_path / "a.jsonl", PAIRS)
    write_pairs(tmp_path / "b.jsonl", [("One more.", "Noch einer."), PAIRS[5]])
    write_pairs(tmp_path / "copies.jsonl", [PAIRS[4]])
    return tmp_path


def test_dropped_training_pairs_are_not_held_out_and_other_files_stay(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    kinds = ["markup", "duplicates", "copies"]
    pairs = load_pairs(recipe_for(folder, "a.jsonl", drop=kinds))
    assert "Dropped: markup 1, duplicates 1, copies 1." in caplog.text
    assert [len(pairs[split]) for split in ("train", "validation", "test")] == [8, 11, 11]
    held_out = load_pairs(recipe_for(folder, "a.jsonl", drop=kinds, validation=3, test=2))
    assert len(held_out["train"]) == 3
    assert not any("<b>" in source for rows in held_out.values() for source in rows["source"])
    with user_error("data.drop: leaves no training pair"):
        load_pairs(recipe_for(folder, "copies.jsonl", drop=["copies"]))


def test_corpora_have_weights(folder: Path) -> None:
    recipe = recipe_for(folder, "a.jsonl", train=["a.jsonl", "b.jsonl"], weights=[1, 3])
    train = load_pairs(recipe)["train"]
    assert train.column_names == list(SIDES)
    expected = [*PAIRS, *[pair for pair in (("One more.", "Noch einer."), PAIRS[5]) for _ in range(3)]]
    assert list(zip(train["source"], train["target"], strict=True)) == expected

    # A held-out pair is in no corpus.
    pairs = load_pairs(recipe_for(folder, train=["a.jsonl", "b.jsonl"], weights=[1, 3], validation=4, test=4))
    trained = set(pairs["train"]["source"])
    for split in ("validation", "test"):
        assert pairs[split].column_names == list(SIDES)
        assert not trained & set(pairs[split]["source"])
    with user_error("data.weights: has a number for each corpus of data.train; got 1, expected 2"):
        recipe_for(folder, train=["a.jsonl", "b.jsonl"], weights=[1])
    with user_error("data.drop: trees stay as they are"):
        recipe_for(folder, kind="trees", drop=["copies"])


def test_look_prints_a_report_of_each_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = folder / "recipe.yaml"
    data = {"path": str(folder), "train": ["a.jsonl", "b.jsonl"], "validation": "b.jsonl", "test": None}
    recipe.write_text(json.dumps({"data": data}), encoding="utf-8")
    look.main([str(recipe), "--data.drop=[markup]"])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].startswith("train: 12 pairs")
    assert "duplicates: 2 pairs (repetitions" in printed
    assert "validation: 2 pairs" in printed
    assert "markup" not in printed


def test_selected_rows_are_read_in_whole_columns() -> None:
    """A selection has a chunk for each row, for each of which Arrow would compile every regular expression anew."""
    pairs = dataset(PAIRS).select([0, 2, 5])
    (table,) = whole_tables(pairs)
    assert [column.num_chunks for column in table.columns] == [1] * table.num_columns
    assert table["source"].to_pylist() == pairs["source"][:]
