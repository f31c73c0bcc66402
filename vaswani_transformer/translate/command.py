"""The command `vaswani-translate MODEL < source.txt > target.txt`, also `python -m vaswani_transformer.translate`."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

import torch
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..checked_loading import load_model, load_tokenizer, loading, refuse_missing_folder, refuse_other_tokenizer
from ..command_line import ArgumentParser, finite_float, positive_int, utf8_text
from ..config import VaswaniTransformerConfig
from ..convert.ctranslate2_exporter import CTranslate2Search
from ..cpu import prepare_for_inference
from .output import (
    LineError,
    ResumableFile,
    Stream,
    Texts,
    UnwritableError,
    digest_of_folder,
    is_finished,
    json_texts,
    one_line,
    reading,
    reason,
    text_lines,
)
from .translator import Overlong, OverlongError, Translation, Translator, translate

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
DTYPE_HELP = "of the products with weights; int8 on a CPU alone (on a CPU float32, else and with CTranslate2 as saved)"


LARGEST_ALPHA = 50  # of lp(Y): the longest translations to this power are numbers still


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command's arguments; those that do not go together end it with status 2."""
    parser = ArgumentParser(
        prog="vaswani-translate",
        description="Translate a text line by line, in its order, by the model's own search.",
        epilog="With --output the same command continues what an interrupted one has left, and leaves alone what is "
        "finished; FILE.record, beside FILE, says by which model and settings.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with a model and its tokenizer, or a name on the Hub")
    lines = parser.add_argument_group("lines")
    lines.add_argument("--input", type=Path, metavar="FILE", help="what to translate, in place of standard input")
    lines.add_argument("--output", type=Path, metavar="FILE", help="where to, in place of standard output")
    lines.add_argument("--format", choices=("text", "jsonl"), default="text", help="of the lines in and out (text)")
    lines.add_argument(
        "--field", type=utf8_text, metavar="NAME", help='of JSON Lines, where the text is: {"NAME": "..."} (text)'
    )
    lines.add_argument(
        "--source", type=utf8_text, metavar="LANGUAGE", help='or in {"translation": {"LANGUAGE": "..."}}'
    )
    lines.add_argument("--scores", action="store_true", help="log P(Y|X) / lp(Y) before each translation, and a tab")
    lines.add_argument(
        "--nbest", type=positive_int, metavar="N", help="the N best, each with its line's number and a tab before"
    )
    lines.add_argument("--interactive", action="store_true", help="translate each line as soon as it is typed")
    lines.add_argument("--progress", action=argparse.BooleanOptionalAction, help="show a bar (on a terminal)")
    search = parser.add_argument_group("search", "as the model's generation config says, where not given")
    search.add_argument("--beams", type=positive_int, metavar="N", help="1 for greedy search")
    search.add_argument("--length_penalty", type=finite_float, metavar="ALPHA", help="alpha of lp(Y)")
    search.add_argument("--max_length", type=positive_int, metavar="N", help="tokens of a translation, its end counted")
    search.add_argument(
        "--max_source_tokens", type=positive_int, metavar="N", help="of a line (the table of positions, or 1024)"
    )
    search.add_argument("--overlong", choices=get_args(Overlong), default="cut", help="what becomes of a longer (cut)")
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--batch_tokens", type=positive_int, default=2048, metavar="N", help="source tokens at once (2048)"
    )
    machine.add_argument(
        "--window", type=positive_int, default=2048, metavar="N", help="lines sorted by length at once (2048)"
    )
    machine.add_argument(
        "--engine",
        choices=("torch", "ctranslate2"),
        default="torch",
        help="what runs MODEL; see vaswani-convert (torch)",
    )
    machine.add_argument("--device", help="the accelerator, where there is one, or else the CPU")
    machine.add_argument("--dtype", choices=DTYPES, default="auto", help=DTYPE_HELP)
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
    if options.length_penalty is not None and abs(options.length_penalty) > LARGEST_ALPHA:
        parser.error(
            f"--length_penalty={options.length_penalty}: lengths to this power overflow; give a number from "
            f"-{LARGEST_ALPHA} to {LARGEST_ALPHA}."
        )
    if options.input and options.input.is_dir():
        parser.error(f"--input={options.input}: a folder; name a file.")
    if options.input and not options.input.exists():
        parser.error(f"--input={options.input}: there is no such file; name one that is there.")
    if options.output and options.output.is_dir():
        parser.error(f"--output={options.output}: a folder; name a file.")
    if options.output and not options.output.absolute().parent.is_dir():
        parser.error(f"--output={options.output}: {options.output.absolute().parent} is no folder; make it first.")
    if options.input and options.output and options.output.exists() and options.output.samefile(options.input):
        parser.error(f"--output={options.output}: the input itself; name another file.")


