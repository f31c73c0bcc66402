"""The command `vaswani-translate MODEL < source.txt > target.txt`, also `python -m vaswani_transformer.translation`."""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from tqdm import tqdm
from transformers.utils import logging

from ..support.command_line import silence_stdout
from ..support.errors import OutputError, UserError, exit_on_user_error
from ..support.files import lines_of, read_errors
from .loading import LoadOptions, load_translator
from .options import parse_arguments
from .output import ResumableFile, StreamOutput, is_finished
from .readers import DigestedInput, json_texts, text_lines
from .translator import TooLongError, Translation, Translator

NAMED_WORDS = 10  # of a line, in a message about a file


def log(message: str) -> None:
    """Write a line to standard error, above the progress bar."""
    tqdm.write(message, file=sys.stderr)


class LineFormat:
    """The lines that `vaswani-translate` reads and writes; `vaswani-parse` overrides what is different there.

    Attributes:
        resume_keys: the options, besides the model, that results depend on.
        lines_per_text: the number of output lines of a line.
    """

    resume_keys: ClassVar[tuple[str, ...]] = (
        "format", "field", "source", "scores", "nbest", "beams", "length_penalty", "iterations", "length_beam",
        "max_length", "max_source_tokens", "too_long", "dtype",
    )  # fmt: skip

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lines_per_text = options.nbest or 1 if options.format == "text" else 1

    def load(self) -> Translator:
        """Return what translates texts with the command's model."""
        return load_translator(self.options)

    def source_text(self, line: str) -> str:
        """Return the text to translate of a line of text."""
        return line

    def read(self, source: BinaryIO, name: str) -> Iterable[str]:
        """Return the texts in the input's lines."""
        if self.options.format == "text":
            return map(self.source_text, text_lines(source, name))
        return json_texts(source, name, self.options.field or "text", self.options.source)

    def write(self, translation: Translation, number: int) -> list[str]:
        """Return the output lines of a line's translations."""
        options, hypotheses = self.options, translation.hypotheses
        if options.format == "text":
            lines = [re.sub(r"[\r\n]", " ", hypothesis.text) for hypothesis in hypotheses]
            if options.scores:
                lines = [f"{hypothesis.score:.4f}\t{line}" for hypothesis, line in zip(hypotheses, lines, strict=True)]
            return lines if options.nbest is None else [f"{number}\t{line}" for line in lines]
        rows: list[dict[str, Any]] = [{"translation": hypothesis.text} for hypothesis in hypotheses]
        for row, hypothesis in zip(rows, hypotheses, strict=True):
            if hypothesis.score is not None:
                row["score"] = round(hypothesis.score, 4)
        return [json.dumps(rows[0] if options.nbest is None else rows[0] | {"nbest": rows}, ensure_ascii=False)]

    def summary(self, count: int) -> str:
        """Return what to log after `count` new lines; nothing where it is empty."""
        return ""


def resume_settings(options: argparse.Namespace, form: LineFormat) -> dict[str, Any]:
    """Return what the results depend on, besides the texts; nothing for a pipe or device, which has no record."""
    if options.output is None or (options.output.exists() and not options.output.is_file()):
        return {}
    given = {name: getattr(options, name) for name in form.resume_keys}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return {"model": LoadOptions.of(options).digest()} | settings


def open_output(
    options: argparse.Namespace, form: LineFormat, settings: dict[str, Any], search: dict[str, Any]
) -> StreamOutput | ResumableFile:
    """Return where the results go."""
    if settings:
        batches = [options.batch_tokens, options.sort_lines]
        return ResumableFile(options.output, form.lines_per_text, settings, batches, search)
    if options.output is None:
        return StreamOutput(sys.stdout.buffer, "standard output")
    return StreamOutput(options.output.open("wb"), str(options.output))


def progress_bar(options: argparse.Namespace, done: int) -> tqdm:
    """Return a bar of translated lines, shown in a terminal or on request."""
    is_shown = sys.stderr.isatty() if options.progress is None else options.progress
    total = None
    if is_shown and options.input is not None and options.input.is_file():
        with options.input.open("rb") as file:
            total = sum(1 for _ in lines_of(file))
    return tqdm(total=total, initial=done, unit="line", disable=not is_shown, file=sys.stderr)


def warn_of_truncation(translations: Translator, translation: Translation, name: str, number: int) -> None:
    can_keep = translations.can_keep(translation.source_tokens)
    keep = "--too_long=keep translates all of it, " if can_keep else ""
    log(
        f"{name}, line {number}: {translation.source_tokens} tokens, more than {translation.max_source_tokens}, so it "
        f"was truncated; {keep}--too_long=error ends at such a line."
    )


