"""Pairs are read in every format, checked, tokenized, and fingerprinted."""

import gzip
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import datasets
import pytest

from tests.helpers import user_error
from training import data as data_module
from training.data import (
    count_unknown,
    fingerprint,
    hold_out,
    load_data,
    load_pairs,
    make_tokenizer,
    sample_texts,
    to_pairs,
    tokenize,
)
from training.recipe import Recipe, recipe_of
from vaswani_transformer import VaswaniTransformerTokenizer

PAIRS = [("one tree", "ein baum"), ("two trees", "zwei bäume"), ("  three </s> ", "drei <pad>")]
SPLITS = ("train", "validation", "test")
TEXTS = {"source": ["one tree", "two trees", "three </s>"], "target": ["ein baum", "zwei bäume", "drei <pad>"]}


def json_line(source: Any, target: Any) -> str:
    return json.dumps({"translation": {"en": source, "de": target}}, ensure_ascii=False)


LINES = "".join(json_line(*pair) + "\n" for pair in PAIRS)
TABLE = datasets.Dataset.from_dict(dict(zip(("en", "de"), zip(*PAIRS, strict=True), strict=True)))
TABS = "en\tde\n" + "".join(f"{source}\t{target}\n" for source, target in PAIRS)


def recipe_for(
    folder: Path, file: str = "all.jsonl", tokenizer: dict[str, Any] | None = None, kind: str = "json", **data: Any
) -> Recipe:
    """Return a recipe for files in a folder; its splits are one file unless `data` names them."""
    data = {"kind": kind, "path": str(folder)} | dict.fromkeys(SPLITS, file) | data
    return recipe_of({"data": data, "tokenizer": tokenizer or {"vocab_size": 280}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "all.jsonl").write_text(LINES, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "name", "write"),
    [
        ("json", "a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(LINES.encode()))),
        ("json", "a.jsonl", TABLE.to_json),
        ("csv", "a.csv", TABLE.to_csv),
        ("csv", "a.tsv.gz", lambda path: path.write_bytes(gzip.compress(TABS.encode()))),
        ("parquet", "a.parquet", TABLE.to_parquet),
    ],
    ids=["field of both languages", "columns", "commas", "tabs", "Parquet"],
)
def test_pairs_are_the_same_in_every_format(tmp_path: Path, kind: str, name: str, write: Callable[[Path], Any]) -> None:
    write(tmp_path / name)
    pairs = load_pairs(recipe_for(tmp_path, name, kind=kind))
    assert {split: rows.to_dict() for split, rows in pairs.items()} == dict.fromkeys(SPLITS, TEXTS)


def test_plain_column_may_be_named_translation() -> None:
    rows = datasets.Dataset.from_dict({"text": ["one"], "translation": ["eins"]})
    recipe: Any = SimpleNamespace(data=SimpleNamespace(source="text", target="translation", empty="error"))
    assert to_pairs(rows, recipe, "train").to_dict() == {"source": ["one"], "target": ["eins"]}


def test_parallel_text_files_are_read_line_by_line(tmp_path: Path) -> None:
    """A byte-order mark is no text, and a line separator of Unicode ends no line."""
    (tmp_path / "a.en").write_bytes("\ufeffone\u2028more\r\ntwo\n".encode())
    (tmp_path / "a.de").write_bytes("\ufeffeins\nzwei\u0085mehr\n".encode())
    recipe = recipe_for(tmp_path, file="a.{language}", kind="text", test=None)
    expected = {"source": ["one\u2028more", "two"], "target": ["eins", "zwei\u0085mehr"]}
    assert load_pairs(recipe)["train"].to_dict() == expected
    (tmp_path / "a.de").write_text("eins\n")
    with user_error(r"data\.train: .*a\.en has 2 lines, and .*a\.de 1; pair the files line by line"):
        load_pairs(recipe)


def test_direction_of_the_pairs_can_be_reversed_and_a_set_may_lack_a_test_split(folder: Path) -> None:
    pairs = load_pairs(recipe_for(folder, source="de", target="en", test=None))
    assert {name: split["source"][0] for name, split in pairs.items()} == dict.fromkeys(SPLITS[:2], "ein baum")


def test_data_set_of_the_hub_is_loaded_by_split(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"translation": {"en": source, "de": target}, "id": 1} for source, target in PAIRS]
    load = Mock(return_value=datasets.Dataset.from_list(rows))
    monkeypatch.setattr(data_module, "load_dataset", load)
    fields = {"kind": "hub", "path": "own/set", "subset": "de-en", "train": "train", "validation": "dev", "test": None}
    pairs = load_pairs(recipe_of({"data": fields}))
    assert pairs["train"].to_dict() == TEXTS
    assert load.mock_calls == [call("own/set", "de-en", split=split) for split in ("train", "dev")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"^data\.train: .*bad\.jsonl cannot be read as json \(.*\); see data\.path and data\.kind"),
        ('{"text": "x"}', r"^data\.train: has no 'en'; it has text\. Set data\.source and data\.target"),
        (json_line("x", "  "), r"^data\.train: pairs with an empty text: 1, the first is pair 4; correct them"),
        (json_line("x", None), r"^data\.train: pairs with an empty text: 1, the first is pair 4; "),
    ],
)
def test_bad_file_is_an_error_of_one_line(tmp_path: Path, line: str, message: str) -> None:
    first = "" if "text" in line else LINES
    (tmp_path / "bad.jsonl").write_text(first + line, encoding="utf-8")
    with user_error(message):
        load_pairs(recipe_for(tmp_path, "bad.jsonl"), ["train"])


