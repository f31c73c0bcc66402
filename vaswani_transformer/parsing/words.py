"""Splitting of text into words, by rules close to those of the Penn Treebank.

Plain text is split at white space, and then:

1. `, ; : ! ?`, quotation marks, brackets, `$`, `%`, ellipses and dashes are words, except for a comma, colon or period
   within a number.
2. A period at the end of the line is a word, unless it ends an abbreviation such as `U.S.`.
3. `n't`, `'s`, `'re`, `'ve`, `'ll`, `'d`, `'m` and a final apostrophe are words. `cannot` is two words.

Hyphenated words are one word. Quotation marks are not changed.
"""

import re

SPACES = re.compile(r"[ \t\r\n\f\v]+")
ALWAYS_WORDS = re.compile(r"\.{3,}|…|--+|[\u2013—;!?\"“”„«»()\[\]{}$%]")
NOT_IN_NUMBERS = re.compile(r"[,:](?!\d)|(?<!\d)[,:]")
LAST_PERIOD = re.compile(r"(?<![.\s])(?<!\.[a-z])\.(?=['\u2019\"”)\]\s]*$)", re.IGNORECASE)
CONTRACTIONS = re.compile(
    r"(?<=\w)n['\u2019]t\b|(?<=[\w.])['\u2019](?:s|re|ve|ll|d|m)\b|(?<=\w)['\u2019](?!\w)", re.IGNORECASE
)
CANNOT = re.compile(r"\b(can)(not)\b", re.IGNORECASE)


def escape_brackets(word: str) -> str:
    """Replace round brackets by `-LRB-` and `-RRB-`, as in treebanks."""
    return word.replace("(", "-LRB-").replace(")", "-RRB-")


def split_tokenized(text: str) -> list[str]:
    """Return the words of tokenized text, separated by spaces."""
    return [escape_brackets(word) for word in SPACES.split(text) if word]


def split_plain(text: str) -> list[str]:
    """Return the words of plain text, by the rules of this module."""
    text = re.sub(r"\s", " ", text)  # such as a no-break space
    for punctuation in (ALWAYS_WORDS, NOT_IN_NUMBERS, LAST_PERIOD):
        text = punctuation.sub(r" \g<0> ", text)
    text = CONTRACTIONS.sub(r" \g<0>", text)
    text = CANNOT.sub(r"\1 \2", text)
    return split_tokenized(text)
