"""English-to-Spanish sentences made by a small grammar, so that a first training run needs no download.

Each choice (verb, noun, number, tense) is drawn once and said in both languages, and the Spanish agrees where English
is silent: "the woman sees the red houses." is "la mujer ve las casas rojas.".

The Spanish is a function of the English, because every choice can be read off the English words. No form belongs to
two words or to two tenses ("fish", "sheep" and "read" are left out), and where English says less one reading holds:
"you" is tú, "they" is ellos, "i", "we" and "who" are masculine, "teacher" is maestra, and "it" stands only after its
noun. The subjects that a Spanish verb shows by itself (yo, tú, nosotros) are dropped. Text is lower-case.

Sentences are drawn so that words meet: nouns are described as often as not, a subject as often as an object or a place,
and denials, places and second clauses stand beside them. A model that never sees two described nouns leaves one of the
adjectives out.

Validation and test ask for unseen combinations of known words. A digest keeps some pairs of adjective and noun ("red
house") and of verb and object ("buy house") for either of them, and a sentence with such a pair belongs there alone.
Training thus sees every word but none of those pairs, and no sentence can stand in two splits.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from datasets import Dataset, DatasetDict, Features, Translation

T = TypeVar("T")
Pair = tuple[str, str]  # a verb or an adjective, and the noun it goes with

THIRD_SINGULAR, THIRD_PLURAL = 2, 4  # rows of a conjugation: i, you, he or she, we, they
LONGEST = 14  # words of an English sentence
LARGEST_SPLIT = 100_000  # sentences; the language holds far more, but a split as small as the test set fills slowly
GROUPS = {
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


def expand(kinds: str) -> tuple[str, ...]:
    """The kinds that a column of a table names, groups spelled out."""
    names = kinds.split(",")
    return tuple(kind for name in names for kind in (expand(GROUPS[name]) if name in GROUPS else (name,)))


def rows(table: str) -> list[list[str]]:
    """The cells of a table, parted by blanks. "_" is a blank in a cell, or no word at all; "-" is a form not in use."""
    return [[cell.replace("_", " ").strip() for cell in line.split()] for line in table.strip().splitlines()]


# kind, gender, English singular and plural, Spanish singular and plural
NOUN_TABLE = """
person     m  man         men           hombre       hombres
person     f  woman       women         mujer        mujeres
person     m  boy         boys          niño         niños
person     f  girl        girls         niña         niñas
person     m  king        -             rey          -
person     f  queen       -             reina        -
person     m  doctor      doctors       médico       médicos
person     f  teacher     teachers      maestra      maestras
person     m  actor       actors        actor        actores
relative   m  father      -             padre        -
relative   f  mother      -             madre        -
relative   m  brother     brothers      hermano      hermanos
relative   f  sister      sisters       hermana      hermanas
relative   m  son         sons          hijo         hijos
relative   f  daughter    daughters     hija         hijas
relative   m  uncle       uncles        tío          tíos
relative   f  aunt        aunts         tía          tías
animal     m  dog         dogs          perro        perros
animal     m  cat         cats          gato         gatos
animal     m  horse       horses        caballo      caballos
animal     m  rabbit      rabbits       conejo       conejos
animal     m  mouse       mice          ratón        ratones
animal     f  cow         cows          vaca         vacas
animal     f  hen         hens          gallina      gallinas
animal     f  turtle      turtles       tortuga      tortugas
animal     f  eagle       eagles        águila       águilas
thing      f  key         keys          llave        llaves
thing      f  cup         cups          taza         tazas
thing      f  lamp        lamps         lámpara      lámparas
thing      f  camera      cameras       cámara       cámaras
thing      f  guitar      guitars       guitarra     guitarras
thing      m  plate       plates        plato        platos
thing      m  clock       clocks        reloj        relojes
thing      m  phone       phones        teléfono     teléfonos
thing      m  pencil      pencils       lápiz        lápices
thing      m  umbrella    umbrellas     paraguas     paraguas
opening    f  door        doors         puerta       puertas
opening    f  window      windows       ventana      ventanas
container  f  box         boxes         caja         cajas
container  f  bottle      bottles       botella      botellas
container  m  drawer      drawers       cajón        cajones
table      f  table       tables        mesa         mesas
table      m  desk        desks         escritorio   escritorios
seat       f  chair       chairs        silla        sillas
seat       f  bed         beds          cama         camas
seat       m  sofa        sofas         sofá         sofás
vehicle    m  car         cars          coche        coches
vehicle    f  bicycle     bicycles      bicicleta    bicicletas
vehicle    m  truck       trucks        camión       camiones
vehicle    f  motorcycle  motorcycles   moto         motos
clothes    f  shirt       shirts        camisa       camisas
clothes    f  skirt       skirts        falda        faldas
clothes    m  dress       dresses       vestido      vestidos
clothes    m  hat         hats          sombrero     sombreros
clothes    m  coat        coats         abrigo       abrigos
clothes    m  shoe        shoes         zapato       zapatos
text       m  book        books         libro        libros
text       f  letter      letters       carta        cartas
text       m  poem        poems         poema        poemas
text       f  story       stories       historia     historias
paper      m  newspaper   newspapers    periódico    periódicos
paper      m  map         maps          mapa         mapas
paper      f  photo       photos        foto         fotos
fruit      f  apple       apples        manzana      manzanas
fruit      f  pear        pears         pera         peras
fruit      f  orange      oranges       naranja      naranjas
fruit      f  strawberry  strawberries  fresa        fresas
fruit      m  tomato      tomatoes      tomate       tomates
fruit      m  lemon       lemons        limón        limones
dish       m  bread       -             pan          -
dish       m  cheese      -             queso        -
dish       f  soup        -             sopa         -
dish       f  meat        -             carne        -
dish       f  pizza       pizzas        pizza        pizzas
dish       m  egg         eggs          huevo        huevos
dish       m  cake        cakes         pastel       pasteles
dish       f  salad       salads        ensalada     ensaladas
drink      f  water       -             agua         -
drink      f  milk        -             leche        -
drink      m  coffee      -             café         -
drink      m  tea         -             té           -
drink      m  juice       -             jugo         -
home       f  house       houses        casa         casas
home       m  apartment   apartments    apartamento  apartamentos
home       f  shop        shops         tienda       tiendas
room       f  kitchen     kitchens      cocina       cocinas
room       f  office      offices       oficina      oficinas
room       m  garden      gardens       jardín       jardines
building   f  school      schools       escuela      escuelas
building   f  church      churches      iglesia      iglesias
building   f  library     libraries     biblioteca   bibliotecas
building   m  museum      museums       museo        museos
building   m  hospital    hospitals     hospital     hospitales
building   m  hotel       hotels        hotel        hoteles
outdoor    m  park        parks         parque       parques
outdoor    m  market      markets       mercado      mercados
outdoor    f  square      squares       plaza        plazas
outdoor    f  city        cities        ciudad       ciudades
outdoor    m  village     villages      pueblo       pueblos
"""


@dataclass(frozen=True, eq=False)  # a word equals itself alone
class Noun:
    kind: str
    is_feminine: bool
    english: tuple[str, str]  # singular, plural
    spanish: tuple[str, str]

    @property
    def is_countable(self) -> bool:
        return self.english[1] != "-"


NOUNS = tuple(
    Noun(kind, gender == "f", (english, englishes), (spanish, spanishes))
    for kind, gender, english, englishes, spanish, spanishes in rows(NOUN_TABLE)
)


@cache
def nouns_of(kinds: str) -> tuple[Noun, ...]:
    return tuple(noun for noun in NOUNS if noun.kind in expand(kinds))


PEOPLE, OWNED, SITES = expand("people"), expand("owned"), expand("home,sights")
DESCRIBED = ("people", "people", "animal", "goods", "goods", "writing", "food", "food", "indoors", "sights")


# kinds of noun, the "to be" it takes, English, Spanish masculine and feminine singular, masculine and feminine plural
ADJECTIVE_TABLE = """
people                                     ser    tall         alto         alta         altos         altas
people                                     ser    rich         rico         rica         ricos         ricas
people                                     ser    poor         pobre        pobre        pobres        pobres
people                                     ser    kind         amable       amable       amables       amables
people                                     ser    happy        feliz        feliz        felices       felices
people                                     ser    hardworking  trabajador   trabajadora  trabajadores  trabajadoras
people                                     estar  sad          triste       triste       tristes       tristes
people                                     estar  busy         ocupado      ocupada      ocupados      ocupadas
people,sights                              ser    famous       famoso       famosa       famosos       famosas
animate                                    ser    young        joven        joven        jóvenes       jóvenes
animate                                    ser    strong       fuerte       fuerte       fuertes       fuertes
animate                                    estar  tired        cansado      cansada      cansados      cansadas
animate                                    estar  sick         enfermo      enferma      enfermos      enfermas
animate,goods,writing,indoors,sights       ser    old          viejo        vieja        viejos        viejas
animal                                     ser    fast         rápido       rápida       rápidos       rápidas
animal,goods,home                          ser    white        blanco       blanca       blancos       blancas
animal,goods                               ser    black        negro        negra        negros        negras
animal,goods                               ser    gray         gris         gris         grises        grises
animal,goods,fruit,indoors,sights          ser    big          grande       grande       grandes       grandes
animal,goods,fruit,indoors,sights          ser    small        pequeño      pequeña      pequeños      pequeñas
goods,writing,indoors,sights               ser    new          nuevo        nueva        nuevos        nuevas
goods,home                                 ser    red          rojo         roja         rojos         rojas
goods,home                                 ser    yellow       amarillo     amarilla     amarillos     amarillas
goods,home                                 ser    green        verde        verde        verdes        verdes
goods,home                                 ser    blue         azul         azul         azules        azules
goods,home                                 ser    pink         rosa         rosa         rosa          rosa
goods,food,home                            ser    expensive    caro         cara         caros         caras
goods,food                                 ser    cheap        barato       barata       baratos       baratas
goods,indoors,outdoor                      estar  dirty        sucio        sucia        sucios        sucias
thing,opening,container,furniture,vehicle  estar  broken       roto         rota         rotos         rotas
writing                                    ser    interesting  interesante  interesante  interesantes  interesantes
writing,indoors,sights                     ser    beautiful    hermoso      hermosa      hermosos      hermosas
vehicle,indoors,building                   ser    modern       moderno      moderna      modernos      modernas
indoors,sights                             estar  empty        vacío        vacía        vacíos        vacías
food                                       estar  delicious    delicioso    deliciosa    deliciosos    deliciosas
dish,drink                                 estar  cold         frío         fría         fríos         frías
dish,drink                                 estar  hot          caliente     caliente     calientes     calientes
"""


@dataclass(frozen=True)
class Adjective:
    kinds: tuple[str, ...]
    to_be: str  # ser or estar
    english: str
    spanish: tuple[str, ...]  # masculine and feminine singular, masculine and feminine plural


ADJECTIVES = tuple(
    Adjective(expand(kinds), to_be, english, tuple(spanish))
    for kinds, to_be, english, *spanish in rows(ADJECTIVE_TABLE)
)


@cache
def adjectives_of(kind: str) -> tuple[Adjective, ...]:
    return tuple(adjective for adjective in ADJECTIVES if kind in adjective.kinds)


# kinds of subject and of object, the Spanish past in use, English base, third person and past, Spanish infinitive
VERB_TABLE = """
people   animate,goods,writing,home,sights        preterite  see        sees        saw          ver
animate  animate                                  preterite  watch      watches     watched      mirar
people   animate,goods,writing                    preterite  look_for   looks_for   looked_for   buscar
people   thing,container,vehicle,clothes,writing  preterite  find       finds       found        encontrar
people   goods,writing,food,home                  preterite  buy        buys        bought       comprar
people   goods,writing,food,home                  preterite  sell       sells       sold         vender
people   goods,writing,home                       imperfect  have       has         had          tener
people   goods,writing,food                       imperfect  need       needs       needed       necesitar
people   thing,opening,container,furniture        preterite  break      breaks      broke        romper
people   opening,furniture,vehicle,home           preterite  paint      paints      painted      pintar
people   vehicle,clothes,fruit                    preterite  wash       washes      washed       lavar
people   opening,container                        preterite  open       opens       opened       abrir
people   text                                     preterite  write      writes      wrote        escribir
animate  fruit,dish                               preterite  eat        eats        ate          comer
animate  drink                                    preterite  drink      drinks      drank        beber
people   animate                                  imperfect  love       loves       loved        amar
people   people                                   preterite  help       helps       helped       ayudar
people   people                                   preterite  call       calls       called       llamar
people   people                                   preterite  listen_to  listens_to  listened_to  escuchar
people   people                                   preterite  wait_for   waits_for   waited_for   esperar
people   people,sights                            preterite  visit      visits      visited      visitar
people   -                                        imperfect  live       lives       lived        vivir
people   -                                        preterite  work       works       worked       trabajar
people   -                                        preterite  sing       sings       sang         cantar
people   -                                        preterite  dance      dances      danced       bailar
animate  -                                        preterite  walk       walks       walked       caminar
animate  -                                        preterite  run        runs        ran          correr
animate  -                                        preterite  sleep      sleeps      slept        dormir
animate  -                                        preterite  rest       rests       rested       descansar
"""


@dataclass(frozen=True)
class Verb:
    subjects: tuple[Noun, ...]
    objects: tuple[Noun, ...]
    past: str  # the Spanish past tense in use: the imperfect for what lasts
    base: str
    third: str
    english_past: str
    infinitive: str


VERBS = tuple(Verb(nouns_of(subjects), nouns_of(objects), *forms) for subjects, objects, *forms in rows(VERB_TABLE))
TRANSITIVE = tuple(verb for verb in VERBS if verb.objects)
OBJECT_OPTIONAL = ("eat", "drink")
INTRANSITIVE = tuple(verb for verb in VERBS if not verb.objects or verb.base in OBJECT_OPTIONAL)


# weight, definiteness, nouns (count, mass or any), kinds, English singular and plural, Spanish as for adjectives
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
    weight: int
    is_definite: bool
    counts: str  # the nouns it goes with: count, mass or any
    kinds: tuple[str, ...]
    english: tuple[str, str]  # singular, plural
    spanish: tuple[str, ...]  # masculine and feminine singular, masculine and feminine plural

    def suits(self, noun: Noun, plural: bool) -> bool:
        if self.english[plural] == "-" or noun.kind not in self.kinds:
            return False
        return self.counts in ("any", "count" if noun.is_countable else "mass")


DETERMINERS = tuple(
    Determiner(int(weight), kind_of == "definite", counts, expand(kinds), (english, englishes), tuple(spanish))
    for weight, kind_of, counts, kinds, english, englishes, *spanish in rows(DETERMINER_TABLE)
)
DEFINITE = tuple(determiner for determiner in DETERMINERS if determiner.is_definite)
INDEFINITE = tuple(determiner for determiner in DETERMINERS if not determiner.is_definite)
THE = DETERMINERS[0]


# English, Spanish, kinds that stand there, kinds of place
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
    english: str
    spanish: str
    located: tuple[Noun, ...]
    places: tuple[Noun, ...]


PREPOSITIONS = tuple(
    Preposition(english, spanish, nouns_of(located), nouns_of(places))
    for english, spanish, located, places in rows(PREPOSITION_TABLE)
)


class Draw:
    """Random choices, all by `random.Random.random`: the one method whose numbers Python promises never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def one_of(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]


