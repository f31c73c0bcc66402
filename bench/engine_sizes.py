"""Size on disk of one model's weights in the form that each engine loads.

`python -m bench.engine_sizes --shapes base small` writes a model of random weights as each engine stores it,
and prints a row a shape: MB (10^6 bytes) of the files. `prepare_for_inference` writes no other form: it packs the
weights of the safetensors file while it loads them.
"""

import tempfile
from pathlib import Path

import torch
from transformers.utils import logging

from bench.measuring import SHAPES, make_parser, report
from bench.train_against_marian import make_model
from vaswani_transformer.convert import to_ctranslate2


def sizes_of(shape: str) -> dict[str, float]:
    """Return the MB of each form of a model of this shape."""
    torch.manual_seed(0)
    model = make_model("ours", shape).eval()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "safetensors float32")
        for quantization in ("float32", "int8"):
            to_ctranslate2(model, None, folder / f"CTranslate2 {quantization}", quantization)
        model.to(torch.bfloat16).save_pretrained(folder / "safetensors bfloat16")
        files = {form.name: [each for each in form.rglob("*") if each.is_file()] for form in sorted(folder.iterdir())}
        return {form: sum(file.stat().st_size for file in each) / 1e6 for form, each in files.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("engine_sizes", __doc__, {"shapes": ["tiny"]})
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["base", "small"])
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    report([{"MB of": shape} | sizes_of(shape) for shape in options.shapes], options)


if __name__ == "__main__":
    main()
