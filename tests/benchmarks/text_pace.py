"""The pace of translating and distilling without a search: reading, batching and writing, and their memory.

    python -m tests.benchmarks.text_pace --lines=10000000 --output=texts.json

Each of both jobs is a process that handles invented lines, and reports its resident memory and CPU time on the way.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

from tests.measuring import add_tiny, make_parser, report, resident_mib, seconds_of, traced_megabytes
from training.data.distilled import Distillation, digest_sources
from training.data.pairs import sources_in_order
from training.distill import Progress, write_parts
from training.recipe.fields import DataRecipe
from training.report.results import commit, cpu_name
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.translation.command import LineFormat, translate_lines
from vaswani_transformer.translation.engine import ScoredTokens
from vaswani_transformer.translation.output import ResumableFile
from vaswani_transformer.translation.readers import DigestedInput
from vaswani_transformer.translation.translator import Translator

WINDOW = 2048
FASTEST = 441  # sentences a second, on one core: CMLM in one pass, the fastest model of docs/non-autoregressive.md
OPTIONS = argparse.Namespace(format="text", scores=False, nbest=None, strict=False, progress=False, input=None)
WORDS = "a the one two three old small black dog tree house sea bird sees finds reads by near under with"
MARKS = (0.1, 0.2, 0.5, 1.0)  # of the lines, at which a job reports


class EchoEngine:
    """An engine that returns its sources at once."""

    num_translations, scores = 1, False
    search: ClassVar[dict[str, Any]] = {}

    def __call__(self, sources: list[list[int]]) -> list[list[ScoredTokens]]:
        return [[(source, None)] for source in sources]


Work = Callable[[Any, Path, EchoEngine], None]


def write_inputs(folder: Path, texts: Iterable[str]) -> None:
    """Write texts as lines, and as the sources of pairs."""
    lines_path, pairs_path = folder / "lines.txt", folder / "train.jsonl"
    with lines_path.open("w", encoding="utf-8") as lines, pairs_path.open("w", encoding="utf-8") as pairs:
        for text in texts:
            lines.write(f"{text}\n")
            pairs.write(json.dumps({"translation": {"en": text, "de": text}}) + "\n")


def translate_all(tokenizer: Any, folder: Path, engine: EchoEngine) -> None:
    """Translate the lines of a folder as `vaswani-translate` does with files."""
    output = ResumableFile(folder / "output.txt", 1, {}, [])
    form = LineFormat(OPTIONS)
    with (folder / "lines.txt").open("rb") as source:
        digested = DigestedInput(form.read(source, "lines"), "lines")
        translate_lines(Translator(engine, tokenizer, 1024, sort_lines=WINDOW), digested, output, form)
        output.finish(digested)


def distill_all(tokenizer: Any, folder: Path, engine: EchoEngine) -> None:
    """Distill the sources of a folder, which are read twice, as `training.distill` does in one process."""
    recipe = DataRecipe(kind="json", path=str(folder), train="train.jsonl", source="en", target="de")
    settings = {"window": WINDOW, "max_length": 1024, "min_length_difference": -20, "max_length_difference": 20}
    data = {"source": "en", "target": "de"} | digest_sources(sources_in_order(recipe))
    record = {"teacher": {"digest": ""}, "search": {}, "data": data, "settings": settings}
    distillation = Distillation(folder / "distilled", record)
    distillation.folder.mkdir()
    numbers = list(range(distillation.num_parts))
    translator = Translator(engine, tokenizer, 1024, sort_lines=WINDOW)
    write_parts(translator, recipe, distillation, numbers, Progress(distillation, numbers))


JOBS: dict[str, Work] = {"translate": translate_all, "distill": distill_all}


def microseconds(work: Work, tokenizer: Any, texts: list[str]) -> float:
    """Return the CPU time of some work for each line."""
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), texts)
        seconds = seconds_of(lambda: work(tokenizer, Path(folder), EchoEngine()), time.process_time)
        return 1e6 * seconds / len(texts)


def peak_megabytes(work: Work, tokenizer: Any, texts: list[str]) -> float:
    """Return the most memory that Python's objects take during some work."""
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), texts)
        return traced_megabytes(lambda: work(tokenizer, Path(folder), EchoEngine()))


def measure_texts(tokenizer: Any, texts: list[str], rounds: int) -> dict[str, float]:
    """Measure the time of a line without its search, its share of the fastest model's, and the memory by lines."""
    results, more = {}, 8 * texts[:WINDOW]
    for name, work in JOBS.items():
        own = statistics.median(microseconds(work, tokenizer, texts) for _ in range(rounds))
        results |= {f"{name}_us": own, f"{name}_share": own * FASTEST / 1e6}
        for windows in (2, 8):
            results[f"{name}_mb_{windows}_windows"] = peak_megabytes(work, tokenizer, more[: windows * len(more) // 8])
    return results


class MeteredEngine(EchoEngine):
    """An engine that returns its sources, and reports memory and CPU time after some numbers of lines.

    marks: these numbers, in order.
    """

    def __init__(self, marks: list[int]) -> None:
        self.marks, self.lines, self.start = marks, 0, time.process_time()
        self.reports: list[dict[str, float]] = [{"lines": 0, "cpu_s": 0.0} | resident_mib()]

    def __call__(self, sources: list[list[int]]) -> list[list[ScoredTokens]]:
        self.lines += len(sources)
        if self.marks and self.lines >= self.marks[0]:
            seconds = round(time.process_time() - self.start, 1)
            self.reports.append({"lines": self.marks.pop(0), "cpu_s": seconds} | resident_mib())
        return super().__call__(sources)


def make_lines(count: int) -> Iterator[str]:
    """Yield short sentences of few words, always the same."""
    draw, words = random.Random(0), WORDS.split()
    return (" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(count))


def run_job(name: str, folder: Path, marks: list[int]) -> list[dict[str, float]]:
    """Run a job on the lines of a folder in this process, and return its reports."""
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(make_lines(1000), vocab_size=400)
    engine = MeteredEngine(marks)
    JOBS[name](tokenizer, folder, engine)
    return engine.reports


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run both jobs on many lines, print their reports, and return them."""
    parser = make_parser("tests.benchmarks.text_pace", __doc__)
    parser.add_argument("--lines", type=int, default=10_000_000, help="of each job (10,000,000)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the reports, as JSON")
    add_tiny(parser, lines=5000)
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"commit": commit(), "cpu": cpu_name()}
    marks = [round(options.lines * mark) for mark in MARKS]
    for name in JOBS:
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as process:
            write_inputs(Path(folder), make_lines(options.lines))
            results[name] = process.submit(run_job, name, Path(folder), marks).result()
    report(results, options.output)
    return results


if __name__ == "__main__":
    main()