def join(*words: str) -> str:
    return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Phrase:
    """Words of both languages that mean the same, and what other words must know to agree with them."""

    en: str = ""
    es: str = ""
    pairs: tuple[Pair, ...] = ()
    person: int = THIRD_SINGULAR
    is_feminine: bool = False
    is_definite: bool = False
    nouns: tuple[Noun, ...] = ()  # none in a pronoun, two in "the man and the woman"

    @property
    def form(self) -> int:
        """The column of an adjective that agrees with it."""
        return 2 * (self.person > THIRD_SINGULAR) + self.is_feminine


def chain(*phrases: Phrase) -> Phrase:
    """The phrases one after the other."""
    en, es = join(*(phrase.en for phrase in phrases)), join(*(phrase.es for phrase in phrases))
    return Phrase(en, es, tuple(pair for phrase in phrases for pair in phrase.pairs))


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
    subject: Phrase
    english_object: str
    clitic: str


PRONOUNS = tuple(
    Pronoun(Phrase(en, es, person=int(person), is_feminine=gender == "f"), english_object, clitic)
    for person, gender, en, es, english_object, clitic in rows(PRONOUN_TABLE)
)
WHO = Phrase("who", "quién")


def say(noun: Noun, plural: bool, determiner: Determiner, adjective: Adjective | None = None) -> Phrase:
    """As in "the red house", "la casa roja": Spanish puts the adjective last and makes all three agree."""
    form = 2 * plural + noun.is_feminine
    en = join(determiner.english[plural], adjective.english if adjective else "", noun.english[plural])
    es = join(determiner.spanish[form], noun.spanish[plural], adjective.spanish[form] if adjective else "")
    pairs = ((adjective.english, noun.english[0]),) if adjective else ()
    person = THIRD_PLURAL if plural else THIRD_SINGULAR
    return Phrase(en, es, pairs, person, noun.is_feminine, determiner.is_definite, (noun,))