def test_pairs_with_an_empty_text_are_dropped_on_request_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_text(LINES + json_line("", "x") + "\n" + json_line("y", " "), encoding="utf-8")
    pairs = load_pairs(recipe_for(tmp_path, "a.jsonl", empty="drop"), ["train"])
    assert pairs["train"].to_dict() == TEXTS
    assert caplog.messages == ["data.train: dropped pairs with an empty text: 2."]


def test_held_out_sentences_occur_in_no_other_pair() -> None:
    train = datasets.Dataset.from_dict({"source": ["a", "a", "b", "c", "d", "e"], "target": [*"uvwwxy"]})
    splits = hold_out(train, {"validation": 1, "test": 1}, seed=1)
    assert sorted([*splits["validation"]["source"], *splits["test"]["source"]]) == ["d", "e"]
    assert list(splits["train"]["source"]) == ["a", "a", "b", "c"]
    with user_error("hold out 3 of 6 pairs, of which 2 have sentences that no other pair has; give fewer"):
        hold_out(train, {"validation": 2, "test": 1}, seed=1)


def test_quotation_marks_and_na_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('en\tde\n"Hi" she said.\t"Hallo\nNA\tnull"\n', encoding="utf-8")
    expected = {"source": ['"Hi" she said.', "NA"], "target": ['"Hallo', 'null"']}
    assert load_pairs(recipe_for(tmp_path, "a.tsv", kind="csv"), ["train"])["train"].to_dict() == expected
    (tmp_path / "a.csv").write_text('en,de\n"Yes, NA",NA\n', encoding="utf-8")
    pairs = load_pairs(recipe_for(tmp_path, "a.csv", kind="csv"), ["train"])
    assert pairs["train"].to_dict() == {"source": ["Yes, NA"], "target": ["NA"]}


def test_recipe_may_hold_pairs_out(folder: Path) -> None:
    recipe = recipe_for(folder, validation=1, test=1)
    pairs = load_pairs(recipe)
    for split in SPLITS:  # of a command that needs only one
        assert load_pairs(recipe, [split])[split].to_dict() == pairs[split].to_dict()
    assert {name: len(rows) for name, rows in pairs.items()} == dict.fromkeys(SPLITS, 1)


def test_trees_are_read_as_sentences_and_linear_trees(tmp_path: Path) -> None:
    tree = "(S (NP-SBJ (DT the) (NN dog)) (VP (VBZ barks)) (. .))\n"
    for name in ("a.mrg", "b.mrg"):
        (tmp_path / name).write_text(tree)
    (tmp_path / "c.mrg.gz").write_bytes(gzip.compress(tree.encode()))
    recipe = recipe_for(
        tmp_path, kind="trees", target="trees", train="[ab].mrg", validation="c.mrg.gz", test="a.mrg c*"
    )
    pairs = load_pairs(recipe)
    assert {name: len(rows) for name, rows in pairs.items()} == {"train": 2, "validation": 1, "test": 2}
    assert pairs["test"][1]["source"] == "the dog barks ."
    assert pairs["test"][1]["target"] == "(S(NP()DT()NN)NP(VP()VBZ)VP().)S"
    (tmp_path / "a.mrg").write_text(tree.replace("dog", "cat"))
    assert load_pairs(recipe)["test"][0]["source"] == "the cat barks ."
    with user_error(r"no file matches 'x\.mrg'"):
        load_pairs(recipe_for(tmp_path, "x.mrg", kind="trees"))


