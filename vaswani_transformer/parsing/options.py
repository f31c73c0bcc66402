"""The options of `vaswani-parse`."""

import argparse
from pathlib import Path

from ..support.command_line import ArgumentParser
from ..translation.options import add_machine_options, add_search_options, check_combination, check_paths


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command's options; options that exclude each other end it with status 2."""
    parser = ArgumentParser(
        prog="vaswani-parse",
        description="Parse sentences, one a line, in order, by the model's own search; write one tree a line.",
        epilog="With --output the same command resumes an interrupted one and leaves a finished file unchanged; "
        "FILE.record, next to FILE, holds the model and settings.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with a model and its tokenizer, or a name on the Hub")
    add_line_options(parser)
    add_search_options(parser)
    add_machine_options(parser)
    parser.set_defaults(format="text", field=None, source=None, scores=False, nbest=None)
    options = parser.parse_args(arguments)
    check_combination(parser, options)
    check_paths(parser, options)
    if options.draw and options.output:
        parser.error("--draw writes many lines a tree, for readers; leave out --output.")
    if options.svg and options.svg.exists() and not options.svg.is_dir():
        parser.error(f"--svg={options.svg}: is a file; name a folder.")
    return options


def add_line_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("lines")
    group.add_argument("--input", type=Path, metavar="FILE", help="the sentences to parse (standard input)")
    group.add_argument("--output", type=Path, metavar="FILE", help="where trees go (standard output)")
    group.add_argument(
        "--tokenized",
        action="store_true",
        help="spaces separate the words, as in the model's treebank; otherwise lines are plain text, and punctuation "
        "and contractions become words",
    )
    group.add_argument("--draw", action="store_true", help="draw each tree as text instead of writing its brackets")
    group.add_argument("--svg", type=Path, metavar="FOLDER", help="also draw the tree of line N as FOLDER/N.svg")
    group.add_argument("--interactive", action="store_true", help="parse each line as soon as it is typed")
    group.add_argument("--progress", action=argparse.BooleanOptionalAction, help="show a progress bar (in a terminal)")