def say_owned(noun: Noun, plural: bool, owner: Phrase, adjective: Adjective | None = None) -> Phrase:
    """As in "the king's red car", "el coche rojo del rey"."""
    phrase = say(noun, plural, replace(THE, english=(f"{owner.en}'s", f"{owner.en}'s")), adjective)
    return replace(phrase, es=f"{phrase.es} de {owner.es}")


def say_both(one: Noun, two: Noun, determiner: Determiner) -> Phrase:
    """As in "the man and the woman", "el hombre y la mujer": masculine unless both are feminine."""
    both = chain(say(one, False, determiner), Phrase("and", "y"), say(two, False, determiner))
    return replace(both, person=THIRD_PLURAL, is_feminine=one.is_feminine and two.is_feminine, nouns=(one, two))


def draw_determiner(draw: Draw, determiners: Sequence[Determiner], *nouns: Noun, plural: bool = False) -> Determiner:
    fitting = [determiner for determiner in determiners if all(determiner.suits(noun, plural) for noun in nouns)]
    return draw.one_of([determiner for determiner in fitting for _ in range(determiner.weight)])


def draw_noun_phrase(
    draw: Draw,
    nouns: Sequence[Noun],
    determiners: Sequence[Determiner] = DETERMINERS,
    plurals: float = 0.35,
    adjectives: float = 0.5,
) -> Phrase:
    """One of the nouns after a determiner or an owner; in the plural, and with an adjective, at the given rates."""
    noun = draw.one_of(nouns)
    plural = noun.is_countable and draw.chance(plurals)
    adjective = draw.one_of(adjectives_of(noun.kind)) if draw.chance(adjectives) else None
    if THE in determiners and noun.kind in OWNED and draw.chance(0.1):
        return say_owned(noun, plural, draw_owner(draw), adjective)
    return say(noun, plural, draw_determiner(draw, determiners, noun, plural=plural), adjective)


