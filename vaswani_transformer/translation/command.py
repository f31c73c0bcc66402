"""The command `vaswani-translate MODEL < source.txt > target.txt`, also `python -m vaswani_transformer.translation`.

First comes what it shares with `vaswani-parse`, from lines to lines: options, input, model, output.
"""

import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, TypeVar, cast, get_args

import torch
from tqdm import tqdm
from transformers.utils import logging

from ..cpu.model import Prepared
from ..settings import DECODING_STRATEGIES
from ..support.command import (
    MODEL_HELP,
    CommandParser,
    OutputError,
    UserError,
    check_open,
    exit_on_user_error,
    number_argument,
    one_line,
    positive_argument,
)
from ..support.files import POINTER, ResumableFile, StreamOutput
from ..support.loading import (
    LoadOptions,
    add_load_options,
    is_non_autoregressive,
    load_model,
    load_model_and_tokenizer,
)
from .reranking import Reranker
from .targets import TargetScore, TargetScorer
from .translator import (
    WIDTH_OPTIONS,
    NanError,
    Pair,
    TooLong,
    TooLongError,
    Translation,
    Translator,
    pairs_of,
    width_setting,
)

RESULTS_DO_NOT_DEPEND_ON = {
    "model", "device", "revision", "trust_remote_code", "input", "output", "interactive", "batch_tokens", "window",
    "score_targets", "prefix",
}  # fmt: skip
"""Options outside the compared settings of a record: the model has a digest, and batches change only rounding."""
SEARCH = {
    "beams": "num_beams",
    "length_penalty": "length_penalty",
    "length_bonus": "length_bonus",
    "iterations": "num_iterations",
    "length_beam": "length_beam_size",
    "decoding_strategy": "decoding_strategy",
    "max_length": "max_new_tokens",
}
"""Options of the search, with their names in `generate()`."""


@dataclass(frozen=True)
class LineOptions(LoadOptions):
    """Options that `vaswani-translate` and `vaswani-parse` share, described by their `--help`; None for a default."""

    input: Path | None = None
    output: Path | None = None
    interactive: bool = False
    beams: int | None = None
    length_penalty: float | None = None
    length_bonus: float | None = None
    iterations: int | None = None
    length_beam: int | None = None
    decoding_strategy: str | None = None
    max_length: int | None = None
    max_source_tokens: int | None = None
    too_long: TooLong = "truncate"
    batch_tokens: int = 2048
    window: int = 2048

    def check(self) -> None:
        """Raise UserError for options that contradict each other."""
        if self.interactive and (self.input or self.output):
            raise UserError("--interactive uses standard input and output; leave out --input and --output.")

    def record(self) -> dict[str, Any]:
        """Return the settings that results depend on: the model and options, without the texts."""
        settings = {name: value for name, value in vars(self).items() if name not in RESULTS_DO_NOT_DEPEND_ON}
        return {"model": self.digest(), **settings}

    def translator_settings(self) -> dict[str, Any]:
        """Return the arguments of `Translator`; the model's generation config has those that are missing."""
        settings: dict[str, Any] = {
            "batch_tokens": self.batch_tokens,
            "max_source_tokens": self.max_source_tokens,
            "too_long": self.too_long,
            "num_return_sequences": 1,
        }
        for option, name in SEARCH.items():
            if (value := getattr(self, option)) is not None:
                settings[name] = value
        return settings

    def check_search(self, translator: Translator) -> None:
        """Raise UserError for a search option that the model does not support."""
        model = translator.model
        defaults = {"beams": 1, "iterations": 1, "length_beam": 1, "length_bonus": 0, "decoding_strategy": None}
        for option, default in defaults.items():
            value = getattr(self, option)
            if value is None:
                continue
            supported = model.family_settings if is_non_autoregressive(model) else ("num_beams",)
            if SEARCH[option] in supported:
                continue
            if value == default:  # as the model decodes without the option
                del translator.generate_kwargs[SEARCH[option]]
            else:
                problem = f"{self.model} is a {type(model).__name__}, which does not support it"
                raise UserError(f"--{option}={value}: {problem}; leave it out.")


