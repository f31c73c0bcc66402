"""A token of a new vocabulary starts from the tokens that write its text in the trained vocabulary."""

from collections.abc import Sequence

import pytest

from training.vocabulary import starting_entries
from vaswani_transformer import VaswaniTransformerTokenizer

WORDS = ["house", "House", "Übung", "green"]


def trained_on(texts: Sequence[str], algorithm: str = "bpe") -> VaswaniTransformerTokenizer:
    return VaswaniTransformerTokenizer.train_from_iterator([list(texts)], vocab_size=400, algorithm=algorithm)


def starts(texts: Sequence[str], trained: VaswaniTransformerTokenizer, algorithm: str = "bpe") -> dict[str, list[str]]:
    """Return the tokens from which each token of a vocabulary learned from `texts` starts."""
    tokenizer = trained_on(texts, algorithm)
    entries, common = starting_entries(tokenizer, trained)
    names = tokenizer.convert_ids_to_tokens(list(entries))
    assert common == len(tokenizer.get_vocab().keys() & trained.get_vocab().keys())
    return {name: [*trained.convert_ids_to_tokens(ids)] for name, ids in zip(names, entries.values(), strict=True)}


def test_common_tokens_and_special_tokens_start_from_themselves() -> None:
    trained = trained_on([f"a {word} a {word}" for word in WORDS])
    found = starts([f"a {word} a {word}" for word in WORDS], trained)
    assert found.keys() == trained.get_vocab().keys()
    assert all(tokens == [name] for name, tokens in found.items())


@pytest.mark.parametrize(
    ("new", "tokens"),
    [
        (" HOUSE", [" house"]),
        ("HOUSE", ["house"]),
        (" ÜBUNG", [" Übung"]),
        (" housegreen", [" house", "green"]),
        (" green", [" green"]),
    ],
)
def test_other_tokens_start_from_the_fewest_that_write_their_text_in_other_letters(new: str, tokens: list[str]) -> None:
    trained = trained_on([f"{word} {word} a {word}" for word in WORDS])
    names = [trained.tokenize(token) for token in tokens]
    assert all(len(name) == 1 for name in names)
    found = starts([f"a{new} a{new}" if new[0] == " " else f"{new} {new}"], trained)
    (name,) = trained_on([f"a{new} a{new}" if new[0] == " " else f"{new} {new}"]).tokenize(new)
    assert found[name] == [piece for one in names for piece in one]


def test_texts_that_the_trained_vocabulary_cannot_write_have_no_start() -> None:
    trained = trained_on(["house green"], "wordpiece")
    found = starts(["house green ж ж"], trained, "wordpiece")
    assert "▁ж" not in found
    assert found["▁house"] == ["▁house"]


def test_byte_level_tokens_start_from_word_pieces_with_their_beginnings() -> None:
    trained = trained_on(["a green house, a green house"], "wordpiece")
    found = starts(["a greens a greens"], trained)
    assert found["Ġgreens"] == ["▁green", "s"]
