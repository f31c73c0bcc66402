"""The content words of the shipped task: nouns, adjectives and verbs.

Each table holds a word class, one word a line. The categories of a noun ("animal", "vehicle") decide which adjectives,
verbs and places go with it. No English form belongs to two words or to two tenses, so "fish", "sheep" and "read" are
not among the words.
"""

from dataclasses import dataclass
from functools import cache

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


def parse_table(table: str) -> list[list[str]]:
    """Return the cells of a table, which blanks separate. "_" is a blank inside a cell, or an empty cell."""
    return [[cell.replace("_", " ").strip() for cell in line.split()] for line in table.strip().splitlines()]


# category, gender, English singular and plural, Spanish singular and plural
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
    for category, gender, english, english_plural, spanish, spanish_plural in parse_table(NOUN_TABLE)
)


@cache
def nouns_in(categories: str) -> tuple[Noun, ...]:
    """Return the nouns of these categories, in the order of the table."""
    return tuple(noun for noun in NOUNS if noun.category in expand_categories(categories))


PEOPLE_CATEGORIES = expand_categories("people")
OWNED_CATEGORIES = expand_categories("owned")
SITE_CATEGORIES = expand_categories("home,sights")


# categories of noun, the Spanish copula, English, Spanish masculine and feminine singular, then plural
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
    """An adjective in both languages, with the copula that it takes in Spanish."""

    categories: tuple[str, ...]
    copula: str  # ser or estar
    english: str
    spanish: tuple[str, ...]  # masculine and feminine singular, masculine and feminine plural


ADJECTIVES = tuple(
    Adjective(expand_categories(categories), copula, english, tuple(spanish))
    for categories, copula, english, *spanish in parse_table(ADJECTIVE_TABLE)
)


@cache
def adjectives_for(category: str) -> tuple[Adjective, ...]:
    """Return the adjectives that describe nouns of a category."""
    return tuple(adjective for adjective in ADJECTIVES if category in adjective.categories)


# categories of subject and of object, the Spanish past tense, English base, third person and past, Spanish infinitive
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
    """A verb in both languages, with the nouns that can be its subject and its object."""

    subjects: tuple[Noun, ...]
    objects: tuple[Noun, ...]
    spanish_past: str  # preterite for events, imperfect for states
    base: str
    third_person: str
    english_past: str
    infinitive: str


VERBS = tuple(
    Verb(nouns_in(subjects), nouns_in(objects), *forms) for subjects, objects, *forms in parse_table(VERB_TABLE)
)
TRANSITIVE = tuple(verb for verb in VERBS if verb.objects)
OBJECT_OPTIONAL = ("eat", "drink")
INTRANSITIVE = tuple(verb for verb in VERBS if not verb.objects or verb.base in OBJECT_OPTIONAL)
