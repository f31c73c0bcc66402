"""Words that a vocabulary cannot encode, as they are written in a text."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.tokenizer import source_encoder, text_encoder
from vaswani_transformer.translation.unknown_words import unknown_words


@pytest.mark.parametrize(
    ("algorithm", "vocab_size", "expected"),
    [
        ("wordpiece", 2000, ["Hello", "catt", "§"]),  # every word of the texts is an entry
        ("wordpiece", 26, ["Hello", "§"]),  # pieces spell the other
        ("bpe", 2000, ["Hello", "catt"]),
        ("bpe", 265, []),  # bytes spell any word
    ],
)
def test_unknown_words_are_those_that_the_vocabulary_lacks(
    algorithm: str, vocab_size: int, expected: list[str], tmp_path: Path
) -> None:
    learned = ["The cat sleeps and the dogs sleep.", "The cats eat the dog and the cat sleeps."]
    VaswaniTransformerTokenizer.train_from_iterator(learned, vocab_size, algorithm).save_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*learned, "", "The  Hello catt sleeps . the §"]
    assert unknown_words(tokenizer, text_encoder(tokenizer)(texts), texts) == [[], [], [], expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the -xyz- cat", ["-", "xyz", "-"]),
        ("the §xyz cat", ["§", "xyz"]),
        ("the\tcat", []),
        ("the\u2028cat", []),
        ("the\u00a0xyz", ["xyz"]),
        ("the cat\u2009sleeps", []),
        ("the \u200bcat", ["\u200b"]),
    ],
)
def test_unknown_words_are_named_as_they_stand_in_the_text(text: str, expected: list[str]) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["the cat sleeps", "the cat"], 200, "wordpiece")
    assert unknown_words(tokenizer, source_encoder(tokenizer)([text]), [text]) == [expected]


def test_new_vocabulary_of_all_bytes_has_no_unknown_words() -> None:
    """The old vocabulary has every word of its texts, which is not true of the new one."""
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["The cat sleeps."], 2000)
    assert tokenizer.init_kwargs["holds_all_words"]
    trained = tokenizer.train_new_from_iterator(["completely different words"], 262)
    assert unknown_words(trained, trained(["different"]), ["different"]) == [[]]