def test_fingerprint_is_the_digest_of_the_texts_in_order() -> None:
    rows = datasets.Dataset.from_dict({"source": ["a", "b"], "target": ["c", "d"]})
    expected = hashlib.sha256(b"a\0c\0b\0d\0").hexdigest()
    assert fingerprint(rows) == {"pairs": 2, "sha256": expected}
    assert fingerprint(rows.select([1, 0]))["sha256"] != expected


def test_vocabulary_is_learned_from_evenly_spaced_pairs() -> None:
    rows = datasets.Dataset.from_dict({side: [f"{side[0]}{n}" for n in range(10)] for side in ("source", "target")})
    assert list(sample_texts(rows, 3)) == ["s0", "s3", "s6", "t0", "t3", "t6"]
    assert len(list(sample_texts(rows, None))) == len(list(sample_texts(rows, 11))) == 20


@pytest.fixture
def tokenizer() -> VaswaniTransformerTokenizer:
    """Return a tokenizer of one token a byte, and one for the end."""
    return VaswaniTransformerTokenizer.train_from_iterator([text for pair in PAIRS for text in pair], 259)


def test_text_that_spells_a_special_token_stays_text(folder: Path, tokenizer: VaswaniTransformerTokenizer) -> None:
    recipe = recipe_for(folder)
    encoded = tokenize(recipe, load_pairs(recipe), tokenizer)["train"][2]
    assert encoded["input_ids"].count(tokenizer.eos_token_id) == 1
    assert tokenizer.pad_token_id not in encoded["labels"]
    assert tokenizer.decode(encoded["labels"], skip_special_tokens=True) == "drei <pad>"


def test_training_pairs_that_are_too_long_are_dropped_or_an_error_and_others_are_kept(
    folder: Path, tokenizer: VaswaniTransformerTokenizer
) -> None:
    recipe = recipe_for(folder, max_length=10)
    dropped = tokenize(recipe, load_pairs(recipe), tokenizer)
    assert tokenizer.decode(dropped["train"]["labels"][0], skip_special_tokens=True) == "ein baum"
    assert {name: len(split) for name, split in dropped.items()} == {"train": 1, "validation": 3, "test": 3}
    for strict in (recipe_for(folder, max_length=10, too_long="error"), recipe_for(folder, max_length=1)):
        with user_error(r"data\.max_length: [23] of 3 training pairs are longer than 10? tokens"):
            tokenize(strict, load_pairs(strict), tokenizer)


@pytest.mark.parametrize("change", ["pad", "end"])
def test_tokenizer_that_cannot_train_a_model_is_an_error(
    folder: Path, tokenizer: VaswaniTransformerTokenizer, change: str
) -> None:
    if change == "end":
        tokenizer.backend_tokenizer.post_processor = None
    tokenizer.save_pretrained(folder / "tokenizer")
    if change == "pad":
        path = folder / "tokenizer" / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"padding_side": "left"}))
    recipe = recipe_for(folder, tokenizer={"path": str(folder / "tokenizer")})
    with user_error(r"tokenizer\.path: .* needs <pad>, padding on the right, and its end token"):
        make_tokenizer(recipe, load_pairs(recipe)["train"])


@pytest.mark.parametrize(("sample", "holds_all"), [(None, True), (3, True), (2, False)])
def test_tokenizer_of_a_sample_makes_no_promise_about_other_words(
    folder: Path, sample: int | None, holds_all: bool
) -> None:
    """Of three pairs; a vocabulary with free entries contains every word that it was learned from."""
    recipe = recipe_for(folder, tokenizer={"vocab_size": 900, "sample": sample})
    train = load_pairs(recipe)["train"]
    assert make_tokenizer(recipe, train).init_kwargs.get("holds_all_words", False) == holds_all


def test_mask_is_added_after_all_other_tokens_for_a_cmlm(folder: Path) -> None:
    recipe = recipe_for(folder)
    plain, masked = (load_data(replace(recipe, model=model)).tokenizer for model in ({}, {"kind": "cmlm"}))
    assert masked.get_vocab() == plain.get_vocab() | {"<mask>": len(plain)}


def test_vocabulary_that_cannot_spell_the_targets_is_a_warning_of_each_split(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = recipe_for(folder)
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["one tree two three ein baum"], 60, "wordpiece")
    tokens = tokenize(recipe, load_pairs(recipe), tokenizer)
    count_unknown(tokens, tokenizer)
    shares = r"\d+\.\d\d% of source, \d+\.\d\d% of target; train a tokenizer on these texts"
    for split, message in zip(SPLITS, caplog.messages, strict=True):
        assert re.match(rf"Unknown tokens of {split}: {shares}", message)
