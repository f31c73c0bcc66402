"""The words of the shipped task: each English form belongs to one word and one tense."""

from collections import Counter

from training.toy_task.lexicon import ADJECTIVES, NOUNS, VERBS


def test_no_english_form_belongs_to_two_words_or_two_tenses() -> None:
    words = [form for noun in NOUNS for form in noun.english if form != "-"]
    words += [adjective.english for adjective in ADJECTIVES]
    words += [form for verb in VERBS for form in (verb.base, verb.third_person, verb.english_past)]
    assert [word for word, count in Counter(words).items() if count > 1] == []
