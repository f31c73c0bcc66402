"""The function words of the shipped task: determiners, prepositions, pronouns and adverbs of time."""

from dataclasses import dataclass

from training.toy_task.lexicon import NO_FORM, Noun, expand_categories, nouns_in, parse_table

THIRD_SINGULAR, THIRD_PLURAL = 2, 4  # persons of a conjugation: i, you, he or she, we, they

# weight, definiteness, nouns (count, mass or any), categories, English singular and plural, Spanish as for adjectives
DETERMINER_TABLE = """
10  definite    any    common      the    the    el       la       los       las
2   definite    any    common      this   these  este     esta     estos     estas
2   definite    any    common      that   those  ese      esa      esos      esas
2   definite    any    owned       my     my     mi       mi       mis       mis
2   definite    any    owned       your   your   tu       tu       tus       tus
1   definite    any    owned       his    his    su       su       sus       sus
1   definite    any    owned       her    her    su       su       sus       sus
1   definite    any    owned       their  their  su       su       sus       sus
2   definite    any    owned       our    our    nuestro  nuestra  nuestros  nuestras
6   indefinite  count  common      a      -      un       una      -         -
6   indefinite  mass   dish,drink  _      -      _        _        -         -
1   indefinite  count  common      -      two    -        -        dos       dos
1   indefinite  count  common      -      three  -        -        tres      tres
1   indefinite  count  common      -      four   -        -        cuatro    cuatro
1   indefinite  count  common      -      five   -        -        cinco     cinco
1   indefinite  count  common      -      many   -        -        muchos    muchas
"""


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
    for weight, definiteness, countability, categories, english, english_plural, *spanish in parse_table(
        DETERMINER_TABLE
    )
)
DEFINITE = tuple(determiner for determiner in DETERMINERS if determiner.is_definite)
INDEFINITE = tuple(determiner for determiner in DETERMINERS if not determiner.is_definite)
THE = DETERMINERS[0]


# English, Spanish, categories of the noun that is located, categories of the location
PREPOSITION_TABLE = """
in           en          animate                indoors,sights
near         cerca_de    animate,vehicle        home,sights
behind       detrás_de   animate,vehicle        home,building
in_front_of  delante_de  animate,vehicle        home,building
on           sobre       thing,writing,clothes  furniture
on           sobre       food                   table
under        debajo_de   thing,writing,clothes  furniture
"""


@dataclass(frozen=True)
class Preposition:
    """A preposition of place in both languages, with the nouns before and after it."""

    english: str
    spanish: str
    located: tuple[Noun, ...]
    locations: tuple[Noun, ...]


PREPOSITIONS = tuple(
    Preposition(english, spanish, nouns_in(located), nouns_in(locations))
    for english, spanish, located, locations in parse_table(PREPOSITION_TABLE)
)


# person, gender, English and Spanish subject, English and Spanish object
PRONOUN_TABLE = """
0  m  i     _      me    me
1  m  you   _      you   te
2  m  he    él     him   lo
2  f  she   ella   her   la
3  m  we    _      us    nos
4  m  they  ellos  them  los
"""


@dataclass(frozen=True)
class Pronoun:
    """A personal pronoun in both languages. Spanish drops the subjects that its verb shows: yo, tú, nosotros."""

    person: int
    is_feminine: bool
    english_subject: str
    spanish_subject: str
    english_object: str
    clitic: str  # the Spanish object, which stands before its verb


PRONOUNS = tuple(Pronoun(int(person), gender == "f", *forms) for person, gender, *forms in parse_table(PRONOUN_TABLE))

# English and Spanish adverbs of time by tense
ADVERBS = {
    "present": (("today", "hoy"),),
    "past": (("today", "hoy"), ("yesterday", "ayer")),
    "future": (("today", "hoy"), ("tomorrow", "mañana")),
}
