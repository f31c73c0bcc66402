"""Sentence pairs: where they come from, and how a bad line is refused."""

import gzip
import json

import datasets
import pytest

from training.data import columns, load_pairs, tokenize
from training.recipe import DataRecipe, RecipeError
from vaswani_transformer import VaswaniTransformerTokenizer

PAIRS = [("one tree", "ein baum"), ("two trees", "zwei bäume"), ("  three </s> ", "drei <pad>")]


def json_line(source, target):
    return json.dumps({"translation": {"en": source, "de": target}}, ensure_ascii=False)


@pytest.fixture
def folder(tmp_path):
    """A folder with the three splits as JSON Lines, the training set compressed."""
    lines = "".join(json_line(*pair) + "\n" for pair in PAIRS)
    with gzip.open(tmp_path / "train.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    for split in ("validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


def recipe(folder, **fields):
    return DataRecipe(**{"path": str(folder), "validation": "validation.jsonl", "test": "test.jsonl"} | fields)


def test_json_lines_are_read_plain_and_compressed(folder):
    pairs = load_pairs(recipe(folder))
    assert set(pairs) == {"train", "validation", "test"}
    for split in pairs.values():
        assert split["source"][:] == ["one tree", "two trees", "three </s>"]
        assert split["target"][:] == ["ein baum", "zwei bäume", "drei <pad>"]


def test_the_direction_can_be_turned(folder):
    assert load_pairs(recipe(folder, source="de", target="en"))["train"]["source"][0] == "ein baum"


def test_a_set_may_have_no_test_split(folder):
    assert set(load_pairs(recipe(folder, test=None))) == {"train", "validation"}


def test_parallel_text_files_are_read_line_by_line(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.en").write_text("one\ntwo\n", encoding="utf-8")
        (tmp_path / f"{split}.de").write_text("eins\nzwei\n", encoding="utf-8")
    own = recipe(tmp_path, kind="text", train="train.{language}", validation="validation.{language}", test=None)
    assert load_pairs(own)["train"].to_dict() == {"source": ["one", "two"], "target": ["eins", "zwei"]}


def test_the_shipped_task_has_three_splits():
    pairs = load_pairs(DataRecipe(kind="grammar", target="es"))
    assert {name: len(split) for name, split in pairs.items()} == {"train": 30_000, "validation": 500, "test": 1_000}


def test_a_data_set_in_the_schema_of_the_hub_is_read():
    features = datasets.Features({"translation": datasets.Translation(languages=["en", "de"])})
    split = datasets.Dataset.from_list([{"translation": {"en": "a", "de": "b"}}], features)
    own = DataRecipe(kind="hub", path="own/set")
    assert columns(datasets.DatasetDict(train=split), own)["train"].to_dict() == {"source": ["a"], "target": ["b"]}
    with pytest.raises(RecipeError, match=r"own/set, split train: .*languages (en, de|de, en), not .* en and fr"):
        columns(datasets.DatasetDict(train=split), DataRecipe(kind="hub", path="own/set", target="fr"))


def test_a_data_set_of_the_hub_may_have_further_columns_and_lack_a_split(tmp_path, monkeypatch):
    """A folder stands in for the data set: `load_dataset` reads either."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    own = tmp_path / "set"
    own.mkdir()
    lines = [json.dumps({"id": str(number)} | json.loads(json_line(*pair))) for number, pair in enumerate(PAIRS)]
    (own / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    hub = DataRecipe(kind="hub", path=str(own), train="train", validation="train[:2]", test=None)
    pairs = load_pairs(hub)
    assert {name: len(split) for name, split in pairs.items()} == {"train": 3, "validation": 2}
    assert pairs["train"].column_names == ["source", "target"]
    with pytest.raises(RecipeError, match=r"data\.test: the split 'test' of .* cannot be loaded .*--data\.test=null"):
        load_pairs(DataRecipe(kind="hub", path=str(own), train="train", validation="train[:2]", test="test"))


def test_only_a_line_feed_ends_a_line_and_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "train.en").write_bytes("\ufeffone\rmore\r\ntwo\n".encode())
    (tmp_path / "train.de").write_bytes("\ufeffeins\nzwei\rmehr\n".encode())
    own = recipe(tmp_path, kind="text", train="train.{language}", validation="train.{language}", test=None)
    assert load_pairs(own)["train"].to_dict() == {"source": ["one\rmore", "two"], "target": ["eins", "zwei\rmehr"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"train\.jsonl, line 2: not JSON \(.* at column 2\); mend the line"),
        ("", r"train\.jsonl, line 2: not JSON"),
        ("[1]", r"train\.jsonl, line 2: no column 'translation' \(found: list\)"),
        ('{"text": "x"}', r"train\.jsonl, line 2: no column 'translation' \(found: text\)"),
        (
            '{"translation": {"en": "x", "fr": "y"}}',
            r"line 2: no text in the language 'de' \(found: en, fr\); set data\.source",
        ),
        ('{"translation": {"en": "x", "de": 3}}', r"line 2: no text in the language 'de'"),
        (json_line("x", "  "), r"line 2: the side 'de' is empty; mend the line or set data\.unusable=drop"),
        (json_line("", "y"), r"line 2: the side 'en' is empty"),
    ],
)
def test_a_bad_line_is_named(folder, line, message):
    (folder / "train.jsonl").write_text(f"{json_line(*PAIRS[0])}\n{line}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=message) as refusal:
        load_pairs(recipe(folder, train="train.jsonl"))
    assert "\n" not in str(refusal.value)


def test_empty_sides_are_dropped_on_request(folder):
    (folder / "train.jsonl").write_text(f"{json_line('x', '')}\n{json_line('y', 'z')}\n", encoding="utf-8")
    assert len(load_pairs(recipe(folder, train="train.jsonl", unusable="drop"))["train"]) == 1


def test_a_missing_file_is_named(folder):
    with pytest.raises(RecipeError, match=r"nothing\.jsonl: there is no such file; set data\.path"):
        load_pairs(recipe(folder, train="nothing.jsonl"))


def test_a_file_that_was_cut_off_is_named(folder):
    whole = (folder / "train.jsonl.gz").read_bytes()
    (folder / "train.jsonl.gz").write_bytes(whole[: len(whole) - 10])
    with pytest.raises(RecipeError, match=r"train\.jsonl\.gz, after line .*not readable"):
        load_pairs(recipe(folder))


def test_an_empty_file_is_refused(folder):
    (folder / "train.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"split train: there is no pair in it"):
        load_pairs(recipe(folder, train="train.jsonl"))


@pytest.mark.parametrize(("shorter", "longer"), [("en", "de"), ("de", "en")])
def test_unpaired_text_files_are_refused(tmp_path, shorter, longer):
    (tmp_path / f"train.{shorter}").write_text("one\n", encoding="utf-8")
    (tmp_path / f"train.{longer}").write_text("eins\nzwei\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=rf"train\.{shorter}: ends before line 2 of .*train\.{longer}"):
        load_pairs(recipe(tmp_path, kind="text", train="train.{language}"))


def test_the_name_of_text_files_needs_a_place_for_the_language(tmp_path):
    with pytest.raises(RecipeError, match=r"train\.txt: .*needs \{language\}"):
        load_pairs(recipe(tmp_path, kind="text", train="train.txt"))


@pytest.fixture
def tokenizer():
    """One token a byte, and one more for the end."""
    return VaswaniTransformerTokenizer.train_from_iterator([text for pair in PAIRS for text in pair], 259)


def test_text_that_spells_a_special_token_stays_text(folder, tokenizer):
    encoded = tokenize(load_pairs(recipe(folder)), tokenizer, recipe(folder))["train"][2]
    assert encoded["input_ids"].count(tokenizer.eos_token_id) == 1
    assert tokenizer.pad_token_id not in encoded["labels"]
    assert tokenizer.decode(encoded["labels"], skip_special_tokens=True) == "drei <pad>"


def test_overlong_training_pairs_are_dropped_or_refused_and_others_kept(folder, tokenizer):
    pairs = load_pairs(recipe(folder))
    dropped = tokenize(pairs, tokenizer, recipe(folder, max_length=10))
    assert tokenizer.decode(dropped["train"]["labels"][0], skip_special_tokens=True) == "ein baum"
    assert {name: len(split) for name, split in dropped.items()} == {"train": 1, "validation": 3, "test": 3}
    with pytest.raises(RecipeError, match=r"data\.max_length: 2 of 3 training pairs are longer than 10 tokens"):
        tokenize(pairs, tokenizer, recipe(folder, max_length=10, overlong="refuse"))
    with pytest.raises(RecipeError, match=r"3 of 3 training pairs"):
        tokenize(pairs, tokenizer, recipe(folder, max_length=1))
