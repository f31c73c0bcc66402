"""The command `vaswani-parse MODEL < sentences.txt > trees.ptb`, also `python -m vaswani_transformer.parsing`."""

from dataclasses import dataclass

from ..translation.lines import LineFormat, LineOptions, load_translator, make_parser, run
from ..translation.translator import Translation, Translator
from .constraint import tree_constraint
from .linear import delinearize
from .parser import check_parser
from .trees import draw_tree_text
from .words import split_plain, split_tokenized


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
