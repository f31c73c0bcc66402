"""Tokens as labels of a figure, with all characters visible."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import cast

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

UNDECODED = "\ufffd"


def common_prefix_length(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token.

    A character of several tokens, such as an emoji in bytes, is the text of the last; the others have "\ufffd".
    """
    texts: list[str] = []
    before = ""
    for end in range(1, len(token_ids) + 1):
        decoded = cast(str, tokenizer.decode(list(token_ids[:end]), clean_up_tokenization_spaces=False))
        complete = decoded.rstrip(UNDECODED)
        texts.append(complete[common_prefix_length(before, complete) :] + UNDECODED * (len(complete) < len(decoded)))
        before = complete
    return texts


def display_form(text: str, before: str = "") -> str:
    """Return the label of a token: without the space before a word, and with "·" if it continues `before`.

    Other spaces become "␣", line breaks "⏎", and invisible characters escape sequences.
    """
    continues = before[-1:].isalnum() and text[:1].isalnum()
    shown = text[1:] if text.startswith(" ") and len(text) > 1 else text
    shown = shown.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    shown = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda match: ascii(match[0])[1:-1], shown)
    if not any(character.isprintable() for character in shown):
        shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in shown)
    return f"·{shown}" if continues else shown


def display_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return the labels of tokens; a token without text has its name, such as `</s>`."""
    texts = token_texts(tokenizer, token_ids)
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    befores = ["", *texts]
    return [display_form(text, before) or name for text, before, name in zip(texts, befores, names, strict=False)]