def draw_owner(draw: Draw) -> Phrase:
    owner = draw.one_of(nouns_of("people"))
    return say(owner, False, draw_determiner(draw, DEFINITE, owner))


def draw_couple(draw: Draw, nouns: Sequence[Noun]) -> Phrase:
    one = draw.one_of(nouns)
    two = draw.one_of(nouns_of(one.kind))
    return say_both(one, two, draw_determiner(draw, DEFINITE, one, two))


def draw_subject(
    draw: Draw,
    nouns: Sequence[Noun],
    determiners: Sequence[Determiner] = DETERMINERS,
    adjectives: float = 0.5,
    pronouns: float = 0.4,
) -> Phrase:
    """A pronoun where people may be meant, at the given rate; else one of the nouns, or two."""
    if includes_people(nouns) and draw.chance(pronouns):
        return draw.one_of(PRONOUNS).subject
    if draw.chance(0.12):
        return draw_couple(draw, nouns)
    return draw_noun_phrase(draw, nouns, determiners, adjectives=adjectives)


def includes_people(nouns: Sequence[Noun]) -> bool:
    return any(noun.kind == "person" for noun in nouns)


def draw_place(draw: Draw, preposition: Preposition) -> Phrase:
    """As in "behind the church", "detrás de la iglesia"."""
    ground = draw_noun_phrase(draw, preposition.places, plurals=0.0, adjectives=0.45)
    return chain(Phrase(preposition.english, preposition.spanish), ground)


