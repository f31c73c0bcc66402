"""The toy task: its Spanish is right and a function of the English, its sentences never change, its splits differ."""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from datasets import DatasetDict, Features, Translation
from hypothesis import given, settings
from hypothesis import strategies as st

from training.toy_task import (
    ADJECTIVES,
    DETERMINERS,
    MAX_ENGLISH_WORDS,
    NOUNS,
    PREPOSITIONS,
    PRONOUNS,
    VERBS,
    Adjective,
    Determiner,
    Noun,
    Phrase,
    Preposition,
    Pronoun,
    Sampler,
    Verb,
    generate_sentences,
    make_splits,
    reserved_split,
    sample_sentence,
)

LEXICON = (*NOUNS, *ADJECTIVES, *VERBS, *DETERMINERS, *PREPOSITIONS, *PRONOUNS)


def english_forms(word: Noun | Adjective | Verb | Determiner | Preposition | Pronoun) -> Sequence[str]:
    match word:
        case Noun() | Determiner():
            return word.english
        case Adjective() | Preposition():
            return (word.english,)
        case Verb():
            return word.base, word.third_person, word.english_past
        case Pronoun():
            return word.english_subject, word.english_object


NOUN_OF = {form: noun.english[0] for noun in NOUNS for form in noun.english}
VERB_OF = {form.split()[0]: verb.base for verb in VERBS for form in (verb.base, verb.third_person, verb.english_past)}
ADJECTIVE_WORDS = {adjective.english for adjective in ADJECTIVES}
DETERMINER_WORDS = {form for determiner in DETERMINERS for form in determiner.english} | {"an"}
COPULA_WORDS = {"am", "is", "are", "was", "were", "will", "be", "not"}
COORDINATION = re.compile(r" and (the|this|that|my|your|his|her|our|their) ")


@pytest.fixture(scope="module")
def splits() -> DatasetDict:
    return make_splits()


@pytest.fixture(scope="module")
def sample() -> list[Phrase]:
    return list(itertools.islice(generate_sentences(seed=7), 30_000))


# Words


def test_no_english_form_belongs_to_two_words_or_two_tenses() -> None:
    words = [form for noun in NOUNS for form in noun.english if form != "-"]
    words += [adjective.english for adjective in ADJECTIVES]
    words += [form for verb in VERBS for form in (verb.base, verb.third_person, verb.english_past)]
    assert [word for word, count in Counter(words).items() if count > 1] == []


# Sentences


# Translations written by hand, as a speaker of both languages would say them.
GOLDEN = {
    # Articles, number, and adjectives of every pattern, after the noun.
    "the woman sees the red house.": "la mujer ve la casa roja.",
    "she bought a green car.": "ella compró un coche verde.",
    "the skirts are blue.": "las faldas son azules.",
    "we are happy.": "somos felices.",
    "the shoes are pink.": "los zapatos son rosa.",
    "my sister is hardworking.": "mi hermana es trabajadora.",
    "that map and that photo are old.": "ese mapa y esa foto son viejos.",
    "the queen and the teacher were sick.": "la reina y la maestra estaban enfermas.",
    "the man and the woman are busy.": "el hombre y la mujer están ocupados.",
    "many girls run in the park.": "muchas niñas corren en el parque.",
    "three mice watched the cat.": "tres ratones miraron al gato.",
    # Ser for identity, estar for state and location, haber for existence.
    "i am tall.": "soy alto.",
    "she is tired.": "ella está cansada.",
    "the soup was cold.": "la sopa estaba fría.",
    "the book is under the bed.": "el libro está debajo de la cama.",
    "there are two dogs in the garden.": "hay dos perros en el jardín.",
    "there was an egg on the table.": "había un huevo sobre la mesa.",
    "is there water on that desk?": "¿hay agua sobre ese escritorio?",
    # Negation.
    "i did not buy a hat.": "no compré un sombrero.",
    "the doctors are not in the hospital.": "los médicos no están en el hospital.",
    # Questions.
    "does the woman see the king?": "¿ve la mujer al rey?",
    "is the house big?": "¿es grande la casa?",
    "are they tired?": "¿están ellos cansados?",
    "did you write the letter?": "¿escribiste la carta?",
    "will the boys sleep?": "¿dormirán los niños?",
    "who opened the door?": "¿quién abrió la puerta?",
    "who does she love?": "¿a quién ama ella?",
    "where are my keys?": "¿dónde están mis llaves?",
    "where did your uncle live?": "¿dónde vivía tu tío?",
    # Pronouns, which come before the verb.
    "i love you.": "te amo.",
    "she sees him.": "ella lo ve.",
    "they do not listen to us.": "ellos no nos escuchan.",
    "will he call her?": "¿la llamará él?",
    "my aunt bought the pears and ate them.": "mi tía compró las peras y las comió.",
    "we find the car and wash it.": "encontramos el coche y lo lavamos.",
    # "A" before people and known animals; "al" and "del".
    "the boy waits for a woman.": "el niño espera a una mujer.",
    "i look for my dog.": "busco a mi perro.",
    "i look for a dog.": "busco un perro.",
    "the king's horse is fast.": "el caballo del rey es rápido.",
    "he sold my brother's white shirt.": "él vendió la camisa blanca de mi hermano.",
    "the cat is in front of the museum.": "el gato está delante del museo.",
    # Feminine nouns with a stressed first a.
    "the water is cold.": "el agua está fría.",
    "an eagle slept near the church.": "un águila durmió cerca de la iglesia.",
    "we saw the white eagle.": "vimos al águila blanca.",
    "the eagles are fast.": "las águilas son rápidas.",
    # Tenses, with the imperfect for what lasts.
    "my mother will sell the motorcycle tomorrow.": "mi madre venderá la moto mañana.",
    "her brother had a guitar.": "su hermano tenía una guitarra.",
    # Combinations: both nouns described, a negation, a location.
    "the old woman does not see the red houses.": "la mujer vieja no ve las casas rojas.",
    "are the old cups under a broken chair?": "¿están las tazas viejas debajo de una silla rota?",
    # Verbs without their object.
    "the cats drank in the kitchen.": "los gatos bebieron en la cocina.",
    # Two clauses.
    "they found a key and did not sell it.": "ellos encontraron una llave y no la vendieron.",
    "the boy sings but his father is sad.": "el niño canta pero su padre está triste.",
}


