"""Pairs are read in every format, checked, tokenized, and fingerprinted."""

import gzip
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests import ROOT
from tests.commands import user_error
from training import data as data_module
from training.data import (
    PAIRS_A_PROCESS,
    Learned,
    count_seen,
    count_unknown,
    find_rows,
    fingerprint,
    hold_out,
    load_data,
    load_pairs,
    make_tokenizer,
    processes_for,
    sample_texts,
    tokenize,
)
from training.recipe import RECIPES, Recipe, load_recipe, recipe_of
from training.train import prepared_name
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.support.loading import load_tokenizer
from vaswani_transformer.tokenizer import source_encoder

PAIRS = [("one tree", "ein baum"), ("two trees", "zwei bäume"), ("  three </s> ", "drei <pad>")]
SPLITS = ("train", "validation", "test")
SIDES = ("source", "target")
TEXTS = {"source": ["one tree", "two trees", "three </s>"], "target": ["ein baum", "zwei bäume", "drei <pad>"]}


def json_line(source: Any, target: Any) -> str:
    return json.dumps({"translation": {"en": source, "de": target}}, ensure_ascii=False)


LINES = "".join(json_line(*pair) + "\n" for pair in PAIRS)


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


def test_direction_of_the_pairs_can_be_reversed_and_a_set_may_lack_a_test_split(folder: Path) -> None:
    pairs = load_pairs(recipe_for(folder, source="de", target="en", test=None))
    assert {name: split["source"][0] for name, split in pairs.items()} == dict.fromkeys(SPLITS[:2], "ein baum")


def test_held_out_sentences_occur_in_no_other_pair() -> None:
    train = datasets.Dataset.from_dict({"source": ["a", "a", "b", "c", "d", "e"], "target": [*"uvwwxy"]})
    splits = hold_out(train, {"validation": 1, "test": 1}, seed=1, max_length=9)
    assert sorted([*splits["validation"]["source"], *splits["test"]["source"]]) == ["d", "e"]
    assert list(splits["train"]["source"]) == ["a", "a", "b", "c"]
    with user_error("hold out 3 of 6 pairs, of which 2 have sentences that no other pair has and are within data"):
        hold_out(train, {"validation": 2, "test": 1}, seed=1, max_length=9)


def test_texts_in_another_normal_form_are_the_same_texts() -> None:
    composed = datasets.Dataset.from_dict({"source": ["\xe9", "a"], "target": ["\xe4", "b"]})
    decomposed = datasets.Dataset.from_dict({"source": ["e\u0301", "c"], "target": ["a\u0308", "d"]})
    for pairs, learned in ((composed, decomposed), (decomposed, composed)):
        assert count_seen(pairs, Learned([learned])) == {"pairs": 1, "sources": 1}
    both = datasets.concatenate_datasets([composed, decomposed])
    assert find_rows(both)["duplicates"].tolist() == [2]
    splits = hold_out(both, {"test": 2}, seed=1, max_length=9)
    assert list(splits["test"]["source"]) == ["a", "c"]


def test_held_out_pairs_stay_when_pairs_are_added_anywhere() -> None:
    """A pair that was learned from is never held out later, and new pairs replace about their share."""
    texts = [f"text {number}" for number in range(600)]
    later = datasets.Dataset.from_dict(
        {side: [f"{side} {text}" for text in texts[300:] + texts[:300]] for side in SIDES}
    )
    earlier = later.select(range(300, 600))
    first, second = (hold_out(rows, {"validation": 40, "test": 50}, 1, 9) for rows in (earlier, later))
    for split, kept in (("validation", 10), ("test", 14)):
        assert not set(first["train"]["source"]) & set(second[split]["source"])
        assert len(set(first[split]["source"]) & set(second[split]["source"])) >= kept
    assert not set(first["validation"]["source"]) & set(second["test"]["source"])
    larger = hold_out(earlier, {"validation": 60, "test": 60}, 1, 9)
    assert all(set(first[split]["source"]) < set(larger[split]["source"]) for split in ("validation", "test"))
    shuffled = hold_out(earlier.shuffle(seed=0), {"validation": 40, "test": 50}, 1, 9)
    assert all(set(first[split]["source"]) == set(shuffled[split]["source"]) for split in SPLITS)


