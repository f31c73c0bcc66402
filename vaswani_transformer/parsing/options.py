"""The options of `vaswani-parse`."""

import argparse
from pathlib import Path

from ..translation.options import add_file_options, line_parser, parse_with_checks


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command's options; options that exclude each other end it with status 2."""
    description = "Parse sentences, one a line, in order, by the model's own search; write one tree a line."
    parser = line_parser("vaswani-parse", description)
    group = add_file_options(parser, "sentences to parse", "trees")
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
