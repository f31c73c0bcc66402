"""Sentence pairs: their sources, and the errors of bad lines."""

import codecs
import dataclasses
import errno
import gzip
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.helpers import user_error
from training.data import distilled
from training.data import files as data_files
from training.data import pairs as data_pairs
from training.data.distilled import Distillation, check_sources, digest_sources
from training.data.pairs import load_pairs, read_rows, sources_in_order, to_source_target
from training.data.stream import PairStream
from training.data.tokenizing import count_unknown, make_encode_fn, report_unknown, target_ids, token_ids, tokenize
from training.data.vocabulary import sample_texts
from training.recipe.fields import DataRecipe
from vaswani_transformer import VaswaniTransformerTokenizer

PAIRS = [("one tree", "ein baum"), ("two trees", "zwei bäume"), ("  three </s> ", "drei <pad>")]


def json_line(source: str, target: str) -> str:
    return json.dumps({"translation": {"en": source, "de": target}}, ensure_ascii=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a folder with the three splits as JSON Lines, the training set compressed."""
    lines = "".join(json_line(*pair) + "\n" for pair in PAIRS)
    with gzip.open(tmp_path / "train.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    for split in ("validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


def recipe(folder: Path, **fields: Any) -> DataRecipe:
    files: dict[str, Any] = {"path": str(folder), "validation": "validation.jsonl", "test": "test.jsonl"}
    return DataRecipe(**files | fields)


def test_json_lines_are_read_plain_and_compressed(folder: Path) -> None:
    pairs = load_pairs(recipe(folder))
    assert set(pairs) == {"train", "validation", "test"}
    for split in pairs.values():
        assert split["source"][:] == ["one tree", "two trees", "three </s>"]
        assert split["target"][:] == ["ein baum", "zwei bäume", "drei <pad>"]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_compressed_file_is_read_and_a_torn_one_is_an_error_that_names_it(folder: Path, suffix: str) -> None:
    path = folder / f"train.jsonl{suffix}"
    with data_files.COMPRESSED[suffix](path, "wb") as file:
        file.write(json_line(*PAIRS[0]).encode())
    assert load_pairs(recipe(folder, train=path.name))["train"]["source"][:] == ["one tree"]
    for content in (path.read_bytes()[:-10], b"no such format"):
        path.write_bytes(content)
        with user_error(rf"train\.jsonl\{suffix}.*: (not readable|cannot be read) \("):
            load_pairs(recipe(folder, train=path.name))


def test_direction_of_the_pairs_can_be_reversed_and_a_set_may_lack_a_test_split(folder: Path) -> None:
    pairs = load_pairs(recipe(folder, source="de", target="en", test=None))
    assert {name: split["source"][0] for name, split in pairs.items()} == dict.fromkeys(
        ("train", "validation"), "ein baum"
    )


def test_parallel_text_files_are_read_line_by_line(tmp_path: Path) -> None:
    """A line ends only at a line feed, and a byte-order mark is no text."""
    for split in ("train", "validation"):
        (tmp_path / f"{split}.en").write_bytes("\ufeffone\rmore\r\ntwo\n".encode())
        (tmp_path / f"{split}.de").write_bytes("\ufeffeins\nzwei\rmehr\n".encode())
    data = recipe(tmp_path, kind="text", train="train.{language}", validation="validation.{language}", test=None)
    assert load_pairs(data)["train"].to_dict() == {"source": ["one\rmore", "two"], "target": ["eins", "zwei\rmehr"]}


@pytest.mark.parametrize("has_group", [True, False])
def test_pairs_are_in_the_group_translation_or_in_columns(folder: Path, has_group: bool) -> None:
    """On the Hub, on the Hub as a stream, and in JSON Lines."""
    pair = {"en": "a", "de": "b"}
    row = {"id": 1, "translation": pair} if has_group else pair | {"id": 1, "translation": "other"}
    split, read = datasets.Dataset.from_list([row]), {"source": ["a"], "target": ["b"]}
    data = DataRecipe(kind="hub", path="own/set")
    assert to_source_target(datasets.DatasetDict({"train": split}), data)["train"].to_dict() == read
    assert list(read_rows(data, split)) == [("a", "b")]
    (folder / "train.jsonl").write_text(json.dumps(row))
    assert load_pairs(recipe(folder, train="train.jsonl"))["train"].to_dict() == read


def test_data_set_in_the_schema_of_the_hub_is_read() -> None:
    features = datasets.Features({"translation": datasets.Translation(languages=["en", "de"])})
    split = datasets.Dataset.from_list([{"translation": {"en": "a", "de": "b"}}], features)
    data = DataRecipe(kind="hub", path="own/set")
    assert to_source_target(datasets.DatasetDict({"train": split}), data)["train"].to_dict() == {
        "source": ["a"],
        "target": ["b"],
    }
    with user_error(r"own/set, split train: .*sides (en, de|de, en), expected en and fr"):
        to_source_target(datasets.DatasetDict({"train": split}), DataRecipe(kind="hub", path="own/set", target="fr"))
    numbers = datasets.Dataset.from_list([{"translation": {"en": "one", "de": 1}}])
    with user_error(r"^own/set, split train: the side 'de' has values of type int64, expected texts"):
        to_source_target(datasets.DatasetDict({"train": numbers}), data)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not JSON \(.* at column 2\); correct the line, or set data\.kind=text for plain text\.$"),
        ("", r"train\.jsonl, line 2: not JSON"),
        ("[1]", r"train\.jsonl, line 2: is a list; each line must be"),
        ('{"translation": "x"}', r"train\.jsonl, line 2: no side 'en' \(found: translation\); set data\.source"),
        ('{"translation": {"en": "x", "de": null}}', r"line 2: the side 'de' is null, no text; correct the line"),
        (
            '{"translation": {"en": "a \\ud800", "de": "y"}}',
            r"line 2: the side 'en' holds \\ud800 at character 3, half of a surrogate pair; correct the line",
        ),
        ('{"text": "x"}', r"train\.jsonl, line 2: no side 'en' \(found: text\); set data\.source"),
        ('{"translation": {"en": "x", "fr": "y"}}', r"line 2: no side 'de' \(found: en, fr\); set data\.source"),
        ('{"translation": {"en": "x", "de": 3}}', r"line 2: the side 'de' is a number, no text"),
        (json_line("x", "  "), r"line 2: the side 'de' is empty; correct the line or set data\.empty=drop"),
        (json_line("", "y"), r"line 2: the side 'en' is empty"),
    ],
)
def test_bad_line_is_an_error_that_names_it(folder: Path, line: str, message: str) -> None:
    (folder / "train.jsonl").write_text(f"{json_line(*PAIRS[0])}\n{line}\n", encoding="utf-8")
    with user_error(message):
        load_pairs(recipe(folder, train="train.jsonl"))


LINE = json_line("x", "y").encode()
LATIN = b"\n".join([codecs.BOM_UTF8 + LINE, *299 * [LINE], b"caf\xe9", LINE])
ONE, TWO = b"one\n", b"eins\nzwei\n"


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("nothing.jsonl", {}, r"nothing\.jsonl: there is no such file; set data\.path .* data\.source"),
        ("x.jsonl.gz", {"x.jsonl.gz": gzip.compress(LINE)[:-10]}, r"x\.jsonl\.gz, after line .*not readable"),
        ("x.jsonl.zip", {"x.jsonl.zip": LINE}, r"zip: is no text; got \.zip, expected .* \.gz, \.bz2 or \.xz\. Unpack"),
        ("x.jsonl", {"x.jsonl": LATIN}, r"x\.jsonl, line 301: not UTF-8 \(byte 0xe9 at byte 4"),
        ("x.jsonl", {"x.jsonl": b""}, r"split train: it has no pairs"),
        ("x.{language}", {"x.en": ONE, "x.de": TWO}, r"x\.en: ends before line 2 of .*x\.de"),
        ("x.{language}", {"x.de": ONE, "x.en": TWO}, r"x\.de: ends before line 2 of .*x\.en"),
        ("x.txt", {}, r"x\.txt: .* \{language\} in it; set data\.train, .* --data\.train='train\.\{language\}'\.$"),
        (f"{'x' * 256}.jsonl", {}, r"x\.jsonl: cannot be read \(File name too long\); make it readable, or name"),
    ],
    ids=["missing", "torn", "archive", "latin-1", "empty", "short source", "short target", "no language", "long name"],
)
def test_unreadable_file_is_an_error_that_names_it(
    folder: Path, name: str, files: dict[str, bytes], message: str
) -> None:
    for file, content in files.items():
        (folder / file).write_bytes(content)
    with user_error(message):
        load_pairs(recipe(folder, kind="json" if "jsonl" in name else "text", train=name))


def test_gz_file_that_expands_without_end_is_an_error_before_it_fills_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (json_line("x", "y").encode() + b"\n") * 40_000
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(lines))
    monkeypatch.setattr(data_files, "EXPANDED_BYTES", len(lines) - 1)
    assert (folder / "train.jsonl.gz").stat().st_size * 100 < len(lines) - 1
    with user_error(r"train\.jsonl\.gz, line 40000: has expanded to more than"):
        load_pairs(recipe(folder))
    (folder / "train.jsonl").write_bytes(lines)
    assert len(load_pairs(recipe(folder, train="train.jsonl"))["train"]) == 40_000
    monkeypatch.setattr(data_files, "EXPANDED_BYTES", len(lines))
    assert len(load_pairs(recipe(folder))["train"]) == 40_000


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
def test_line_longer_than_the_limit_is_an_error_that_names_it(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = json_line("x" * 500, "y").encode() + b"\n"
    monkeypatch.setattr(data_files, "LONGEST_LINE", len(longest))
    for content in (longest, b" " + longest):
        lines = json_line("x", "y").encode() + b"\n" + content
        (folder / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
        if content == longest:
            assert len(load_pairs(recipe(folder, train=name))["train"]) == 2
    with user_error(rf"{name}, line 2: is longer than \d+ bytes; correct the line"):
        load_pairs(recipe(folder, train=name))


def test_pairs_with_an_empty_side_are_dropped_on_request_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "train.en").write_text("one\n\nthree\n", encoding="utf-8")
    (tmp_path / "train.de").write_text("eins\nzwei\ndrei\n", encoding="utf-8")
    files = dict.fromkeys(("train", "validation"), "train.{language}")
    with caplog.at_level(logging.WARNING):
        pairs = load_pairs(recipe(tmp_path, kind="text", empty="drop", test=None, **files))
    assert pairs["train"]["source"][:] == ["one", "three"]
    assert f"{tmp_path / 'train.en'}: dropped 1 pairs with an empty side." in caplog.messages


@pytest.mark.parametrize("kind", ["json", "text"])
def test_streamed_files_give_the_pairs_of_files_in_memory_in_every_iteration(folder: Path, kind: str) -> None:
    for side, code in enumerate(("en", "de")):
        (folder / f"train.{code}").write_text("".join(pair[side] + "\n" for pair in PAIRS), encoding="utf-8")
    names = {} if kind == "json" else {"kind": "text", "train": "train.{language}", "validation": "train.{language}"}
    data = recipe(folder, streaming=True, test=None, **names)
    at_once = load_pairs(dataclasses.replace(data, streaming=False))["train"]
    stream = PairStream(data, seed=0)
    for epoch in range(2):
        stream.set_epoch(epoch)
        assert list(stream) == list(zip(at_once["source"], at_once["target"], strict=True))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataRecipe:
    """Write a folder of four shards in place of a data set of the Hub: `load_dataset` reads either."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder_of_set = tmp_path / "set"
    folder_of_set.mkdir()
    for shard in range(4):
        lines = [json_line(f"text {shard} {number}", f"wort {number}" if number else "") for number in range(10)]
        lines = [json.dumps({"id": "x"} | json.loads(line)) for line in lines]
        (folder_of_set / f"train-{shard}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return DataRecipe(
        kind="hub", path=str(folder_of_set), train="train", validation="train[:2]", test=None, streaming=True
    )


def test_data_set_of_the_hub_may_have_further_columns_and_lack_a_split(hub: DataRecipe) -> None:
    pairs = load_pairs(dataclasses.replace(hub, empty="drop", streaming=False))
    assert {name: len(split) for name, split in pairs.items()} == {"train": 36, "validation": 1}
    assert pairs["train"].column_names == ["source", "target"]


def test_streamed_data_set_of_the_hub_has_another_order_in_every_epoch(
    hub: DataRecipe, caplog: pytest.LogCaptureFixture
) -> None:
    data = dataclasses.replace(hub, empty="drop", buffer=10)
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (0, 0), (1, 0)):
        stream = PairStream(data, seed)
        stream.set_epoch(epoch)
        with caplog.at_level(logging.WARNING):
            orders.append(list(stream))
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len(orders[0]) == 36
    assert caplog.messages == [f"{data.path}, split train: dropped 4 pairs with an empty side."] * 4
    first, second, again, other = orders
    assert first == again
    assert second != first != other
    assert [text for text, _ in first[:9]] != sorted(text for text, _ in first[:9])