ADVERBS = {
    "present": (("today", "hoy"),),
    "past": (("today", "hoy"), ("yesterday", "ayer")),
    "future": (("today", "hoy"), ("tomorrow", "mañana")),
}


def draw_adjunct(draw: Draw, tense: str, places: float, times: float) -> Phrase:
    """Where or when somebody does something, at the given rates; else nothing."""
    if draw.chance(places):
        return draw_place(draw, draw.one_of([place for place in PREPOSITIONS if includes_people(place.located)]))
    return Phrase(*draw.one_of(ADVERBS[tense])) if draw.chance(times) else Phrase()


@dataclass(frozen=True)
class VerbGroup:
    """A verb that agrees with its subject. "Not" and questions part it in English: "sees", but "does" ... "see"."""

    finite: str
    auxiliary: str
    base: str
    spanish: str


# Endings for i, you, he or she, we, they. Those of the future follow the infinitive, the others its stem.
ENDINGS = {
    ("ar", "present"): "o as a amos an",
    ("er", "present"): "o es e emos en",
    ("ir", "present"): "o es e imos en",
    ("ar", "preterite"): "é aste ó amos aron",
    ("er", "preterite"): "í iste ió imos ieron",
    ("ir", "preterite"): "í iste ió imos ieron",
    ("ar", "imperfect"): "aba abas aba ábamos aban",
    ("er", "imperfect"): "ía ías ía íamos ían",
    ("ir", "imperfect"): "ía ías ía íamos ían",
}
FUTURE_ENDINGS = "é ás á emos án"
IRREGULAR = {
    ("ser", "present"): "soy eres es somos son",
    ("ser", "imperfect"): "era eras era éramos eran",
    ("estar", "present"): "estoy estás está estamos están",
    ("haber", "present"): "- - hay - hay",
    ("haber", "imperfect"): "- - había - había",
    ("haber", "future"): "- - habrá - habrá",
    ("ver", "present"): "veo ves ve vemos ven",
    ("ver", "preterite"): "vi viste vio vimos vieron",
    ("tener", "present"): "tengo tienes tiene tenemos tienen",
    ("tener", "future"): "tendré tendrás tendrá tendremos tendrán",
    ("encontrar", "present"): "encuentro encuentras encuentra encontramos encuentran",
    ("buscar", "preterite"): "busqué buscaste buscó buscamos buscaron",
    ("dormir", "present"): "duermo duermes duerme dormimos duermen",
    ("dormir", "preterite"): "dormí dormiste durmió dormimos durmieron",
}
TO_BE = {"present": "am are is are are", "past": "was were was were were"}


def conjugate(infinitive: str, tense: str, person: int) -> str:
    if (infinitive, tense) in IRREGULAR:
        return IRREGULAR[infinitive, tense].split()[person]
    if tense == "future":
        return infinitive + FUTURE_ENDINGS.split()[person]
    return infinitive[:-2] + ENDINGS[infinitive[-2:], tense].split()[person]


