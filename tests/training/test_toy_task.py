"""The toy task: its sentences and splits never change, and its Spanish is a function of the English."""

import hashlib
import itertools

from training.toy_task import generate_sentences, make_splits


def test_one_english_sentence_has_one_spanish_sentence() -> None:
    spanish: dict[str, str] = {}
    sample = list(itertools.islice(generate_sentences(seed=7), 30_000))
    for sentence in sample:
        assert spanish.setdefault(sentence.en, sentence.es) == sentence.es
    assert len(spanish) < len(sample), "a sample without repetitions shows nothing"


def test_splits_behind_published_scores_are_unchanged() -> None:
    """The digests are those of results.json. A changed grammar needs new ones and a new quickstart run."""
    digests = {
        "train": "34a6396789a09309a78f4510dfbd142c81df4dbaa25f6bd057b3cf223baf0e02",
        "validation": "bf8c5919e948b487d93609e980d16bae5cd07cc0bccd1ca6d303d61235e34660",
        "test": "d9e11ac67110381b88b8ddc63d77c119d1433f802f671fdf8c2f6f47d2b6733e",
    }
    for split, rows in make_splits().items():
        texts = "".join(f"{pair['en']}\0{pair['es']}\0" for pair in rows["translation"])
        assert hashlib.sha256(texts.encode()).hexdigest() == digests[str(split)]


def test_smaller_splits_are_the_beginning_of_larger_ones() -> None:
    smaller, larger = make_splits(20, 5, 5), make_splits(40, 8, 6)
    for split, rows in smaller.items():
        assert rows[:] == larger[split][: len(rows)]