class SteeredSampler(Sampler):
    """Draws only words of the wanted sentence, all equally likely, so that it appears soon."""

    def __init__(self, wanted: str) -> None:
        super().__init__(0)
        words = wanted.rstrip(".?").replace("'s", "")
        self.wanted = f" {words} ".replace(" an ", " a ")
        self.unwanted = {id(word) for word in LEXICON if not self.is_in_sentence(english_forms(word))}

    def is_in_sentence(self, forms: Sequence[str]) -> bool:
        return any(form == "" or f" {form} " in self.wanted for form in forms)

    def choice(self, seq: Any) -> Any:
        if isinstance(seq[0], Determiner):
            seq = tuple(dict.fromkeys(seq))  # without the weights
        return super().choice([option for option in seq if id(option) not in self.unwanted] or seq)


def translate(english: str, tries: int = 200_000) -> str:
    """Return the grammar's Spanish for an English sentence, by drawing until that sentence appears."""
    sampler = SteeredSampler(english)
    for _ in range(tries):
        sentence = sample_sentence(sampler)
        if sentence.en == english:
            return sentence.es
    raise AssertionError(f"the grammar does not make {english!r}")


@pytest.mark.parametrize(("english", "spanish"), GOLDEN.items())
def test_spanish_is_what_a_speaker_would_say(english: str, spanish: str) -> None:
    assert translate(english) == spanish


def test_one_english_sentence_has_one_spanish_sentence(sample: list[Phrase]) -> None:
    spanish: dict[str, str] = {}
    for sentence in sample:
        assert spanish.setdefault(sentence.en, sentence.es) == sentence.es
    assert len(spanish) < len(sample), "a sample without repetitions shows nothing"


def test_sentence_repeats_no_noun_or_adjective(sample: list[Phrase]) -> None:
    content = {form for noun in NOUNS for form in noun.english} | {adjective.english for adjective in ADJECTIVES}
    for sentence in sample:
        words = Counter(re.findall("[a-z]+", sentence.en))
        assert all(count == 1 for word, count in words.items() if word in content), sentence.en


@settings(max_examples=20)
@given(seed=st.integers())
def test_every_sentence_has_valid_spelling_and_punctuation(seed: int) -> None:
    for sentence in itertools.islice(generate_sentences(seed), 200):
        english, spanish = sentence.en, sentence.es
        assert english == english.lower()
        assert spanish == spanish.lower()
        assert re.fullmatch(r"[a-z' ]+[.?]", english)
        assert re.fullmatch(r"¿[a-zñáéíóú ]+\?" if english.endswith("?") else r"[a-zñáéíóú ]+\.", spanish)
        assert 2 <= len(english.split()) <= MAX_ENGLISH_WORDS == 14
        assert not re.search(r"  | $|\ba [aeiou]|\ban [^aeiou]", english)
        assert not re.search(r"  | [.?]|\b(a|de) el\b|\b(la|una) águila\b|\bla agua\b", spanish)


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


def test_recorded_collocations_are_those_that_a_reader_sees(sample: list[Phrase]) -> None:
    for sentence in sample:
        visible, recorded = visible_collocations(sentence.en), set(sentence.collocations)
        assert visible <= recorded, sentence
        assert visible == recorded or COORDINATION.search(sentence.en), sentence


def test_training_and_validation_never_see_the_collocations_of_the_test_set(splits: DatasetDict) -> None:
    for split, allowed in (("train", {"train"}), ("validation", {"train", "validation"}), ("test", {"train", "test"})):
        for text in english(splits, split):
            assert {reserved_split(collocation) for collocation in visible_collocations(text)} <= allowed, text


def test_smaller_split_is_the_beginning_of_a_larger_one(splits: DatasetDict) -> None:
    small = make_splits(train_size=200, validation_size=20, test_size=30)
    for split, rows in small.items():
        assert rows["translation"][:] == splits[split]["translation"][: len(rows)]
