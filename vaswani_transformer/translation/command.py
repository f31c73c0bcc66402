"""The command `vaswani-translate MODEL < source.txt > target.txt`, also `python -m vaswani_transformer.translation`."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from tqdm import tqdm
from transformers.utils import logging

from ..cpu.linear import chosen_layouts
from ..support.errors import OutputError, UserError, exit_on_user_error
from .lines import LineFormat, lines_of, text_lines
from .options import TranslationOptions, parse_arguments
from .output import ResumableFile, StreamOutput
from .translator import TooLongError, Translation, Translator

NAMED_WORDS = 10  # largest number of unknown words that a message lists


def main(arguments: list[str] | None = None) -> None:
    run(parse_arguments(arguments), LineFormat)


def silence_stdout() -> None:
    """Discard unwritten output, which Python would write again at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(options: TranslationOptions, make_format: Callable[..., LineFormat]) -> None:
    """Run a command; a user error ends it with one line and exit status 2."""
    logging.disable_progress_bar()
    what_now = "; the same command resumes it" if options.output else ""
    with exit_on_user_error(ValueError, OSError, what_now=what_now):
        try:
            options.check()
            form = make_format(options)
            translate = translate_typed if options.interactive else translate_lines
            translate(form)
        except BrokenPipeError:  # the reader closed the pipe
            silence_stdout()
            sys.exit(141)
        except OutputError:
            if options.output is None:
                silence_stdout()
            raise
        except (MemoryError, torch.OutOfMemoryError):
            given = [f"--{name}" for name in ("beams", "length_beam") if (getattr(options, name) or 1) > 1]
            fewer = f"a smaller {' or '.join(given)}, or " if given else ""
            log(f"The device has too little memory for a batch; give {fewer}a smaller --batch_tokens.")
            sys.exit(1)


def translate_lines(form: LineFormat) -> None:
    """Translate the input into the output, unless the output file is finished."""
    options = form.options
    source = sys.stdin.buffer if options.input is None else options.input.open("rb")
    with source, contextlib.closing(open_output(form)) as output:
        texts = output.watch(form.read(source))
        if output.is_finished:
            for _ in texts:  # checks that the texts have not changed
                pass
            log(f"{options.output}: is finished already and stays unchanged.")
            return
        if isinstance(output, ResumableFile):
            chosen_layouts.update(output.record["layouts"])
        translator = form.load()
        if isinstance(output, ResumableFile):
            output.record |= {"search": translator.search, "layouts": dict(chosen_layouts)}
            if output.done:
                log(f"{options.output}: resumes after line {output.done} of {options.input_name}.")
            if output.batching_changed:
                log(f"{options.output}: was started with other batches, so sums may be rounded differently.")
        write_results(form, translator, texts, output)


def write_results(form: LineFormat, translator: Translator, texts: Iterable[str], output: StreamOutput) -> None:
    """Write the results of all remaining texts."""
    name, number = form.options.input_name, output.done
    unknown_lines, first_unknown = 0, ""
    with progress_bar(form.options, output.done) as bar:
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


def translate_typed(form: LineFormat) -> None:
    """Translate each line as soon as it is read."""
    translator = form.load()
    output = StreamOutput(sys.stdout.buffer, "standard output")
    for number, line in enumerate(typed_lines(), start=1):
        try:
            (translation,) = translator([form.source_text(line)])
        except TooLongError as error:
            log(f"{error.tokens} tokens, more than {error.limit}; shorten the line.")
            continue
        warn_of_truncation(translator, translation, f"standard input, line {number}")
        if translation.unknown_words:
            log(f"Unknown words, whose results are guesses: {list_words(translation.unknown_words)}.")
        output.write(form.write(translation, number))


def typed_lines() -> Iterator[str]:
    """Yield lines of standard input; in a terminal with prompt, editing and history."""
    if not sys.stdin.isatty():
        yield from text_lines(sys.stdin.buffer, "standard input")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` editing and a history
    prompt = "> " if sys.stdout.isatty() else ""
    with contextlib.suppress(EOFError):
        while True:
            yield input(prompt).strip()


def open_output(form: LineFormat) -> StreamOutput:
    """Return the output: standard output, a pipe or device, or a resumable file."""
    options = form.options
    if options.output is None:
        return StreamOutput(sys.stdout.buffer, "standard output")
    if options.output.exists() and not options.output.is_file():
        return StreamOutput(options.output.open("wb"), str(options.output))
    batches = [options.batch_tokens, options.sort_lines]
    return ResumableFile(options.output, form.lines_per_text, options.record(), batches)


def progress_bar(options: TranslationOptions, done: int) -> tqdm:
    """Return a progress bar of translated lines, shown in a terminal or on request."""
    is_shown = sys.stderr.isatty() if options.progress is None else options.progress
    total = None
    if is_shown and options.input is not None and options.input.is_file():
        with options.input.open("rb") as file:
            total = sum(1 for _ in lines_of(file))
    return tqdm(total=total, initial=done, unit="line", disable=not is_shown, file=sys.stderr)


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
