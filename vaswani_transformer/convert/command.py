"""The command `vaswani-convert`, also `python -m vaswani_transformer.convert`: models into and out of other tools."""

import argparse
import sys
from pathlib import Path
from typing import cast

from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.utils import logging

from ..checked_loading import load_model, load_tokenizer, loading, new_folder, refuse_folder, refuse_missing_folder
from ..command_line import ArgumentParser, positive_int
from ..config import VaswaniTransformerConfig
from ..model import VaswaniTransformerForConditionalGeneration
from ..translate.output import reason
from .ctranslate2_exporter import QUANTIZATIONS, to_ctranslate2
from .fairseq import Import, from_fairseq, from_fsmt, from_marian


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command's arguments."""
    parser = ArgumentParser(prog="vaswani-convert", description="Convert a model.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    engine = kinds.add_parser("ctranslate2", help="a model of this package to CTranslate2")
    engine.add_argument("model", metavar="MODEL", help="a folder with a model and its tokenizer, or a name on the Hub")
    engine.add_argument("output", type=Path, metavar="OUT", help="a new folder")
    engine.add_argument("--quantization", choices=QUANTIZATIONS, help="how weights are stored (float32)")
    engine.add_argument(
        "--positions", type=positive_int, default=1024, metavar="N", help="the longest text's tokens (1024)"
    )
    engine.add_argument("--revision", default="main", help="of a model on the Hub")
    engine.set_defaults(run=convert_to_ctranslate2)
    fairseq = kinds.add_parser("fairseq", help="a checkpoint of fairseq to this package")
    fairseq.add_argument("model", type=Path, metavar="CHECKPOINT", help="the .pt file; no code in it is run")
    fairseq.add_argument("output", type=Path, metavar="OUT", help="a new folder")
    fairseq.add_argument("--dict", type=Path, metavar="FILE", help="dict.txt, the vocabulary of source and target")
    fairseq.add_argument(
        "--codes", type=Path, metavar="FILE", help="the merges; else texts are split by them beforehand"
    )
    fairseq.add_argument("--config", type=Path, metavar="FILE", help="JSON, settings by fairseq's names")
    fairseq.set_defaults(run=convert_from_fairseq)
    for name, read in (("fsmt", from_fsmt), ("marian", from_marian)):
        kind = kinds.add_parser(name, help=f"a {name} model of Transformers to this package")
        kind.add_argument(
            "model", metavar="MODEL", help="a folder with a model and its tokenizer, or a name on the Hub"
        )
        kind.add_argument("output", type=Path, metavar="OUT", help="a new folder")
        kind.add_argument("--without_tokenizer", action="store_true", help="convert the model alone")
        kind.set_defaults(run=convert_from_transformers, read=read)
    for kind in kinds.choices.values():
        kind.add_argument("--force", action="store_true", help="replace the model in OUT")
    return parser.parse_args(arguments)


def refuse_itself(options: argparse.Namespace) -> None:
    """Refuse to replace a model by what is made of it."""
    if options.output.exists() and Path(options.model).exists() and options.output.samefile(options.model):
        raise ValueError(f"{options.output}: the model itself; name another folder.")


def refuse_other_kinds(model: str, revision: str) -> None:
    """Refuse a model that is none of this package's, before it is loaded as if it were one."""
    refuse_missing_folder(model)
    with loading(model):
        kind = AutoConfig.from_pretrained(model, revision=revision).model_type
    if kind != VaswaniTransformerConfig.model_type:
        raise ValueError(f"{model}: a model of type {kind!r}, not {VaswaniTransformerConfig.model_type!r}.")


def convert_to_ctranslate2(options: argparse.Namespace) -> None:
    """`vaswani-convert ctranslate2 MODEL OUT`."""
    refuse_other_kinds(options.model, options.revision)
    tokenizer = load_tokenizer(options.model, revision=options.revision)
    model = load_model(options.model, VaswaniTransformerForConditionalGeneration, revision=options.revision)
    to_ctranslate2(
        cast(VaswaniTransformerForConditionalGeneration, model),
        tokenizer,
        options.output,
        options.quantization,
        positions=options.positions,
        force=options.force,
    )
    sys.stdout.write(f"{options.output}: {options.model} for CTranslate2, {options.quantization or 'float32'}\n")


def convert_from_fairseq(options: argparse.Namespace) -> None:
    """`vaswani-convert fairseq CHECKPOINT OUT`."""
    if options.codes is not None and options.dict is None:
        raise ValueError(f"--codes={options.codes}: a tokenizer needs the vocabulary too; give --dict as well.")
    save(from_fairseq(options.model, options.dict, options.codes, options.config), options)


def convert_from_transformers(options: argparse.Namespace) -> None:
    """`vaswani-convert fsmt MODEL OUT` and `vaswani-convert marian MODEL OUT`."""
    refuse_missing_folder(options.model)
    with loading(options.model):
        found = AutoConfig.from_pretrained(options.model).model_type
    if found != options.kind:
        raise ValueError(f"{options.model}: a model of type {found!r}, not {options.kind!r}.")
    save(options.read(options.model, with_tokenizer=not options.without_tokenizer), options)


def save(found: Import, options: argparse.Namespace) -> None:
    """Write what was imported, and say how near it is to the original."""
    with new_folder(options.output, options.force) as folder:
        found.model.save_pretrained(folder)
        if found.tokenizer is not None:
            found.tokenizer.save_pretrained(folder)
    tokenizer = "without a tokenizer" if found.tokenizer is None else f"with a {type(found.tokenizer).__name__}"
    sys.stdout.write(f"{options.output}: {options.model}, {tokenizer}\n")
    if found.difference is None:
        sys.stdout.write("No original to compare it with.\n")
    else:
        sys.stdout.write(
            f"Largest difference on random sentences: {found.difference:.1e}, of log-probabilities down to "
            f"-{found.largest:.1f}\n"
        )


def main(arguments: list[str] | None = None) -> None:
    """The command line; what cannot be converted ends it with one line and exit status 2."""
    options = parse(arguments)
    logging.disable_progress_bar()
    try:
        refuse_itself(options)
        refuse_folder(options.output, options.force)
        options.run(options)
    except (ValueError, OSError, ImportError, SafetensorError) as error:
        sys.stderr.write(f"{reason(error)}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
