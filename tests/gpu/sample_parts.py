"""Parts for the tests of the runner, each with another ending."""

import importlib
import os
import time
from collections.abc import Iterator

import torch

from tests.gpu.runner import Part, Row, Setting, SkipPart


def good(setting: Setting) -> Iterator[Row]:
    yield {"compared": "sums", "difference": 0.001, "bound": 0.01}
    yield {"compared": "products", "difference": 0.0, "bound": 0.01}


def far(setting: Setting) -> Iterator[Row]:
    yield {"compared": "sums", "difference": 0.5, "bound": 0.01}
    yield {"compared": "products", "difference": float("nan"), "bound": 0.01}


def raising(setting: Setting) -> Iterator[Row]:
    yield {"ms": 1.5}
    raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")


def skipping(setting: Setting) -> Iterator[Row]:
    raise SkipPart("there is no such kernel")
    yield {}


def exhausting(setting: Setting) -> Iterator[Row]:
    yield {"ms": 1.5}
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nand more lines")


def hanging(setting: Setting) -> Iterator[Row]:
    yield {"ms": 1.5}
    time.sleep(600)


def crashing(setting: Setting) -> Iterator[Row]:
    os._exit(7)
    yield {}


def writing(setting: Setting) -> Iterator[Row]:
    print("what a library prints")
    (setting.folder / "file").write_text("text")
    yield {"ms": 2.5}


def importing(setting: Setting) -> Iterator[Row]:
    importlib.import_module("no_such_package")
    yield {}


def importing_ours(setting: Setting) -> Iterator[Row]:
    importlib.import_module("vaswani_transformer.gone")
    yield {}


def parts() -> list[Part]:
    return [
        Part("good", "Correctness", good),
        Part("far", "Correctness", far),
        Part("raising", "Speed", raising),
        Part("skipping", "Speed", skipping),
        Part("lacking", "Speed", good, needs=lambda setting: f"{setting.device} is not enough"),
        Part("exhausting", "Speed", exhausting),
        Part("hanging", "Speed", hanging, limit=2),
        Part("crashing", "Speed", crashing),
        Part("writing", "Speed", writing),
        Part("importing", "Speed", importing),
        Part("importing ours", "Speed", importing_ours),
    ]
