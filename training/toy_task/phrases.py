"""Phrases in both languages: noun phrases that agree, subjects, places and adverbs of time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from training.toy_task.function_words import (
    ADVERBS,
    DEFINITE,
    DETERMINERS,
    PREPOSITIONS,
    PRONOUNS,
    THE,
    THIRD_PLURAL,
    THIRD_SINGULAR,
    Determiner,
    Preposition,
)
from training.toy_task.lexicon import OWNED_CATEGORIES, Adjective, Noun, adjectives_for, nouns_in
from training.toy_task.sampler import Sampler

Collocation = tuple[str, str]  # a verb or an adjective, and the noun it goes with, in English


@dataclass(frozen=True)
class Phrase:
    """Words of both languages with the same meaning, and what other words need to agree with them."""

    en: str = ""
    es: str = ""
    collocations: tuple[Collocation, ...] = ()
    person: int = THIRD_SINGULAR
    is_feminine: bool = False
    is_definite: bool = False
    nouns: tuple[Noun, ...] = ()  # none in a pronoun, two in "the man and the woman"

    @property
    def agreement_form(self) -> int:
        """The index of an adjective's Spanish form that agrees with the phrase."""
        return 2 * (self.person > THIRD_SINGULAR) + self.is_feminine


NOTHING = Phrase()
WHO = Phrase("who", "quién")


def join_words(*words: str) -> str:
    """Return the words with blanks between them, without the empty ones."""
    return " ".join(word for word in words if word)


def join_phrases(*phrases: Phrase) -> Phrase:
    """Return the phrases one after the other, with all their collocations."""
    en = join_words(*(phrase.en for phrase in phrases))
    es = join_words(*(phrase.es for phrase in phrases))
    return Phrase(en, es, tuple(collocation for phrase in phrases for collocation in phrase.collocations))


def noun_phrase(noun: Noun, plural: bool, determiner: Determiner, adjective: Adjective | None = None) -> Phrase:
    """Build "the red house", "la casa roja": Spanish puts the adjective last and makes all three agree."""
    form = 2 * plural + noun.is_feminine
    en = join_words(determiner.english[plural], adjective.english if adjective else "", noun.english[plural])
    es = join_words(determiner.spanish[form], noun.spanish[plural], adjective.spanish[form] if adjective else "")
    collocations = ((adjective.english, noun.english[0]),) if adjective else ()
    person = THIRD_PLURAL if plural else THIRD_SINGULAR
    return Phrase(en, es, collocations, person, noun.is_feminine, determiner.is_definite, (noun,))


def possessive_phrase(sampler: Sampler, noun: Noun, plural: bool, adjective: Adjective | None = None) -> Phrase:
    """Draw the owner in "the king's red car", "el coche rojo del rey"."""
    person = sampler.choice(nouns_in("people"))
    owner = noun_phrase(person, False, sample_determiner(sampler, DEFINITE, person))
    phrase = noun_phrase(noun, plural, replace(THE, english=(f"{owner.en}'s", f"{owner.en}'s")), adjective)
    return replace(phrase, es=f"{phrase.es} de {owner.es}")


def sample_determiner(
    sampler: Sampler, determiners: Sequence[Determiner], *nouns: Noun, plural: bool = False
) -> Determiner:
    """Draw a determiner that every noun accepts, by weight."""
    accepted = [determiner for determiner in determiners if all(determiner.accepts(noun, plural) for noun in nouns)]
    return sampler.choice([determiner for determiner in accepted for _ in range(determiner.weight)])


def sample_noun_phrase(
    sampler: Sampler,
    nouns: Sequence[Noun],
    determiners: Sequence[Determiner] = DETERMINERS,
    plural_rate: float = 0.35,
    adjective_rate: float = 0.5,
) -> Phrase:
    """Draw a noun after a determiner or an owner; in the plural, and with an adjective, at the given rates."""
    noun = sampler.choice(nouns)
    plural = noun.is_countable and sampler.chance(plural_rate)
    adjective = sampler.choice(adjectives_for(noun.category)) if sampler.chance(adjective_rate) else None
    if THE in determiners and noun.category in OWNED_CATEGORIES and sampler.chance(0.1):
        return possessive_phrase(sampler, noun, plural, adjective)
    return noun_phrase(noun, plural, sample_determiner(sampler, determiners, noun, plural=plural), adjective)


def sample_coordinated_phrase(sampler: Sampler, nouns: Sequence[Noun]) -> Phrase:
    """Draw two nouns of a category: "the man and the woman", "el hombre y la mujer", masculine unless both are not."""
    first = sampler.choice(nouns)
    second = sampler.choice(nouns_in(first.category))
    determiner = sample_determiner(sampler, DEFINITE, first, second)
    one, other = (noun_phrase(noun, False, determiner) for noun in (first, second))
    phrase = join_phrases(one, Phrase("and", "y"), other)
    is_feminine = first.is_feminine and second.is_feminine
    return replace(phrase, person=THIRD_PLURAL, is_feminine=is_feminine, nouns=(first, second))


def sample_subject(
    sampler: Sampler,
    nouns: Sequence[Noun],
    determiners: Sequence[Determiner] = DETERMINERS,
    adjective_rate: float = 0.5,
    pronoun_rate: float = 0.4,
) -> Phrase:
    """Draw one of the nouns, or two; if people are among them, a pronoun at the given rate."""
    if includes_people(nouns) and sampler.chance(pronoun_rate):
        pronoun = sampler.choice(PRONOUNS)
        forms = pronoun.english_subject, pronoun.spanish_subject
        return Phrase(*forms, person=pronoun.person, is_feminine=pronoun.is_feminine)
    if sampler.chance(0.12):
        return sample_coordinated_phrase(sampler, nouns)
    return sample_noun_phrase(sampler, nouns, determiners, adjective_rate=adjective_rate)


def includes_people(nouns: Sequence[Noun]) -> bool:
    return any(noun.category == "person" for noun in nouns)


def sample_location(sampler: Sampler, preposition: Preposition) -> Phrase:
    """Draw a prepositional phrase: "behind the church", "detrás de la iglesia"."""
    location = sample_noun_phrase(sampler, preposition.locations, plural_rate=0.0, adjective_rate=0.45)
    return join_phrases(Phrase(preposition.english, preposition.spanish), location)


def sample_adjunct(sampler: Sampler, tense: str, location_rate: float, time_rate: float) -> Phrase:
    """Draw where or when somebody does something, at the given rates; otherwise an empty phrase."""
    if sampler.chance(location_rate):
        prepositions = [preposition for preposition in PREPOSITIONS if includes_people(preposition.located)]
        return sample_location(sampler, sampler.choice(prepositions))
    return Phrase(*sampler.choice(ADVERBS[tense])) if sampler.chance(time_rate) else NOTHING
