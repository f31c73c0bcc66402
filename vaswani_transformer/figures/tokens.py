"""Tokens as labels of a figure, with all characters visible."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import cast

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

UNDECODED = "\ufffd"
FRACTION_SLASH = "\u2044"
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
FRACTION = re.compile(f"[⁰¹²³⁴⁵⁶⁷⁸⁹]+{FRACTION_SLASH}[₀₁₂₃₄₅₆₇₈₉]+")


def common_prefix_length(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def fraction(numerator: int, denominator: int) -> str:
    """Return a fraction such as "¹⁄₂"."""
    return str(numerator).translate(SUPERSCRIPTS) + FRACTION_SLASH + str(denominator).translate(SUBSCRIPTS)


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token.

    A character of several tokens, such as an emoji in bytes, appears at each of them: "🙂¹⁄₂", "🙂²⁄₂".
    """
    texts: list[str] = []
    unfinished: list[int] = []  # tokens of an incomplete character
    before = ""
    for end in range(1, len(token_ids) + 1):
        decoded = cast(str, tokenizer.decode(list(token_ids[:end]), clean_up_tokenization_spaces=False))
        complete = decoded.rstrip(UNDECODED)
        kept = common_prefix_length(before, complete)
        text = complete[kept:]
        if unfinished and text:
            count = len(unfinished) + 1
            for number, index in enumerate(unfinished, start=1):
                texts[index] += text[0] + fraction(number, count)
            text = text[0] + fraction(count, count) + text[1:]
            unfinished = []
        texts.append(text)
        if len(complete) < len(decoded):
            unfinished.append(end - 1)
        before = complete
    for index in unfinished:
        texts[index] += UNDECODED
    return texts


def display_form(text: str, before: str = "") -> str:
    """Return the label of a token: without the space before a word, and with "·" if it continues `before`.

    Other spaces become "␣", line breaks "⏎", and invisible characters escape sequences.
    """
    continues = before[-1:].isalnum() and text[:1].isalnum()
    shown = text[1:] if text.startswith(" ") and len(text) > 1 else text
    shown = shown.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    shown = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda match: ascii(match[0])[1:-1], shown)
    if not any(character.isprintable() for character in FRACTION.sub("", shown)):
        shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in shown)
    return f"·{shown}" if continues else shown


def display_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return the labels of tokens; a token without text has its name, such as `</s>`."""
    texts = token_texts(tokenizer, token_ids)
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    befores = ["", *texts]
    return [display_form(text, before) or name for text, before, name in zip(texts, befores, names, strict=False)]
