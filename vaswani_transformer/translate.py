"""The command `vaswani-translate MODEL < source.txt > target.txt`, also `python -m vaswani_transformer.translate`."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

import torch
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .ctranslate2_engine import CTranslate2Search
from .lines import (
    LineError,
    ResumableFile,
    Stream,
    Texts,
    digest_of_folder,
    json_texts,
    one_line,
    read_progress,
    text_lines,
    whole_lines,
)
from .translation import Overlong, OverlongError, Translation, Translator, translate


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command's arguments; those that do not go together end it with status 2."""
    parser = argparse.ArgumentParser(
        prog="vaswani-translate",
        allow_abbrev=False,
        description="Translate a text line by line, in its order, by the model's own search.",
        epilog="With --output the same command goes on with what an interrupted one has left.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with a model and its tokenizer, or a name on the Hub")
    lines = parser.add_argument_group("lines")
    lines.add_argument("--input", type=Path, metavar="FILE", help="what to translate, in place of standard input")
    lines.add_argument("--output", type=Path, metavar="FILE", help="where to, in place of standard output")
    lines.add_argument("--format", choices=("text", "jsonl"), default="text", help="of the lines in and out (text)")
    lines.add_argument("--field", metavar="NAME", help='of JSON Lines, where the text is: {"NAME": "..."} (text)')
    lines.add_argument("--source", metavar="LANGUAGE", help='or in {"translation": {"LANGUAGE": "..."}}')
    lines.add_argument("--scores", action="store_true", help="log P(Y|X) / lp(Y) before each translation, and a tab")
    lines.add_argument(
        "--nbest", type=int, metavar="N", help="the N best, each with its line's number and a tab before"
    )
    lines.add_argument("--interactive", action="store_true", help="translate each line as soon as it is typed")
    lines.add_argument("--progress", action=argparse.BooleanOptionalAction, help="show a bar (on a terminal)")
    search = parser.add_argument_group("search", "as the model's generation config says, where not given")
    search.add_argument("--beams", type=int, metavar="N", help="1 for greedy search")
    search.add_argument("--length_penalty", type=float, metavar="ALPHA", help="alpha of lp(Y)")
    search.add_argument("--max_length", type=int, metavar="N", help="tokens of a translation, its end counted")
    search.add_argument(
        "--max_source_tokens", type=int, metavar="N", help="of a line (the table of positions, or 1024)"
    )
    search.add_argument("--overlong", choices=get_args(Overlong), default="cut", help="what becomes of a longer (cut)")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--batch_tokens", type=int, default=2048, metavar="N", help="source tokens at once (2048)")
    machine.add_argument("--window", type=int, default=2048, metavar="N", help="lines sorted by length at once (2048)")
    machine.add_argument(
        "--engine",
        choices=("torch", "ctranslate2"),
        default="torch",
        help="what runs MODEL; see vaswani-convert (torch)",
    )
    machine.add_argument("--device", help="the accelerator, where there is one, or else the CPU")
    machine.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    machine.add_argument("--revision", help="of a model on the Hub")
    machine.add_argument("--trust_remote_code", action="store_true", help="run the code that comes with the model")
    options = parser.parse_args(arguments)
    refuse_misfits(parser, options)
    return options