class UnknownWords:
    """The lines of the input `name` with words that the vocabulary lacks, for one warning at the end, or an error."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.is_strict = name, options.strict
        self.lines, self.first = 0, ""

    def count(self, translation: Translation, number: int) -> None:
        if not translation.unknown_words:
            return
        words = ", ".join(map(repr, translation.unknown_words[:NAMED_WORDS]))
        line = f"line {number}: {words}{' ...' if len(translation.unknown_words) > NAMED_WORDS else ''}"
        if self.is_strict:
            raise UserError(f"{self.name}, {line}: the vocabulary lacks them; change the line, or leave out --strict.")
        self.lines, self.first = self.lines + 1, self.first or line

    def warn(self) -> None:
        """Log how many lines there are, and the first one's words."""
        if self.lines:
            lines = f"{self.lines} line{' has' if self.lines == 1 else 's have'} words that the vocabulary lacks"
            log(f"{self.name}: {lines}, whose results are guesses ({self.first}); --strict ends at such a line.")


def translate_lines(
    translations: Translator, texts: DigestedInput, output: StreamOutput | ResumableFile, form: LineFormat
) -> None:
    """Write the results of all texts that have none yet."""
    unknown = UnknownWords(texts.name, form.options)
    with progress_bar(form.options, output.done) as bar:
        try:
            results = translations(texts, skip=output.done, progress=bar.update)
            for number, translation in enumerate(results, output.done + 1):
                if translation.is_truncated:
                    warn_of_truncation(translations, translation, texts.name, number)
                unknown.count(translation, number)
                output.write(form.write(translation, number), texts)
        except TooLongError as error:
            raise error.in_command(texts.name) from error
    unknown.warn()
    if summary := form.summary(texts.count - output.done):
        log(summary)


def translate_input(options: argparse.Namespace, form: LineFormat) -> None:
    name = "standard input" if options.input is None else str(options.input)
    with read_errors(name):
        source = sys.stdin.buffer if options.input is None else options.input.open("rb")
    with source:
        settings = resume_settings(options, form)
        if settings and is_finished(options.output, settings, form.read(source, name), name):
            log(f"{options.output}: is finished already and stays unchanged.")
            return
        translations = form.load()
        with contextlib.closing(open_output(options, form, settings, translations.engine.search)) as output:
            if output.done:
                log(f"{options.output}: resumes after line {output.done} of {name}.")
            if output.batching_changed:
                log(f"{options.output}: was started with other batches, so sums may be rounded differently.")
            texts = DigestedInput(form.read(source, name), name, output.done, output.known, output.digest)
            translate_lines(translations, texts, output, form)
            output.finish(texts)


def prompt_lines() -> Iterator[str]:
    """Yield lines of standard input; in a terminal with a prompt, editing and a history.

    If the output is no terminal, `input` would write the prompt among the translations.
    """
    if not sys.stdin.isatty():
        yield from text_lines(sys.stdin.buffer, "standard input")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` editing and a history
    prompt = "> " if sys.stdout.isatty() else ""
    with contextlib.suppress(EOFError):
        while True:
            try:
                line = input(prompt).strip()
                line.encode()
            except UnicodeError:
                log("The line is not UTF-8; type it again.")
            else:
                yield line


def run_interactive(options: argparse.Namespace, form: LineFormat) -> None:
    """Translate each line as soon as it is read."""
    translations = form.load()
    output = StreamOutput(sys.stdout.buffer, "standard output")
    for number, line in enumerate(prompt_lines(), start=1):
        try:
            (translation,) = translations([form.source_text(line)])
        except TooLongError as error:
            log(f"{error.tokens} tokens, more than {error.limit}; shorten the line.")
            continue
        if translation.is_truncated:
            warn_of_truncation(translations, translation, "standard input", number)
        if translation.unknown_words:
            log(f"Unknown words, whose results are guesses: {', '.join(map(repr, translation.unknown_words))}.")
        output.write(form.write(translation, number))


def check_streams(options: argparse.Namespace) -> None:
    """Check that standard input and output are open if the command uses them."""
    for stream, name, path in ((sys.stdin, "input", options.input), (sys.stdout, "output", options.output)):
        if stream is None and path is None:
            raise UserError(f"standard {name} is closed; give --{name}=FILE.")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory is used up; for the CPU's memory torch raises a RuntimeError."""
    names_memory = re.search("out of memory|allocate memory|not enough memory", str(error)) is not None
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or names_memory


def run_command(options: argparse.Namespace, form: Callable[[argparse.Namespace], LineFormat]) -> None:
    """Run a command on its lines; a user's error ends it with one line and exit status 2."""
    logging.disable_progress_bar()
    what_now = "; the same command resumes it" if options.output else ""
    with exit_on_user_error(ValueError, OSError, what_now=what_now):
        try:
            check_streams(options)
            run = run_interactive if options.interactive else translate_input
            run(options, form(options))
        except BrokenPipeError:  # the reader has closed the pipe, as `head` does
            silence_stdout()
            sys.exit(141)
        except OutputError:
            if options.output is None:
                silence_stdout()
            raise
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            given = [f"--{name}" for name in ("beams", "length_beam") if (getattr(options, name) or 1) > 1]
            fewer = f"a smaller {' or '.join(given)}, or " if given else ""
            log(f"The device has too little memory for a batch; give {fewer}a smaller --batch_tokens.")
            sys.exit(1)


def main(arguments: list[str] | None = None) -> None:
    run_command(parse_arguments(arguments), LineFormat)