def device_of(options: argparse.Namespace) -> torch.device:
    """Where the model is to run.

    Raises:
        LineError: there is no such device.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        return torch.zeros(1, device=options.device or accelerator or "cpu").device
    except (RuntimeError, AssertionError) as error:
        raise LineError(f"--device={options.device}: the model cannot go there: {reason(error)}") from error


def is_to_be_prepared(options: argparse.Namespace, kind: str, device: torch.device) -> bool:
    """Whether a model of this kind is prepared for the device: one of this package on a CPU, but for float16.

    Raises:
        LineError: it is not, and could not compute in 8 bits.
    """
    is_own, is_on_cpu = kind == VaswaniTransformerConfig.model_type, device.type == "cpu"
    if options.dtype == "int8" and not (is_own and is_on_cpu):
        raise LineError(
            f"--dtype=int8: for models of this package on a CPU, and {options.model} is of type {kind!r} on {device}; "
            f"give {'another --dtype' if is_on_cpu else '--device=cpu, or another --dtype'}."
        )
    return is_own and is_on_cpu and options.dtype != "float16"


def refuse_converted(model: str) -> None:
    """Refuse another engine's folder.

    Raises:
        LineError: naming it.
    """
    if all((Path(model) / name).is_file() for name in ("model.bin", "shared_vocabulary.json")):
        raise LineError(f"{model}: a model of CTranslate2; vaswani-translate runs it with --engine=ctranslate2.")


def load(options: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, where it is to run, and its tokenizer; on a CPU a copy that `prepare_for_inference` made.

    Raises:
        LineError: they cannot be loaded, do not go together, or cannot run there or in that dtype.
    """
    refuse_missing_folder(options.model)
    refuse_converted(options.model)
    device = device_of(options)
    shared = {"revision": options.revision or "main", "trust_remote_code": options.trust_remote_code}
    with loading(options.model):
        kind = AutoConfig.from_pretrained(options.model, **shared).model_type
    is_prepared = is_to_be_prepared(options, kind, device)
    if device.type == "meta":
        raise LineError("--device=meta: weights hold no numbers there; give a device that computes.")
    tokenizer = load_tokenizer(options.model, **shared)
    model = load_model(options.model, dtype="float32" if is_prepared else options.dtype, **shared)
    with loading(options.model):
        cast(Any, model).to(device)
    refuse_other_tokenizer(model, tokenizer, options.model)
    if is_prepared:
        model = prepare_for_inference(model, "float32" if options.dtype == "auto" else options.dtype)
    return model, tokenizer


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


def chosen_translator(options: argparse.Namespace) -> Callable[..., Iterator[Translation]]:
    """What translates by the engine that is asked for.

    Raises:
        LineError: as the engines raise it.
    """
    if options.engine == "ctranslate2":
        return engine_translator(options)
    return translator(options, *load(options))


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


RESULTS_DEPEND_ON = (
    "format", "field", "source", "scores", "nbest", "beams", "length_penalty", "max_length", "max_source_tokens",
    "overlong", "dtype", "engine",
)  # fmt: skip


def has_record(options: argparse.Namespace) -> bool:
    """Whether the output is a file, and so keeps a record, and no pipe or device."""
    return options.output is not None and (options.output.is_file() or not options.output.exists())


def model_digest(options: argparse.Namespace) -> str:
    """What a record knows the model by: a digest of its folder's files or, on the Hub, its commit.

    Raises:
        LineError: there is no such model.
    """
    if (folder := Path(options.model)).is_dir():
        return digest_of_folder(folder)
    if options.engine == "ctranslate2":  # there is none: the engine itself says so
        return ""
    refuse_missing_folder(options.model)
    with loading(options.model):
        config = AutoConfig.from_pretrained(
            options.model, revision=options.revision or "main", trust_remote_code=options.trust_remote_code
        )
    return f"{options.model}@{getattr(config, '_commit_hash', None)}"


