"""The command `vaswani-translate MODEL < source.txt > target.txt`, also `python -m vaswani_transformer.translation`.

The file follows a line's way: options, input, model, search, output.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tqdm import tqdm
from transformers.utils import logging

from ..support.command_line import MODEL_HELP, length_penalty_argument, positive_argument
from ..support.errors import OutputError, UserError, check_open, exit_on_user_error, one_line
from ..support.modes import is_non_autoregressive
from .loading import LoadOptions, add_load_options, load_model_and_tokenizer
from .output import ResumableFile, StreamOutput
from .translator import NanError, TooLong, TooLongError, Translation, Translator

RESULTS_DO_NOT_DEPEND_ON = {
    "model", "device", "revision", "trust_remote_code", "input", "output", "interactive", "batch_tokens", "sort_lines",
}  # fmt: skip
"""Options outside the compared settings of a record: the model has a digest, and batches change only rounding."""
SEARCH = {
    "beams": "num_beams",
    "length_penalty": "length_penalty",
    "iterations": "num_iterations",
    "length_beam": "length_beam_size",
    "max_length": "max_new_tokens",
    "nbest": "num_return_sequences",
}
"""Options of the search, with their names in `generate()`."""


@dataclass(frozen=True)
class TranslationOptions(LoadOptions):
    """Options of `vaswani-translate` and `vaswani-parse`, described by their `--help`; None for a default.

    `sort_lines` is `--window`.
    """

    input: Path | None = None
    output: Path | None = None
    interactive: bool = False
    format: Literal["text", "jsonl"] = "text"
    field: str | None = None
    source: str | None = None
    scores: bool = False
    nbest: int | None = None
    beams: int | None = None
    length_penalty: float | None = None
    iterations: int | None = None
    length_beam: int | None = None
    max_length: int | None = None
    max_source_tokens: int | None = None
    too_long: TooLong = "truncate"
    batch_tokens: int = 2048
    sort_lines: int = 2048
    tokenized: bool = False
    draw: bool = False

    def record(self) -> dict[str, Any]:
        """Return the settings that results depend on: the model and options, without the texts."""
        given = {name: value for name, value in vars(self).items() if name not in RESULTS_DO_NOT_DEPEND_ON}
        return {"model": self.digest()} | given


def make_parser(prog: str, description: str, texts: str, results: str) -> tuple[argparse.ArgumentParser, Any]:
    """Return the parser of a command from lines of `texts` to lines of `results`, and its group of line options."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="With --output the same command resumes an interrupted one and leaves a finished file unchanged; "
        "FILE.record, next to FILE, holds the model and settings.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    lines = parser.add_argument_group("lines")
    lines.add_argument("--input", type=Path, metavar="FILE", help=f"the {texts} (standard input)")
    lines.add_argument("--output", type=Path, metavar="FILE", help=f"where {results} go (standard output)")
    lines.add_argument("--interactive", action="store_true", help="answer each line as soon as it is typed")
    search = parser.add_argument_group("search", "the model's generation config is the default")
    counts = {
        "--beams": ("N", "beams; 1 for greedy search"),
        "--iterations": ("N", "passes over an output, for a CMLM"),
        "--length_beam": ("L", "lengths that a non-autoregressive model tries for each line"),
        "--max_length": ("N", "most tokens of an output, with </s>"),
        "--max_source_tokens": ("N", "most tokens of a line (what a table of positions has room for, or 1024)"),
    }
    for name, (metavar, text) in counts.items():
        search.add_argument(name, type=positive_argument, metavar=metavar, help=text)
    search.add_argument("--length_penalty", type=length_penalty_argument, metavar="ALPHA", help="alpha of lp(Y)")
    search.add_argument(
        "--too_long", choices=get_args(TooLong), default="truncate", help="what happens to a longer line (truncate)"
    )
    machine = parser.add_argument_group("machine")
    size: dict[str, Any] = {"type": positive_argument, "default": 2048, "metavar": "N"}
    machine.add_argument("--batch_tokens", help="source tokens at once (2048)", **size)
    machine.add_argument("--window", dest="sort_lines", help="lines sorted by length at once (2048)", **size)
    add_load_options(machine)
    return parser, lines