def make_parser(prog: str, description: str, texts: str, results: str) -> tuple[CommandParser, Any]:
    """Return the parser of a command from lines of `texts` to lines of `results`, and its group of line options."""
    parser = CommandParser(
        prog=prog,
        description=description,
        epilog="With --output the same command resumes an interrupted one and leaves a finished file unchanged; "
        "FILE.record, next to FILE, contains the model and settings.",
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
        "--max_length": ("N", "maximum tokens of an output, with </s>"),
        "--max_source_tokens": ("N", "maximum tokens of a line (the number of learned positions, or 1024)"),
    }
    for name, (metavar, text) in counts.items():
        search.add_argument(name, type=positive_argument, metavar=metavar, help=text)
    numbers = {
        "--length_penalty": ("ALPHA", "alpha of the length penalty"),
        "--length_bonus": ("B", "added to log P for each token, in CTC's beam search"),
    }
    for name, (metavar, text) in numbers.items():
        search.add_argument(name, type=number_argument, metavar=metavar, help=text)
    search.add_argument("--decoding_strategy", choices=DECODING_STRATEGIES, help="how a DAG model chooses a path")
    search.add_argument(
        "--too_long", choices=get_args(TooLong), default="truncate", help="what to do with a longer line (truncate)"
    )
    machine = parser.add_argument_group("machine")
    size: dict[str, Any] = {"type": positive_argument, "default": 2048, "metavar": "N"}
    machine.add_argument("--batch_tokens", help="source tokens in a batch (2048)", **size)
    machine.add_argument("--window", help="lines to read and sort by length at once (2048)", **size)
    add_load_options(machine)
    return parser, lines


Options = TypeVar("Options", bound=LineOptions)
AnyTranslator = Translator | TargetScorer
Result = Translation | TargetScore
Input = str | Pair


@dataclass
class LineFormat(Generic[Options]):
    """Input and output lines of a command."""

    options: Options

    def read(self, line: bytes, where: str) -> str:
        """Return the text of an input line, which `where` names in an error."""
        fix = "correct the line, or convert the file, for example with iconv."
        try:
            text = line.decode("utf-8-sig").strip()  # without a byte order mark
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 ({error}); {fix}") from error
        if "\0" in text:  # UTF-16 may look like UTF-8
            raise UserError(f"{where}: contains a NUL character, as UTF-16 and damaged files do; {fix}")
        if re.match(POINTER, line):
            raise UserError(f"{where}: is a pointer of Git LFS, not the file; run git lfs pull.")
        return text

    def read_all(self, lines: Iterable[bytes], name: str) -> Iterator[Input]:
        """Yield what each line of the input `name` asks for."""
        return (self.read(line, f"{name}, line {number}") for number, line in enumerate(lines, start=1))

    def results(
        self, translator: Any, window: list[Any], number: int, progress: Callable[[int], object]
    ) -> Sequence[Result]:
        """Return the results of a window, whose first line has the index `number`."""
        return translator.translate_window(window, number, progress=progress)

    def write(self, translation: Any, number: int) -> list[str]:
        """Return the output lines for input line `number`."""
        raise NotImplementedError

    def summary(self, count: int) -> str:
        """Return the message to log after `count` new lines, or an empty string."""
        return ""


Load = Callable[[dict[str, str]], AnyTranslator]
"""Function from recorded layouts to the translator of a command."""


def load_translator(options: LineOptions, layouts: dict[str, str]) -> Translator:
    """Return the translator of a command's model, prepared with the recorded `layouts`.

    Raises:
        UserError: this model does not support an option.
    """
    model, tokenizer = load_model_and_tokenizer(options, layouts)
    translator = Translator(model, tokenizer, **options.translator_settings())
    options.check_search(translator)
    return translator


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


def warn_of_truncation(translation: Result, where: str) -> None:
    if translation.is_truncated:
        limit = translation.max_source_tokens
        log(f"{where}: {translation.source_tokens} tokens, more than {limit}, so it was truncated; see --too_long.")


def check_input_stays(options: LineOptions, source: BinaryIO) -> None:
    """Raise UserError if the output is the input file, by whatever name."""
    if options.output is None or not options.output.is_file():
        return
    with contextlib.suppress(io.UnsupportedOperation):  # an input without a file
        if os.path.samestat(os.fstat(source.fileno()), options.output.stat()):
            raise UserError(
                f"--output={options.output}: is the input, which stays unchanged; choose a different --output."
            )