@pytest.mark.parametrize("streaming", [True, False])
def test_sources_of_the_hub_keep_their_order(hub: DataRecipe, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    data = dataclasses.replace(hub, empty="drop", streaming=streaming)
    sources = list(sources_in_order(data))
    assert sources == [f"text {shard} {number}" for shard in range(4) for number in range(1, 10)]
    monkeypatch.setattr(distilled, "FIRST_SOURCES", 15)  # beyond the first pair with an empty side
    digests = digest_sources(sources)
    assert (digests["sources"], digests["first"]["sources"]) == (36, 15)
    settings = {"window": 40}
    distillation = Distillation(Path(), {"data": digests, "settings": settings})
    check_sources(distillation, sources_in_order(data), streaming)
    with user_error("was written for other sources"):
        check_sources(distillation, sources_in_order(dataclasses.replace(data, source="de", target="en")), streaming)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"split train: 4 pairs have an empty side; set data\.empty=drop"),
        ({"target": "fr"}, r"split train: has the sides en, de, expected en and fr; set"),
        ({"train": "training"}, r"data\.train: the split 'training' of .* cannot be loaded"),
        ({"test": "test"}, r"data\.test: the split 'test' of .* cannot be loaded .*--data\.test=null"),
    ],
)
def test_bad_data_set_of_the_hub_is_an_error(hub: DataRecipe, fields: dict[str, str], message: str) -> None:
    with user_error(message):
        load_pairs(dataclasses.replace(hub, **fields))


