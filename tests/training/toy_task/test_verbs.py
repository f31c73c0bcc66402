"""Spanish verbs of the shipped task, against tables written by hand."""

import pytest

from training.toy_task.verbs import conjugate

# Written by hand: i, you, he or she, we, they.
CONJUGATIONS = {
    ("comprar", "present"): "compro compras compra compramos compran",
    ("comprar", "preterite"): "compré compraste compró compramos compraron",
    ("comprar", "future"): "compraré comprarás comprará compraremos comprarán",
    ("amar", "imperfect"): "amaba amabas amaba amábamos amaban",
    ("beber", "present"): "bebo bebes bebe bebemos beben",
    ("beber", "preterite"): "bebí bebiste bebió bebimos bebieron",
    ("beber", "future"): "beberé beberás beberá beberemos beberán",
    ("abrir", "present"): "abro abres abre abrimos abren",
    ("abrir", "preterite"): "abrí abriste abrió abrimos abrieron",
    ("vivir", "imperfect"): "vivía vivías vivía vivíamos vivían",
    ("buscar", "present"): "busco buscas busca buscamos buscan",
    ("buscar", "preterite"): "busqué buscaste buscó buscamos buscaron",
    ("dormir", "present"): "duermo duermes duerme dormimos duermen",
    ("dormir", "preterite"): "dormí dormiste durmió dormimos durmieron",
    ("encontrar", "present"): "encuentro encuentras encuentra encontramos encuentran",
    ("encontrar", "preterite"): "encontré encontraste encontró encontramos encontraron",
    ("tener", "present"): "tengo tienes tiene tenemos tienen",
    ("tener", "imperfect"): "tenía tenías tenía teníamos tenían",
    ("tener", "future"): "tendré tendrás tendrá tendremos tendrán",
    ("ver", "present"): "veo ves ve vemos ven",
    ("ver", "preterite"): "vi viste vio vimos vieron",
    ("ver", "future"): "veré verás verá veremos verán",
    ("ser", "present"): "soy eres es somos son",
    ("ser", "imperfect"): "era eras era éramos eran",
    ("ser", "future"): "seré serás será seremos serán",
    ("estar", "present"): "estoy estás está estamos están",
    ("estar", "imperfect"): "estaba estabas estaba estábamos estaban",
}


@pytest.mark.parametrize(("infinitive", "tense"), CONJUGATIONS)
def test_verbs_are_conjugated_as_in_a_grammar_book(infinitive: str, tense: str) -> None:
    assert " ".join(conjugate(infinitive, tense, person) for person in range(5)) == CONJUGATIONS[infinitive, tense]
