"""The pace of the data around a model: steps ordered, batches padded, texts tokenized, streamed and written.

    python -m tests.benchmarks.data_pace --pairs 4500000 --output pace.json

Rates are a second of a process's CPU time, the median of `--rounds`, so other work on the machine counts little.
Lengths and tokens are invented. With `--texts` and `--tokenizer` the first 40,000 lines of a file are tokenized,
streamed by one rank and by two, and translated and distilled by an engine that returns at once.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerBase

from tests.benchmarks.host_pace import FAMILIES, measure_host_step
from tests.benchmarks.stream_pace import measure_streams
from tests.benchmarks.text_pace import measure_texts
from tests.measuring import add_tiny, in_turns, make_parser, medians, report, seconds_of, traced_megabytes
from training.data.tokenizing import token_ids
from vaswani_transformer import PairCollator, PairTokens, TokenBudgetBatchSampler, VaswaniTransformerTokenizer

MEAN_LENGTH, LONGEST, VOCABULARY = 25, 256, 32_000
LINES = 40_000  # of the texts that are tokenized


def cpu_seconds(work: Callable[[], Any], rounds: int) -> float:
    """Return the median CPU time of some work."""
    return statistics.median(seconds_of(work, time.process_time) for _ in range(rounds))


def invent_lengths(pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return log-normal lengths of sources, and of targets in proportion."""
    generator = np.random.default_rng(0)
    sources = np.exp(generator.normal(np.log(MEAN_LENGTH), 0.6, pairs))
    targets = sources * generator.uniform(0.8, 1.3, pairs)
    return tuple(np.clip(side, 2, LONGEST).astype(np.int32) for side in (sources, targets))


def measure_order(pairs: int, rounds: int) -> dict[str, float]:
    """Measure the sampler's constructor, the first batch of an epoch, and the memory that they need."""
    lengths = invent_lengths(pairs)
    constructor = cpu_seconds(lambda: TokenBudgetBatchSampler(*lengths), rounds)
    sampler = TokenBudgetBatchSampler(*lengths)
    first_batch = cpu_seconds(lambda: next(iter(sampler)), rounds)
    megabytes = traced_megabytes(lambda: next(iter(TokenBudgetBatchSampler(*lengths))))
    return {"constructor_s": constructor, "first_batch_s": first_batch, "megabytes": megabytes, "steps": len(sampler)}


def invent_tokens(pairs: int, folder: Path) -> datasets.Dataset:
    """Write the token ids of some pairs to a file, and return them mapped into memory."""
    columns = {}
    for name, lengths in zip(("input_ids", "labels"), invent_lengths(pairs), strict=True):
        offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        ids = np.random.default_rng(1).integers(4, VOCABULARY, offsets[-1], dtype=np.int32)
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
    table, path = pa.table(columns), folder / "tokens.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    return datasets.Dataset.from_file(str(path))


def measure_batches(tokenizer: PreTrainedTokenizerBase, pairs: int, rounds: int) -> dict[str, float]:
    """Measure batches of flat arrays, and the stock collator's of lists, in turns of twenty steps."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = invent_tokens(pairs, Path(folder))
        flat, lists = PairTokens(dataset), dataset.with_format(None)
        steps = list(itertools.islice(TokenBudgetBatchSampler(flat.source_lengths, flat.target_lengths), 20))
        tokens = sum(int(flat.target_lengths[step].sum()) for step in steps)
        collate, stock = PairCollator(tokenizer), DataCollatorForSeq2Seq(tokenizer)
        turns = {
            "flat": lambda: cpu_seconds(lambda: [collate(flat.__getitems__(step)) for step in steps], 1),
            "stock": lambda: cpu_seconds(lambda: [stock(lists.__getitems__(step)) for step in steps], 1),
        }
        seconds = medians(in_turns(turns, rounds))
    return {
        "ms_a_step": 1000 * seconds["flat"] / len(steps),
        "target_tokens_per_s": tokens / seconds["flat"],
        "stock_ms_a_step": 1000 * seconds["stock"] / len(steps),
        "times_stock": seconds["stock"] / seconds["flat"],
    }


def measure_tokenizing(tokenizer: PreTrainedTokenizerBase, texts: list[str], rounds: int) -> dict[str, float]:
    """Measure texts to Arrow's arrays against the library's own encoding, both by one thread, in turns."""
    dataset = datasets.Dataset.from_dict({"source": texts, "target": texts})

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        return dict(zip(("input_ids", "labels"), token_ids(tokenizer, batch["source"], batch["target"]), strict=True))

    def through_map() -> datasets.Dataset:
        return dataset.map(encode, batched=True, remove_columns=["source", "target"], new_fingerprint="pace")

    def library() -> None:
        for first in range(0, len(texts), 1000):
            for _ in ("source", "target"):
                tokenizer(texts[first : first + 1000])

    turns = {"map": lambda: cpu_seconds(through_map, 1), "library": lambda: cpu_seconds(library, 1)}
    seconds = medians(in_turns(turns, rounds))
    tokens = int(PairTokens(through_map()).target_lengths.sum())
    rates = {"target_tokens_per_s_a_core": tokens / seconds["map"]}
    return rates | {"share_of_library_rate": seconds["library"] / seconds["map"]}


def measure_given(tokenizer_path: str, texts: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Measure what needs a tokenizer and texts."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_path)
    results = {"tokenizing": measure_tokenizing(tokenizer, texts, rounds)}
    with tempfile.TemporaryDirectory() as folder:
        results["streams"] = measure_streams(Path(folder), tokenizer_path, texts, rounds)
    return results | {"texts": measure_texts(tokenizer, texts, rounds)}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Print what is measured, and write it as JSON."""
    parser = make_parser("tests.benchmarks.data_pace", __doc__, rounds=3)
    parser.add_argument("--pairs", type=int, default=1_500_000, help="pairs to order (1500000)")
    parser.add_argument("--batch-pairs", type=int, default=200_000, help="pairs with tokens (200000)")
    parser.add_argument("--families", nargs="*", default=[*FAMILIES], choices=[*FAMILIES], help="of steps (all)")
    parser.add_argument("--step-tokens", type=int, default=25_000, help="of each side of these steps (25000)")
    parser.add_argument("--tokenizer", help="a folder or Hub name, to tokenize --texts")
    parser.add_argument("--texts", type=Path, help="a file with a text a line, whose first ones are tokenized")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    add_tiny(parser, pairs=5000, batch_pairs=5000, rounds=1, families=["cmlm"], step_tokens=2000)
    options = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # rates are those of one core
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    tokenizer: Any = VaswaniTransformerTokenizer.train_from_iterator(["a few words"], vocab_size=270)
    results: dict[str, Any] = {
        "pairs": options.pairs,
        "order": measure_order(options.pairs, options.rounds),
        "batches": measure_batches(tokenizer, options.batch_pairs, options.rounds),
    }
    for family in options.families:
        results[f"{family} step, ms"] = measure_host_step(family, options.step_tokens)
    if options.texts is not None and options.tokenizer is not None:
        with options.texts.open(encoding="utf-8") as lines:
            texts = [line.strip() for line in itertools.islice(lines, LINES) if line.strip()]
        results |= measure_given(options.tokenizer, texts, options.rounds)
    report(results, options.output)
    return results


if __name__ == "__main__":
    main()