def do(verb: Verb, tense: str, person: int) -> VerbGroup:
    spanish = conjugate(verb.infinitive, verb.past if tense == "past" else tense, person)
    if tense == "future":
        return VerbGroup(f"will {verb.base}", "will", verb.base, spanish)
    if tense == "past":
        return VerbGroup(verb.english_past, "did", verb.base, spanish)
    if person == THIRD_SINGULAR:
        return VerbGroup(verb.third, "does", verb.base, spanish)
    return VerbGroup(verb.base, "do", verb.base, spanish)


def be(infinitive: str, tense: str, person: int) -> VerbGroup:
    """One English verb for three: ser for what something is, estar for how or where it is, haber for what there is."""
    spanish = conjugate(infinitive, "imperfect" if tense == "past" else tense, person)
    if tense == "future":
        return VerbGroup("will be", "will", "be", spanish)
    english = TO_BE[tense].split()[person]
    return VerbGroup(english, english, "", spanish)


def put_clitic(clitic: str, verb: VerbGroup) -> VerbGroup:
    return replace(verb, spanish=f"{clitic} {verb.spanish}")


@dataclass(frozen=True)
class Clause:
    """A subject, its verb and what follows, before they become a statement or a question."""

    subject: Phrase
    verb: VerbGroup
    rest: Phrase = Phrase()
    is_description: bool = False


def transitive(draw: Draw, tense: str, subject: Phrase | None = None) -> Clause:
    """As in "the woman sees the house", "la mujer ve la casa"; "she sees him", "ella lo ve"."""
    verb = draw.one_of(TRANSITIVE)
    subject = subject or draw_subject(draw, verb.subjects)
    group = do(verb, tense, subject.person)
    if includes_people(verb.objects) and draw.chance(0.3):
        pronoun = draw_object_pronoun(draw, subject)
        return Clause(subject, put_clitic(pronoun.clitic, group), Phrase(pronoun.english_object))
    object_ = draw_object(draw, verb, verb.objects)
    is_event = verb.past == "preterite" and object_.nouns[0].kind not in SITES
    return Clause(subject, group, chain(object_, draw_adjunct(draw, tense, 0.25, 0.1)) if is_event else object_)


def draw_object_pronoun(draw: Draw, subject: Phrase) -> Pronoun:
    """Any that does not mean the subject again, as in "i see me" and "we see me"."""
    same = {0: (0, 3), 1: (1,), 3: (0, 3)}.get(subject.person, ())
    return draw.one_of([pronoun for pronoun in PRONOUNS if pronoun.subject.person not in same])


def draw_object(draw: Draw, verb: Verb, nouns: Sequence[Noun]) -> Phrase:
    """A direct object. Spanish puts "a" before people, and before animals that are known ones."""
    phrase = draw_noun_phrase(draw, nouns)
    noun = phrase.nouns[0]
    is_personal = noun.kind in PEOPLE or (noun.kind == "animal" and phrase.is_definite)
    es = f"a {phrase.es}" if is_personal else phrase.es
    return replace(phrase, es=es, pairs=((verb.base, noun.english[0]), *phrase.pairs))


def intransitive(draw: Draw, tense: str, subject: Phrase | None = None) -> Clause:
    """As in "the girls sing in the park", "las niñas cantan en el parque"."""
    verb = draw.one_of(INTRANSITIVE)
    subject = subject or draw_subject(draw, verb.subjects)
    places = 1.0 if verb.base == "live" else 0.4
    return Clause(subject, do(verb, tense, subject.person), draw_adjunct(draw, tense, places, times=0.15))


def description(draw: Draw, tense: str, subject: Phrase | None = None) -> Clause:
    """As in "the house is red", "la casa es roja", but "the house is dirty", "la casa está sucia"."""
    subject = subject or draw_subject(draw, nouns_of(draw.one_of(DESCRIBED)), DEFINITE, adjectives=0.0)
    adjective = draw.one_of(adjectives_of(subject.nouns[0].kind if subject.nouns else "person"))
    pairs = tuple((adjective.english, noun.english[0]) for noun in subject.nouns)
    rest = Phrase(adjective.english, adjective.spanish[subject.form], pairs)
    return Clause(subject, be(adjective.to_be, tense, subject.person), rest, is_description=True)


def location(draw: Draw, tense: str) -> Clause:
    """As in "the key is on the table", "la llave está sobre la mesa"."""
    preposition = draw.one_of(PREPOSITIONS)
    subject = draw_subject(draw, preposition.located, DEFINITE)
    return Clause(subject, be("estar", tense, subject.person), draw_place(draw, preposition))