def open_output(options: LineOptions) -> StreamOutput:
    """Return the output: standard output, a pipe or device, or a resumable file."""
    if options.output is None:
        check_open("stdout", "use --output")
        return StreamOutput(sys.stdout.buffer, "standard output")
    if options.output.exists() and not options.output.is_file():
        return StreamOutput(options.output.open("wb"), str(options.output))
    return ResumableFile(options.output, options.record())


def count_lines(path: Path | None) -> int | None:
    """Return the number of lines in a file; None without a file."""
    if path is None or not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(1 for _ in file)


@contextlib.contextmanager
def line_errors(name: str) -> Generator[None]:
    """Name the line of the input `name`, and the options, in errors of the translator."""
    try:
        yield
    except TooLongError as error:
        problem = f"{error.tokens} tokens, more than {error.limit}"
        fix = "shorten it, or choose a different --too_long."
        raise UserError(f"{name}, line {error.index + 1}: {problem}; {fix}") from error
    except NanError as error:
        problem = "the scores of its translation are NaN"
        fix = "use --dtype=float32, and check that the model's weights are finite."
        raise UserError(f"{name}, line {error.index + 1}: {problem}; {fix}") from error


def write_results(
    form: LineFormat[Any], translator: AnyTranslator, texts: Iterator[Input], output: StreamOutput, name: str
) -> None:
    """Write the results of all remaining texts of the input `name`, a window at a time."""
    number = output.done
    unknown_lines = 0
    first_unknown = ""
    total = count_lines(form.options.input) if sys.stderr.isatty() else None
    with tqdm(total=total, initial=number, unit="line", disable=None, file=sys.stderr) as bar:  # None: in a terminal
        while window := list(islice(texts, form.options.window)):
            with line_errors(name):
                translations = form.results(translator, window, number, bar.update)

            lines: list[str] = []
            for translation in translations:
                number += 1
                warn_of_truncation(translation, f"{name}, line {number}")
                if translation.unknown_words:
                    unknown_lines += 1
                    first_unknown = first_unknown or f"line {number}, {translation.unknown_words[0]!r}"
                lines += form.write(translation, number)
            output.write(window, lines)
    output.finish()

    # Messages about the whole input come last, where a long run's reader looks.
    if unknown_lines:
        count = "1 line contains" if unknown_lines == 1 else f"{unknown_lines} lines contain"
        log(f"{name}: {count} out-of-vocabulary words, so the results are guesses (first: {first_unknown}).")
    if summary := form.summary(number - output.done):
        log(summary)


def translate_lines(form: LineFormat[Any], load: Load) -> None:
    """Translate the input into the output, unless the output file is finished."""
    options = form.options
    name = "standard input" if options.input is None else str(options.input)
    if options.input is None:
        check_open("stdin", "use --input")
    source = sys.stdin.buffer if options.input is None else options.input.open("rb")
    check_input_stays(options, source)

    with source, contextlib.closing(open_output(options)) as output:
        layouts: dict[str, str] = {}
        texts = form.read_all(source, name)
        if isinstance(output, ResumableFile):
            output.skip(texts)
            if output.is_finished:
                log(f"{options.output}: is finished already and stays unchanged.")
                return
            # Layouts round differently, so the rest of the file gets those of its beginning.
            layouts = output.record["layouts"]
            if output.done:
                log(f"{options.output}: resumes after line {output.done} of {name}.")

        translator = load(layouts)
        if isinstance(output, ResumableFile):
            layouts.update(getattr(translator.model, "layouts", {}))  # of a prepared model
            output.save_record(search=translator.settings.search(), layouts=layouts)
        write_results(form, translator, texts, output, name)


def translate_typed(form: LineFormat[Any], load: Load) -> None:
    """Translate each line as soon as it is read."""
    for stream in ("stdin", "stdout"):
        check_open(stream, "--interactive needs it")
    translator = load({})
    output = StreamOutput(sys.stdout.buffer, "standard output")
    for number, line in enumerate(typed_lines(), start=1):
        where = f"standard input, line {number}"
        try:
            with line_errors("standard input"):
                (translation,) = cast(Translator, translator).translate_window([form.read(line, where)], number - 1)
        except UserError as error:
            log(str(error))
            continue
        warn_of_truncation(translation, where)
        if translation.warning:
            log(translation.warning)
        output.write([translation.source], form.write(translation, number))


