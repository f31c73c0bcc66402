"""The function `parse` and the command `vaswani-parse MODEL < sentences.txt > trees.ptb`."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..support.command import UserError
from ..translation.command import LineFormat, LineOptions, load_translator, make_parser, run
from ..translation.translator import Translation, Translator, translate
from .constraint import tree_constraint
from .linear import ParsedSentence, delinearize, is_parser
from .trees import draw_tree_text, escape_brackets, split_plain, split_tokenized


def source_text(sentence: str | Sequence[str], index: int) -> str:
    """Return the words of a plain text, or the given words, separated by spaces; `index` is for errors."""
    if isinstance(sentence, str):
        return " ".join(split_plain(sentence))
    if not isinstance(sentence, Sequence) or not all(isinstance(word, str) for word in sentence):
        raise TypeError(f"Sentence {index}: got {sentence!r:.80}, expected a str or a list of words.")
    for word in sentence:
        if split_tokenized(word) != [escape_brackets(word)]:
            raise ValueError(
                f"sentences: a word is empty or contains white space; got {word!r}, expected one word. Split it, or "
                "pass the sentence as one text."
            )
    return " ".join(map(escape_brackets, sentence))


def check_parser(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    if not is_parser(tokenizer):
        raise UserError(
            f"{name}: is not a parser: its vocabulary has no tree tags. Use a model that was trained on trees "
            "(data.kind: trees), or translate with vaswani-translate."
        )


def parse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Iterable[str | Sequence[str]],
    **settings: Any,
) -> Iterator[ParsedSentence]:
    """Yield the tree of each sentence in order, by the model's generation config.

    The leaves of a tree are always the words of the sentence. `is_repaired` is True if the output was malformed.

    Args:
        model: a model trained for parsing.
        tokenizer: its tokenizer.
        sentences: plain texts, which are split by rules close to those of the Penn Treebank, or lists of words.
        **settings: arguments of `translate`, such as `batch_tokens`, and of `generate()`, such as `num_beams`.

    Raises:
        TypeError: `sentences` is a single text, or contains anything but texts and lists of words.
        ValueError: the model is not a parser, a word is empty or contains white space, or `translate` raises it.
    """
    if isinstance(sentences, str):
        raise TypeError(f"sentences is the str {sentences!r}; pass a list of sentences, for example [sentence].")
    check_parser(tokenizer, "tokenizer")
    settings.setdefault("constraint", tree_constraint(model, tokenizer))
    for translation in translate(model, tokenizer, map(source_text, sentences, itertools.count()), **settings):
        yield delinearize(translation.text, split_tokenized(translation.source))


@dataclass(frozen=True)
class ParsingOptions(LineOptions):
    """Options of `vaswani-parse`."""

    tokenized: bool = False
    draw: bool = False


@dataclass
class TreeFormat(LineFormat[ParsingOptions]):
    """Input lines of sentences, and output lines of trees."""

    repaired: int = 0

    def read(self, line: bytes, where: str) -> str:
        """Return the words of a line, separated by spaces."""
        split = split_tokenized if self.options.tokenized else split_plain
        return " ".join(split(super().read(line, where)))

    def write(self, translation: Translation, number: int) -> list[str]:
        """Return the output line of a tree; without words there is no tree."""
        tree, is_repaired = delinearize(translation.text, split_tokenized(translation.source))
        if not tree.children:
            return [""]
        self.repaired += is_repaired
        return [draw_tree_text(tree) if self.options.draw else str(tree)]

    def summary(self, count: int) -> str:
        if not self.repaired:
            return ""
        return f"{self.repaired} of the {count} sentences had malformed output, and their trees were repaired."


def load_parser(options: ParsingOptions, layouts: dict[str, str]) -> Translator:
    """Return the translator of a parser, which permits only well-formed trees."""
    translator = load_translator(options, layouts)
    check_parser(translator.tokenizer, options.model)
    translator.constraint = tree_constraint(translator.model, translator.tokenizer)
    return translator


def main(arguments: list[str] | None = None) -> None:
    description = "Parse sentences, one a line, in order, by the model's own search; write one tree a line."
    parser, lines = make_parser("vaswani-parse", description, "sentences to parse", "trees")
    lines.add_argument(
        "--tokenized",
        action="store_true",
        help="the input is already tokenized (space-separated, as in the Penn Treebank); otherwise it is plain text, "
        "and punctuation and contractions become words",
    )
    lines.add_argument("--draw", action="store_true", help="draw each tree as text instead of writing its brackets")
    options = ParsingOptions(**vars(parser.parse_args(arguments)))
    if options.draw and options.output:
        parser.error("--draw writes several lines for each tree, to be read on a screen; leave out --output.")
    run(TreeFormat(options), lambda layouts: load_parser(options, layouts))