def test_bad_pair_of_a_streamed_data_set_is_an_error_that_names_it(hub: DataRecipe) -> None:
    with user_error(r"set, split train, pair \d+: the side 'de' is empty"):
        list(PairStream(hub, seed=0))


@pytest.mark.parametrize("read", [load_pairs, lambda data: list(PairStream(data, seed=0))], ids=["first", "all"])
def test_stream_of_the_hub_that_breaks_off_is_an_error(hub: DataRecipe, read: Callable[[DataRecipe], object]) -> None:
    """An unreadable file raises an error of Arrow, a lost connection one of the network's libraries."""
    (Path(str(hub.path)) / "train-3.jsonl").write_text('{"id": "x", "translation"')
    with user_error(r"^data\.train: the split 'train' of .* cannot be loaded \(.*\); correct it, or if the network"):
        read(dataclasses.replace(hub, empty="drop"))


def test_stream_checks_its_first_pairs_and_names_a_bad_line_on_reaching_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_pairs, "PREVIEW_PAIRS", 2)
    lines = [json_line(*pair) for pair in PAIRS[:2]]
    data = recipe(folder, train="train.jsonl", streaming=True)
    for bad in (1, 2, 3):
        text = "\n".join([*lines[: bad - 1], "{", *lines[bad - 1 :]])
        (folder / "train.jsonl").write_text(text, encoding="utf-8")
        if bad < 3:
            with user_error(rf"train\.jsonl, line {bad}: not JSON"):
                load_pairs(data)
        else:
            assert len(load_pairs(data)["train"]) == 2
            pairs = iter(PairStream(data, seed=0))
            assert list(itertools.islice(pairs, 2)) == PAIRS[:2]
            with user_error(r"train\.jsonl, line 3: not JSON"):
                next(pairs)


