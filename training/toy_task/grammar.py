"""Sentences that mean the same in English and Spanish.

Each choice (verb, noun, number, tense) is drawn once and expressed in both languages. Spanish agrees where English has
no mark: "the woman sees the red houses." is "la mujer ve las casas rojas.".

The Spanish is a function of the English, because every choice shows in the English words. Where English says less, one
reading holds: "you" is tú, "they" is ellos, "i", "we" and "who" are masculine, "teacher" is maestra, and "it" occurs
only after its noun. Text is lower-case.

Words meet in many ways: every second noun has an adjective, as subject, as object or as place, also in sentences with
negation, places or a second clause. A model that never sees two adjectives in a sentence omits one of them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from training.toy_task.function_words import DEFINITE, INDEFINITE, PREPOSITIONS, PRONOUNS, THIRD_PLURAL
from training.toy_task.lexicon import (
    ADJECTIVES,
    INTRANSITIVE,
    NOUNS,
    PEOPLE_CATEGORIES,
    SITE_CATEGORIES,
    TRANSITIVE,
    Noun,
    Verb,
    adjectives_for,
    nouns_in,
)
from training.toy_task.phrases import (
    NOTHING,
    WHO,
    Collocation,
    Phrase,
    includes_people,
    join_phrases,
    join_words,
    sample_adjunct,
    sample_location,
    sample_noun_phrase,
    sample_subject,
)
from training.toy_task.sampler import Sampler
from training.toy_task.verbs import VerbGroup, add_clitic, copula, verb_group

MAX_ENGLISH_WORDS = 14
# Categories that a description draws its subject from; those named twice come up twice as often.
DESCRIBED_CATEGORIES = (*["people"] * 2, "animal", *["goods"] * 2, "writing", *["food"] * 2, "indoors", "sights")


@dataclass(frozen=True)
class Clause:
    """A subject, its verb and the words after it, before they become a statement or a question."""

    subject: Phrase
    verb: VerbGroup
    complement: Phrase = NOTHING
    is_description: bool = False


def transitive(sampler: Sampler, tense: str, subject: Phrase | None = None) -> Clause:
    """Draw "the woman sees the house", "la mujer ve la casa"; or "she sees him", "ella lo ve"."""
    verb = sampler.choice(TRANSITIVE)
    subject = subject or sample_subject(sampler, verb.subjects)
    group = verb_group(verb, tense, subject.person)
    if includes_people(verb.objects) and sampler.chance(0.3):
        same_persons = {0: (0, 3), 1: (1,), 3: (0, 3)}.get(subject.person, ())  # no "i see me" and no "we see me"
        pronoun = sampler.choice([pronoun for pronoun in PRONOUNS if pronoun.person not in same_persons])
        return Clause(subject, add_clitic(pronoun.clitic, group), Phrase(pronoun.english_object))
    object_ = sample_object(sampler, verb, verb.objects)
    is_event = verb.spanish_past == "preterite" and object_.nouns[0].category not in SITE_CATEGORIES
    if is_event:
        object_ = join_phrases(object_, sample_adjunct(sampler, tense, location_rate=0.25, time_rate=0.1))
    return Clause(subject, group, object_)


def sample_object(sampler: Sampler, verb: Verb, nouns: Sequence[Noun]) -> Phrase:
    """Draw a direct object. Spanish puts "a" before people, and before animals with a definite determiner."""
    phrase = sample_noun_phrase(sampler, nouns)
    noun = phrase.nouns[0]
    takes_a = noun.category in PEOPLE_CATEGORIES or (noun.category == "animal" and phrase.is_definite)
    es = f"a {phrase.es}" if takes_a else phrase.es
    return replace(phrase, es=es, collocations=((verb.base, noun.english[0]), *phrase.collocations))


def intransitive(sampler: Sampler, tense: str, subject: Phrase | None = None) -> Clause:
    """Draw "the girls sing in the park", "las niñas cantan en el parque"."""
    verb = sampler.choice(INTRANSITIVE)
    subject = subject or sample_subject(sampler, verb.subjects)
    location_rate = 1.0 if verb.base == "live" else 0.4
    adjunct = sample_adjunct(sampler, tense, location_rate, time_rate=0.15)
    return Clause(subject, verb_group(verb, tense, subject.person), adjunct)


def description(sampler: Sampler, tense: str, subject: Phrase | None = None) -> Clause:
    """Draw "the house is red", "la casa es roja", but "the house is dirty", "la casa está sucia"."""
    if not subject:
        nouns = nouns_in(sampler.choice(DESCRIBED_CATEGORIES))
        subject = sample_subject(sampler, nouns, DEFINITE, adjective_rate=0.0)
    adjective = sampler.choice(adjectives_for(subject.nouns[0].category if subject.nouns else "person"))
    collocations = tuple((adjective.english, noun.english[0]) for noun in subject.nouns)
    complement = Phrase(adjective.english, adjective.spanish[subject.agreement_form], collocations)
    return Clause(subject, copula(adjective.copula, tense, subject.person), complement, is_description=True)


def location(sampler: Sampler, tense: str) -> Clause:
    """Draw "the key is on the table", "la llave está sobre la mesa"."""
    preposition = sampler.choice(PREPOSITIONS)
    subject = sample_subject(sampler, preposition.located, DEFINITE)
    return Clause(subject, copula("estar", tense, subject.person), sample_location(sampler, preposition))


def existence(sampler: Sampler, tense: str) -> Clause:
    """Draw "there are two dogs in the park", "hay dos perros en el parque"."""
    preposition = sampler.choice(PREPOSITIONS)
    nouns = [
        noun for noun in preposition.located if any(determiner.accepts(noun, plural=False) for determiner in INDEFINITE)
    ]
    located = sample_noun_phrase(sampler, nouns, INDEFINITE)
    complement = join_phrases(located, sample_location(sampler, preposition))
    return Clause(Phrase("there"), copula("haber", tense, located.person), complement)


def declarative(clause: Clause, negative: bool = False) -> Phrase:
    """Build "she does not see him", "ella no lo ve"."""
    subject, verb, complement = clause.subject, clause.verb, clause.complement
    english_verb = (verb.auxiliary, "not", verb.base) if negative else (verb.finite,)
    en = join_words(subject.en, *english_verb, complement.en)
    es = join_words(subject.es, "no" if negative else "", verb.spanish, complement.es)
    return Phrase(en, es, subject.collocations + complement.collocations)


def interrogative(clause: Clause, question_word: Phrase = NOTHING) -> Phrase:
    """Build "does he see her", "la ve él"; an adjective comes before the noun it describes: "es roja la casa"."""
    subject, verb, complement = clause.subject, clause.verb, clause.complement
    en = join_words(question_word.en, verb.auxiliary, subject.en, verb.base, complement.en)
    is_inverted = clause.is_description and subject.nouns
    spanish_end = (complement.es, subject.es) if is_inverted else (subject.es, complement.es)
    es = join_words(question_word.es, verb.spanish, *spanish_end)
    return Phrase(en, es, subject.collocations + complement.collocations)


@dataclass(frozen=True)
class Sentence:
    """A sentence in both languages, and the collocations that decide which split it belongs to."""

    en: str
    es: str
    collocations: tuple[Collocation, ...]


# Changes where two words meet. "Agua" and "águila" are feminine, and change only an article right before them.
ENGLISH_CONTACT_RULES = ((r"\ba (?=[aeiou])", "an "),)
SPANISH_CONTACT_RULES = (
    (r"\bla (?=agua\b|águila\b)", "el "),
    (r"\buna (?=águila\b)", "un "),
    (r"\ba el\b", "al"),
    (r"\bde el\b", "del"),
)


def make_sentence(phrase: Phrase, is_question: bool = False) -> Sentence:
    """Apply the contact rules and the punctuation of both languages."""
    en, es = phrase.en, phrase.es
    for pattern, replacement in ENGLISH_CONTACT_RULES:
        en = re.sub(pattern, replacement, en)
    for pattern, replacement in SPANISH_CONTACT_RULES:
        es = re.sub(pattern, replacement, es)
    en, es = (f"{en}?", f"¿{es}?") if is_question else (f"{en}.", f"{es}.")
    return Sentence(en, es, phrase.collocations)


def statement(sampler: Sampler, tense: str) -> Sentence:
    """Draw one clause, affirmative or negative."""
    clauses = (transitive, transitive, transitive, intransitive, description, description, location)
    clause = sampler.choice(clauses)(sampler, tense)
    return make_sentence(declarative(clause, negative=sampler.chance(0.3)))


def yes_no_question(sampler: Sampler, tense: str) -> Sentence:
    """Draw "is there a cat in the garden?", "¿hay un gato en el jardín?"."""
    clauses = (transitive, transitive, intransitive, description, description, location, existence)
    clause = sampler.choice(clauses)(sampler, tense)
    return make_sentence(interrogative(clause), is_question=True)


def existence_statement(sampler: Sampler, tense: str) -> Sentence:
    """Draw "there is a cat in the garden.", "hay un gato en el jardín."."""
    return make_sentence(declarative(existence(sampler, tense)))


def who_question(sampler: Sampler, tense: str) -> Sentence:
    """Draw "who bought the car?", "¿quién compró el coche?"."""
    clause = sampler.choice((transitive, intransitive, description))(sampler, tense, WHO)
    return make_sentence(declarative(clause), is_question=True)


def object_question(sampler: Sampler, tense: str) -> Sentence:
    """Draw "what does she eat?", "¿qué come ella?"; or "who did they help?", "¿a quién ayudaron ellos?"."""
    verb = sampler.choice(TRANSITIVE)
    subject = sample_subject(sampler, verb.subjects)
    question_word = Phrase("who", "a quién") if includes_people(verb.objects) else Phrase("what", "qué")
    clause = Clause(subject, verb_group(verb, tense, subject.person))
    return make_sentence(interrogative(clause, question_word), is_question=True)


def where_question(sampler: Sampler, tense: str) -> Sentence:
    """Draw "where does he live?", "¿dónde vive él?"; or "where are the keys?", "¿dónde están las llaves?"."""
    verb = sampler.choice(INTRANSITIVE) if sampler.chance(0.5) else None
    subject = sample_subject(sampler, verb.subjects if verb else NOUNS, DEFINITE)
    group = verb_group(verb, tense, subject.person) if verb else copula("estar", tense, subject.person)
    return make_sentence(interrogative(Clause(subject, group), Phrase("where", "dónde")), is_question=True)


# Verbs of a second clause about a thing that was just bought or found
SECOND_VERBS = {"buy": ("eat", "drink", "wash", "paint", "sell"), "find": ("wash", "open", "sell", "break")}


def two_actions(sampler: Sampler, tense: str) -> Sentence:
    """Draw "she bought the pears and did not eat them.", "ella compró las peras y no las comió."."""
    first = sampler.choice([verb for verb in TRANSITIVE if verb.base in SECOND_VERBS])
    second = sampler.choice([verb for verb in TRANSITIVE if verb.base in SECOND_VERBS[first.base]])
    subject = sample_subject(sampler, first.subjects)
    object_ = sample_object(sampler, first, [noun for noun in first.objects if noun in second.objects])
    clitic = ("lo", "la", "los", "las")[object_.agreement_form]
    collocations = ((second.base, object_.nouns[0].english[0]),)
    pronoun = Phrase("them" if object_.person == THIRD_PLURAL else "it", collocations=collocations)
    first_clause = Clause(subject, verb_group(first, tense, subject.person), object_)
    second_group = add_clitic(clitic, verb_group(second, tense, subject.person))
    second_clause = Clause(Phrase("and", "y"), second_group, pronoun)
    negative = sampler.chance(0.2)
    return make_sentence(join_phrases(declarative(first_clause), declarative(second_clause, negative)))


def two_clauses(sampler: Sampler, tense: str) -> Sentence:
    """Draw "the man sings but his son is sad.", "el hombre canta pero su hijo está triste."."""
    subjects = (sample_subject(sampler, nouns_in("people"), pronoun_rate=0.0) for _ in range(2))
    clauses = [sampler.choice((intransitive, description))(sampler, tense, subject) for subject in subjects]
    conjunction = sampler.choice((Phrase("and", "y"), Phrase("but", "pero")))
    first, second = (declarative(clause, negative=sampler.chance(0.3)) for clause in clauses)
    return make_sentence(join_phrases(first, conjunction, second))


PATTERNS = (
    *([statement] * 8),
    *([yes_no_question] * 4),
    *([two_actions] * 2),
    *([two_clauses] * 2),
    existence_statement,
    who_question,
    object_question,
    where_question,
)
TENSES = ("present", "present", "past", "future")
NOUNS_AND_ADJECTIVES = {form for noun in NOUNS for form in noun.english} | {
    adjective.english for adjective in ADJECTIVES
}


def is_natural(sentence: Sentence) -> bool:
    """Return True if the sentence is short and repeats no noun or adjective ("the king paints the king's door")."""
    words = sentence.en.rstrip(".?").replace("'s", "").split()
    content = [word for word in words if word in NOUNS_AND_ADJECTIVES]
    return len(words) <= MAX_ENGLISH_WORDS and len(set(content)) == len(content)


def generate_sentences(seed: int) -> Iterator[Sentence]:
    """Yield sentences without end, some of them more than once. The same seed gives the same ones on every machine."""
    sampler = Sampler(seed)
    while True:
        sentence = sampler.choice(PATTERNS)(sampler, sampler.choice(TENSES))
        if is_natural(sentence):
            yield sentence