@dataclass
class LineFormat:
    """Input and output lines of `vaswani-translate`; `vaswani-parse` has a subclass."""

    options: TranslationOptions

    def read(self, line: bytes, where: str) -> str:
        """Return the text to translate of an input line, which `where` names in an error."""
        try:
            text = line.decode("utf-8-sig").strip()  # without a byte order mark
        except UnicodeDecodeError as error:
            fix = "correct the line, or convert the file, for example with iconv."
            raise UserError(f"{where}: not UTF-8 ({error}); {fix}") from error
        if not text or self.options.format == "text":
            return text
        language, key = self.options.source, self.options.source or self.options.field or "text"
        try:
            row = json.loads(text)
            value = (row if language is None else row["translation"])[key].strip()
            value.encode()  # fails for half of a surrogate pair
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            expected = f'{{"{key}": "..."}}'
            expected = expected if language is None else f'{{"translation": {expected}}}'
            raise UserError(
                f"{where}: got {text[:80]}, expected {expected} ({one_line(error)}); correct the line, or give another "
                "--field or --source."
            ) from error
        return value

    def load(self, layouts: dict[str, str] | None = None) -> Translator:
        """Return the translator with the command's model, prepared with the recorded `layouts`.

        Raises:
            UserError: this model lacks an option.
        """
        names = ("batch_tokens", "max_source_tokens", "too_long", "scores")
        settings: dict[str, Any] = {name: getattr(self.options, name) for name in names} | {"num_return_sequences": 1}
        search = {name: getattr(self.options, option) for option, name in SEARCH.items()}
        settings |= {name: value for name, value in search.items() if value is not None}
        translator = Translator(*load_model_and_tokenizer(self.options, layouts), **settings)
        self.check_search(translator)
        return translator

    def check_search(self, translator: Translator) -> None:
        """Raise UserError for a search option that the model lacks, or for more results than the search finds."""
        options, model, search = self.options, translator.model, translator.settings.values
        if is_non_autoregressive(model):
            lacked = ["beams", *([] if "num_iterations" in model.family_settings else ["iterations"])]
            width = search.get("length_beam_size", 1) * search.get("num_latent_samples", 1)
            widen = "length_beam"
        else:
            lacked = ["iterations", "length_beam"]
            width, widen = math.inf if search.get("do_sample") else search.get("num_beams", 1), "beams"
        for option in lacked:
            if (value := getattr(options, option)) not in (None, 1):
                raise UserError(
                    f"--{option}={value}: {options.model} is a {type(model).__name__}, without it; leave it out."
                )
        if options.nbest is not None and options.nbest > width:
            problem = f"more than the search finds; got {options.nbest}, expected at most {width}"
            raise UserError(f"--nbest: {problem}. Give a larger --{widen}, or a smaller --nbest.")

    def write(self, translation: Translation, number: int) -> list[str]:
        """Return the output lines for one input line."""
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
        """Return the message to log after `count` new lines, or an empty string."""
        return ""