def test_vocabulary_is_learned_from_evenly_spaced_pairs_of_a_set_and_the_first_of_a_stream(folder: Path) -> None:
    (folder / "train.jsonl").write_text("\n".join(json_line(f"s{n}", f"t{n}") for n in range(10)), encoding="utf-8")
    data = recipe(folder, train="train.jsonl", streaming=True)
    stream, in_memory = PairStream(data, seed=0), load_pairs(data)["train"]
    assert list(sample_texts(in_memory, 3)) == ["s0", "s3", "s6", "t0", "t3", "t6"]
    assert list(sample_texts(stream, 3)) == ["s0", "t0", "s1", "t1", "s2", "t2"]
    everything = {f"{side}{number}" for side in "st" for number in range(10)}
    for pairs in (in_memory, stream):
        for count in (None, 10, 11):
            assert set(sample_texts(pairs, count)) == everything


@pytest.fixture
def tokenizer() -> VaswaniTransformerTokenizer:
    """Return a tokenizer of one token a byte, and one for the end."""
    return VaswaniTransformerTokenizer.train_from_iterator([text for pair in PAIRS for text in pair], 259)


def test_text_that_spells_a_special_token_stays_text(folder: Path, tokenizer: VaswaniTransformerTokenizer) -> None:
    encoded = tokenize(load_pairs(recipe(folder)), tokenizer, recipe(folder))["train"][2]
    assert encoded["input_ids"].count(tokenizer.eos_token_id) == 1
    assert tokenizer.pad_token_id not in encoded["labels"]
    assert tokenizer.decode(encoded["labels"], skip_special_tokens=True) == "drei <pad>"


