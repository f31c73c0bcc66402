"""English-to-Spanish sentences that a small grammar makes, so that a first training run needs no download.

Each choice (verb, noun, number, tense) is drawn once and expressed in both languages. Spanish agrees where English has
no mark: "the woman sees the red houses." is "la mujer ve las casas rojas.".

The Spanish is a function of the English. Where English says less, one reading holds: "you" is tú, "they" is ellos, "i",
"we" and "who" are masculine, "teacher" is maestra, and "it" occurs only after its noun. Text is lower-case.

Validation and test have unseen combinations of known words: a digest reserves some collocations, which are pairs of
adjective and noun ("red house") or of verb and object ("buy house"), for either split. A sentence with a reserved
collocation belongs only to that split.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from datasets import Dataset, DatasetDict, Features, Translation

T = TypeVar("T")
WORDS = Path(__file__).parent / "toy_words"
NO_FORM = "-"  # a form that is not in use, such as the plural of "milk"
THIRD_SINGULAR, THIRD_PLURAL = 2, 4  # persons of a conjugation: i, you, he or she, we, they
MAX_ENGLISH_WORDS = 14
# Categories that a description draws its subject from; those named twice come up twice as often.
DESCRIBED_CATEGORIES = (*["people"] * 2, "animal", *["goods"] * 2, "writing", *["food"] * 2, "indoors", "sights")
ADVERBS = {  # English and Spanish adverbs of time by tense
    "present": (("today", "hoy"),),
    "past": (("today", "hoy"), ("yesterday", "ayer")),
    "future": (("today", "hoy"), ("tomorrow", "mañana")),
}


# Words


def read_table(name: str) -> list[list[str]]:
    """Return the cells of a table, a word a line, which blanks separate; "_" is a blank inside a cell, or no text.

    The categories of a noun ("animal", "vehicle") decide which adjectives, verbs and places go with it. No English form
    belongs to two words or to two tenses, so "fish", "sheep" and "read" are not among the words.
    """
    _, *lines = (WORDS / f"{name}.txt").read_text(encoding="utf-8").splitlines()  # the first one names the columns
    return [[cell.replace("_", " ").strip() for cell in line.split()] for line in lines]


GROUPS = dict(read_table("categories"))


@cache
def expand_categories(names: str) -> tuple[str, ...]:
    """Return the categories that a table names, with every group replaced by its members."""
    lists = (expand_categories(GROUPS[name]) if name in GROUPS else (name,) for name in names.split(","))
    return tuple(category for categories in lists for category in categories)


@dataclass(frozen=True, eq=False)  # words compare by identity
class Noun:
    category: str
    is_feminine: bool
    english: tuple[str, str]  # singular, plural
    spanish: tuple[str, str]

    @property
    def is_countable(self) -> bool:
        return self.english[1] != NO_FORM


NOUNS = tuple(
    Noun(category, gender == "f", (english, english_plural), (spanish, spanish_plural))
    for category, gender, english, english_plural, spanish, spanish_plural in read_table("nouns")
)


@cache
def nouns_in(categories: str) -> tuple[Noun, ...]:
    """Return the nouns of these categories, in the order of the table."""
    return tuple(noun for noun in NOUNS if noun.category in expand_categories(categories))


@dataclass(frozen=True)
class Adjective:
    categories: tuple[str, ...]
    copula: str  # ser or estar
    english: str
    spanish: tuple[str, ...]  # masculine and feminine singular, masculine and feminine plural


ADJECTIVES = tuple(
    Adjective(expand_categories(categories), copula, english, tuple(spanish))
    for categories, copula, english, *spanish in read_table("adjectives")
)


@cache
def adjectives_for(category: str) -> tuple[Adjective, ...]:
    """Return the adjectives that describe nouns of a category."""
    return tuple(adjective for adjective in ADJECTIVES if category in adjective.categories)


@dataclass(frozen=True)
class Determiner:
    """An article, a demonstrative, a possessive or a quantity."""

    weight: int  # how often it is drawn, compared with the other determiners that a noun accepts
    is_definite: bool
    countability: str  # the nouns it goes with: count, mass or any
    categories: tuple[str, ...]
    english: tuple[str, str]  # singular, plural
    spanish: tuple[str, ...]  # masculine and feminine singular, masculine and feminine plural

    def accepts(self, noun: Noun, plural: bool) -> bool:
        if self.english[plural] == NO_FORM or noun.category not in self.categories:
            return False
        return self.countability in ("any", "count" if noun.is_countable else "mass")


DETERMINERS = tuple(
    Determiner(int(weight), definite == "definite", nouns, expand_categories(categories), (one, many), tuple(spanish))
    for weight, definite, nouns, categories, one, many, *spanish in read_table("determiners")
)
DEFINITE = tuple(determiner for determiner in DETERMINERS if determiner.is_definite)
INDEFINITE = tuple(determiner for determiner in DETERMINERS if not determiner.is_definite)
THE = DETERMINERS[0]


@dataclass(frozen=True)
class Preposition:
    """A preposition of place, with the nouns before and after it."""

    english: str
    spanish: str
    located: tuple[Noun, ...]
    locations: tuple[Noun, ...]


PREPOSITIONS = tuple(
    Preposition(english, spanish, nouns_in(located), nouns_in(locations))
    for english, spanish, located, locations in read_table("prepositions")
)


@dataclass(frozen=True)
class Pronoun:
    """A personal pronoun. Spanish drops the subjects that its verb shows: yo, tú, nosotros."""

    person: int
    is_feminine: bool
    english_subject: str
    spanish_subject: str
    english_object: str
    clitic: str  # the Spanish object, which stands before its verb


PRONOUNS = tuple(Pronoun(int(person), gender == "f", *forms) for person, gender, *forms in read_table("pronouns"))


@dataclass(frozen=True)
class Verb:
    subjects: tuple[Noun, ...]
    objects: tuple[Noun, ...]
    spanish_past: str  # preterite for events, imperfect for states
    base: str
    third_person: str
    english_past: str
    infinitive: str


VERBS = tuple(Verb(nouns_in(subjects), nouns_in(objects), *forms) for subjects, objects, *forms in read_table("verbs"))
TRANSITIVE = tuple(verb for verb in VERBS if verb.objects)
INTRANSITIVE = tuple(verb for verb in VERBS if not verb.objects or verb.base in ("eat", "drink"))
CONJUGATION = {(verb, tense): forms for verb, tense, *forms in read_table("conjugation")}


def conjugate(verb: str, tense: str, person: int) -> str:
    """Return the form of "be" or a Spanish verb for a tense (present, preterite, imperfect, future) and a person."""
    if (verb, tense) in CONJUGATION:
        return CONJUGATION[verb, tense][person]
    return verb[:-2] + CONJUGATION[f"-{verb[-2:]}", tense][person]


# Phrases


class Sampler:
    """Random choices by `random.Random.random`, the only method whose numbers Python promises never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]


