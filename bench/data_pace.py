"""The pace of a run's data: pairs read and tokenized by `datasets`, steps ordered, batches padded; and the memory.

`python -m bench.data_pace --pairs 4500000` invents pairs of words, and prints a row for each stage: what a new run does
(read the files, check and tokenize the pairs, into the cache of `datasets`), what the next run does (find them there),
the sampler of batches by token budget, its first batch of an epoch, and padded batches from the mapped tokens, against
those of the stock collator from lists. The first two stages are timed by the clock, since `map` starts processes, the
others by this process's CPU time. Memory is that of this process, now and at most so far.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # `datasets` forks

import datasets.config
import yaml
from transformers import DataCollatorForSeq2Seq

from bench.measuring import Row, make_parser, report, resident_mib
from training.data import load_data
from training.fields import Recipe
from training.recipe import load_recipe
from vaswani_transformer import PairCollator, PairTokens, TokenBudgetBatchSampler

WORDS = 20_000  # that texts are made of
MEAN_LENGTH = 25  # words of a source or target
LONGEST = 200  # words


def write_recipe(folder: Path, options: argparse.Namespace) -> Recipe:
    """Write pairs of invented words, some of which are frequent, and return a recipe of them."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(WORDS)]
    weights = [1 / (rank + 1) for rank in range(WORDS)]
    texts = draw.choices(words, weights, k=1_000_000)
    for split, count in (("train", options.pairs), ("validation", 20)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                length = min(LONGEST, max(1, round(draw.lognormvariate(3.04, 0.6))))
                pair = {}
                for language in ("en", "de"):
                    start = draw.randrange(990_000)
                    size = max(1, round(length * draw.uniform(0.8, 1.3)))
                    pair[language] = " ".join(texts[start : start + size])
                file.write(json.dumps(pair) + "\n")
    files = {"train": "train.jsonl", "validation": "validation.jsonl", "test": None}
    recipe = {"name": "pace", "data": {"kind": "json", "path": str(folder), "source": "en", "target": "de"} | files}
    recipe["tokenizer"] = {"vocab_size": options.vocabulary}
    (folder / "pace.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return load_recipe(str(folder / "pace.yaml"), [f"--output_dir={folder / 'run'}", "--training.steps=1"])


def timed(
    stage: str, call: Callable[[], Any], now: Callable[[], float], tokens: Callable[[Any], int] | None = None
) -> tuple[Row, Any]:
    """Return the row of a stage and the result of the call, of which `tokens` gives the target tokens."""
    start = now()
    result = call()
    seconds = now() - start
    memory = {f"MiB {name}": round(size) for name, size in resident_mib().items()}
    rate = None if tokens is None else tokens(result) / max(seconds, 1e-9)
    return {"stage": stage, "seconds": seconds, "target tokens/s": rate} | memory, result


def main(arguments: list[str] | None = None) -> None:
    tiny = {"pairs": 500, "vocabulary": 400, "budget": 1000, "steps": 2}
    parser = make_parser("data_pace", __doc__, tiny)
    parser.add_argument("--pairs", type=int, default=500_000, help="of the training set (500000)")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="entries of the vocabulary (32000)")
    parser.add_argument("--budget", type=int, default=25_000, help="tokens of each side of a batch (25000)")
    parser.add_argument("--steps", type=int, default=200, help="batches that are padded (200)")
    options = parser.parse_args(arguments)
    datasets.disable_progress_bars()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        recipe = write_recipe(folder, options)

        def tokens_of(data: Any) -> int:
            return int(PairTokens(data.tokens["train"]).target_lengths.sum())

        for stage in ("a new run: vocabulary and tokens", "another run: tokens from the cache"):
            row, data = timed(stage, lambda: load_data(recipe), time.perf_counter, tokens_of)
            rows.append(row)
        pairs = PairTokens(data.tokens["train"])
        lists = data.tokens["train"].with_format(None)
        sides = (pairs.source_lengths, pairs.target_lengths)
        budgets = (options.budget, options.budget)
        now = time.process_time
        row, sampler = timed("order the steps", lambda: TokenBudgetBatchSampler(*sides, *budgets), now)
        rows.append(row)
        rows.append(timed("first batch of an epoch", lambda: next(iter(sampler)), now)[0])
        steps = list(islice(sampler, options.steps))
        count = sum(int(pairs.target_lengths[step].sum()) for step in steps)

        def padded(pairs: Any, collate: Any) -> list[Any]:
            return [collate(pairs.__getitems__(step)) for step in steps]

        for stage, call in (
            ("padded batches", partial(padded, pairs, PairCollator(data.tokenizer))),
            ("stock collator's batches", partial(padded, lists, DataCollatorForSeq2Seq(data.tokenizer))),
        ):
            rows.append(timed(stage, call, now, lambda _: count)[0])
    report(rows, options)


if __name__ == "__main__":
    main()
