"""Options of `vaswani-translate`."""

import argparse
import dataclasses
import hashlib
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ..support.checked_loading import load_config
from ..support.command_line import add_model_argument, positive_argument
from ..support.errors import UserError
from .translator import TooLong

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
MAX_ALPHA = 50  # keeps lp(Y) finite
RESULTS_DO_NOT_DEPEND_ON = {
    "model", "device", "revision", "trust_remote_code", "input", "output", "interactive", "progress", "batch_tokens",
    "sort_lines",
}  # fmt: skip
"""Options outside the compared settings of a record: the model has a digest, and batches change only rounding."""
MODEL_FILES = (
    "*.bin", "*.index.json", "*.model", "*.py", "*.safetensors", "*.spm", "*config.json", "*vocab*",
    "added_tokens.json", "merges.txt", "special_tokens_map.json", "tokenizer.json",
)  # fmt: skip
"""Files of a saved model: weights, settings, code and tokenizer."""


def digest_of_model(folder: Path) -> str:
    """Return the SHA-256 of the names, sizes and contents of `MODEL_FILES` in a folder."""
    sha256 = hashlib.sha256()
    for path in sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)}):
        if path.is_file():
            sha256.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    sha256.update(block)
    return sha256.hexdigest()


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Options for loading a model.

    Attributes:
        model: a folder, or a name on the Hub.
        device: the device; None for an accelerator if available, else the CPU.
        dtype: dtype of products with weights, or "auto".
        revision: revision of a model on the Hub; None for its main branch.
        trust_remote_code: whether to run the model's own code.
    """

    model: str
    device: str | None = None
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Return the fields of this class among a command's options."""
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})

    @property
    def hub_settings(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` for the Hub."""
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}

    def digest(self) -> str:
        """Return the model's identity in a record: a digest of its files, or on the Hub its commit."""
        if (folder := Path(self.model)).is_dir():
            return digest_of_model(folder)
        return f"{self.model}@{getattr(load_config(self.model, **self.hub_settings), '_commit_hash', None)}"


@dataclasses.dataclass(frozen=True)
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

    @property
    def input_name(self) -> str:
        return "standard input" if self.input is None else str(self.input)

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


def add_load_options(group: Any) -> None:
    """Add the options of `LoadOptions`, except for the model."""
    group.add_argument("--device", help="where to run (the accelerator if there is one, else the CPU)")
    dtype_help = "of products with weights; int8 only on a CPU (float32 on a CPU, as saved on other devices)"
    group.add_argument("--dtype", choices=DTYPES, default="auto", help=dtype_help)
    group.add_argument("--revision", help="branch, tag or commit of a model on the Hub (main)")
    group.add_argument("--trust_remote_code", action="store_true", help="run the code that comes with the model")


def add_beam_options(group: Any) -> None:
    group.add_argument("--beams", type=positive_argument, metavar="N", help="beams; 1 for greedy search")
    group.add_argument("--length_penalty", type=float, metavar="ALPHA", help="alpha of lp(Y)")


def add_batch_tokens(group: Any) -> None:
    group.add_argument(
        "--batch_tokens", type=positive_argument, default=2048, metavar="N", help="source tokens at once (2048)"
    )


def add_window(group: Any) -> None:
    text = "lines sorted by length at once (2048)"
    group.add_argument("--window", dest="sort_lines", type=positive_argument, default=2048, metavar="N", help=text)


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
    add_beam_options(search)
    counts = {
        "--iterations": ("N", "passes over an output, for a CMLM"),
        "--length_beam": ("L", "lengths that a non-autoregressive model tries for each line"),
        "--max_length": ("N", "most tokens of an output, with </s>"),
        "--max_source_tokens": ("N", "most tokens of a line (what a table of positions has room for, or 1024)"),
    }
    for name, (metavar, text) in counts.items():
        search.add_argument(name, type=positive_argument, metavar=metavar, help=text)
    search.add_argument(
        "--too_long", choices=get_args(TooLong), default="truncate", help="what happens to a longer line (truncate)"
    )
    machine = parser.add_argument_group("machine")
    add_batch_tokens(machine)
    add_window(machine)
    add_load_options(machine)
    return parser, lines


def parse_arguments(arguments: list[str] | None = None) -> TranslationOptions:
    """Return the options of `vaswani-translate`."""
    description = "Translate a text line by line, in order, by the model's own search."
    parser, lines = make_parser("vaswani-translate", description, "text to translate", "results")
    lines.add_argument("--format", choices=("text", "jsonl"), default="text", help="format of input and output (text)")
    lines.add_argument("--field", metavar="NAME", help='field of JSON Lines with the text: {"NAME": "..."} (text)')
    lines.add_argument("--source", metavar="LANGUAGE", help='or its language, in {"translation": {"LANGUAGE": "..."}}')
    lines.add_argument(
        "--scores",
        action="store_true",
        help="write the score that ranks translations, such as log P(Y|X) / lp(Y), and a tab before each",
    )
    lines.add_argument(
        "--nbest", type=positive_argument, metavar="N", help="write the N best, each after its line number and a tab"
    )
    return TranslationOptions(**vars(parser.parse_args(arguments)))
