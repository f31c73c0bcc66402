"""The command `vaswani-convert`, also `python -m vaswani_transformer.convert`."""

import argparse
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..config import VaswaniTransformerConfig
from ..model import VaswaniTransformerForConditionalGeneration
from ..support.command import MODEL_HELP, CommandParser, UserError, exit_on_user_error, positive_argument, say
from ..support.files import atomic_folder, check_new_folder, write_errors
from ..support.loading import load_model, load_tokenizer
from .ctranslate2_exporter import QUANTIZATIONS, ctranslate2_specs, to_ctranslate2
from .fairseq import from_fairseq
from .foreign import ImportResult, check_type, from_fsmt, from_marian
from .onnx_exporter import onnx_runtime, to_onnx

INPUTS = ("model", "dict", "codes", "config")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="vaswani-convert", description="Convert a model.", allow_abbrev=False)
    formats = parser.add_subparsers(dest="format", required=True, metavar="FORMAT")

    ctranslate2 = formats.add_parser("ctranslate2", help="a model of this package to CTranslate2")
    ctranslate2.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    ctranslate2.add_argument("--quantization", choices=QUANTIZATIONS, help="how weights are stored (float32)")
    ctranslate2.add_argument(
        "--positions",
        type=positive_argument,
        default=1024,
        metavar="N",
        help="tokens of the longest text (1024); ignored with learned positions, whose table has a fixed size",
    )

    onnx = formats.add_parser("onnx", help="a model of this package to ONNX, for transformers.js and onnxruntime")
    onnx.add_argument("model", metavar="MODEL", help=MODEL_HELP)

    for exporter in (ctranslate2, onnx):
        exporter.add_argument("--revision", default="main", help="branch, tag or commit of a model on the Hub (main)")

    fairseq = formats.add_parser("fairseq", help="a checkpoint of fairseq to this package")
    fairseq.add_argument("model", type=Path, metavar="CHECKPOINT", help="the .pt file; no code in it runs")
    fairseq.add_argument("--dict", type=Path, metavar="FILE", help="dict.txt, the vocabulary of source and target")
    fairseq.add_argument(
        "--codes",
        type=Path,
        metavar="FILE",
        help="the merges, or a SentencePiece *.model; without it texts must be split into sub-words",
    )
    fairseq.add_argument("--config", type=Path, metavar="FILE", help="JSON with settings by fairseq's names")

    for name in ("fsmt", "marian"):
        foreign = formats.add_parser(name, help=f"a {name} model of Transformers to this package")
        foreign.add_argument("model", metavar="MODEL", help=MODEL_HELP)
        foreign.add_argument("--without_tokenizer", action="store_true", help="convert the model only")

    for subparser in formats.choices.values():
        subparser.allow_abbrev = False
        subparser.add_argument("output", type=Path, metavar="OUT", help="a new folder")
        subparser.add_argument("--force", action="store_true", help="replace the model in OUT")
    return parser.parse_args(arguments)


def load_for_export(
    options: argparse.Namespace,
) -> tuple[VaswaniTransformerForConditionalGeneration, PreTrainedTokenizerBase]:
    check_type(options.model, VaswaniTransformerConfig.model_type, revision=options.revision)
    tokenizer = load_tokenizer(options.model, revision=options.revision)
    return load_model(options.model, VaswaniTransformerForConditionalGeneration, revision=options.revision), tokenizer


def convert_to_ctranslate2(options: argparse.Namespace) -> None:
    ctranslate2_specs()  # before the model is loaded
    model, tokenizer = load_for_export(options)
    to_ctranslate2(
        model, tokenizer, options.output, options.quantization, positions=options.positions, force=options.force
    )
    say(f"{options.output}: {options.model} for CTranslate2, {options.quantization or 'float32'}")


def convert_to_onnx(options: argparse.Namespace) -> None:
    onnx_runtime()  # before the model is loaded
    exported = to_onnx(*load_for_export(options), options.output, force=options.force)
    say(f"{options.output}: {options.model} for transformers.js and onnxruntime, float32 and int8")
    say(f"Largest difference of logits on random tokens: {exported.difference:.1e} in float32")
    say(f"Most probable next tokens that are equal in int8, on random tokens: {exported.equal_tokens:.0%}")


def import_model(options: argparse.Namespace) -> ImportResult:
    if options.format == "fairseq":
        if options.codes is not None and options.dict is None:
            raise UserError(f"--codes={options.codes}: a tokenizer needs the vocabulary too; add --dict=FILE.")
        return from_fairseq(options.model, options.dict, options.codes, options.config)
    importer = {"fsmt": from_fsmt, "marian": from_marian}[options.format]
    return importer(options.model, with_tokenizer=not options.without_tokenizer)


def save(imported: ImportResult, options: argparse.Namespace) -> None:
    """Save an imported model, and report its difference from the original."""
    errors = write_errors(options.output, "make room, or choose a different folder")
    with atomic_folder(options.output, options.force) as folder, errors:
        imported.model.save_pretrained(folder)
        if imported.tokenizer is not None:
            imported.tokenizer.save_pretrained(folder)
    tokenizer = "without a tokenizer"
    if imported.tokenizer is not None:
        tokenizer = f"with a {type(imported.tokenizer).__name__}"
    say(f"{options.output}: {options.model}, {tokenizer}")
    if imported.difference is None:
        say("Not compared with the original, which cannot run here.")
    else:
        say(f"Largest difference of log-probabilities on random sentences: {imported.difference:.1e}")


def check_inputs(options: argparse.Namespace) -> None:
    """Check that the output folder contains no input of the command, which --force would delete."""
    for name in INPUTS:
        path = getattr(options, name, None)
        if path is None or not options.output.exists():
            continue
        file = Path(path).resolve()
        if file.exists() and any(options.output.samefile(folder) for folder in (file, *file.parents)):
            content = "the model itself" if name == "model" else f"--{name}={path}"
            raise UserError(f"{options.output}: contains {content}; choose a different folder.")


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    logging.disable_progress_bar()
    with exit_on_user_error(ValueError, OSError, ImportError, SafetensorError):
        check_inputs(options)
        check_new_folder(options.output, options.force)
        if options.format == "ctranslate2":
            convert_to_ctranslate2(options)
        elif options.format == "onnx":
            convert_to_onnx(options)
        else:
            save(import_model(options), options)