@pytest.mark.parametrize(
    "long", ["a " * 40, "\u4e00" * 700, "\u3000".join("ab" * 20)], ids=["words", "letters", "wide"]
)
def test_pairs_that_training_would_drop_are_not_held_out(long: str) -> None:
    train = datasets.Dataset.from_dict({"source": [*"abcd", long], "target": [f"{long}.", *"vwxy"]})
    for seed in range(9):
        splits = hold_out(train, {"validation": 3}, seed, max_length=40)
        assert sorted(splits["validation"]["source"]) == ["b", "c", "d"]


def test_recipe_may_hold_pairs_out(folder: Path) -> None:
    recipe = recipe_for(folder, validation=1, test=1)
    pairs = load_pairs(recipe)
    for split in SPLITS:  # of a command that needs only one
        assert load_pairs(recipe, [split])[split].to_dict() == pairs[split].to_dict()
    assert {name: len(rows) for name, rows in pairs.items()} == dict.fromkeys(SPLITS, 1)


def test_split_seed_holds_out_the_same_pairs_whatever_the_seed_of_the_run(tmp_path: Path) -> None:
    for language in ("source", "target"):
        (tmp_path / f"{language}.txt").write_text("".join(f"{language} {line}\n" for line in range(50)))
    own = ["--data.validation=10", "--data.test=10", f"--data.path={tmp_path}"]

    def tested(*arguments: str) -> list[str]:
        return load_pairs(load_recipe(RECIPES / "own.yaml", [*own, *arguments]), ["test"])["test"]["source"][:]

    assert tested() == tested("--seed=1") == tested("--seed=2")
    assert tested("--data.split_seed=null", "--seed=1") == tested("--data.split_seed=1") != tested()


@pytest.mark.parametrize("algorithm", ["bpe", "wordpiece"])
def test_special_tokens_of_a_recipe_are_never_split(algorithm: str, tmp_path: Path) -> None:
    """Neither where they stand, nor after saving and loading; control tokens in a text still are."""
    pairs = [(f"<2de> <bt> tree {number}", f"baum {number}<2de> a</s>b") for number in range(30)]
    (tmp_path / "all.jsonl").write_text("\n".join(json_line(*pair) for pair in pairs), encoding="utf-8")
    settings = {"vocab_size": 300, "algorithm": algorithm, "special_tokens": ["<bt>", "<2de>"]}
    recipe = recipe_for(tmp_path, tokenizer=settings)
    train = load_pairs(recipe)["train"]
    tokenizer = make_tokenizer(recipe, train)
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = load_tokenizer(str(tmp_path / "saved"))
    for text in ("<2de> <bt> tree 7", "tree<2de>tree", "a</s>b <bt>"):
        ids = [source_encoder(one)(text)["input_ids"] for one in (tokenizer, loaded)]
        assert ids[0] == ids[1]
        tokens = loaded.convert_ids_to_tokens(ids[0])
        assert [token for token in tokens if token in settings["special_tokens"]] == re.findall("<2de>|<bt>", text)
        assert tokens.count("</s>") == 1
        assert loaded.decode(ids[0][:-1]) == text
    assert len(loaded) <= 300
    again = {"path": str(tmp_path / "saved")}
    assert len(make_tokenizer(recipe_for(tmp_path, tokenizer=settings | again), train)) == len(tokenizer)
    with user_error("does not contain all tokens of tokenizer.special_tokens, such as '<2fr>'"):
        make_tokenizer(recipe_for(tmp_path, tokenizer=again | {"special_tokens": ["<2fr>"]}), train)
    with user_error("tokenizer.special_tokens"):
        recipe_for(tmp_path, tokenizer=settings | {"special_tokens": ["</s>"]})


