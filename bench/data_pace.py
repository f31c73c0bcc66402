"""Time and memory of a run's data: pairs read and tokenized by `datasets`, steps ordered, batches padded.

`python -m bench.data_pace --pairs 4500000` invents pairs of words, and prints a row for each stage. A new run reads the
files, checks and tokenizes the pairs, and fills the cache of `datasets`; the next run finds the tokens there. Then come
the sampler of batches by token budget, its first batch of an epoch, and padded batches: those of our collator from the
mapped tokens, and those of Transformers' collator from lists. The first two stages are timed by the clock, since `map`
starts processes, the others by this process's CPU time. Memory is that of this process, now and at most so far.
"""

import argparse
import json
import os
import random
import string
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # `datasets` forks

import datasets.config
import yaml
from transformers import DataCollatorForSeq2Seq

from bench.measuring import Row, make_parser, report, resident_mib
from training.data import Data, load_data
from training.recipe import Recipe, load_recipe
from vaswani_transformer import PairCollator, PairTokens, TokenBudgetBatchSampler

WORDS = 20_000  # that texts are made of
MEAN_LENGTH = 25  # words of a source or target
LONGEST = 200  # words


def write_recipe(folder: Path, options: argparse.Namespace) -> Recipe:
    """Write pairs of invented words, some of which are frequent, and return a recipe of them."""
    # A long text of words, whose frequencies fall as those of a language do.
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(WORDS)]
    weights = [1 / (rank + 1) for rank in range(WORDS)]
    text = draw.choices(words, weights, k=1_000_000)

    # Each sentence is a piece of it.
    for split, count in (("train", options.pairs), ("validation", 20)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                length = min(LONGEST, max(1, round(draw.lognormvariate(3.04, 0.6))))
                pair = {}
                for language in ("en", "de"):
                    start = draw.randrange(990_000)
                    size = max(1, round(length * draw.uniform(0.8, 1.3)))
                    pair[language] = " ".join(text[start : start + size])
                file.write(json.dumps(pair) + "\n")

    data = {"kind": "json", "path": str(folder), "source": "en", "target": "de"}
    data.update(train="train.jsonl", validation="validation.jsonl", test=None)
    recipe = {"name": "pace", "data": data, "tokenizer": {"vocab_size": options.vocabulary}}
    (folder / "pace.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return load_recipe(str(folder / "pace.yaml"), [f"--output_dir={folder / 'run'}", "--training.steps=1"])


class Stages:
    """The rows of the stages that were timed, in order."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def time(self, stage: str, call: Callable[[], Any], now: Callable[[], float], tokens: int | None = None) -> Any:
        """Time a call, add a row, and return the call's result; `tokens` are target tokens that it handles."""
        start = now()
        result = call()
        seconds = now() - start
        row: Row = {"stage": stage, "seconds": seconds}
        row["target tokens/s"] = None if tokens is None else tokens / max(seconds, 1e-9)
        for name, size in resident_mib().items():
            row[f"MiB {name}"] = round(size)
        self.rows.append(row)
        return result


def time_loading(recipe: Recipe, stages: Stages) -> Data:
    """Time a new run's data, then the next run's, and return them."""
    for stage in ("a new run: vocabulary and tokens", "the next run: tokens from the cache"):
        data = stages.time(stage, lambda: load_data(recipe), time.perf_counter)
        row = stages.rows[-1]
        row["target tokens/s"] = int(PairTokens(data.tokens["train"]).target_lengths.sum()) / row["seconds"]
    return data


def time_batches(data: Data, budget: int, count: int, stages: Stages) -> None:
    """Time the sampler, and `count` padded batches of our collator and of Transformers'."""
    now = time.process_time
    tokens = data.tokens["train"]
    pairs = PairTokens(tokens)
    lengths = (pairs.source_lengths, pairs.target_lengths)
    sampler = stages.time("order the steps", lambda: TokenBudgetBatchSampler(*lengths, budget, budget), now)
    stages.time("first batch of an epoch", lambda: next(iter(sampler)), now)

    steps = list(islice(sampler, count))
    target_tokens = sum(int(pairs.target_lengths[step].sum()) for step in steps)

    def padded(rows: Any, collate: Callable[[Any], Any]) -> list[Any]:
        return [collate(rows.__getitems__(step)) for step in steps]

    stages.time("padded batches", lambda: padded(pairs, PairCollator(data.tokenizer)), now, target_tokens)
    lists = tokens.with_format(None)
    stock = DataCollatorForSeq2Seq(data.tokenizer)
    stages.time("stock collator's batches", lambda: padded(lists, stock), now, target_tokens)


def main(arguments: list[str] | None = None) -> None:
    tiny = {"pairs": 500, "vocabulary": 400, "budget": 1000, "steps": 2}
    parser = make_parser("data_pace", __doc__, tiny)
    parser.add_argument("--pairs", type=int, default=500_000, help="pairs of the training set (500000)")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="entries of the vocabulary (32000)")
    parser.add_argument("--budget", type=int, default=25_000, help="tokens on each side of a batch (25000)")
    parser.add_argument("--steps", type=int, default=200, help="batches to pad (200)")
    options = parser.parse_args(arguments)
    datasets.disable_progress_bars()
    stages = Stages()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        data = time_loading(write_recipe(folder, options), stages)
        time_batches(data, options.budget, options.steps, stages)
    report(stages.rows, options)


if __name__ == "__main__":
    main()