def test_added_language_tag_is_one_token_in_training(tokenizer: VaswaniTransformerTokenizer) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<2de>"]})
    tag, end = tokenizer.get_vocab()["<2de>"], tokenizer.eos_token_id
    sources, targets = token_ids(tokenizer, ["<2de> one </s>"], ["ein</s>"])
    assert target_ids(tokenizer, ["ein</s>"]) == targets
    assert (sources[0][0], sources[0].count(tag)) == (tag, 1)
    assert [tokens.index(end) for tokens in (*sources, *targets)] == [len(sources[0]) - 1, len(targets[0]) - 1]


def test_training_pairs_that_are_too_long_are_dropped_or_an_error_and_others_are_kept(
    folder: Path, tokenizer: VaswaniTransformerTokenizer
) -> None:
    pairs = load_pairs(recipe(folder))
    dropped = tokenize(pairs, tokenizer, recipe(folder, max_length=10))
    assert tokenizer.decode(dropped["train"]["labels"][0], skip_special_tokens=True) == "ein baum"
    assert {name: len(split) for name, split in dropped.items()} == {"train": 1, "validation": 3, "test": 3}
    with user_error(r"data\.max_length: 2 of 3 training pairs are longer than 10 tokens"):
        tokenize(pairs, tokenizer, recipe(folder, max_length=10, too_long="error"))
    with user_error(r"all 3 training pairs are longer than 1 tokens, .* the shortest has 9; raise it"):
        tokenize(pairs, tokenizer, recipe(folder, max_length=1))


def test_streamed_pairs_have_the_tokens_of_pairs_in_memory(
    folder: Path, tokenizer: VaswaniTransformerTokenizer
) -> None:
    data = recipe(folder, streaming=True)
    at_once = tokenize(load_pairs(data), tokenizer, data)["train"].remove_columns(["number"])
    assert make_encode_fn(tokenizer, data)(list(PairStream(data, seed=0))) == at_once.to_list()