def existence(draw: Draw, tense: str) -> Clause:
    """As in "there are two dogs in the park", "hay dos perros en el parque"."""
    preposition = draw.one_of(PREPOSITIONS)
    nouns = [noun for noun in preposition.located if any(some.suits(noun, plural=False) for some in INDEFINITE)]
    located = draw_noun_phrase(draw, nouns, INDEFINITE)
    return Clause(Phrase("there"), be("haber", tense, located.person), chain(located, draw_place(draw, preposition)))


def declare(clause: Clause, negative: bool = False) -> Phrase:
    """As in "she does not see him", "ella no lo ve"."""
    subject, verb, rest = clause.subject, clause.verb, clause.rest
    words = (verb.auxiliary, "not", verb.base) if negative else (verb.finite,)
    en = join(subject.en, *words, rest.en)
    es = join(subject.es, "no" if negative else "", verb.spanish, rest.es)
    return Phrase(en, es, subject.pairs + rest.pairs)


def ask(clause: Clause, asked: Phrase = Phrase()) -> Phrase:
    """As in "does he see her", "la ve él"; an adjective stands before the noun it describes: "es roja la casa"."""
    subject, verb, rest = clause.subject, clause.verb, clause.rest
    en = join(asked.en, verb.auxiliary, subject.en, verb.base, rest.en)
    ending = (rest.es, subject.es) if clause.is_description and subject.nouns else (subject.es, rest.es)
    return Phrase(en, join(asked.es, verb.spanish, *ending), subject.pairs + rest.pairs)


@dataclass(frozen=True)
class Sentence:
    """A sentence in both languages, and the pairs of words that decide which split it belongs to."""

    en: str
    es: str
    pairs: tuple[Pair, ...]


# What two words become where they meet. "Agua" and "águila" are feminine: only an article right before them changes.
ENGLISH_CONTACTS = ((r"\ba (?=[aeiou])", "an "),)
SPANISH_CONTACTS = (
    (r"\bla (?=agua\b|águila\b)", "el "),
    (r"\buna (?=águila\b)", "un "),
    (r"\ba el\b", "al"),
    (r"\bde el\b", "del"),
)


def finish(phrase: Phrase, is_question: bool = False) -> Sentence:
    en, es = phrase.en, phrase.es
    for pattern, written in ENGLISH_CONTACTS:
        en = re.sub(pattern, written, en)
    for pattern, written in SPANISH_CONTACTS:
        es = re.sub(pattern, written, es)
    return Sentence(f"{en}?", f"¿{es}?", phrase.pairs) if is_question else Sentence(f"{en}.", f"{es}.", phrase.pairs)


def statement(draw: Draw, tense: str) -> Sentence:
    """One clause, affirmed or denied."""
    clauses = (transitive, transitive, transitive, intransitive, description, description, location)
    clause = draw.one_of(clauses)(draw, tense)
    return finish(declare(clause, negative=draw.chance(0.3)))


def yes_no_question(draw: Draw, tense: str) -> Sentence:
    """As in "is there a cat in the garden?", "¿hay un gato en el jardín?"."""
    clauses = (transitive, transitive, intransitive, description, description, location, existence)
    clause = draw.one_of(clauses)(draw, tense)
    return finish(ask(clause), is_question=True)


def existence_statement(draw: Draw, tense: str) -> Sentence:
    return finish(declare(existence(draw, tense)))


def who_question(draw: Draw, tense: str) -> Sentence:
    """As in "who bought the car?", "¿quién compró el coche?"."""
    clause = draw.one_of((transitive, intransitive, description))(draw, tense, WHO)
    return finish(declare(clause), is_question=True)


def object_question(draw: Draw, tense: str) -> Sentence:
    """As in "what does she eat?", "¿qué come ella?"; "who did they help?", "¿a quién ayudaron ellos?"."""
    verb = draw.one_of(TRANSITIVE)
    subject = draw_subject(draw, verb.subjects)
    asked = Phrase("who", "a quién") if includes_people(verb.objects) else Phrase("what", "qué")
    return finish(ask(Clause(subject, do(verb, tense, subject.person)), asked), is_question=True)


def where_question(draw: Draw, tense: str) -> Sentence:
    """As in "where does he live?", "¿dónde vive él?"; "where are the keys?", "¿dónde están las llaves?"."""
    verb = draw.one_of(INTRANSITIVE) if draw.chance(0.5) else None
    subject = draw_subject(draw, verb.subjects if verb else NOUNS, DEFINITE)
    group = do(verb, tense, subject.person) if verb else be("estar", tense, subject.person)
    return finish(ask(Clause(subject, group), Phrase("where", "dónde")), is_question=True)


# What one does with a thing just bought or found.
SEQUELS = {"buy": ("eat", "drink", "wash", "paint", "sell"), "find": ("wash", "open", "sell", "break")}