def test_variants_copy_a_share_of_the_training_pairs_in_other_letters(tmp_path: Path) -> None:
    """Other splits stay, added pairs move no copy, and pairs that are written so already are not copied."""
    lines = [json_line(f"it's tree {number} of McGee", f"baum {number}") for number in range(400)]
    lines.append(json_line("OK 9", "OK 9"))
    (tmp_path / "all.jsonl").write_text("\n".join(lines), encoding="utf-8")
    variants = {"upper": 0.25, "title": 1.0}
    recipe = recipe_for(tmp_path, variants=variants, validation=9, test=9)
    pairs = load_pairs(recipe)
    assert len(pairs["validation"]) == len(pairs["test"]) == 9
    train = list(zip(pairs["train"]["source"], pairs["train"]["target"], strict=True))
    originals, copies = train[:383], train[383:]
    capitals = [pair for pair in copies if pair[0].isupper()]
    assert 60 < len(capitals) < 130
    assert {(source.upper(), target.upper()) for source, target in originals} > set(capitals)
    assert all(
        "It's Tree" in source and "Of McGee" in source and target[0] == "B"
        for source, target in copies[len(capitals) :]
    )
    assert len(copies) - len(capitals) == sum(source != "OK 9" for source, _ in originals)

    (tmp_path / "more.jsonl").write_text("\n".join([*lines, *lines[:3]]), encoding="utf-8")
    alone, more = (
        load_pairs(recipe_for(tmp_path, file, variants={"upper": 0.25}), ["train"])["train"]["source"][:]
        for file in ("all.jsonl", "more.jsonl")
    )
    assert set(alone) == set(more)


def test_copies_are_counted_in_the_log_and_in_the_data(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    data = load_data(recipe_for(folder, variants={"upper": 1.0, "lower": 1.0}))
    assert data.variants == {"upper": 3, "lower": 0}
    assert data.fingerprints["train"]["pairs"] == 6
    assert "Copies of training pairs in other letters: upper 3, lower 0 of 3." in caplog.text
    with user_error("data.variants: trees stay as they are"):
        recipe_for(folder, kind="trees", variants={"upper": 0.1})


@pytest.mark.parametrize(
    ("target", "is_logged"),
    [
        ("青い船と馬が見える。", True),
        ("แมวนั่งอยู่บนเสื่อ", True),
        ("青い 船 と 馬 が 見える 。", False),
        ("Donaudampfschiff", False),
    ],
)
def test_targets_without_spaces_in_a_column_of_no_language_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str, is_logged: bool
) -> None:
    pairs = [json.dumps({"en": f"text {number}", "target": target}) for number in range(4)]
    (tmp_path / "all.jsonl").write_text("\n".join(pairs), encoding="utf-8")
    load_pairs(recipe_for(tmp_path, target="target"))
    assert [line.split(":")[0] for line in caplog.messages] == ["score.tokenize"] * is_logged
    caplog.clear()
    load_pairs(recipe_for(tmp_path, target="target", target_language="ja"))
    assert not caplog.messages


def test_processes_fit_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"source": ["a"]}).select([0] * 3 * PAIRS_A_PROCESS)
    for cores, processes in ((1, None), (2, 2), (64, 3)):
        monkeypatch.setattr(data_module, "allowed_cores", lambda cores=cores: cores)
        assert processes_for(rows) == processes


def test_source_must_not_be_the_target(folder: Path) -> None:
    with user_error(r"^data\.source, data\.target: name the same texts.*; got 'de' for both\. Set both fields\.$"):
        recipe_for(folder, source="de", target="de")


def test_fingerprint_is_the_digest_of_the_texts_in_order() -> None:
    rows = datasets.Dataset.from_dict({"source": ["a", "b"], "target": ["c", "d"]})
    expected = hashlib.sha256(b"a\0c\0b\0d\0").hexdigest()
    assert fingerprint(rows) == {"pairs": 2, "sha256": expected}
    assert fingerprint(rows.select([1, 0]))["sha256"] != expected


def test_folder_of_data_is_looked_up_here_and_then_in_the_clone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "training").mkdir()
    (folder / "all.jsonl").rename(folder / "training" / "all.jsonl")
    monkeypatch.chdir(folder)
    recipe = recipe_for(Path("training"))
    assert len(load_pairs(recipe)["train"])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with user_error(rf"data\.train: cannot be read as json \({ROOT}/training/all\.jsonl: No such file"):
        load_pairs(recipe)
    here, there = tmp_path / "empty" / "nothing", ROOT / "nothing"
    with user_error(rf"^data\.path: no such folder; looked for {here} and {there}\. Set --data\.path=FOLDER\.$"):
        load_pairs(recipe_for(Path("nothing")))
    with user_error(rf"^data\.path: no such folder; looked for {folder}/training/all\.jsonl\. Set"):
        load_pairs(recipe_for(folder / "training" / "all.jsonl"))