def run(form: LineFormat[Any], load: Load) -> None:
    """Run a command, whose model `load` loads; a user error ends it with one line and exit status 2."""
    logging.disable_progress_bar()
    options = form.options
    what_now = "; the same command resumes it" if options.output else ""
    with exit_on_user_error(ValueError, OSError, what_now=what_now):
        options.check()
        try:
            translate = translate_typed if options.interactive else translate_lines
            translate(form, load)
        except (BrokenPipeError, OutputError) as error:
            if options.output is None:  # discard unwritten output, which Python would write again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, OutputError):
                raise
            sys.exit(141)  # the reader closed the pipe
        except RuntimeError as error:
            if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):  # on a CPU
                raise
            fix = "use a smaller --batch_tokens or fewer --beams."
            raise UserError(f"The device has too little memory for a batch; {fix}") from error


SCORES = (
    "log_probability", "length_log_probability", "estimated_log_probability", "tokens", "token_log_probabilities",
)  # fmt: skip
"""Fields of `TargetScore` in JSON Lines."""

LIMITS_OF_TEXTS = ("batch_tokens", "max_source_tokens", "too_long")
"""Settings of a `Translator` that a `TargetScorer` has too."""


def rounded(value: Any) -> Any:
    """Return a value of JSON with four digits of its numbers, None for minus infinity."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


@dataclass(frozen=True)
class TranslationOptions(LineOptions):
    """Options of `vaswani-translate`."""

    format: Literal["text", "jsonl"] = "text"
    field: str | None = None
    source: str | None = None
    scores: bool = False
    nbest: int | None = None
    score_targets: Path | None = None
    rerank: str | None = None
    prefix: Path | None = None
    target: str | None = None
    details: bool = False
    alignment_layer: int | None = None

    def check(self) -> None:
        super().check()
        if self.interactive and self.format != "text":
            raise UserError("--interactive reads and writes plain text; leave out --format.")
        for option in ("interactive", "scores", "nbest", "rerank", "prefix", "details", *SEARCH):
            value = getattr(self, option)
            if self.score_targets and not (value is None or value is False):  # 0 is a length penalty
                raise UserError(f"--{option}: has no effect on given targets; leave it or --score_targets out.")
        if self.interactive and self.prefix:
            raise UserError("--interactive reads only sources; leave out --prefix.")
        for option in ("score_targets", "prefix"):
            if (path := getattr(self, option)) is not None:
                self.check_file(path, f"--{option}")

    def check_file(self, path: Path, option: str) -> None:
        """Raise an error for a file of targets that is missing or does not fit the input."""
        path.stat()  # raises for a missing file
        count, expected = count_lines(path), count_lines(self.input)
        if None not in (count, expected) and count != expected:
            numbers = f"got {count} lines, expected {expected}, as in {self.input}"
            raise UserError(f"{option}={path}: needs a line for each line of the input; {numbers}. Correct one.")

    @property
    def target_file(self) -> Path | None:
        """File with a target, or the prefix of one, for each line."""
        return self.score_targets or self.prefix

    def record(self) -> dict[str, Any]:
        """Return the settings that results depend on, among them what there is besides sources."""
        given = {"targets": self.score_targets, "prefixes": self.prefix, "details": self.details}
        flags = {name: True if value else None for name, value in given.items()}
        teacher = None if self.rerank is None else self.teacher().digest()
        return {**super().record(), **flags, "rerank": teacher}

    def teacher(self) -> LoadOptions:
        """Return the options for loading the teacher of `--rerank`; `--revision` is that of the model alone."""
        return LoadOptions(str(self.rerank), self.device, self.dtype, trust_remote_code=self.trust_remote_code)

    def translator_settings(self) -> dict[str, Any]:
        settings = super().translator_settings()
        settings["scores"] = self.scores
        settings["alignment_layer"] = self.alignment_layer
        if self.nbest is not None:
            settings["num_return_sequences"] = self.nbest
        return settings

    def check_search(self, translator: Translator) -> None:
        """Raise UserError for an option that the model does not support, or for more results than the search finds."""
        super().check_search(translator)
        if self.prefix is not None:
            translator.check_prefixes("--prefix")
        if self.details:
            translator.check_autoregressive("--details")
        if self.nbest is not None and self.nbest > (width := translator.most_hypotheses):
            problem = f"more than the search finds; got {self.nbest}, expected at most {width}"
            name = width_setting(translator.model)
            fix = "Leave it out." if name is None else f"Use a larger {WIDTH_OPTIONS[name]}, or a smaller --nbest."
            raise UserError(f"--nbest: {problem}. {fix}")


@dataclass
class TranslationFormat(LineFormat[TranslationOptions]):
    """Input lines of text or JSON, and output lines of translations, the unfinished of which it counts."""

    unfinished: int = 0
    first_unfinished: int = 0  # its line

    def read(self, line: bytes, where: str) -> str:
        language = self.options.source
        return self.read_field(line, where, language, language or self.options.field or "text")

    def read_all(self, lines: Iterable[bytes], name: str) -> Iterator[str | Pair]:
        texts = cast(Iterator[str], super().read_all(lines, name))
        path = self.options.target_file
        return texts if path is None else pairs_of(texts, self.read_targets(path), name, str(path))

    def read_targets(self, path: Path) -> Iterator[str]:
        """Yield the target of each line of a file; a line of JSON has it where `write` and data sets do."""
        language = self.options.target
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield self.read_field(line, f"{path}, line {number}", language, language or "translation")

    def read_field(self, line: bytes, where: str, language: str | None, key: str) -> str:
        """Return the text of a line, of JSON in the field `key`, or in the translations of `language`."""
        text = super().read(line, where)
        if not text or self.options.format == "text":
            return text
        try:
            row = json.loads(text)
            texts = row if language is None else row["translation"]
            value = texts[key].strip()
            value.encode()  # fails for half of a surrogate pair
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            expected = f'{{"{key}": "..."}}'
            if language is not None:
                expected = f'{{"translation": {expected}}}'
            problem = f"got {text[:80]}, expected {expected} ({one_line(error)})"
            raise UserError(
                f"{where}: {problem}; correct the line, or change --field, --source or --target."
            ) from error
        return value

    def results(
        self, translator: Any, window: list[Any], number: int, progress: Callable[[int], object]
    ) -> Sequence[Result]:
        if isinstance(translator, TargetScorer):
            return translator.score_window(window, number, progress)
        return super().results(translator, window, number, progress)

    def write_score(self, score: TargetScore) -> list[str]:
        """Return the line of a target's log-probability."""
        if self.options.format == "text":
            return [f"{score.log_probability:.4f}"]
        values = {name: getattr(score, name) for name in SCORES if getattr(score, name) is not None}
        return [json.dumps({name: rounded(value) for name, value in values.items()}, ensure_ascii=False)]

    def write(self, translation: Translation | TargetScore, number: int) -> list[str]:
        if isinstance(translation, TargetScore):
            return self.write_score(translation)
        if translation.is_unfinished:
            self.unfinished += 1
            self.first_unfinished = self.first_unfinished or number
        if self.options.format == "text":
            return self.write_text(translation, number)
        rows: list[dict[str, Any]] = []
        for hypothesis in translation.hypotheses:
            row: dict[str, Any] = {"translation": hypothesis.text}
            if hypothesis.score is not None:
                row["score"] = rounded(hypothesis.score)
            if hypothesis.is_unfinished:
                row["unfinished"] = True
            if (details := hypothesis.details) is not None:
                row["tokens"] = details.tokens
                row["token_log_probabilities"] = rounded(details.token_log_probabilities)
                row["alignment"] = details.pharaoh
            rows.append(row)
        result = rows[0] if self.options.nbest is None else {**rows[0], "nbest": rows}
        return [json.dumps(result, ensure_ascii=False)]

    def write_text(self, translation: Translation, number: int) -> list[str]:
        """Return a line of text for each hypothesis, after its number and score if options ask for them."""
        lines = []
        for hypothesis in translation.hypotheses:
            line = re.sub(r"[\r\n]", " ", hypothesis.text)
            if self.options.scores:
                line = f"{hypothesis.score:.4f}\t{line}"
            if self.options.nbest is not None:
                line = f"{number}\t{line}"
            lines.append(line)
        return lines

    def summary(self, count: int) -> str:
        """Return the number of unfinished translations, or an empty string."""
        if not self.unfinished:
            return ""
        subject = "1 translation is" if self.unfinished == 1 else f"{self.unfinished} translations are"
        where = f"first: line {self.first_unfinished}"
        return f"{subject} unfinished, cut off at the length limit or repeating the same words ({where})."


