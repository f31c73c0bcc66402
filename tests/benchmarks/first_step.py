"""The time from the training command to the end of its first step, with many pairs: in the first run and the second.

    python -m tests.benchmarks.first_step --pairs 4500000 --output first_step.json

The first run tokenizes, by all cores; the second finds the tokens on the disk. Beside them stands the time in which the
tokenizers library encodes the same texts by its own threads. Texts are invented: three of 20,000 phrases each.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.benchmarks.host_pace import TINY
from tests.measuring import add_tiny, make_parser, report, seconds_of
from vaswani_transformer import VaswaniTransformerTokenizer

PHRASES, PARTS, BATCH = 20_000, 3, 10_000
VOCABULARY = 16_000


def invent_phrases(generator: np.random.Generator) -> list[str]:
    """Return phrases of about seven words, of which a few are frequent, as in a language."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(generator.choice(letters, length)) for length in generator.integers(2, 9, VOCABULARY)]
    counts = generator.integers(4, 11, PHRASES)
    return [" ".join(words[min(int(rank), VOCABULARY) - 1] for rank in generator.zipf(1.2, count)) for count in counts]


def invent_texts(phrases: list[str], pairs: int, seed: int) -> Iterator[list[str]]:
    """Yield batches of texts of both sides, one after the other."""
    generator = np.random.default_rng(seed)
    for first in range(0, pairs, BATCH):
        rows = generator.integers(0, PHRASES, (2 * min(BATCH, pairs - first), PARTS))
        yield [" ".join(phrases[number] for number in row) for row in rows.tolist()]


def write_run(folder: Path, pairs: int) -> tuple[Any, list[str], list[str]]:
    """Write the pairs, a vocabulary and a recipe; return tokenizer, phrases and command."""
    phrases = invent_phrases(np.random.default_rng(0))
    for split, count in (("train", pairs), ("validation", 20)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for texts in invent_texts(phrases, count, seed=len(split)):
                sides = zip(texts[::2], texts[1::2], strict=True)
                file.writelines(json.dumps({"translation": {"en": en, "de": de}}) + "\n" for en, de in sides)
    tokenizer: Any = VaswaniTransformerTokenizer.train_from_iterator(phrases, vocab_size=VOCABULARY)
    tokenizer.save_pretrained(folder / "tokenizer")
    data = {"kind": "json", "path": str(folder), "train": "train.jsonl", "validation": "validation.jsonl", "test": None}
    recipe = {"name": "first-step", "data": data, "model": TINY, "training": {"steps": 1, "evaluation_steps": 1}}
    recipe["tokenizer"] = {"path": str(folder / "tokenizer")}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return tokenizer, phrases, [sys.executable, "-m", "training.train", str(folder / "recipe.yaml")]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print what is measured, and write it as JSON."""
    parser = make_parser("tests.benchmarks.first_step", __doc__)
    parser.add_argument("--pairs", type=int, default=4_500_000, help="pairs of the training set (4500000)")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    add_tiny(parser, pairs=200)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder, seconds = Path(name), {}
        tokenizer, phrases, command = write_run(folder, options.pairs)
        environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache")}
        for run in ("first_run", "second_run"):
            given = [*command, f"--output_dir={folder / run}"]
            train = functools.partial(subprocess.run, given, check=True, env=environment)
            seconds[run] = seconds_of(train, time.perf_counter)
        texts_of = invent_texts(phrases, options.pairs, seed=len("train"))
        encodings = (functools.partial(tokenizer, texts) for texts in texts_of)
        seconds["library"] = sum(seconds_of(encode, time.perf_counter) for encode in encodings)
    results = {"pairs": options.pairs} | {f"{name}_s": value for name, value in seconds.items()}
    results["times_library"] = seconds["first_run"] / seconds["library"]
    report(results, options.output)
    return results


if __name__ == "__main__":
    main()