def test_datasets_hashes_no_function_and_so_swallows_no_interruption_of_it(
    folder: Path, tokenizer: VaswaniTransformerTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It catches any exception while it hashes, which takes long only for a function with a tokenizer."""
    pairs, update = load_pairs(recipe(folder)), datasets.fingerprint.update_fingerprint

    def update_without_function(fingerprint: str, transform: Any, arguments: dict[str, Any]) -> str:
        assert not any(callable(argument) for argument in arguments.values())
        return update(fingerprint, transform, arguments)

    monkeypatch.setattr("datasets.arrow_dataset.update_fingerprint", update_without_function)
    tokenize(pairs, tokenizer, recipe(folder))


@pytest.mark.parametrize("algorithm", ["bpe", "wordpiece"])
def test_unknown_tokens_are_counted_and_the_commonest_words_named(
    folder: Path, caplog: pytest.LogCaptureFixture, algorithm: str
) -> None:
    words = {"bpe": "known words", "wordpiece": "one tree ein two three drei zwei </s> <pad>"}[algorithm]
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([words], 300, algorithm)
    lines = [json_line("one", "ein bäum"), json_line("tree öl", "drei ñu bäum"), json_line("one", "ein ñu bäum")]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = recipe(folder, train="train.jsonl")
    pairs = load_pairs(data)
    counts = {str(name): count_unknown(split, tokenizer) for name, split in tokenize(pairs, tokenizer, data).items()}
    with caplog.at_level(logging.INFO):
        report_unknown(counts, pairs, tokenizer)
    if algorithm == "bpe":  # spells every text
        assert counts["train"]["target"]["unknown"] == counts["train"]["source"]["unknown"] == 0
        assert caplog.messages == []
        return
    ends, pieces = 3, 3  # of the known words
    assert counts["train"]["target"] == {"tokens": 5 + pieces + ends, "unknown": 5}
    assert counts["train"]["source"]["unknown"] == 1
    info, warning = caplog.messages[-2:]
    assert "train 14.29% of source, 45.45% of target; validation" in info
    assert "targets of train; got 45.5% unknown tokens (<unk>), expected at most 1%" in warning
    assert "words are 'bäum', 'ñu'. Train" in warning


def test_streamed_pair_that_is_too_long_is_an_error_if_the_recipe_says_so(
    folder: Path, tokenizer: VaswaniTransformerTokenizer
) -> None:
    pairs = list(PairStream(recipe(folder, streaming=True), seed=0))
    longest = max(len(side) for sides in token_ids(tokenizer, *map(list, zip(*pairs, strict=True))) for side in sides)
    assert len(make_encode_fn(tokenizer, recipe(folder, max_length=10))(pairs)) == 3
    assert len(make_encode_fn(tokenizer, recipe(folder, max_length=longest, too_long="error"))(pairs)) == 3
    with user_error(r"data\.max_length: a training pair \('two trees'...\) has 12 tokens on a s"):
        make_encode_fn(tokenizer, recipe(folder, max_length=10, too_long="error"))(pairs)
    with user_error(r"all the first 3 training pairs are longer than 1 tokens"):
        tokenize(load_pairs(recipe(folder)), tokenizer, recipe(folder, max_length=1, streaming=True))


def test_disk_that_fails_while_pairs_are_read_is_an_error_of_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Any, path: Path) -> Iterator[bytes]:
        yield json_line("one tree", "ein baum").encode()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(data_files, "bounded_lines", fail)
    with user_error(r"train\.jsonl\.gz: cannot be read \(Input/output error\); make it readable, or name another\.$"):
        list(sources_in_order(recipe(folder)))


@pytest.mark.parametrize(
    ("pair", "is_lost", "message"),
    [
        ({"en": "a", "de": "b"}, True, r"00000\.jsonl: cannot be read \(No such file or directory\); remove it and"),
        ({"en": "a", "fr": "b"}, False, r"00000\.jsonl: has a line that is no pair \('de'\); remove it and"),
    ],
)
def test_part_of_a_distillation_that_is_lost_or_of_another_language_is_an_error_of_one_line(
    tmp_path: Path, pair: dict[str, str], is_lost: bool, message: str
) -> None:
    data = {"source": "en", "target": "de"} | digest_sources(["a"])
    record = {"teacher": {"digest": ""}, "search": {}, "data": data, "settings": {"window": 1}}
    distillation = Distillation(tmp_path, record)
    distillation.write_part(0, [pair], Counter())
    if is_lost:
        distillation.paths(0)[0].unlink()
    with user_error(message):
        list(distillation.pairs())