def load_scorer(options: TranslationOptions, layouts: dict[str, str]) -> TargetScorer:
    """Return the scorer of the command's model, prepared with the recorded `layouts`."""
    settings = {name: getattr(options, name) for name in LIMITS_OF_TEXTS}
    return TargetScorer(*load_model_and_tokenizer(options, layouts), **settings)


def set_details(options: TranslationOptions, translator: Translator) -> None:
    """Let a translator take details from the unprepared model if a command asks for them."""
    if options.details:
        source: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
        is_prepared = isinstance(translator.model, Prepared)
        translator.details_from = (
            load_model(options.model, dtype="float32", **source) if is_prepared else translator.model
        )


def load_detailed(options: TranslationOptions, layouts: dict[str, str]) -> Translator:
    """Return the translator of a command, possibly with details."""
    translator = load_translator(options, layouts)
    set_details(options, translator)
    return translator


def load_reranker(options: TranslationOptions, layouts: dict[str, str]) -> Reranker:
    """Return the translator of a command whose teacher chooses, both prepared with the recorded `layouts`."""
    model, tokenizer = load_model_and_tokenizer(options, layouts)
    teacher, teacher_tokenizer = load_model_and_tokenizer(options.teacher(), layouts)
    layouts.update(getattr(teacher, "layouts", {}))
    settings = {**options.translator_settings(), "scores": False}  # they are the teacher's
    scorer = TargetScorer(teacher, teacher_tokenizer, **{name: settings[name] for name in LIMITS_OF_TEXTS})
    reranker = Reranker(model, tokenizer, scorer, **settings)
    options.check_search(reranker)
    set_details(options, reranker)
    return reranker


