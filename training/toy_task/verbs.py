"""Verb groups in both languages: Spanish conjugation, English auxiliaries, and the copula."""

from dataclasses import dataclass, replace

from training.toy_task.function_words import THIRD_SINGULAR
from training.toy_task.lexicon import Verb

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
ENGLISH_COPULA = {"present": "am are is are are", "past": "was were was were were"}


def conjugate(infinitive: str, tense: str, person: int) -> str:
    """Return the Spanish form for a tense (present, preterite, imperfect, future) and a person (0 to 4)."""
    if (infinitive, tense) in IRREGULAR:
        return IRREGULAR[infinitive, tense].split()[person]
    if tense == "future":
        return infinitive + FUTURE_ENDINGS.split()[person]
    return infinitive[:-2] + ENDINGS[infinitive[-2:], tense].split()[person]


@dataclass(frozen=True)
class VerbGroup:
    """A verb that agrees with its subject. English negation and questions split it: "sees", but "does" ... "see"."""

    finite: str
    auxiliary: str
    base: str
    spanish: str


def verb_group(verb: Verb, tense: str, person: int) -> VerbGroup:
    """Return a verb in a tense (present, past, future) and a person (0 to 4)."""
    spanish = conjugate(verb.infinitive, verb.spanish_past if tense == "past" else tense, person)
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
    english = ENGLISH_COPULA[tense].split()[person]
    return VerbGroup(english, english, "", spanish)


def add_clitic(clitic: str, verb: VerbGroup) -> VerbGroup:
    """Return the verb group with a Spanish object pronoun before the verb."""
    return replace(verb, spanish=f"{clitic} {verb.spanish}")
