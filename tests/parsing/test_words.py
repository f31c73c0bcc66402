"""The words of plain and of tokenized text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaswani_transformer.parsing.words import split_plain, split_tokenized


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The dog slept.", "The dog slept ."),
        ('He said, "I can\'t (really) go to the U.S."', 'He said , " I ca n\'t -LRB- really -RRB- go to the U.S. "'),
        ("It costs $3,000.50 at 10:30; the dogs' tails...", "It costs $ 3,000.50 at 10:30 ; the dogs ' tails ..."),
        ("We cannot know Mr. Smith's well-known things!", "We can not know Mr. Smith 's well-known things !"),
        ("They'll don\u2019t \u201cgo\u201d?", "They 'll do n\u2019t \u201c go \u201d ?"),
        ("The U.S.'s and the U.K.\u2019s", "The U.S. 's and the U.K. \u2019s"),
        ("I\u00a0know\u2003him.", "I know him ."),
        (" \t", ""),
    ],
)
def test_plain_text_is_split_close_to_the_treebanks_rules(text: str, words: str) -> None:
    assert split_plain(text) == words.split()


@given(st.text())
def test_words_hold_no_bracket_and_splitting_loses_no_character(text: str) -> None:
    words = split_plain(text)
    assert not any(sign in word for word in words for sign in "() \t\n")
    shown = "".join(words).replace("-LRB-", "(").replace("-RRB-", ")")
    assert shown == "".join(text.split()).replace("-LRB-", "(").replace("-RRB-", ")")


@given(st.lists(st.text(st.characters(exclude_characters="() \t\r\n\f\v"), min_size=1)))
def test_tokenized_words_are_unchanged(words: list[str]) -> None:
    assert split_tokenized(" ".join(words)) == words