@dataclass(frozen=True)
class Phrase:
    """Words of both languages with the same meaning, and what other words need to agree with them."""

    en: str = ""
    es: str = ""
    collocations: tuple[tuple[str, str], ...] = ()  # a verb or an adjective, and the noun it goes with, in English
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
    if THE in determiners and noun.category in expand_categories("owned") and sampler.chance(0.1):
        person = sampler.choice(nouns_in("people"))  # "the king's red car", "el coche rojo del rey"
        owner = noun_phrase(person, False, sample_determiner(sampler, DEFINITE, person))
        phrase = noun_phrase(noun, plural, replace(THE, english=(f"{owner.en}'s", f"{owner.en}'s")), adjective)
        return replace(phrase, es=f"{phrase.es} de {owner.es}")
    return noun_phrase(noun, plural, sample_determiner(sampler, determiners, noun, plural=plural), adjective)


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
    if sampler.chance(0.12):  # "the man and the woman", "el hombre y la mujer", masculine unless both are not
        first = sampler.choice(nouns)
        second = sampler.choice(nouns_in(first.category))
        determiner = sample_determiner(sampler, DEFINITE, first, second)
        one, other = (noun_phrase(noun, False, determiner) for noun in (first, second))
        is_feminine = first.is_feminine and second.is_feminine
        both = join_phrases(one, Phrase("and", "y"), other)
        return replace(both, person=THIRD_PLURAL, is_feminine=is_feminine, nouns=(first, second))
    return sample_noun_phrase(sampler, nouns, determiners, adjective_rate=adjective_rate)


