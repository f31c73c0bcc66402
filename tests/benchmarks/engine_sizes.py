"""Size on disk of one model's weights in the form that each engine loads.

`python -m tests.benchmarks.engine_sizes --shapes base small` writes a model of random weights as each engine stores it,
and prints one JSON object: MB (10^6 bytes) of the files. `prepare_for_inference` has no form of its own: it packs the
weights of the safetensors file while it loads them.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from tests.benchmarks.train_against_marian import SHAPES, make_model
from tests.measuring import add_tiny, make_parser, report
from vaswani_transformer.convert import to_ctranslate2


def write_forms(model: Any, folder: Path) -> None:
    """Write a model in each form, in a folder of the form's name."""
    model.save_pretrained(folder / "safetensors float32")
    for quantization in ("float32", "int8"):
        to_ctranslate2(model, None, folder / f"CTranslate2 {quantization}", quantization)
    model.to(torch.bfloat16).save_pretrained(folder / "safetensors bfloat16")


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def sizes_of(shape: str) -> dict[str, float]:
    """Return the MB of each form of a model of this shape."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_forms(make_model("ours", shape).eval(), Path(folder))
        return {path.name: megabytes(path) for path in sorted(Path(folder).iterdir())}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("tests.benchmarks.engine_sizes", __doc__)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["base", "small"])
    add_tiny(parser, shapes=["tiny"])
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    report({shape: sizes_of(shape) for shape in options.shapes})


if __name__ == "__main__":
    main()