def typed_lines() -> Iterator[bytes]:
    """Yield lines of standard input; in a terminal with prompt, editing and history."""
    if not sys.stdin.isatty():
        yield from sys.stdin.buffer
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` editing and a history
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # else a byte that is not UTF-8 ends `input`
    prompt = "> " if sys.stdout.isatty() else ""
    with contextlib.suppress(EOFError):
        while True:
            yield input(prompt).encode(errors="surrogateescape")


def log(message: str) -> None:
    """Write a line to standard error, above the progress bar."""
    tqdm.write(message, file=sys.stderr)


def warn_of_truncation(translation: Translation, where: str) -> None:
    if translation.is_truncated:
        limit = translation.max_source_tokens
        log(f"{where}: {translation.source_tokens} tokens, more than {limit}, so it was truncated; see --too_long.")


def check_input_stays(options: TranslationOptions, source: Any) -> None:
    """Raise UserError if the output, or its record, is the input file, by whatever name."""
    if options.output is None or not options.output.is_file():
        return
    with contextlib.suppress(io.UnsupportedOperation):  # an input without a file
        if os.path.samestat(os.fstat(source.fileno()), options.output.stat()):
            raise UserError(f"--output={options.output}: is the input; it stays unchanged. Give another --output.")


def open_output(options: TranslationOptions) -> StreamOutput:
    """Return the output: standard output, a pipe or device, or a resumable file."""
    if options.output is None:
        check_open("stdout", "give --output")
        return StreamOutput(sys.stdout.buffer, "standard output")
    if options.output.exists() and not options.output.is_file():
        return StreamOutput(options.output.open("wb"), str(options.output))
    return ResumableFile(options.output, options.record())


def write_results(
    form: LineFormat, translator: Translator, texts: Iterator[str], output: StreamOutput, name: str
) -> None:
    """Write the results of all remaining texts of the input `name`, a window at a time."""
    number, source, total = output.done, form.options.input, None
    unknown_lines, first_unknown = 0, ""
    if sys.stderr.isatty() and source is not None and source.is_file():
        with source.open("rb") as file:
            total = sum(1 for _ in file)
    with tqdm(total=total, initial=number, unit="line", disable=None, file=sys.stderr) as bar:  # None: in a terminal
        while window := list(islice(texts, form.options.sort_lines)):
            lines: list[str] = []
            try:
                for translation in translator.translate_window(window, number, progress=bar.update):
                    number += 1
                    warn_of_truncation(translation, f"{name}, line {number}")
                    if translation.unknown_words:
                        unknown_lines += 1
                        first_unknown = first_unknown or f"line {number}: {translation.unknown_words[0]!r}"
                    lines += form.write(translation, number)
            except TooLongError as error:
                problem = f"{error.tokens} tokens, more than {error.limit}"
                fix = "shorten it, or give another --too_long."
                raise UserError(f"{name}, line {error.index + 1}: {problem}; {fix}") from error
            except NanError as error:
                problem = "the scores of its translation are NaN"
                fix = "give --dtype=float32, and check that the model's weights are finite."
                raise UserError(f"{name}, line {error.index + 1}: {problem}; {fix}") from error
            output.write(window, lines)
    output.finish()
    if unknown_lines:
        log(f"{name}: lines with words that the vocabulary lacks, so guesses: {unknown_lines} ({first_unknown}).")
    if summary := form.summary(number - output.done):
        log(summary)


def translate_lines(form: LineFormat) -> None:
    """Translate the input into the output, unless the output file is finished."""
    options = form.options
    name = "standard input" if options.input is None else str(options.input)
    if options.input is None:
        check_open("stdin", "give --input")
    source = sys.stdin.buffer if options.input is None else options.input.open("rb")
    check_input_stays(options, source)
    with source, contextlib.closing(open_output(options)) as output:
        layouts: dict[str, str] = {}  # of an earlier command
        texts = (form.read(line, f"{name}, line {number}") for number, line in enumerate(source, start=1))
        if isinstance(output, ResumableFile):
            output.skip(texts)
            if output.is_finished:
                log(f"{options.output}: is finished already and stays unchanged.")
                return
            layouts = output.record["layouts"]
            if output.done:
                log(f"{options.output}: resumes after line {output.done} of {name}.")
        translator = form.load(layouts)
        if isinstance(output, ResumableFile):
            layouts.update(getattr(translator.model, "layouts", {}))  # of a prepared model
            output.save_record(search=translator.settings.search(), layouts=layouts)
        write_results(form, translator, texts, output, name)


def translate_typed(form: LineFormat) -> None:
    """Translate each line as soon as it is read."""
    for stream in ("stdin", "stdout"):
        check_open(stream, "--interactive needs it")
    translator, output = form.load(), StreamOutput(sys.stdout.buffer, "standard output")
    for number, line in enumerate(typed_lines(), start=1):
        where = f"standard input, line {number}"
        try:
            (translation,) = translator([form.read(line, where)])
        except UserError as error:
            log(str(error))
            continue
        warn_of_truncation(translation, where)
        if translation.warning:
            log(translation.warning)
        output.write([translation.source], form.write(translation, number))


def run(form: LineFormat) -> None:
    """Run a command; a user error ends it with one line and exit status 2."""
    logging.disable_progress_bar()
    options = form.options
    with exit_on_user_error(ValueError, OSError, what_now="; the same command resumes it" if options.output else ""):
        if options.interactive and (options.input or options.output or options.format != "text"):
            raise UserError("--interactive reads and writes lines of text; leave out --input, --output and --format.")
        try:
            translate = translate_typed if options.interactive else translate_lines
            translate(form)
        except (BrokenPipeError, OutputError) as error:
            if options.output is None:  # discard unwritten output, which Python would write again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, OutputError):
                raise
            sys.exit(141)  # the reader closed the pipe
        except torch.OutOfMemoryError as error:
            fix = "give a smaller --batch_tokens or fewer --beams."
            raise UserError(f"The device has too little memory for a batch; {fix}") from error


def main(arguments: list[str] | None = None) -> None:
    description = "Translate a text line by line, in order, by the model's own search."
    parser, lines = make_parser("vaswani-translate", description, "text to translate", "results")
    lines.add_argument("--format", choices=("text", "jsonl"), default="text", help="format of input and output (text)")
    key = lines.add_mutually_exclusive_group()
    key.add_argument("--field", metavar="NAME", help='field of JSON Lines with the text: {"NAME": "..."} (text)')
    key.add_argument("--source", metavar="LANGUAGE", help='or its language, in {"translation": {"LANGUAGE": "..."}}')
    scores_help = "write the score that ranks translations, such as log P(Y|X) / lp(Y), and a tab before each"
    lines.add_argument("--scores", action="store_true", help=scores_help)
    nbest_help = "write the N best, each after its line number and a tab"
    lines.add_argument("--nbest", type=positive_argument, metavar="N", help=nbest_help)
    options = TranslationOptions(**vars(parser.parse_args(arguments)))
    if options.format == "text" and (options.field or options.source):
        parser.error("--field and --source are of JSON Lines; give --format=jsonl as well.")
    run(LineFormat(options))