def includes_people(nouns: Sequence[Noun]) -> bool:
    return any(noun.category == "person" for noun in nouns)


def sample_object(sampler: Sampler, verb: Verb, nouns: Sequence[Noun]) -> Phrase:
    """Draw a direct object. Spanish puts "a" before people, and before animals with a definite determiner."""
    phrase = sample_noun_phrase(sampler, nouns)
    noun = phrase.nouns[0]
    takes_a = noun.category in expand_categories("people") or (noun.category == "animal" and phrase.is_definite)
    es = f"a {phrase.es}" if takes_a else phrase.es
    return replace(phrase, es=es, collocations=((verb.base, noun.english[0]), *phrase.collocations))


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


# Clauses


@dataclass(frozen=True)
class VerbGroup:
    """A verb that agrees with its subject. English negation and questions split it: "sees", but "does" ... "see"."""

    finite: str
    auxiliary: str
    base: str
    spanish: str


def verb_group(verb: Verb, tense: str, person: int, clitic: str = "") -> VerbGroup:
    """Return a verb in a tense and a person (0 to 4); a clitic is a Spanish object pronoun before it."""
    spanish = join_words(clitic, conjugate(verb.infinitive, verb.spanish_past if tense == "past" else tense, person))
    if tense == "future":
        return VerbGroup(f"will {verb.base}", "will", verb.base, spanish)
    if tense == "past":
        return VerbGroup(verb.english_past, "did", verb.base, spanish)
    if person == THIRD_SINGULAR:
        return VerbGroup(verb.third_person, "does", verb.base, spanish)
    return VerbGroup(verb.base, "do", verb.base, spanish)


def copula(infinitive: str, tense: str, person: int) -> VerbGroup:
    """Return "to be" in a tense and a person.

    Spanish has three verbs for it: ser for what something is, estar for how or where it is, haber for what there is.
    """
    spanish = conjugate(infinitive, "imperfect" if tense == "past" else tense, person)
    if tense == "future":
        return VerbGroup("will be", "will", "be", spanish)
    english = conjugate("be", tense, person)
    return VerbGroup(english, english, "", spanish)


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
    if includes_people(verb.objects) and sampler.chance(0.3):
        same_persons = {0: (0, 3), 1: (1,), 3: (0, 3)}.get(subject.person, ())  # no "i see me" and no "we see me"
        pronoun = sampler.choice([pronoun for pronoun in PRONOUNS if pronoun.person not in same_persons])
        group = verb_group(verb, tense, subject.person, pronoun.clitic)
        return Clause(subject, group, Phrase(pronoun.english_object))
    object_ = sample_object(sampler, verb, verb.objects)
    is_event = verb.spanish_past == "preterite" and object_.nouns[0].category not in expand_categories("home,sights")
    if is_event:
        object_ = join_phrases(object_, sample_adjunct(sampler, tense, location_rate=0.25, time_rate=0.1))
    return Clause(subject, verb_group(verb, tense, subject.person), object_)


def intransitive(sampler: Sampler, tense: str, subject: Phrase | None = None) -> Clause:
    """Draw "the girls sing in the park", "las niñas cantan en el parque"."""
    verb = sampler.choice(INTRANSITIVE)
    subject = subject or sample_subject(sampler, verb.subjects)
    adjunct = sample_adjunct(sampler, tense, 1.0 if verb.base == "live" else 0.4, time_rate=0.15)
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
    nouns = [noun for noun in preposition.located if any(each.accepts(noun, plural=False) for each in INDEFINITE)]
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


