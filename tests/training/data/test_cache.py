"""Large sets are read and tokenized once: a later run, another rank and a run after a kill take what is on the disk."""

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import pytest

from tests.helpers import model_of_pairs, no_space, user_error, write_pairs
from training.data import cache, pairs, tokenizing
from training.data.pairs import load_pairs
from training.data.tokenizing import tokenize
from training.recipe.fields import DataRecipe

TOKENIZER = model_of_pairs()[1]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataRecipe:
    """Return a set of 25 pairs, in parts of ten, that counts as large."""
    monkeypatch.setattr(cache, "CACHED_BYTES", 1)
    monkeypatch.setattr(cache, "PART", 10)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_pairs(tmp_path / "train.jsonl", [("a tree " * (n % 4 + 1), f"baum {n}") for n in range(25)])
    fields: dict[str, Any] = {"path": str(tmp_path), "validation": None, "test": None, "max_length": 30}
    return DataRecipe(kind="json", train="train.jsonl", source="en", target="de", **fields)


def encoded(recipe: DataRecipe) -> datasets.Dataset:
    return tokenize(load_pairs(recipe), TOKENIZER, recipe)["train"]


def folder_of_tokens(tmp_path: Path) -> Path:
    (record,) = (path for path in tmp_path.glob("cache/*/*/complete.json") if "pairs.arrow" not in path.read_text())
    return record.parent


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, calls: list[int]) -> None:
    function: Callable = getattr(module, name)

    def counted(first: Any, second: Any, *more: Any) -> Any:
        calls.append(len(second))
        return function(first, second, *more)

    monkeypatch.setattr(module, name, counted)


def test_large_set_is_read_and_tokenized_once(recipe: DataRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    count_calls(monkeypatch, pairs, "read_file", calls)
    count_calls(monkeypatch, tokenizing, "token_ids", calls)
    first = encoded(recipe)
    assert len(first.cache_files) == 3
    assert calls == [len("train.jsonl"), 10, 10, 5]
    assert encoded(recipe).to_list() == first.to_list()
    shorter = encoded(dataclasses.replace(recipe, max_length=20))  # other pairs of the same tokens
    assert len(shorter) < len(first)
    assert len(calls) == 4
    monkeypatch.setattr(cache, "CACHED_BYTES", 2**20)
    assert encoded(recipe).to_list() == first.to_list()
    assert len(calls) > 4


@pytest.mark.slow
def test_processes_tokenize_shares_of_a_part_in_order(recipe: DataRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokenize(load_pairs(recipe), TOKENIZER, dataclasses.replace(recipe, max_length=29))["train"].to_list()
    monkeypatch.setattr(cache, "num_cores", lambda: 2)
    monkeypatch.setattr(cache, "PAIRS_A_PROCESS", 2)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", f"{datasets.config.HF_DATASETS_CACHE}-two")
    shared = encoded(recipe)
    assert len(shared.cache_files) == 6
    assert shared.to_list() == expected
    assert encoded(recipe).to_list() == expected


def test_run_after_a_kill_tokenizes_the_missing_parts_only(
    recipe: DataRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    expected = encoded(recipe).to_list()
    folder = folder_of_tokens(tmp_path)
    (folder / "complete.json").unlink()
    (folder / "00001.arrow").unlink()
    (folder / "tmpx").touch()
    count_calls(monkeypatch, tokenizing, "token_ids", calls)
    assert encoded(recipe).to_list() == expected
    assert calls == [10]
    assert not (folder / "tmpx").exists()


def test_set_that_another_run_writes_at_the_same_time_is_waited_for(
    recipe: DataRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    count_calls(monkeypatch, tokenizing, "token_ids", calls)
    texts = load_pairs(recipe)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: tokenize(texts, TOKENIZER, recipe)["train"].to_list(), range(2))
    assert one == other
    assert calls == [10, 10, 5]


def test_damaged_file_is_written_again(recipe: DataRecipe, tmp_path: Path) -> None:
    expected = encoded(recipe).to_list()
    for path in tmp_path.glob("cache/*/*/*.arrow"):
        path.write_bytes(path.read_bytes()[:-9])
    assert encoded(recipe).to_list() == expected


def test_full_disk_is_one_line_before_anything_is_tokenized(
    recipe: DataRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage(7))
    with user_error(r"disk is too full for the pairs; got 0\.00 GB free, .* HF_DATASETS_CACHE\.$"):
        encoded(recipe)

    monkeypatch.undo()
    monkeypatch.setattr(cache, "CACHED_BYTES", 1)
    monkeypatch.setattr(cache, "write_pairs", no_space)
    with user_error(r"cannot be written: No space left on device; free some space"):
        encoded(recipe)


def test_space_that_a_killed_run_has_filled_is_not_needed_again(
    recipe: DataRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded(recipe)
    folder, usage = folder_of_tokens(tmp_path), namedtuple("usage", "free")
    for name in ("complete.json", "00002.arrow"):
        (folder / name).unlink()
    written = sum(path.stat().st_size for path in folder.glob("*.arrow"))
    free = max(0, load_pairs(recipe)["train"].data.nbytes - written)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage(free))
    assert len(encoded(recipe)) == 25


def test_set_is_tokenized_in_memory_where_nothing_can_be_written(
    recipe: DataRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "file" / "cache"))
    assert not encoded(recipe).cache_files


def test_tokens_stay_in_memory_where_only_the_pairs_could_be_written(
    recipe: DataRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = load_pairs(recipe)
    assert read["train"].cache_files
    monkeypatch.setattr(cache, "cache_folder", lambda *_: None)
    assert not tokenize(read, TOKENIZER, recipe)["train"].cache_files