def test_name_of_a_public_set_is_that_of_its_own_files(folder: Path) -> None:
    text = b"".join(f"{json_line(f'a {number}', f'b {number}')}\n".encode() for number in range(9))
    for name in ("train", "test"):
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text))
    digest = hashlib.sha256(text).hexdigest()
    files = {"train.jsonl.gz": digest, "test.jsonl.gz": digest}
    (folder / "prepared.json").write_text(json.dumps({"name": "multi30k", "files": files}))
    recipe = recipe_for(folder, "train.jsonl.gz", validation=2, test="test.jsonl.gz")
    assert prepared_name(recipe) == "multi30k"
    assert prepared_name(recipe_for(folder, "others.jsonl.gz", validation=2, test="test.jsonl.gz")) is None
    for content in (gzip.compress(text[:-5]), gzip.compress(text)[:-9], text):
        (folder / "test.jsonl.gz").write_bytes(content)
        assert prepared_name(recipe) is None


def test_splits_behind_published_scores_are_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart finds its files from every folder."""
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(RECIPES / "quickstart.yaml", [])
    assert prepared_name(recipe) == "quickstart"
    pairs = load_pairs(recipe)
    assert {str(split): fingerprint(rows)["sha256"] for split, rows in pairs.items()} == {
        "train": "34a6396789a09309a78f4510dfbd142c81df4dbaa25f6bd057b3cf223baf0e02",
        "validation": "bf8c5919e948b487d93609e980d16bae5cd07cc0bccd1ca6d303d61235e34660",
        "test": "d9e11ac67110381b88b8ddc63d77c119d1433f802f671fdf8c2f6f47d2b6733e",
    }


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
    fixes = {"raise it or set data.too_long=drop": recipe_for(folder, max_length=10, too_long="error")}
    for fix, strict in (fixes | {"raise it": recipe_for(folder, max_length=1)}).items():
        with user_error(rf"data\.max_length: [23] of 3 training pairs are longer than 10? tokens; {fix}\.$"):
            tokenize(strict, load_pairs(strict), tokenizer)


def test_pairs_that_cannot_be_evaluated_are_an_error(folder: Path, tokenizer: VaswaniTransformerTokenizer) -> None:
    (folder / "long.jsonl").write_text(LINES + json_line("a " * 90, "b"), encoding="utf-8")
    recipe = recipe_for(folder, validation="long.jsonl", max_length=10)
    with user_error(
        r"data\.validation: pairs with more than 160 tokens, 16 times data\.max_length: 1, the longest has"
    ):
        tokenize(recipe, load_pairs(recipe), tokenizer)
    recipe = recipe_for(folder, validation="long.jsonl", max_length=160)
    learned = replace(recipe, model={"position_embedding": "learned", "max_position_embeddings": 10})
    with user_error(
        r"data\.train: pairs with more than 10 tokens, the learned positions: 2, .* set data\.max_length to"
    ):
        tokenize(learned, load_pairs(learned), tokenizer)
    shorter = replace(learned, data=replace(learned.data, max_length=10))
    with user_error(r"data\.validation: pairs with more than 10 .* or raise model\.max_position_embeddings"):
        tokenize(shorter, load_pairs(shorter), tokenizer)


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


def test_mask_is_added_after_all_other_tokens_for_a_cmlm(folder: Path) -> None:
    recipe = recipe_for(folder)
    plain, masked = (load_data(replace(recipe, model=model)).tokenizer for model in ({}, {"kind": "cmlm"}))
    assert masked.get_vocab() == plain.get_vocab() | {"<mask>": len(plain)}


def test_pairs_and_sources_of_the_test_set_that_are_in_the_training_data_are_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    test = [*PAIRS[:1], ("two trees", "zwei Linden"), ("a house", "zwei bäume"), ("two trees", "zwei bäume")]
    (folder / "test.jsonl").write_text("\n".join(json_line(*pair) for pair in test), encoding="utf-8")
    (folder / "new.jsonl").write_text(json_line("four", "vier"), encoding="utf-8")
    data = load_data(recipe_for(folder, validation="new.jsonl", test="test.jsonl"))
    assert data.seen == {"validation": {"pairs": 0, "sources": 0}, "test": {"pairs": 2, "sources": 3}}
    (message,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert message.startswith("test set: the training data contain 2 of its 4 pairs, and 3 of its sources, so")


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
