"""Tokens as words of a figure: their texts spell the complete text, and every character is visible."""

import re

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import model_of_pairs
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.figures.tokens import display_form, display_tokens, token_texts

# Any text without the replacement character of invalid bytes and without the signs of the fractions.
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd\u2044⁰¹²³⁴⁵⁶⁷⁸⁹"))
SPLIT = re.compile("(.)([⁰¹²³⁴⁵⁶⁷⁸⁹]+)\u2044([₀₁₂₃₄₅₆₇₈₉]+)", flags=re.DOTALL)
PLAIN = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉", "0123456789" * 2)


def without_fractions(text: str) -> str:
    """Keep a character that several tokens spell only at its last token."""

    def once(match: re.Match[str]) -> str:
        return match[1] if match[2].translate(PLAIN) == match[3].translate(PLAIN) else ""

    return SPLIT.sub(once, text)


def words(tokenizer: VaswaniTransformerTokenizer, text: str) -> list[str]:
    return display_tokens(tokenizer, tokenizer(text, add_special_tokens=False).input_ids)


@given(any_text)
def test_token_texts_spell_the_whole_text(text: str) -> None:
    _, tokenizer = model_of_pairs()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert without_fractions("".join(texts)) == text


@given(any_text)
def test_display_tokens_are_never_empty_or_garbled(text: str) -> None:
    _, tokenizer = model_of_pairs()
    ids = tokenizer(text).input_ids
    shown = display_tokens(tokenizer, ids)
    assert len(shown) == len(ids)
    assert all(shown)
    assert not any(character in word for word in shown for character in " \n\t\x00\ufffdĠ")


def test_display_tokens_are_words_and_their_parts() -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["hello world", "a book"] * 3, vocab_size=280)
    assert words(tokenizer, "hello world") == ["hello", "world"]
    assert words(tokenizer, "a book is a bookkeeper's") == [
        *("a", "book", "␣", "i", "·s", "␣", "a", "book", "·k", "·e", "·e", "·p", "·e", "·r", "'", "s")
    ]
    assert words(tokenizer, "a,  book") == ["a", ",", "␣", "book"]
    assert words(tokenizer, "\n\t\x07") == ["⏎", "⇥", "\\x07"]
    assert words(tokenizer, "🙂") == [f"🙂{part}\u2044₄" for part in "¹²³⁴"]
    assert display_tokens(tokenizer, [0, *tokenizer("hello").input_ids]) == ["<s>", "hello", "</s>"]


def test_bytes_that_are_no_character_are_marked() -> None:
    _, tokenizer = model_of_pairs()
    first, *_ = tokenizer("🙂", add_special_tokens=False).input_ids
    assert display_tokens(tokenizer, [first, first, *tokenizer("a").input_ids])[-1] == "</s>"
    assert display_tokens(tokenizer, [first]) == ["\ufffd"]


def test_invisible_characters_are_escaped() -> None:
    assert display_form("\u200d") == "\\u200d"
    assert display_form("\u200d¹\u2044₃") == "\\u200d¹\u2044₃"
    assert display_form("a\u200db") == "a\u200db"
    assert display_form("ing", before="book") == "·ing"
    assert display_form(".", before="book") == "."