def sequel(draw: Draw, tense: str) -> Sentence:
    """As in "she bought the pears and did not eat them.", "ella compró las peras y no las comió."."""
    first = draw.one_of([verb for verb in TRANSITIVE if verb.base in SEQUELS])
    second = draw.one_of([verb for verb in TRANSITIVE if verb.base in SEQUELS[first.base]])
    subject = draw_subject(draw, first.subjects)
    thing = draw_object(draw, first, [noun for noun in first.objects if noun in second.objects])
    one = Clause(subject, do(first, tense, subject.person), thing)
    verb = put_clitic(("lo", "la", "los", "las")[thing.form], do(second, tense, subject.person))
    pairs = ((second.base, thing.nouns[0].english[0]),)
    two = Clause(Phrase("and", "y"), verb, Phrase("them" if thing.person == THIRD_PLURAL else "it", pairs=pairs))
    return finish(chain(declare(one), declare(two, negative=draw.chance(0.2))))


def two_clauses(draw: Draw, tense: str) -> Sentence:
    """As in "the man sings but his son is sad.", "el hombre canta pero su hijo está triste."."""
    subjects = (draw_subject(draw, nouns_of("people"), pronouns=0.0) for _ in range(2))
    one, two = (draw.one_of((intransitive, description))(draw, tense, subject) for subject in subjects)
    link = draw.one_of((Phrase("and", "y"), Phrase("but", "pero")))
    one, two = (declare(clause, negative=draw.chance(0.3)) for clause in (one, two))
    return finish(chain(one, link, two))


PATTERNS = (
    *([statement] * 8),
    *([yes_no_question] * 4),
    *([sequel] * 2),
    *([two_clauses] * 2),
    existence_statement,
    who_question,
    object_question,
    where_question,
)
TENSES = ("present", "present", "past", "future")
CONTENT_WORDS = {form for noun in NOUNS for form in noun.english} | {adjective.english for adjective in ADJECTIVES}


def is_natural(sentence: Sentence) -> bool:
    """Whether it is short and says nothing twice, as "the king paints the king's door" does."""
    words = sentence.en.rstrip(".?").replace("'s", "").split()
    content = [word for word in words if word in CONTENT_WORDS]
    return len(words) <= LONGEST and len(set(content)) == len(content)


def sentences(seed: int) -> Iterator[Sentence]:
    """Sentences without end, some of them more than once. The same seed gives the same ones on every machine."""
    draw = Draw(seed)
    while True:
        sentence = draw.one_of(PATTERNS)(draw, draw.one_of(TENSES))
        if is_natural(sentence):
            yield sentence


def reservation(pair: Pair) -> str:
    """The split a pair is kept for: one in ten for the test set, one in ten for validation, the others for training."""
    digest = hashlib.sha256(" ".join(pair).encode()).digest()
    return {0: "test", 1: "validation"}.get(digest[0] % 10, "train")


def split_of(sentence: Sentence) -> str | None:
    """The split that the sentence's pairs are kept for, "train" when it is no other; None when two claim it."""
    claims = {reservation(pair) for pair in sentence.pairs} - {"train"}
    if len(claims) > 1:
        return None
    return claims.pop() if claims else "train"


def draw_splits(sizes: dict[str, int], seed: int) -> dict[str, dict[str, str]]:
    """The first distinct sentences of each split, Spanish by English."""
    chosen: dict[str, dict[str, str]] = {split: {} for split in sizes}
    unfilled, stream = set(sizes), sentences(seed)
    while unfilled:
        sentence = next(stream)
        split = split_of(sentence)
        if split in unfilled:
            chosen[split][sentence.en] = sentence.es
            if len(chosen[split]) == sizes[split]:
                unfilled.remove(split)
    return chosen


def make_splits(
    train_size: int = 30_000, validation_size: int = 500, test_size: int = 1_000, seed: int = 2017
) -> DatasetDict:
    """Distinct sentence pairs in the schema of translation data sets: `{"translation": {"en": ..., "es": ...}}`.

    With the same seed a smaller split is the beginning of a larger one. Raises ValueError for a size below 1 or above
    `LARGEST_SPLIT`.
    """
    sizes = {"train": train_size, "validation": validation_size, "test": test_size}
    for split, size in sizes.items():
        if not 1 <= size <= LARGEST_SPLIT:
            raise ValueError(
                f"{split}_size ({size}) must be between 1 and {LARGEST_SPLIT}, the most distinct sentences the shipped "
                "task gives a split in reasonable time. Ask for fewer, or train on data of your own."
            )
    features = Features({"translation": Translation(languages=["en", "es"])})
    return DatasetDict(
        {
            split: Dataset.from_list([{"translation": {"en": en, "es": es}} for en, es in pairs.items()], features)
            for split, pairs in draw_splits(sizes, seed).items()
        }
    )
