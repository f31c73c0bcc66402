"""The options of `vaswani-translate`."""

import argparse
from pathlib import Path
from typing import Any, get_args

from ..support.command_line import add_model_argument, check_output_file, positive_argument
from .translator import TooLong

MAX_ALPHA = 50  # of lp(Y): the longest translations to this power are still finite

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
DTYPE_HELP = "of products with weights; int8 only on a CPU (float32 on a CPU, as saved on other devices)"


def add_beam_options(group: Any) -> None:
    group.add_argument("--beams", type=positive_argument, metavar="N", help="beams; 1 for greedy search")
    group.add_argument("--length_penalty", type=float, metavar="ALPHA", help="alpha of lp(Y)")


def add_batch_tokens(group: Any) -> None:
    group.add_argument(
        "--batch_tokens", type=positive_argument, default=2048, metavar="N", help="source tokens at once (2048)"
    )


def add_sort_lines(group: Any, help: str) -> None:
    group.add_argument("--window", dest="sort_lines", type=positive_argument, default=2048, metavar="N", help=help)


def add_load_options(group: Any) -> None:
    """Add the options that `LoadOptions` has besides the model."""
    group.add_argument("--device", help="where to run (the accelerator if there is one, else the CPU)")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help=DTYPE_HELP)
    group.add_argument("--revision", help="branch, tag or commit of a model on the Hub (main)")
    group.add_argument("--trust_remote_code", action="store_true", help="run the code that comes with the model")


def line_parser(prog: str, description: str, texts: str, results: str) -> tuple[argparse.ArgumentParser, Any]:
    """Return a parser of a command that reads `texts` and writes `results` line by line, and its group for lines."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog=prog,
        description=description,
        epilog="With --output the same command resumes an interrupted one and leaves a finished file unchanged; "
        "FILE.record, next to FILE, holds the model and settings.",
    )
    add_model_argument(parser)
    group = parser.add_argument_group("lines")
    group.add_argument("--input", type=Path, metavar="FILE", help=f"the {texts} (standard input)")
    group.add_argument("--output", type=Path, metavar="FILE", help=f"where {results} go (standard output)")
    group.add_argument("--interactive", action="store_true", help="answer each line as soon as it is typed")
    group.add_argument("--progress", action=argparse.BooleanOptionalAction, help="show a progress bar (in a terminal)")
    return parser, group


def check_combination(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.interactive and (options.input or options.output or options.format != "text"):
        parser.error("--interactive reads and writes lines of text; leave out --input, --output and --format.")
    if options.interactive and options.strict:
        parser.error("--interactive names each line's unknown words and continues; leave out --strict.")
    if options.format == "text" and (options.field or options.source):
        parser.error("--field and --source are of JSON Lines; give --format=jsonl as well.")
    if options.field and options.source:
        parser.error("--field and --source both say where the text is; give one of them.")
    if not -MAX_ALPHA <= (options.length_penalty or 0) <= MAX_ALPHA:  # also NaN
        parser.error(
            f"--length_penalty={options.length_penalty}: lengths to this power overflow; give a number from "
            f"-{MAX_ALPHA} to {MAX_ALPHA}."
        )


def check_paths(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.input and options.input.is_dir():
        parser.error(f"--input={options.input}: is a folder; name a file.")
    if options.input and not options.input.exists():
        parser.error(f"--input={options.input}: does not exist; name an existing file.")
    if options.output:
        check_output_file(parser, options.output)
    if options.input and options.output and options.output.exists() and options.output.samefile(options.input):
        parser.error(f"--output={options.output}: is the input itself; name another file.")


def parse_with_checks(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Return a command's options, also those of search and machine; a bad combination ends it with status 2."""
    group = parser.add_argument_group("search", "the model's generation config is the default")
    add_beam_options(group)
    group.add_argument("--iterations", type=positive_argument, metavar="N", help="passes over an output, for a CMLM")
    group.add_argument(
        "--length_beam",
        type=positive_argument,
        metavar="L",
        help="lengths that a model which predicts all words at once tries for each line",
    )
    group.add_argument("--max_length", type=positive_argument, metavar="N", help="most tokens of an output, with </s>")
    group.add_argument(
        "--max_source_tokens",
        type=positive_argument,
        metavar="N",
        help="most tokens of a line (what a table of positions has room for, or 1024)",
    )
    group.add_argument(
        "--too_long", choices=get_args(TooLong), default="truncate", help="what happens to a longer line (truncate)"
    )
    group.add_argument("--strict", action="store_true", help="end at a line with a word that the vocabulary lacks")
    group = parser.add_argument_group("machine")
    add_batch_tokens(group)
    add_sort_lines(group, "lines sorted by length at once (2048)")
    add_load_options(group)
    options = parser.parse_args(arguments)
    check_combination(parser, options)
    check_paths(parser, options)
    return options


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of `vaswani-translate`; options that exclude each other end it with status 2."""
    description = "Translate a text line by line, in order, by the model's own search."
    parser, group = line_parser("vaswani-translate", description, "text to translate", "results")
    group.add_argument("--format", choices=("text", "jsonl"), default="text", help="format of input and output (text)")
    group.add_argument("--field", metavar="NAME", help='field of JSON Lines with the text: {"NAME": "..."} (text)')
    group.add_argument("--source", metavar="LANGUAGE", help='or its language, in {"translation": {"LANGUAGE": "..."}}')
    group.add_argument(
        "--scores",
        action="store_true",
        help="write the score that ranks translations, such as log P(Y|X) / lp(Y), and a tab before each",
    )
    group.add_argument(
        "--nbest", type=positive_argument, metavar="N", help="write the N best, each after its line number and a tab"
    )
    return parse_with_checks(parser, arguments)
