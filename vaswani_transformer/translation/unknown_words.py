"""Words of sources that a vocabulary cannot encode, whose translations are guesses."""

import re
from collections.abc import Sequence
from typing import Any

from ..tokenizer import ALL_WORDS_KEY, WORD_START


def unknown_words(tokenizer: Any, encoded: Any, texts: Sequence[str]) -> list[list[str]]:
    """Return the unknown words of each text.

    These are words with an `<unk>`, as the text has them; white space is not a word. If the vocabulary contains
    every word of its training texts, they include words with a letter or digit that are not a single entry.

    Args:
        tokenizer: the tokenizer; with one written in Python, words are separated by white space.
        encoded: its result for `texts`.
        texts: the texts.
    """
    unknown_id = tokenizer.unk_token_id
    has_all_words = encoded.is_fast and tokenizer.init_kwargs.get(ALL_WORDS_KEY, False)
    words: list[list[str]] = []
    for row, (text, ids) in enumerate(zip(texts, encoded["input_ids"], strict=True)):
        if unknown_id not in ids and not has_all_words:
            words.append([])
        elif encoded.is_fast:
            words.append(aligned_words_with(unknown_id, encoded.encodings[row], text, ids, has_all_words))
        else:
            words.append(split_words_with(unknown_id, tokenizer, text))
    return words


def split_words_with(unknown_id: int, tokenizer: Any, text: str) -> list[str]:
    """Return the words of a text that a tokenizer written in Python encodes with an `<unk>`."""
    return [word for word in text.split() if unknown_id in tokenizer(word)["input_ids"]]


def aligned_words_with(
    unknown_id: int | None, encoding: Any, text: str, ids: list[int], has_all_words: bool
) -> list[str]:
    """Return the words of a text with an `<unk>`, and with `has_all_words` those of several pieces."""
    pieces: dict[int, list[int]] = {}  # positions of each word's pieces, by word index
    for position, index in enumerate(encoding.word_ids):
        if index is not None:
            pieces.setdefault(index, []).append(position)

    words = []
    for positions in pieces.values():
        first = positions[0]
        last = positions[-1]
        start, _ = encoding.offsets[first]
        _, end = encoding.offsets[last]
        word = text[start:end].strip()
        # The mark before a word is aligned with the character before it, which is not a letter.
        if encoding.tokens[first].startswith(WORD_START) and re.match(r"[^\w\s].", word, re.DOTALL):
            word = word[1:]
        is_split = has_all_words and len(positions) > 1 and any(map(str.isalnum, word))
        is_unknown = unknown_id in [ids[position] for position in positions]
        if word and (is_split or is_unknown):
            words.append(word)
    return words
