"""Tokens as words of a figure: their texts spell the complete text, and every character is visible."""

from hypothesis import given
from hypothesis import strategies as st

from tests.models import model_of_pairs
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.figures.tokens import display_form, display_tokens, token_labels, token_texts

# Any text without the replacement character of invalid bytes.
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"))


def words(tokenizer: VaswaniTransformerTokenizer, text: str) -> list[str]:
    return display_tokens(tokenizer, tokenizer(text, add_special_tokens=False).input_ids)


@given(any_text)
def test_token_texts_spell_the_whole_text(text: str) -> None:
    _, tokenizer = model_of_pairs()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    texts = list(token_texts(tokenizer, [tuple(ids[:end]) for end in range(1, len(ids) + 1)]).values())
    assert len(texts) == len(ids)
    assert "".join(texts).replace("\ufffd", "") == text


@given(any_text)
def test_display_tokens_are_never_empty_or_garbled(text: str) -> None:
    _, tokenizer = model_of_pairs()
    ids = tokenizer(text).input_ids
    shown = display_tokens(tokenizer, ids)
    assert len(shown) == len(ids)
    assert all(shown)
    assert not any(character in word for word in shown for character in " \n\t\x00Ġ")


def test_display_tokens_are_words_and_their_parts() -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["hello world", "a book"] * 3, vocab_size=280)
    assert words(tokenizer, "hello world") == ["hello", "world"]
    assert words(tokenizer, "a book is a bookkeeper's") == [
        *("a", "book", "␣", "i", "·s", "␣", "a", "book", "·k", "·e", "·e", "·p", "·e", "·r", "'", "s")
    ]
    assert words(tokenizer, "a,  book") == ["a", ",", "␣", "book"]
    assert words(tokenizer, "\n\t\x07") == ["⏎", "⇥", "\\x07"]
    assert words(tokenizer, "🙂") == ["\ufffd"] * 3 + ["🙂"]
    assert display_tokens(tokenizer, [0, *tokenizer("hello").input_ids]) == ["<s>", "hello", "</s>"]


def test_labels_of_a_tree_are_those_of_each_of_its_texts() -> None:
    _, tokenizer = model_of_pairs()
    whole = [tokenizer(text).input_ids for text in ("el gato", "el libro")]
    targets = {tuple(ids[:end]): None for ids in whole for end in range(1, len(ids) + 1)}
    labels = token_labels(tokenizer, targets)
    for ids in whole:
        assert [labels[tuple(ids[:end])] for end in range(1, len(ids) + 1)] == display_tokens(tokenizer, ids)


def test_invisible_characters_are_escaped() -> None:
    assert display_form("\u200d") == "\\u200d"
    assert display_form("a\u200db") == "a\u200db"
    assert display_form("ing", before="book") == "·ing"
    assert display_form(".", before="book") == "."
