"""Tokens as labels of a figure, with all characters visible."""

import re
from collections.abc import Iterable, Sequence
from typing import cast

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

UNDECODED = "\ufffd"

Target = tuple[int, ...]
"""Tokens up to and including one of them."""


def common_prefix(first: str, second: str) -> str:
    length = 0
    for first_letter, second_letter in zip(first, second, strict=False):
        if first_letter != second_letter:
            break
        length += 1
    return first[:length]


def token_texts(tokenizer: PreTrainedTokenizerBase, targets: Iterable[Target]) -> dict[Target, str]:
    """Return the text of the last token of each of `targets`, which follow the targets that they continue.

    A character of several tokens, such as an emoji in bytes, is the text of the last; the others have "\ufffd".
    """
    complete: dict[Target, str] = {(): ""}
    texts = {}
    for target in targets:
        decoded = cast(str, tokenizer.decode(list(target), clean_up_tokenization_spaces=False))
        complete[target] = decoded.rstrip(UNDECODED)
        old = common_prefix(complete[target[:-1]], complete[target])  # decoding may change the text before
        texts[target] = complete[target].removeprefix(old)
        if complete[target] != decoded:
            texts[target] += UNDECODED
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


def token_labels(tokenizer: PreTrainedTokenizerBase, targets: Iterable[Target]) -> dict[Target, str]:
    """Return the label of the last token of each of `targets`; a token without text has its name, such as `</s>`."""
    texts = token_texts(tokenizer, targets)
    labels = {}
    for target, text in texts.items():
        before = texts.get(target[:-1], "")
        name = cast(str, tokenizer.convert_ids_to_tokens(target[-1]))
        labels[target] = display_form(text, before) or name
    return labels


def display_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return the labels of the tokens of one text."""
    beginnings = [tuple(token_ids[:end]) for end in range(1, len(token_ids) + 1)]
    return list(token_labels(tokenizer, beginnings).values())
