"""The splits of the shipped task: their schema, their held-out collocations, and the words that meet in training."""

import itertools
import re
from collections import Counter

import pytest
from datasets import DatasetDict, Features, Translation

from tests.training.toy_task.words import (
    ADJECTIVE_WORDS,
    COORDINATION,
    COPULA_WORDS,
    DETERMINER_WORDS,
    LEXICON,
    LOCATION,
    NOUN_OF,
    VERB_OF,
    english_forms,
)
from training.toy_task.grammar import Sentence
from training.toy_task.splits import assign_split, make_splits, reserved_split


def test_splits_have_the_schema_of_a_translation_data_set(splits: DatasetDict) -> None:
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 60_000, "validation": 500, "test": 1_000}
    for rows in splits.values():
        assert rows.features == Features({"translation": Translation(languages=["en", "es"])})
        assert set(rows[0]["translation"]) == {"en", "es"}
        assert not rows.cache_files


def test_splits_repeat_no_sentence(splits: DatasetDict) -> None:
    sentences_of = {split: english(splits, str(split)) for split in splits}
    for texts in sentences_of.values():
        assert len(set(texts)) == len(texts)
    for first, second in itertools.combinations(sentences_of.values(), 2):
        assert not set(first) & set(second)


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


def test_recorded_collocations_are_those_that_a_reader_sees(sample: list[Sentence]) -> None:
    for sentence in sample:
        visible, recorded = visible_collocations(sentence.en), set(sentence.collocations)
        assert visible <= recorded, sentence
        assert visible == recorded or COORDINATION.search(sentence.en), sentence


def test_training_and_validation_never_see_the_collocations_of_the_test_set(splits: DatasetDict) -> None:
    for split, allowed in (("train", {"train"}), ("validation", {"train", "validation"}), ("test", {"train", "test"})):
        for text in english(splits, split):
            assert {reserved_split(collocation) for collocation in visible_collocations(text)} <= allowed, text


@pytest.mark.parametrize("split", ["validation", "test"])
def test_every_held_out_sentence_has_a_collocation_unseen_in_training(splits: DatasetDict, split: str) -> None:
    for text in english(splits, split):
        reserved = {reserved_split(collocation) for collocation in visible_collocations(text)}
        assert COORDINATION.search(text) or split in reserved, text


def test_sentence_reserved_for_two_splits_is_in_neither(sample: list[Sentence]) -> None:
    unassigned = [sentence for sentence in sample if assign_split(sentence) is None]
    assert unassigned
    for sentence in unassigned:
        assert {"validation", "test"} <= {reserved_split(collocation) for collocation in sentence.collocations}


def test_training_sees_every_word_of_the_other_splits(splits: DatasetDict) -> None:
    for language in ("en", "es"):
        known, *other_splits = (words_of(splits, split, language) for split in ("train", "validation", "test"))
        for words in other_splits:
            assert words <= known


def words_of(splits: DatasetDict, split: str, language: str) -> set[str]:
    return {word for pair in splits[split]["translation"] for word in re.findall(r"\w+", pair[language])}


def test_training_sees_every_word_of_the_lexicon(splits: DatasetDict) -> None:
    known = words_of(splits, "train", "en")
    for word in LEXICON:
        forms = {form for form in english_forms(word) if form not in ("", "-")}
        assert {single for form in forms for single in form.split()} <= known


def test_smaller_split_is_the_beginning_of_a_larger_one(splits: DatasetDict) -> None:
    small = make_splits(train_size=200, validation_size=20, test_size=30)
    for split, rows in small.items():
        assert rows["translation"][:] == splits[split]["translation"][: len(rows)]


def test_another_seed_gives_other_sentences_and_keeps_the_splits_apart(splits: DatasetDict) -> None:
    other = make_splits(train_size=300, validation_size=20, test_size=100, seed=1)
    assert english(other, "test") != english(splits, "test")[:100]
    assert not set(english(other, "test")) & set(english(splits, "train"))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("size", [0, -1, 100_001, 10**12])
def test_split_size_out_of_range_is_an_error(split: str, size: int) -> None:
    with pytest.raises(ValueError, match=rf"^{split}_size: .*; got {size}, expected 1 to 100000\. Choose a size"):
        make_splits(**{f"{split}_size": size})


def described_nouns(text: str) -> int:
    """Return the number of nouns with an adjective before them."""
    return sum(first in ADJECTIVE_WORDS and second in NOUN_OF for first, second in itertools.pairwise(words_in(text)))


def words_in(text: str) -> list[str]:
    return re.findall("[a-z]+", text.replace("'s", ""))


MEETINGS = {
    "two described nouns": (0.06, lambda text: described_nouns(text) >= 2),
    "a negation and a described noun": (0.07, lambda text: "not" in text.split() and described_nouns(text) >= 1),
    "a negation and two described nouns": (0.01, lambda text: "not" in text.split() and described_nouns(text) >= 2),
    "a negation and a place": (0.02, lambda text: "not" in text.split() and LOCATION.search(text)),
    "a place and two described nouns": (0.02, lambda text: LOCATION.search(text) and described_nouns(text) >= 2),
    "a question and a described noun": (0.10, lambda text: text.endswith("?") and described_nouns(text) >= 1),
    "two clauses": (0.12, lambda text: re.search(r" (and|but) ", text)),
}


@pytest.mark.parametrize("meeting", MEETINGS)
def test_words_meet_in_training(splits: DatasetDict, meeting: str) -> None:
    minimum_share, holds = MEETINGS[meeting]
    texts = english(splits, "train")
    assert sum(bool(holds(text)) for text in texts) >= minimum_share * len(texts)


def test_every_adjective_describes_a_first_and_a_later_noun_in_training(splits: DatasetDict) -> None:
    """Each appears at least 50 times in both positions, except "fast", which describes only animals."""
    seen = Counter()
    for text in english(splits, "train"):
        words = words_in(text)
        nouns = [index for index, word in enumerate(words) if word in NOUN_OF]
        for order, index in enumerate(nouns):
            if words[index - 1] in ADJECTIVE_WORDS:
                seen[words[index - 1], order > 0] += 1
    rare = {word for word in ADJECTIVE_WORDS for is_later in (False, True) if seen[word, is_later] < 50}
    assert rare <= {"fast"}
    assert seen["fast", True] > 0
