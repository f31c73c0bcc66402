"""The command `vaswani-translate MODEL < source.txt > target.txt`, also `python -m vaswani_transformer.translation`.

The file follows a line's way: options, input, model, search, output.
"""

import argparse
import codecs
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tqdm import tqdm
from transformers.utils import logging

from ..cpu.linear import chosen_layouts
from ..support.command_line import add_model_argument, positive_argument
from ..support.errors import OutputError, UserError, exit_on_user_error, one_line
from .loading import LoadOptions, add_load_options, load_model_and_tokenizer
from .output import ResumableFile, StreamOutput
from .translator import MAX_ALPHA, TooLong, TooLongError, Translation, Translator

NAMED_WORDS = 10  # largest number of unknown words that a message lists
RESULTS_DO_NOT_DEPEND_ON = {
    "model", "device", "revision", "trust_remote_code", "input", "output", "interactive", "progress", "batch_tokens",
    "sort_lines",
}  # fmt: skip
"""Options outside the compared settings of a record: the model has a digest, and batches change only rounding."""


@dataclass(frozen=True)
class TranslationOptions(LoadOptions):
    """Options of `vaswani-translate`, described by its `--help`; None for a default. `sort_lines` is `--window`."""

    input: Path | None = None
    output: Path | None = None
    interactive: bool = False
    progress: bool | None = None
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

    def check(self) -> None:
        """Raise a UserError for options that exclude each other, or for an invalid output."""
        if self.interactive and (self.input or self.output or self.format != "text"):
            raise UserError("--interactive reads and writes lines of text; leave out --input, --output and --format.")
        if self.format == "text" and (self.field or self.source):
            raise UserError("--field and --source are of JSON Lines; give --format=jsonl as well.")
        if self.field and self.source:
            raise UserError("--field and --source both say where the text is; give one of them.")
        if not -MAX_ALPHA <= (self.length_penalty or 0) <= MAX_ALPHA:  # also NaN
            raise UserError(
                f"--length_penalty={self.length_penalty}: lengths to this power overflow; give a number from "
                f"-{MAX_ALPHA} to {MAX_ALPHA}."
            )
        if self.output and (self.output.is_dir() or not self.output.absolute().parent.is_dir()):
            raise UserError(f"--output={self.output}: is no file in an existing folder; name one.")

    def record(self) -> dict[str, Any]:
        """Return the settings that results depend on: the model and options, without the texts."""
        given = {name: value for name, value in vars(self).items() if name not in RESULTS_DO_NOT_DEPEND_ON}
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
        return {"model": self.digest()} | settings


def make_parser(prog: str, description: str, texts: str, results: str) -> tuple[argparse.ArgumentParser, Any]:
    """Return the parser of a command from lines of `texts` to lines of `results`, and its group of line options."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="With --output the same command resumes an interrupted one and leaves a finished file unchanged; "
        "FILE.record, next to FILE, holds the model and settings.",
        allow_abbrev=False,
    )
    add_model_argument(parser)
    lines = parser.add_argument_group("lines")
    lines.add_argument("--input", type=Path, metavar="FILE", help=f"the {texts} (standard input)")
    lines.add_argument("--output", type=Path, metavar="FILE", help=f"where {results} go (standard output)")
    lines.add_argument("--interactive", action="store_true", help="answer each line as soon as it is typed")
    lines.add_argument("--progress", action=argparse.BooleanOptionalAction, help="show a progress bar (in a terminal)")
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
    search.add_argument("--length_penalty", type=float, metavar="ALPHA", help="alpha of lp(Y)")
    search.add_argument(
        "--too_long", choices=get_args(TooLong), default="truncate", help="what happens to a longer line (truncate)"
    )
    machine = parser.add_argument_group("machine")
    size: dict[str, Any] = {"type": positive_argument, "default": 2048, "metavar": "N"}
    machine.add_argument("--batch_tokens", help="source tokens at once (2048)", **size)
    machine.add_argument("--window", dest="sort_lines", help="lines sorted by length at once (2048)", **size)
    add_load_options(machine)
    return parser, lines


def json_text(line: str, options: TranslationOptions, where: str) -> str:
    """Return the text in the options' field or language of a line of JSON Lines."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for huge integers
        is_syntax = isinstance(error, json.JSONDecodeError)
        problem = f"{error.msg} at column {error.colno}" if is_syntax else one_line(error)
        raise UserError(f"{where}: not JSON ({problem}); correct the line.") from error
    if options.source is None:
        key = options.field or "text"
        expected = f'{{"{key}": "..."}}'
    else:
        key, row = options.source, row.get("translation") if isinstance(row, dict) else None
        expected = f'{{"translation": {{"{key}": "..."}}}}'
    text = row.get(key) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UserError(
            f"{where}: got {line[:80]}, expected {expected}; correct the line, or give another --field or --source."
        )
    if half := re.search("[\ud800-\udfff]", text):
        raise UserError(
            f"{where}: the text holds \\u{ord(half[0]):04x} at character {half.start() + 1}, half of a surrogate pair; "
            "correct the line."
        )
    return text.strip()


