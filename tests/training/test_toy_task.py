"""The toy task: its sentences and splits never change, and its Spanish is a function of the English."""

import hashlib
import itertools

import pytest
from datasets import DatasetDict, Features, Translation

from training.toy_task import generate_sentences, make_splits


@pytest.fixture(scope="module")
def splits() -> DatasetDict:
    return make_splits()


def test_one_english_sentence_has_one_spanish_sentence() -> None:
    spanish: dict[str, str] = {}
    sample = list(itertools.islice(generate_sentences(seed=7), 30_000))
    for sentence in sample:
        assert spanish.setdefault(sentence.en, sentence.es) == sentence.es
    assert len(spanish) < len(sample), "a sample without repetitions shows nothing"


def test_splits_behind_published_scores_are_unchanged(splits: DatasetDict) -> None:
    """The digests are those of results.json. A changed grammar needs new ones and a new quickstart run."""
    digests = {
        "train": "34a6396789a09309a78f4510dfbd142c81df4dbaa25f6bd057b3cf223baf0e02",
        "validation": "bf8c5919e948b487d93609e980d16bae5cd07cc0bccd1ca6d303d61235e34660",
        "test": "d9e11ac67110381b88b8ddc63d77c119d1433f802f671fdf8c2f6f47d2b6733e",
    }
    for split, rows in splits.items():
        texts = "".join(f"{pair['en']}\0{pair['es']}\0" for pair in rows["translation"])
        assert hashlib.sha256(texts.encode()).hexdigest() == digests[str(split)]


def test_splits_have_the_schema_of_a_translation_data_set(splits: DatasetDict) -> None:
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 60_000, "validation": 500, "test": 1_000}
    for rows in splits.values():
        assert rows.features == Features({"translation": Translation(languages=["en", "es"])})
        assert set(rows[0]["translation"]) == {"en", "es"}
        assert not rows.cache_files


def test_smaller_split_is_the_beginning_of_a_larger_one(splits: DatasetDict) -> None:
    small = make_splits(train_size=200, validation_size=20, test_size=30)
    for split, rows in small.items():
        assert rows["translation"][:] == splits[split]["translation"][: len(rows)]
