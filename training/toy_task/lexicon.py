"""The content words of the shipped task: nouns, adjectives and verbs.

Each file of `tables` holds a word class, one word a line. The categories of a noun ("animal", "vehicle") decide which
adjectives, verbs and places go with it. No English form belongs to two words or to two tenses, so "fish", "sheep" and
"read" are not among the words.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLES = Path(__file__).parent / "tables"
NO_FORM = "-"  # a form that is not in use, such as the plural of "milk"
CATEGORY_GROUPS = {
    "people": "person,relative",
    "animate": "people,animal",
    "furniture": "table,seat",
    "goods": "thing,opening,container,furniture,vehicle,clothes",
    "writing": "text,paper",
    "food": "fruit,dish,drink",
    "indoors": "home,room",
    "sights": "building,outdoor",
    "owned": "relative,animal,goods,writing,food,indoors",
    "common": "person,animal,goods,writing,food,indoors,sights",
}


def expand_categories(names: str) -> tuple[str, ...]:
    """Return the categories that a table names, with every group replaced by its members."""
    return tuple(
        category
        for name in names.split(",")
        for category in (expand_categories(CATEGORY_GROUPS[name]) if name in CATEGORY_GROUPS else (name,))
    )


def read_table(name: str) -> list[list[str]]:
    """Return the cells of a table, which blanks separate. "_" is a blank inside a cell, or an empty cell."""
    _, *lines = (TABLES / f"{name}.txt").read_text(encoding="utf-8").splitlines()  # the first one names the columns
    return [[cell.replace("_", " ").strip() for cell in line.split()] for line in lines]


@dataclass(frozen=True, eq=False)  # words compare by identity
class Noun:
    """A noun in both languages."""

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


PEOPLE_CATEGORIES = expand_categories("people")
OWNED_CATEGORIES = expand_categories("owned")
SITE_CATEGORIES = expand_categories("home,sights")


@dataclass(frozen=True)
class Adjective:
    """An adjective in both languages, with the copula that it takes in Spanish."""

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
class Verb:
    """A verb in both languages, with the nouns that can be its subject and its object."""

    subjects: tuple[Noun, ...]
    objects: tuple[Noun, ...]
    spanish_past: str  # preterite for events, imperfect for states
    base: str
    third_person: str
    english_past: str
    infinitive: str


VERBS = tuple(Verb(nouns_in(subjects), nouns_in(objects), *forms) for subjects, objects, *forms in read_table("verbs"))
TRANSITIVE = tuple(verb for verb in VERBS if verb.objects)
OBJECT_OPTIONAL = ("eat", "drink")
INTRANSITIVE = tuple(verb for verb in VERBS if not verb.objects or verb.base in OBJECT_OPTIONAL)
