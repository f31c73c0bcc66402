"""The command `vaswani-parse MODEL < sentences.txt > trees.ptb`, also `python -m vaswani_transformer.parsing`."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from ..support.errors import UserError
from ..support.files import write_errors
from ..translation.command import LineFormat, run_command
from ..translation.loading import load_translator
from ..translation.options import line_parser, parse_with_checks
from ..translation.translator import Translation, Translator
from .constraint import tree_constraint
from .linear import delinearize
from .parser import check_parser
from .trees import draw_tree_text
from .words import split_plain, split_tokenized


class TreeFormat(LineFormat):
    """A sentence in each line that is read, and its tree in each that is written.

    The trees that are drawn as SVG are an option that results depend on: a resumed command would draw no earlier tree.
    """

    resume_keys = (
        "tokenized", "svg", "beams", "length_penalty", "iterations", "length_beam", "max_length", "max_source_tokens",
        "too_long", "dtype",
    )  # fmt: skip

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.split = split_tokenized if options.tokenized else split_plain
        self.repaired = 0
        if options.svg is not None and find_spec("matplotlib") is None:
            fix = 'Run pip install "vaswani-transformer[figures]".'
            raise UserError(f"--svg: figures need Matplotlib, which is not installed. {fix}")

    def load(self) -> Translator:
        return load_translator(self.options, check_parser, tree_constraint)

    def source_text(self, line: str) -> str:
        """Return the words of a line, with a space between them."""
        return " ".join(self.split(line))

    def write(self, translation: Translation, number: int) -> list[str]:
        """Return the output of a line's tree, and draw it as SVG if that is wanted; a line without words has none."""
        tree, is_repaired = delinearize(translation.text, split_tokenized(translation.source))
        if not tree.children:
            return [""]
        self.repaired += is_repaired
        if (folder := self.options.svg) is not None:
            from .figure import draw_tree

            with write_errors(folder, "make room, or give another --svg"):
                folder.mkdir(parents=True, exist_ok=True)
                draw_tree(tree).savefig(folder / f"{number}.svg")
        return [draw_tree_text(tree) if self.options.draw else str(tree)]

    def summary(self, count: int) -> str:
        if not self.repaired:
            return ""
        return f"{self.repaired} of the {count} sentences had malformed output, and their trees were repaired."


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command's options; options that exclude each other end it with status 2."""
    description = "Parse sentences, one a line, in order, by the model's own search; write one tree a line."
    parser, group = line_parser("vaswani-parse", description, "sentences to parse", "trees")
    group.add_argument(
        "--tokenized",
        action="store_true",
        help="spaces separate the words, as in the model's treebank; otherwise lines are plain text, and punctuation "
        "and contractions become words",
    )
    group.add_argument("--draw", action="store_true", help="draw each tree as text instead of writing its brackets")
    group.add_argument("--svg", type=Path, metavar="FOLDER", help="also draw the tree of line N as FOLDER/N.svg")
    parser.set_defaults(format="text", field=None, source=None, scores=False, nbest=None)
    options = parse_with_checks(parser, arguments)
    if options.draw and options.output:
        parser.error("--draw writes many lines a tree, for readers; leave out --output.")
    if options.svg and options.svg.exists() and not options.svg.is_dir():
        parser.error(f"--svg={options.svg}: is a file; name a folder.")
    return options


def main(arguments: list[str] | None = None) -> None:
    run_command(parse_arguments(arguments), TreeFormat)