# Sentences


def make_sentence(phrase: Phrase, is_question: bool = False) -> Phrase:
    """Apply what changes where two words meet, and the punctuation of both languages."""
    en = re.sub(r"\ba (?=[aeiou])", "an ", phrase.en)
    es = re.sub(r"\bla (?=agua\b|águila\b)", "el ", phrase.es)  # both are feminine
    es = re.sub(r"\buna (?=águila\b)", "un ", es)
    es = re.sub(r"\b(a|de) el\b", lambda match: f"{match[1]}l", es)
    en, es = (f"{en}?", f"¿{es}?") if is_question else (f"{en}.", f"{es}.")
    return Phrase(en, es, phrase.collocations)


def object_question(sampler: Sampler, tense: str) -> Phrase:
    """Draw "what does she eat?", "¿qué come ella?"; or "who did they help?", "¿a quién ayudaron ellos?"."""
    verb = sampler.choice(TRANSITIVE)
    subject = sample_subject(sampler, verb.subjects)
    question_word = Phrase("who", "a quién") if includes_people(verb.objects) else Phrase("what", "qué")
    clause = Clause(subject, verb_group(verb, tense, subject.person))
    return make_sentence(interrogative(clause, question_word), is_question=True)


def where_question(sampler: Sampler, tense: str) -> Phrase:
    """Draw "where does he live?", "¿dónde vive él?"; or "where are the keys?", "¿dónde están las llaves?"."""
    verb = sampler.choice(INTRANSITIVE) if sampler.chance(0.5) else None
    subject = sample_subject(sampler, verb.subjects if verb else NOUNS, DEFINITE)
    group = verb_group(verb, tense, subject.person) if verb else copula("estar", tense, subject.person)
    return make_sentence(interrogative(Clause(subject, group), Phrase("where", "dónde")), is_question=True)


# Verbs of a second clause about a thing that was just bought or found
SECOND_VERBS = {"buy": ("eat", "drink", "wash", "paint", "sell"), "find": ("wash", "open", "sell", "break")}


def two_actions(sampler: Sampler, tense: str) -> Phrase:
    """Draw "she bought the pears and did not eat them.", "ella compró las peras y no las comió."."""
    first = sampler.choice([verb for verb in TRANSITIVE if verb.base in SECOND_VERBS])
    second = sampler.choice([verb for verb in TRANSITIVE if verb.base in SECOND_VERBS[first.base]])
    subject = sample_subject(sampler, first.subjects)
    object_ = sample_object(sampler, first, [noun for noun in first.objects if noun in second.objects])
    first_clause = Clause(subject, verb_group(first, tense, subject.person), object_)
    collocations = ((second.base, object_.nouns[0].english[0]),)
    pronoun = Phrase("them" if object_.person == THIRD_PLURAL else "it", collocations=collocations)
    clitic = ("lo", "la", "los", "las")[object_.agreement_form]
    second_clause = Clause(Phrase("and", "y"), verb_group(second, tense, subject.person, clitic), pronoun)
    negative = sampler.chance(0.2)
    return make_sentence(join_phrases(declarative(first_clause), declarative(second_clause, negative)))


def two_clauses(sampler: Sampler, tense: str) -> Phrase:
    """Draw "the man sings but his son is sad.", "el hombre canta pero su hijo está triste."."""
    subjects = (sample_subject(sampler, nouns_in("people"), pronoun_rate=0.0) for _ in range(2))
    clauses = [sampler.choice((intransitive, description))(sampler, tense, subject) for subject in subjects]
    conjunction = sampler.choice((Phrase("and", "y"), Phrase("but", "pero")))
    first, second = (declarative(clause, negative=sampler.chance(0.3)) for clause in clauses)
    return make_sentence(join_phrases(first, conjunction, second))


