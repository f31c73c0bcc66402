"""The toy task: its sentences never change, its Spanish is a function of the English, its splits differ."""

import hashlib
import itertools

import pytest
from datasets import DatasetDict, Features, Translation

from training.toy_task import ADJECTIVES, DETERMINERS, NOUNS, VERBS, generate_sentences, make_splits, reserved_split

NOUN_OF = {form: noun.english[0] for noun in NOUNS for form in noun.english}
VERB_OF = {form.split()[0]: verb.base for verb in VERBS for form in (verb.base, verb.third_person, verb.english_past)}
ADJECTIVE_WORDS = {adjective.english for adjective in ADJECTIVES}
DETERMINER_WORDS = {form for determiner in DETERMINERS for form in determiner.english} | {"an"}
COPULA_WORDS = {"am", "is", "are", "was", "were", "will", "be", "not"}


@pytest.fixture(scope="module")
def splits() -> DatasetDict:
    return make_splits()


# Sentences


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


# Splits


def test_splits_have_the_schema_of_a_translation_data_set(splits: DatasetDict) -> None:
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 60_000, "validation": 500, "test": 1_000}
    for rows in splits.values():
        assert rows.features == Features({"translation": Translation(languages=["en", "es"])})
        assert set(rows[0]["translation"]) == {"en", "es"}
        assert not rows.cache_files


def english(splits: DatasetDict, split: str) -> list[str]:
    return [pair["en"] for pair in splits[split]["translation"]]


def visible_collocations(text: str) -> set[tuple[str, str]]:
    """Return the collocations that a reader sees in the English.

    These are an adjective next to its noun, on either side once "to be" is removed, and a verb with the first noun
    after it, or with the noun that its "it" or "them" means.
    """
    words = [word for word in text.rstrip(".?").split() if word not in COPULA_WORDS]
    collocations, verb, last_noun = set(), None, None
    for before, word in itertools.pairwise(["", *words]):
        if word in NOUN_OF and before in ADJECTIVE_WORDS:
            collocations.add((before, NOUN_OF[word]))
        if before in NOUN_OF and word in ADJECTIVE_WORDS:
            collocations.add((word, NOUN_OF[before]))
        if verb and (word in NOUN_OF or (last_noun and word in ("it", "them"))):
            last_noun = NOUN_OF.get(word, last_noun)
            collocations.add((verb, last_noun))
        if word in VERB_OF:
            verb = VERB_OF[word]
        elif word not in {"for", "to"} | DETERMINER_WORDS | ADJECTIVE_WORDS and not word.endswith("'s"):
            verb = None
    return collocations


def test_training_and_validation_never_see_the_collocations_of_the_test_set(splits: DatasetDict) -> None:
    for split, allowed in (("train", {"train"}), ("validation", {"train", "validation"}), ("test", {"train", "test"})):
        for text in english(splits, split):
            assert {reserved_split(collocation) for collocation in visible_collocations(text)} <= allowed, text


def test_smaller_split_is_the_beginning_of_a_larger_one(splits: DatasetDict) -> None:
    small = make_splits(train_size=200, validation_size=20, test_size=30)
    for split, rows in small.items():
        assert rows["translation"][:] == splits[split]["translation"][: len(rows)]
