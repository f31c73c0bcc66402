"""The function words of the shipped task: determiners, prepositions, pronouns and adverbs of time."""

from dataclasses import dataclass

from training.toy_task.lexicon import NO_FORM, Noun, expand_categories, nouns_in, read_table

THIRD_SINGULAR, THIRD_PLURAL = 2, 4  # persons of a conjugation: i, you, he or she, we, they


@dataclass(frozen=True)
class Determiner:
    """An article, a demonstrative, a possessive or a quantity in both languages."""

    weight: int  # how often it is drawn, against the other determiners that a noun accepts
    is_definite: bool
    countability: str  # the nouns it goes with: count, mass or any
    categories: tuple[str, ...]
    english: tuple[str, str]  # singular, plural
    spanish: tuple[str, ...]  # masculine and feminine singular, masculine and feminine plural

    def accepts(self, noun: Noun, plural: bool) -> bool:
        """Return True if the determiner can stand before the noun in this number."""
        if self.english[plural] == NO_FORM or noun.category not in self.categories:
            return False
        return self.countability in ("any", "count" if noun.is_countable else "mass")


DETERMINERS = tuple(
    Determiner(
        int(weight),
        definiteness == "definite",
        countability,
        expand_categories(categories),
        (english, english_plural),
        tuple(spanish),
    )
    for weight, definiteness, countability, categories, english, english_plural, *spanish in read_table("determiners")
)
DEFINITE = tuple(determiner for determiner in DETERMINERS if determiner.is_definite)
INDEFINITE = tuple(determiner for determiner in DETERMINERS if not determiner.is_definite)
THE = DETERMINERS[0]


@dataclass(frozen=True)
class Preposition:
    """A preposition of place in both languages, with the nouns before and after it."""

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
    """A personal pronoun in both languages. Spanish drops the subjects that its verb shows: yo, tú, nosotros."""

    person: int
    is_feminine: bool
    english_subject: str
    spanish_subject: str
    english_object: str
    clitic: str  # the Spanish object, which stands before its verb


PRONOUNS = tuple(Pronoun(int(person), gender == "f", *forms) for person, gender, *forms in read_table("pronouns"))

# English and Spanish adverbs of time by tense
ADVERBS = {
    "present": (("today", "hoy"),),
    "past": (("today", "hoy"), ("yesterday", "ayer")),
    "future": (("today", "hoy"), ("tomorrow", "mañana")),
}
