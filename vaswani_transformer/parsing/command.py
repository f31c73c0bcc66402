"""The command `vaswani-parse MODEL < sentences.txt > trees.ptb`, also `python -m vaswani_transformer.parsing`."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, BinaryIO

from ..support.errors import UserError
from ..support.files import write_errors
from ..translation.command import (
    UnknownWords,
    has_record,
    is_done,
    log,
    log_unknown_words,
    open_input,
    open_output,
    progress_bar,
    prompt_lines,
    run_guarded,
    warn_of_truncation,
)
from ..translation.loading import make_translator, model_digest
from ..translation.output import ResumableFile, StreamOutput
from ..translation.readers import DigestedInput, text_lines
from ..translation.translator import TooLongError, Translation
from .constraint import tree_constraint
from .drawing import draw_tree_text
from .linear import ParsedSentence
from .options import parse_options
from .parser import SourceTexts, check_parser
from .words import split_plain, split_tokenized

RESUME_KEYS = (
    "tokenized", "beams", "length_penalty", "iterations", "length_beam", "max_length", "max_source_tokens", "too_long",
    "dtype", "engine",
)  # fmt: skip
"""The options, besides the model, that trees depend on."""


def split_line(line: str, options: argparse.Namespace) -> list[str]:
    """Return the words of a line."""
    return split_tokenized(line) if options.tokenized else split_plain(line)


def read_sentences(options: argparse.Namespace, source: BinaryIO, name: str) -> Iterator[list[str]]:
    """Yield the words of each line of the input."""
    return (split_line(line, options) for line in text_lines(source, name))


def resume_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the trees depend on, besides the sentences, and the folder of their drawings.

    Raises:
        UserError: as `model_digest`.
    """
    drawings = None if options.svg is None else str(options.svg)  # a resumed command would draw no earlier tree
    settings = {name: getattr(options, name) for name in RESUME_KEYS}
    return {"model": model_digest(options), "svg": drawings} | settings


def format_tree(sentence: ParsedSentence, number: int, options: argparse.Namespace) -> str:
    """Return the output of a line's tree, and draw it as SVG if that is wanted; a line without words has no tree.

    Raises:
        OutputError: the SVG cannot be written.
    """
    tree = sentence.tree
    if not tree.children:
        return ""
    if options.svg is not None:
        from .figure import draw_tree

        with write_errors(options.svg, "make room, or give another --svg"):
            options.svg.mkdir(parents=True, exist_ok=True)
            draw_tree(tree).savefig(options.svg / f"{number}.svg")
    return draw_tree_text(tree) if options.draw else str(tree)


def parse_lines(
    translations: Callable[..., Iterator[Translation]],
    texts: SourceTexts,
    digested: DigestedInput,
    output: StreamOutput | ResumableFile,
    options: argparse.Namespace,
) -> None:
    """Write the trees of all sentences that have none yet.

    Raises:
        UserError: a line is invalid, too long under `--too_long=error`, or has unknown words under `--strict`.
    """
    repaired, texts.first, unknown = 0, output.done, UnknownWords(digested.name, options)
    with progress_bar(options, output.done) as bar:
        try:
            results = translations(digested, skip=output.done, progress=bar.update)
            for number, translation in enumerate(results, output.done + 1):
                if translation.is_truncated:
                    warn_of_truncation(translation, digested.name, number)
                unknown.count(translation, number)
                sentence = texts.tree(number - 1, translation.text)
                repaired += sentence.is_repaired and bool(sentence.tree.children)
                output.write([format_tree(sentence, number, options)], digested)
        except TooLongError as error:
            raise error.in_command(digested.name) from error
    unknown.warn()
    if repaired:
        log(f"{repaired} of the {digested.count} sentences had malformed output, and their trees were repaired.")


def check_svg(options: argparse.Namespace) -> None:
    """Check that trees can be drawn as SVG if that is wanted.

    Raises:
        UserError: Matplotlib is not installed.
    """
    if options.svg is not None and find_spec("matplotlib") is None:
        raise UserError(
            '--svg: figures need Matplotlib, which is not installed. Run pip install "vaswani-transformer[figures]".'
        )


def parse_input(options: argparse.Namespace) -> None:
    """Parse the input's lines.

    Raises:
        UserError: the input, the output or the model cannot be used.
    """
    check_svg(options)
    name = "standard input" if options.input is None else str(options.input)
    with open_input(options) as source:
        settings = resume_settings(options) if has_record(options) else {}
        texts = SourceTexts(read_sentences(options, source, name))
        if is_done(options, settings, texts, name):
            return
        translations = make_translator(options, check_parser, tree_constraint)
        with contextlib.closing(open_output(options, settings)) as output:
            if output.done:
                log(f"{options.output}: resumes after line {output.done} of {name}.")
            digested = DigestedInput(texts, name, output.done, output.known, output.digest)
            parse_lines(translations, texts, digested, output, options)
            output.finish(digested)


def run_interactive(options: argparse.Namespace) -> None:
    """Parse each line as soon as it is read.

    Raises:
        UserError: the model cannot be used.
    """
    check_svg(options)
    translations = make_translator(options, check_parser, tree_constraint)
    output = StreamOutput(sys.stdout.buffer, "standard output")
    for number, line in enumerate(prompt_lines(), start=1):
        texts = SourceTexts([split_line(line, options)])
        try:
            (translation,) = translations(texts)
        except TooLongError as error:
            log(f"{error.tokens} tokens, more than {error.limit}; shorten the line.")
            continue
        log_unknown_words(translation)
        output.write([format_tree(texts.tree(0, translation.text), number, options)])


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's error ends it with one line and exit status 2."""
    options = parse_options(arguments)
    run_guarded(run_interactive if options.interactive else parse_input, options)


if __name__ == "__main__":
    main()
