"""The pace of translating and distilling without a search: reading, batching and writing, and their memory."""

import argparse
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from training.data.distilled import Distillation, digest_sources
from training.distill import Progress, write_parts
from training.recipe.fields import DataRecipe
from vaswani_transformer.translation.command import LineFormat, translate_lines
from vaswani_transformer.translation.engine import ScoredTokens
from vaswani_transformer.translation.output import ResumableFile
from vaswani_transformer.translation.readers import DigestedInput
from vaswani_transformer.translation.translator import Translator

WINDOW = 2048
FASTEST = 441  # sentences a second, on one core: CMLM in one pass, the fastest model of docs/non-autoregressive.md
OPTIONS = argparse.Namespace(format="text", scores=False, nbest=None, strict=False, progress=False, input=None)


Work = Callable[[Any, list[str], Path], None]


class EchoEngine:
    """An engine that returns its sources at once."""

    num_translations, scores = 1, False

    def __call__(self, sources: list[list[int]]) -> list[list[ScoredTokens]]:
        return [[(source, None)] for source in sources]


def translate_all(tokenizer: Any, texts: list[str], folder: Path) -> None:
    """Translate lines as `vaswani-translate` does with files."""
    lines = (f"{text}\n".encode() for text in texts)
    output = ResumableFile(folder / "output.txt", 1, {}, [])
    form = LineFormat(OPTIONS)
    digested = DigestedInput(form.read(cast(Any, lines), "lines"), "lines")
    translate_lines(Translator(EchoEngine(), tokenizer, 1024, sort_lines=WINDOW), digested, output, form)
    output.finish(digested)


def distill_all(tokenizer: Any, texts: list[str], folder: Path) -> None:
    """Distill sources as `training.distill` does in one process."""
    recipe = DataRecipe(kind="json", path=str(folder), train="train.jsonl", source="en", target="de")
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"translation": {"en": text, "de": text}}) + "\n" for text in texts)
    settings = {"window": WINDOW, "max_length": 1024, "min_length_difference": -20, "max_length_difference": 20}
    data = {"source": "en", "target": "de"} | digest_sources(texts)
    record = {"teacher": {"digest": ""}, "search": {}, "data": data, "settings": settings}
    distillation = Distillation(folder / "distilled", record)
    distillation.folder.mkdir()
    numbers = list(range(distillation.num_parts))
    translator = Translator(EchoEngine(), tokenizer, 1024, sort_lines=WINDOW)
    write_parts(translator, recipe, distillation, numbers, Progress(distillation, numbers))


def microseconds(work: Work, tokenizer: Any, texts: list[str]) -> float:
    """Return the CPU time of some work for each line."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        work(tokenizer, texts, Path(folder))
        return 1e6 * (time.process_time() - start) / len(texts)


def peak_megabytes(work: Work, tokenizer: Any, texts: list[str]) -> float:
    """Return the most memory that Python's objects take during some work."""
    with tempfile.TemporaryDirectory() as folder:
        tracemalloc.start()
        work(tokenizer, texts, Path(folder))
        megabytes = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        return megabytes


def measure_texts(tokenizer: Any, texts: list[str], rounds: int) -> dict[str, float]:
    """Measure the time of a line without its search, its share of the fastest model's, and the memory by lines."""
    results, more = {}, 8 * texts[:WINDOW]
    for name, work in (("translate", translate_all), ("distill", distill_all)):
        own = statistics.median(microseconds(work, tokenizer, texts) for _ in range(rounds))
        results |= {f"{name}_us": own, f"{name}_share": own * FASTEST / 1e6}
        for windows in (2, 8):
            results[f"{name}_mb_{windows}_windows"] = peak_megabytes(work, tokenizer, more[: windows * len(more) // 8])
    return results