def refuse_misfits(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the command where arguments do not go together."""
    if options.interactive and (options.input or options.output or options.format != "text"):
        parser.error("--interactive reads and writes lines of text; leave out --input, --output and --format.")
    if options.format == "text" and (options.field or options.source):
        parser.error("--field and --source are of JSON Lines; give --format=jsonl as well.")
    if options.field and options.source:
        parser.error("--field and --source both say where the text is; give one of them.")
    if options.engine == "ctranslate2" and (options.revision or options.trust_remote_code):
        parser.error("--revision and --trust_remote_code are of the Hub; CTranslate2 runs a folder of vaswani-convert.")
    for name in ("nbest", "beams", "max_length", "max_source_tokens", "batch_tokens", "window"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name}={value}: not positive; give at least 1.")
    if options.output and not options.output.absolute().parent.is_dir():
        parser.error(f"--output={options.output}: {options.output.absolute().parent} is no folder; make it first.")
    if options.input and options.output and options.output.exists() and options.output.samefile(options.input):
        parser.error(f"--output={options.output}: the input itself; name another file.")


def reason(error: Exception) -> str:
    """The first line of what an error says."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def load(options: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, where it is to run, and its tokenizer.

    Raises:
        LineError: they cannot be loaded, or not there.
    """
    if options.model.startswith((".", "/", "~")) and not Path(options.model).is_dir():
        raise LineError(f"{options.model}: there is no such folder; name one with a model, or a model on the Hub.")
    shared = {"revision": options.revision or "main", "trust_remote_code": options.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model, **shared)
        model = AutoModelForSeq2SeqLM.from_pretrained(options.model, dtype=options.dtype, **shared)
    except Exception as error:  # whatever a broken folder or the network makes the libraries raise
        raise LineError(f"{options.model}: cannot be loaded: {reason(error)}") from error
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = options.device or accelerator or "cpu"
    try:
        return model.to(device), cast(PreTrainedTokenizerBase, tokenizer)
    except (RuntimeError, AssertionError) as error:
        raise LineError(f"--device={device}: the model cannot go there: {reason(error)}") from error


def search_settings(options: argparse.Namespace, model: PreTrainedModel) -> dict[str, Any]:
    """The arguments of `generate()`.

    Raises:
        LineError: more translations are asked for than there are beams.
    """
    beams = options.beams or model.generation_config.num_beams or 1
    if options.nbest is not None and options.nbest > beams:
        raise LineError(f"--nbest={options.nbest}: more than the {beams} beams; give --beams={options.nbest} as well.")
    settings = {
        "num_beams": options.beams,
        "length_penalty": options.length_penalty,
        "max_new_tokens": options.max_length,
        "num_return_sequences": options.nbest or 1,
    }
    return {name: value for name, value in settings.items() if value is not None}


def translator(
    options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Callable[..., Iterator[Translation]]:
    """`translate` with what the arguments say of it.

    Raises:
        LineError: as `search_settings` raises it.
    """
    return partial(
        translate,
        model,
        tokenizer,
        batch_tokens=options.batch_tokens,
        window=options.window,
        max_source_tokens=options.max_source_tokens,
        overlong=options.overlong,
        scores=options.scores,
        **search_settings(options, model),
    )


def engine_translator(options: argparse.Namespace) -> Translator:
    """The same by CTranslate2, in a folder that `vaswani-convert ctranslate2` wrote.

    Raises:
        LineError: there is no such model, or it cannot be run as the arguments say.
    """
    try:
        search = CTranslate2Search(
            options.model,
            scores=options.scores,
            num_beams=options.beams,
            length_penalty=options.length_penalty,
            max_new_tokens=options.max_length,
            num_return_sequences=options.nbest or 1,
            batch_tokens=0,  # they come in batches
            device=options.device or "auto",
            compute_type="default" if options.dtype == "auto" else options.dtype,
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise LineError(reason(error)) from error
    if search.tokenizer is None:
        raise LineError(f"{options.model}: was converted without its tokenizer; convert it with its tokenizer.")
    longest = options.max_source_tokens or search.longest_source()
    return Translator(search, search.tokenizer, longest, options.batch_tokens, options.window, options.overlong)


def chosen_translator(options: argparse.Namespace) -> tuple[Callable[..., Iterator[Translation]], str]:
    """What translates by the engine that is asked for, and what the model is known by in a file that is gone on with.

    Raises:
        LineError: as the engines raise it.
    """
    folder = Path(options.model)
    if options.engine == "ctranslate2":
        return engine_translator(options), digest_of_folder(folder)
    model, tokenizer = load(options)
    commit = getattr(model.config, "_commit_hash", None)  # of a model on the Hub
    known_by = digest_of_folder(folder) if folder.is_dir() else f"{options.model}@{commit}"
    return translator(options, model, tokenizer), known_by


def texts_of(options: argparse.Namespace, source: BinaryIO, name: str) -> Iterator[str]:
    """The texts that the input's lines hold."""
    if options.format == "text":
        return text_lines(source, name)
    return json_texts(source, name, options.field or "text", options.source)


def formatted(translation: Translation, number: int, options: argparse.Namespace) -> list[str]:
    """The lines that a line's translations make."""
    found = translation.hypotheses
    if options.format == "text":
        lines = [one_line(hypothesis.text) for hypothesis in found]
        if options.scores:
            lines = [f"{hypothesis.score:.4f}\t{line}" for hypothesis, line in zip(found, lines, strict=True)]
        return lines if options.nbest is None else [f"{number}\t{line}" for line in lines]
    rows: list[dict[str, Any]] = [{"translation": hypothesis.text} for hypothesis in found]
    if options.scores:
        for row, hypothesis in zip(rows, found, strict=True):
            row["score"] = round(cast(float, hypothesis.score), 4)
    return [json.dumps(rows[0] if options.nbest is None else rows[0] | {"nbest": rows}, ensure_ascii=False)]


def lines_each(options: argparse.Namespace) -> int:
    """The lines that a line's translations make."""
    return options.nbest or 1 if options.format == "text" else 1


def is_finished(options: argparse.Namespace, source: BinaryIO, name: str) -> bool:
    """Whether the output is there to its end: not unfinished, and with lines for every line of the input.

    Raises:
        LineError: it holds anything else.
    """
    path = options.output
    if path is None or not path.is_file() or path.stat().st_size == 0 or read_progress(path) is not None:
        return False
    found, each = whole_lines(path), lines_each(options)
    if found != each * sum(1 for _ in islice(source, found // each + 1)):
        raise LineError(
            f"{path}: holds {found} lines, and is no unfinished translation of {name}; it is left as it is: give "
            "another --output, or remove it."
        )
    return True


RESULTS_DEPEND_ON = (
    "format", "field", "source", "scores", "nbest", "beams", "length_penalty", "max_length", "max_source_tokens",
    "overlong", "dtype", "engine",
)  # fmt: skip


def output_of(options: argparse.Namespace, known_by: str) -> Stream | ResumableFile:
    """Where the results go.

    Raises:
        LineError: to a file that was begun otherwise.
    """
    if options.output is None:
        return Stream(sys.stdout.buffer)
    if options.output.exists() and not options.output.is_file():  # a pipe or a device
        return Stream(options.output.open("wb"))
    settings = {"model": known_by} | {name: getattr(options, name) for name in RESULTS_DEPEND_ON}
    return ResumableFile(options.output, lines_each(options), settings, [options.batch_tokens, options.window])


def say(message: str) -> None:
    """A line to the user, above the bar where there is one."""
    tqdm.write(message, file=sys.stderr)


def progress_bar(options: argparse.Namespace, done: int) -> tqdm:
    """How many lines of how many are translated, on a terminal or on request."""
    is_shown = sys.stderr.isatty() if options.progress is None else options.progress
    total = None
    if is_shown and options.input is not None and options.input.is_file():
        with options.input.open("rb") as file:
            total = sum(1 for _ in file)
    return tqdm(total=total, initial=done, unit="line", disable=not is_shown, file=sys.stderr)


def warn_of_cut(found: Translation, name: str, number: int) -> None:
    say(
        f"{name}, line {number}: {found.source_tokens} tokens are too many, and the last of them were cut off; "
        "--overlong=keep translates all, --overlong=refuse ends at such a line."
    )


def translate_lines(
    translations: Callable[..., Iterator[Translation]],
    texts: Texts,
    output: Stream | ResumableFile,
    options: argparse.Namespace,
) -> None:
    """Write the translations of all texts that have none yet.

    Raises:
        LineError: a text is no text, or too long where that is refused.
    """
    with progress_bar(options, output.done) as bar:
        try:
            for number, found in enumerate(translations(texts, skip=output.done, progress=bar.update), output.done + 1):
                if found.is_cut:
                    warn_of_cut(found, texts.name, number)
                output.write(formatted(found, number, options), texts)
        except OverlongError as error:
            raise LineError(
                f"{texts.name}, line {error.index + 1}: {error.tokens} tokens, more than {error.limit}; shorten it, or "
                "give --overlong=cut, --overlong=keep or another --max_source_tokens."
            ) from error


def run(options: argparse.Namespace) -> None:
    """Translate the input's lines.

    Raises:
        LineError: the input, the output or the model cannot be used.
    """
    name = "standard input" if options.input is None else str(options.input)
    with sys.stdin.buffer if options.input is None else options.input.open("rb") as source:
        if is_finished(options, source, name):
            say(f"{options.output}: finished already, and left as it is.")
            return
        translations, known_by = chosen_translator(options)
        with contextlib.closing(output_of(options, known_by)) as output:
            if output.done:
                say(f"{options.output}: goes on behind line {output.done} of {name}.")
            if output.has_other_batches:
                say(f"{options.output}: was begun with other batches, so that sums may be rounded otherwise.")
            texts = Texts(texts_of(options, source, name), name, output.done, output.known, output.digest)
            translate_lines(translations, texts, output, options)
            output.finish()


def typed_lines() -> Iterator[str]:
    """Lines of standard input, each asked for on a terminal, where it can be edited and earlier ones called back."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - it takes hold of `input`
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError):
        while True:
            yield input(prompt).strip()


def converse(options: argparse.Namespace) -> None:
    """Translate each line as soon as it is there.

    Raises:
        LineError: the model cannot be used.
    """
    translations, _ = chosen_translator(options)
    for number, line in enumerate(typed_lines(), start=1):
        try:
            (found,) = translations([line])
        except OverlongError as error:
            say(f"{error.tokens} tokens, more than {error.limit}; shorten the line.")
            continue
        if found.is_cut:
            warn_of_cut(found, "standard input", number)
        sys.stdout.write("".join(f"{row}\n" for row in formatted(found, number, options)))
        sys.stdout.flush()


def main(arguments: list[str] | None = None) -> None:
    """The command line; what cannot be translated ends it with one line and exit status 2."""
    options = parse(arguments)
    logging.disable_progress_bar()
    try:
        converse(options) if options.interactive else run(options)
    except BrokenPipeError:  # nobody reads on, as with `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        say(f"Interrupted{'; the same command goes on from here' if options.output else ''}.")
        sys.exit(130)
    except torch.OutOfMemoryError:
        say("The device has too little memory for a batch; give a smaller --batch_tokens.")
        sys.exit(1)
    except (ValueError, OSError) as error:
        say(reason(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
