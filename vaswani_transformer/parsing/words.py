"""The words of a sentence: of tokenized text, or of plain text by rules close to the Penn Treebank's.

Plain text is split at white space, and then:

1. `, ; : ! ?`, quotation marks, brackets, `$`, `%`, ellipses and dashes are words. A comma, colon or period within a
   number stays.
2. A period is a word at the end of the line, unless it ends an abbreviation such as `U.S.`.
3. `n't`, `'s`, `'re`, `'ve`, `'ll`, `'d` and `'m` are words, and so is the apostrophe that ends a word; `cannot` is
   two words.

Hyphenated words are one word, and quotation marks do not change.
"""

import re

SPACES = re.compile(r"[ \t\r\n\f\v]+")
SPLITS = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"\.{3,}|…|--+|[\u2013—;!?\"“”„«»()\[\]{}$%]", r" \g<0> "),
        (r"[,:](?!\d)|(?<!\d)[,:]", r" \g<0> "),
        (r"(?<![.\s])(?<!\.[a-z])\.(?=['\u2019\"”)\]\s]*$)", r" \g<0> "),
        (r"(?<=\w)n['\u2019]t\b|(?<=[\w.])['\u2019](?:s|re|ve|ll|d|m)\b|(?<=\w)['\u2019](?!\w)", r" \g<0>"),
        (r"\b(can)(not)\b", r"\1 \2"),
    )
)


def escape_brackets(word: str) -> str:
    """Return a word with round brackets as treebanks write them, `-LRB-` and `-RRB-`."""
    return word.replace("(", "-LRB-").replace(")", "-RRB-")


def split_tokenized(text: str) -> list[str]:
    """Return the words of tokenized text, which spaces separate."""
    return [escape_brackets(word) for word in SPACES.split(text) if word]


def split_plain(text: str) -> list[str]:
    """Return the words of plain text, by the rules of this file."""
    for pattern, replacement in SPLITS:
        text = pattern.sub(replacement, text)
    return split_tokenized(text)
