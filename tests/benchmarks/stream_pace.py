"""The pace of a stream: pairs a second that ranks read, tokenize, sort and pad together, each on one core."""

import multiprocessing
import os
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from transformers import AutoTokenizer

from tests.benchmarks.text_pace import write_inputs
from tests.measuring import in_turns, median_ratio, medians, seconds_of
from training.data.stream import PairStream
from training.data.tokenizing import make_encode_fn
from training.recipe.fields import DataRecipe
from vaswani_transformer.batching import PairCollator, TokenBudgetBatches

BUFFERS = 4  # of a stream


def recipe_of(folder: Path) -> DataRecipe:
    """Return the data of a recipe that streams the pairs."""
    return DataRecipe(kind="json", path=str(folder), train="train.jsonl", streaming=True, too_long="drop")


def rank_seconds(folder: Path, tokenizer_path: str, pairs: int, port: int, num_processes: int, rank: int) -> float:
    """Return the CPU seconds in which a rank gets its padded batches of an epoch."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core
    recipe = recipe_of(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_path)
    store = TCPStore("localhost", port, wait_for_workers=False) if num_processes > 1 else None
    options: dict[str, Any] = {"buffer_size": pairs // BUFFERS, "max_length": recipe.max_length, "too_long": "drop"}
    batches = TokenBudgetBatches(
        PairStream(recipe, 0),
        num_processes=num_processes,
        rank=rank,
        encode=make_encode_fn(tokenizer, recipe),
        store=store,
        **options,
    )
    collate, start = PairCollator(tokenizer), time.process_time()
    for batch in batches.batches_of(0):
        collate(batch)
    return time.process_time() - start


def measure_streams(folder: Path, tokenizer_path: str, texts: list[str], rounds: int) -> dict[str, float]:
    """Measure one rank and two, in turns; the rate of two is that of the slower one, on a core for each.

    Two processes at a time measure one rank too, since two slow each other down on one processor.
    """
    write_inputs(folder, texts)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:

        def slower_one(num_processes: int) -> float:
            server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            arguments = (folder, tokenizer_path, len(texts), server.port, num_processes)
            ranks = [pool.submit(rank_seconds, *arguments, rank % num_processes) for rank in range(2)]
            return max(rank.result() for rank in ranks)

        turns = {"one_rank": lambda: slower_one(1), "two_ranks": lambda: slower_one(2)}
        seconds = in_turns(turns, rounds)
    read = seconds_of(lambda: deque(PairStream(recipe_of(folder), 0), maxlen=0), time.process_time)
    rates = {name: len(texts) / taken for name, taken in ({"read_only": read} | medians(seconds)).items()}
    ratio = median_ratio(seconds["one_rank"], seconds["two_ranks"])
    return {f"pairs_per_s_{name}": rate for name, rate in rates.items()} | {"times_one_rank": ratio}
