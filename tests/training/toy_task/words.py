"""The words of the shipped task by their English forms, for the tests of its sentences and splits."""

import re
from collections.abc import Sequence

from training.toy_task.function_words import DETERMINERS, PREPOSITIONS, PRONOUNS, Determiner, Preposition, Pronoun
from training.toy_task.lexicon import ADJECTIVES, NOUNS, VERBS, Adjective, Noun, Verb

LEXICON = (*NOUNS, *ADJECTIVES, *VERBS, *DETERMINERS, *PREPOSITIONS, *PRONOUNS)


def english_forms(word: Noun | Adjective | Verb | Determiner | Preposition | Pronoun) -> Sequence[str]:
    match word:
        case Noun() | Determiner():
            return word.english
        case Adjective() | Preposition():
            return (word.english,)
        case Verb():
            return word.base, word.third_person, word.english_past
        case Pronoun():
            return word.english_subject, word.english_object


NOUN_OF = {form: noun.english[0] for noun in NOUNS for form in noun.english}
VERB_OF = {form.split()[0]: verb.base for verb in VERBS for form in (verb.base, verb.third_person, verb.english_past)}
ADJECTIVE_WORDS = {adjective.english for adjective in ADJECTIVES}
DETERMINER_WORDS = {form for determiner in DETERMINERS for form in determiner.english} | {"an"}
COPULA_WORDS = {"am", "is", "are", "was", "were", "will", "be", "not"}
LOCATION = re.compile(rf" ({'|'.join(preposition.english for preposition in PREPOSITIONS)}) ")
COORDINATION = re.compile(r" and (the|this|that|my|your|his|her|our|their) ")