PATTERNS = ["statement"] * 8 + ["yes or no"] * 4 + ["two actions"] * 2 + ["two clauses"] * 2
PATTERNS += ["existence", "who", "what", "where"]
TENSES = ("present", "present", "past", "future")
STATED = (transitive, transitive, transitive, intransitive, description, description, location)
ASKED = (transitive, transitive, intransitive, description, description, location, existence)
CONTENT = {form for noun in NOUNS for form in noun.english} | {adjective.english for adjective in ADJECTIVES}


def sample_sentence(sampler: Sampler) -> Phrase:
    """Draw a sentence of any pattern."""
    pattern, tense = sampler.choice(PATTERNS), sampler.choice(TENSES)
    if pattern == "statement":
        clause = sampler.choice(STATED)(sampler, tense)
        return make_sentence(declarative(clause, negative=sampler.chance(0.3)))
    if pattern == "yes or no":  # "is there a cat in the garden?", "¿hay un gato en el jardín?"
        return make_sentence(interrogative(sampler.choice(ASKED)(sampler, tense)), is_question=True)
    if pattern == "existence":  # "there is a cat in the garden.", "hay un gato en el jardín."
        return make_sentence(declarative(existence(sampler, tense)))
    if pattern == "who":  # "who bought the car?", "¿quién compró el coche?"
        clause = sampler.choice((transitive, intransitive, description))(sampler, tense, WHO)
        return make_sentence(declarative(clause), is_question=True)
    make = {"what": object_question, "where": where_question, "two actions": two_actions, "two clauses": two_clauses}
    return make[pattern](sampler, tense)


def generate_sentences(seed: int) -> Iterator[Phrase]:
    """Yield sentences without end, some of them more than once. The same seed gives the same ones on every machine.

    They are short and repeat no noun or adjective, as in "the king paints the king's door".
    """
    sampler = Sampler(seed)
    while True:
        sentence = sample_sentence(sampler)
        words = sentence.en.rstrip(".?").replace("'s", "").split()
        content = [word for word in words if word in CONTENT]
        if len(words) <= MAX_ENGLISH_WORDS and len(set(content)) == len(content):
            yield sentence


# Splits


def reserved_split(collocation: tuple[str, str]) -> str:
    """Return the split that a collocation is reserved for: one in ten for test, one in ten for validation."""
    digest = hashlib.sha256(" ".join(collocation).encode()).digest()
    return {0: "test", 1: "validation"}.get(digest[0] % 10, "train")


def sample_splits(sizes: dict[str, int], seed: int) -> dict[str, dict[str, str]]:
    """Return the first distinct sentences of each split as a dict from English to Spanish."""
    splits: dict[str, dict[str, str]] = {split: {} for split in sizes}
    unfilled, sentences = set(sizes), generate_sentences(seed)
    while unfilled:
        sentence = next(sentences)
        reserved = {reserved_split(collocation) for collocation in sentence.collocations} - {"train"}
        split = next(iter(reserved), "train")
        if split in unfilled and len(reserved) <= 1:  # one that is reserved for two splits is in neither
            splits[split][sentence.en] = sentence.es
            if len(splits[split]) == sizes[split]:
                unfilled.remove(split)
    return splits


def make_splits(
    train_size: int = 60_000, validation_size: int = 500, test_size: int = 1_000, seed: int = 2017
) -> DatasetDict:
    """Return distinct sentence pairs in the schema of translation data sets: `{"translation": {"en": ..., "es": ...}}`.

    A smaller split is the beginning of a larger one with the same seed.
    """
    sizes = {"train": train_size, "validation": validation_size, "test": test_size}
    features = Features({"translation": Translation(languages=["en", "es"])})
    return DatasetDict(
        {
            split: Dataset.from_list([{"translation": {"en": en, "es": es}} for en, es in pairs.items()], features)
            for split, pairs in sample_splits(sizes, seed).items()
        }
    )