def recorded_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the results depend on, beside the texts.

    Raises:
        LineError: as `model_digest`.
    """
    return {"model": model_digest(options)} | {name: getattr(options, name) for name in RESULTS_DEPEND_ON}


def output_of(options: argparse.Namespace, settings: dict[str, Any]) -> Stream | ResumableFile:
    """Where the results go.

    Raises:
        LineError: to a file that was begun otherwise.
    """
    if options.output is None:
        return Stream(sys.stdout.buffer, "standard output")
    if not has_record(options):
        return Stream(options.output.open("wb"), str(options.output))
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
        f"{name}, line {number}: {found.source_tokens} tokens, more than {found.max_source_tokens}, so the last of "
        "them were cut off; --overlong=keep translates all, --overlong=refuse ends at such a line."
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


def open_input(options: argparse.Namespace) -> BinaryIO:
    """Where the lines come from.

    Raises:
        LineError: the file cannot be read.
    """
    if options.input is None:
        return sys.stdin.buffer
    with reading(str(options.input)):
        return options.input.open("rb")


def run(options: argparse.Namespace) -> None:
    """Translate the input's lines.

    Raises:
        LineError: the input, the output or the model cannot be used.
    """
    name = "standard input" if options.input is None else str(options.input)
    with open_input(options) as source:
        settings = recorded_settings(options) if has_record(options) else {}
        if settings and is_finished(options.output, settings, texts_of(options, source, name), name):
            say(f"{options.output}: finished already, and left as it is.")
            return
        translations = chosen_translator(options)
        with contextlib.closing(output_of(options, settings)) as output:
            if output.done:
                say(f"{options.output}: goes on behind line {output.done} of {name}.")
            if output.has_other_batches:
                say(f"{options.output}: was begun with other batches, so that sums may be rounded otherwise.")
            texts = Texts(texts_of(options, source, name), name, output.done, output.known, output.digest)
            translate_lines(translations, texts, output, options)
            output.finish(texts)


def typed_lines() -> Iterator[str]:
    """Lines of standard input, each asked for on a terminal, where it can be edited and earlier ones called back.

    Raises:
        LineError: a line is not UTF-8 and comes from no terminal.
    """
    if not sys.stdin.isatty():
        yield from text_lines(sys.stdin.buffer, "standard input")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - it takes hold of `input`
    with contextlib.suppress(EOFError):
        while True:
            try:
                line = input("> ").strip()
                line.encode()
            except UnicodeError:
                say("The line is not UTF-8; type it again.")
            else:
                yield line


def converse(options: argparse.Namespace) -> None:
    """Translate each line as soon as it is there.

    Raises:
        LineError: the model cannot be used.
    """
    translations = chosen_translator(options)
    output = Stream(sys.stdout.buffer, "standard output")
    for number, line in enumerate(typed_lines(), start=1):
        try:
            (found,) = translations([line])
        except OverlongError as error:
            say(f"{error.tokens} tokens, more than {error.limit}; shorten the line.")
            continue
        if found.is_cut:
            warn_of_cut(found, "standard input", number)
        output.write(formatted(found, number, options))


def refuse_closed_streams(options: argparse.Namespace) -> None:
    """Refuse to read from standard input, or to write to standard output, where the caller has closed it.

    Raises:
        LineError: naming the argument to give instead.
    """
    for stream, name, way in ((sys.stdin, "input", options.input), (sys.stdout, "output", options.output)):
        if stream is None and way is None:
            raise LineError(f"standard {name} is closed; give --{name}=FILE.")


def is_about_memory(error: BaseException) -> bool:
    """Whether it says that memory is used up; for want of the CPU's, torch and CTranslate2 raise a RuntimeError."""
    says_so = re.search("out of memory|allocate memory|not enough memory", str(error)) is not None
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or says_so


def drop_output() -> None:
    """Let what standard output could not take go nowhere, which Python would try again at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: list[str] | None = None) -> None:
    """The command line; what cannot be translated ends it with one line and exit status 2."""
    options = parse(arguments)
    logging.disable_progress_bar()
    try:
        refuse_closed_streams(options)
        converse(options) if options.interactive else run(options)
    except BrokenPipeError:  # nobody reads on, as with `head`
        drop_output()
        sys.exit(141)
    except KeyboardInterrupt:
        say(f"Interrupted{'; the same command goes on from here' if options.output else ''}.")
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        if not is_about_memory(error):
            raise
        say("The device has too little memory for a batch; give a smaller --batch_tokens.")
        sys.exit(1)
    except (ValueError, OSError) as error:
        say(reason(error))
        if isinstance(error, UnwritableError) and options.output is None:
            drop_output()
        sys.exit(2)


if __name__ == "__main__":
    main()