def main(arguments: list[str] | None = None) -> None:
    description = "Translate a text line by line, in order, by the model's own search."
    parser, lines = make_parser("vaswani-translate", description, "text to translate", "results")
    lines.add_argument("--format", choices=("text", "jsonl"), default="text", help="format of input and output (text)")
    key = lines.add_mutually_exclusive_group()
    key.add_argument("--field", metavar="NAME", help='field of JSON Lines with the text: {"NAME": "..."} (text)')
    key.add_argument(
        "--source", metavar="LANGUAGE", help='language of the text, in {"translation": {"LANGUAGE": "..."}}'
    )
    scores_help = "write the score that ranks translations, such as log P(Y|X) / lp(Y), and a tab before each"
    lines.add_argument("--scores", action="store_true", help=scores_help)
    nbest_help = "write the N best, each after its line number and a tab"
    lines.add_argument("--nbest", type=positive_argument, metavar="N", help=nbest_help)
    score_help = "write the log-probability of the target in each line of FILE, instead of translating"
    lines.add_argument("--score_targets", type=Path, metavar="FILE", help=score_help)
    rerank_help = "let this model choose among the translations of all lengths, latents or beams of the search"
    lines.add_argument("--rerank", metavar="TEACHER", help=rerank_help)
    prefix_help = "begin each translation with the text in its line of FILE; an empty line leaves it free"
    lines.add_argument("--prefix", type=Path, metavar="FILE", help=prefix_help)
    target_help = 'language of FILE, in {"translation": {"LANGUAGE": "..."}} (JSON Lines of {"translation": "..."})'
    lines.add_argument("--target", metavar="LANGUAGE", help=target_help)
    details_help = "add each token with its log-probability, and the alignment of words, to JSON Lines"
    lines.add_argument("--details", action="store_true", help=details_help)
    layer_help = "decoder layer whose attention aligns the words of --details, counted from 1 (the last)"
    lines.add_argument("--alignment_layer", type=positive_argument, metavar="N", help=layer_help)
    options = TranslationOptions(**vars(parser.parse_args(arguments)))
    if options.format == "text" and (options.field or options.source):
        parser.error("--field and --source select the text of JSON Lines; add --format=jsonl.")
    if options.target and not (options.target_file and options.format == "jsonl"):
        parser.error("--target selects the targets of JSON Lines; add --format=jsonl, and --score_targets or --prefix.")
    if options.details and options.format == "text":
        parser.error("--details adds fields to JSON Lines; add --format=jsonl.")
    if options.alignment_layer and not options.details:
        parser.error("--alignment_layer is a setting of --details; add it.")
    load: Callable[..., Translator | TargetScorer] = load_detailed
    if options.score_targets is not None:
        load = load_scorer
    elif options.rerank is not None:
        load = load_reranker
    run(TranslationFormat(options), lambda layouts: load(options, layouts))