@dataclass
class LineFormat:
    """Input and output lines of `vaswani-translate`; `vaswani-parse` has a subclass."""

    options: TranslationOptions

    def read(self, line: bytes, where: str) -> str:
        """Return the text to translate of an input line, which `where` names in an error."""
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where}: not UTF-8 (byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line); correct "
                "the line, or convert the file, for example with iconv."
            ) from error
        return json_text(text, self.options, where) if text and self.options.format == "jsonl" else text

    def load(self) -> Translator:
        """Return the translator with the command's model."""
        options = self.options
        model, tokenizer = load_model_and_tokenizer(options)
        search: dict[str, Any] = {
            "num_beams": options.beams,
            "length_penalty": options.length_penalty,
            "num_iterations": options.iterations,
            "length_beam_size": options.length_beam,
            "max_new_tokens": options.max_length,
            "num_return_sequences": options.nbest or 1,
        }
        return Translator(
            model,
            tokenizer,
            batch_tokens=options.batch_tokens,
            sort_lines=options.sort_lines,
            max_source_tokens=options.max_source_tokens,
            too_long=options.too_long,
            scores=options.scores,
            **{name: value for name, value in search.items() if value is not None},
        )

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


def lines_of(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream, without a byte order mark.

    They end with a line feed, or in a text without any with a carriage return.
    """
    for number, line in enumerate(stream):
        if number > 0:
            yield line
        elif line.endswith(b"\n"):
            yield line.removeprefix(codecs.BOM_UTF8)
        else:
            yield from line.removeprefix(codecs.BOM_UTF8).splitlines()


def typed_lines() -> Iterator[bytes]:
    """Yield lines of standard input; in a terminal with prompt, editing and history."""
    if not sys.stdin.isatty():
        yield from lines_of(sys.stdin.buffer)
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


def list_words(words: list[str]) -> str:
    return ", ".join(map(repr, words[:NAMED_WORDS])) + (" ..." if len(words) > NAMED_WORDS else "")


def warn_of_truncation(translator: Translator, translation: Translation, where: str) -> None:
    if translation.is_truncated:
        keep = "--too_long=keep translates it in full, " if translator.can_keep(translation.source_tokens) else ""
        log(
            f"{where}: {translation.source_tokens} tokens, more than {translation.max_source_tokens}, so it was "
            f"truncated; {keep}--too_long=error ends at such a line."
        )


def open_output(options: TranslationOptions) -> StreamOutput:
    """Return the output: standard output, a pipe or device, or a resumable file."""
    if options.output is None:
        return StreamOutput(sys.stdout.buffer, "standard output")
    if options.output.exists() and not options.output.is_file():
        return StreamOutput(options.output.open("wb"), str(options.output))
    lines_per_text = options.nbest or 1 if options.format == "text" else 1
    return ResumableFile(options.output, lines_per_text, options.record(), [options.batch_tokens, options.sort_lines])


def write_results(
    form: LineFormat, translator: Translator, texts: Iterable[str], output: StreamOutput, name: str
) -> None:
    """Write the results of all remaining texts of the input `name`."""
    options, number = form.options, output.done
    unknown_lines, first_unknown, total = 0, "", None
    is_shown = sys.stderr.isatty() if options.progress is None else options.progress
    if is_shown and options.input is not None and options.input.is_file():
        with options.input.open("rb") as file:
            total = sum(1 for _ in lines_of(file))
    with tqdm(total=total, initial=number, unit="line", disable=not is_shown, file=sys.stderr) as bar:
        try:
            for translation in translator(texts, skip=output.done, progress=bar.update):
                number += 1
                warn_of_truncation(translator, translation, f"{name}, line {number}")
                if translation.unknown_words:
                    unknown_lines += 1
                    first_unknown = first_unknown or f"line {number}: {list_words(translation.unknown_words)}"
                output.write(form.write(translation, number))
        except TooLongError as error:
            problem = f"{error.tokens} tokens, more than {error.limit}"
            others = "truncate or keep" if translator.can_keep(error.tokens) else "truncate"
            fix = f"shorten it, or give --too_long={others}."
            raise UserError(f"{name}, line {error.index + 1}: {problem}; {fix}") from error
    output.finish()
    if unknown_lines:
        lines = f"{unknown_lines} line{' has' if unknown_lines == 1 else 's have'}"
        log(f"{name}: {lines} words that the vocabulary lacks, whose results are guesses ({first_unknown}).")
    if summary := form.summary(number - output.done):
        log(summary)


def translate_lines(form: LineFormat) -> None:
    """Translate the input into the output, unless the output file is finished."""
    options = form.options
    name = "standard input" if options.input is None else str(options.input)
    source = sys.stdin.buffer if options.input is None else options.input.open("rb")
    with source, contextlib.closing(open_output(options)) as output:
        texts = (form.read(line, f"{name}, line {number}") for number, line in enumerate(lines_of(source), start=1))
        if isinstance(output, ResumableFile):
            texts = output.watch(texts)
            if output.is_finished:
                for _ in texts:  # checks that the texts have not changed
                    pass
                log(f"{options.output}: is finished already and stays unchanged.")
                return
            chosen_layouts.update(output.record["layouts"])
            if output.done:
                log(f"{options.output}: resumes after line {output.done} of {name}.")
            if output.batching_changed:
                log(f"{options.output}: was started with other batches, so sums may be rounded differently.")
        translator = form.load()
        if isinstance(output, ResumableFile):
            output.record |= {"search": translator.search, "layouts": dict(chosen_layouts)}
        write_results(form, translator, texts, output, name)


def translate_typed(form: LineFormat) -> None:
    """Translate each line as soon as it is read."""
    translator, output = form.load(), StreamOutput(sys.stdout.buffer, "standard output")
    for number, line in enumerate(typed_lines(), start=1):
        where = f"standard input, line {number}"
        try:
            (translation,) = translator([form.read(line, where)])
        except TooLongError as error:
            log(f"{error.tokens} tokens, more than {error.limit}; shorten the line.")
            continue
        except UserError as error:
            log(str(error))
            continue
        warn_of_truncation(translator, translation, where)
        if translation.unknown_words:
            log(f"Unknown words, whose results are guesses: {list_words(translation.unknown_words)}.")
        output.write(form.write(translation, number))


def silence_stdout() -> None:
    """Discard unwritten output, which Python would write again at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(form: LineFormat) -> None:
    """Run a command; a user error ends it with one line and exit status 2."""
    logging.disable_progress_bar()
    options = form.options
    with exit_on_user_error(ValueError, OSError, what_now="; the same command resumes it" if options.output else ""):
        try:
            options.check()
            translate = translate_typed if options.interactive else translate_lines
            translate(form)
        except BrokenPipeError:  # the reader closed the pipe
            silence_stdout()
            sys.exit(141)
        except OutputError:
            if options.output is None:
                silence_stdout()
            raise
        except (MemoryError, RuntimeError) as error:
            is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            if not is_memory and "DefaultCPUAllocator" not in str(error):  # on a CPU torch raises a plain RuntimeError
                raise
            given = [f"--{name}" for name in ("beams", "length_beam") if (getattr(options, name) or 1) > 1]
            fewer = f"a smaller {' or '.join(given)}, or " if given else ""
            log(f"The device has too little memory for a batch; give {fewer}a smaller --batch_tokens.")
            sys.exit(1)


def main(arguments: list[str] | None = None) -> None:
    description = "Translate a text line by line, in order, by the model's own search."
    parser, lines = make_parser("vaswani-translate", description, "text to translate", "results")
    lines.add_argument("--format", choices=("text", "jsonl"), default="text", help="format of input and output (text)")
    lines.add_argument("--field", metavar="NAME", help='field of JSON Lines with the text: {"NAME": "..."} (text)')
    lines.add_argument("--source", metavar="LANGUAGE", help='or its language, in {"translation": {"LANGUAGE": "..."}}')
    scores_help = "write the score that ranks translations, such as log P(Y|X) / lp(Y), and a tab before each"
    lines.add_argument("--scores", action="store_true", help=scores_help)
    nbest_help = "write the N best, each after its line number and a tab"
    lines.add_argument("--nbest", type=positive_argument, metavar="N", help=nbest_help)
    run(LineFormat(TranslationOptions(**vars(parser.parse_args(arguments)))))
