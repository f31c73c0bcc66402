"""What the benchmarks and the GPU command share: arguments, rounds, memory, reports, pairs, sources, searches, Marian.

It needs none of the extras. B batch, S source.
"""

import argparse
import ctypes
import json
import random
import re
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, MarianConfig, MarianMTModel, TrainerCallback

from vaswani_transformer import VaswaniTransformerConfig
from vaswani_transformer.support.command_line import ArgumentParser, positive_argument

T = TypeVar("T")
Pairs = list[dict[str, Tensor]]
TARGET_LENGTH = 27  # tokens that every search writes
MEAN_LENGTH = 25  # tokens of a side of a pair


def make_parser(module: str, description: str | None, rounds: int | None = None, threads: int | None = None) -> Any:
    """Return the parser of a command, with the options that several have, where a default is given."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(prog=f"python -m {module}", description=description, formatter_class=layout)
    if rounds is not None:
        parser.add_argument("--rounds", type=positive_argument, default=rounds, help=f"of each measurement ({rounds})")
    if threads is not None:
        parser.add_argument("--threads", type=positive_argument, default=threads, help=f"of a CPU ({threads})")
    return parser


def add_tiny(parser: argparse.ArgumentParser, **sizes: Any) -> None:
    """Add `--tiny`, which gives options the sizes of a run of seconds; options after it replace them."""

    class Tiny(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
            vars(namespace).update(sizes)

    text = "tiny sizes, for a test that the command runs"
    parser.add_argument("--tiny", action=Tiny, nargs=0, default=argparse.SUPPRESS, help=text)


def report(results: Any, output: Path | None = None) -> None:
    """Print results as JSON, and write them to a file if one is given."""
    text = json.dumps(results, indent=2, default=str)
    print(text, flush=True)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")


def clock(threads: int | None = None) -> Callable[[], float]:
    """Return the clock of this process: CPU time on one thread, which other work changes least, else clock time."""
    return time.process_time if (threads or torch.get_num_threads()) == 1 else time.perf_counter


def seconds_of(call: Callable[[], Any], now: Callable[[], float], settle: Callable[[], None] = lambda: None) -> float:
    """Return the seconds of a call; `settle` waits for a device."""
    settle()
    start = now()
    call()
    settle()
    return now() - start


def traced_megabytes(call: Callable[[], Any]) -> float:
    """Return the most memory that Python's objects take during a call."""
    tracemalloc.start()
    call()
    megabytes = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return megabytes


def rotated(items: list[T], turn: int) -> list[T]:
    """Return the items of a turn: each turn begins with the next one."""
    first = turn % len(items)
    return items[first:] + items[:first]


def in_turns(calls: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return the results of all calls by name, round by round."""
    results: dict[str, list[T]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in rotated(list(calls), turn):
            results[name].append(calls[name]())
    return results


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in times.items()}


def median_ratio(over: list[float], under: list[float]) -> float:
    """Return the median of the ratios of two lists, one by one."""
    return statistics.median(one / other for one, other in zip(over, under, strict=True))


def resident_mib(pid: int | str = "self") -> dict[str, float]:
    """Return the resident memory of a process, and its peak since the process began; nothing of one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    sizes = {name: re.search(rf"Vm{field}:\s+(\d+) kB", status) for name, field in (("now", "RSS"), ("peak", "HWM"))}
    return {f"{name}_MiB": round(int(size[1]) / 1024, 1) for name, size in sizes.items() if size is not None}


def peak_mib(call: Callable[[], object]) -> float | None:
    """Return the peak of a call above this process's memory before it; None where the system does not report it."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise the call could use memory that is freed but kept
        Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    except OSError:
        return None
    before = resident_mib()["now_MiB"]
    call()
    return max(0.0, resident_mib()["peak_MiB"] - before)


class StepClock(TrainerCallback):
    """Measures the seconds of the steps after the first `warm_up` ones, to step `last` or to the end.

    `settle` waits for a device.
    """

    def __init__(self, warm_up: int, settle: Callable[[], None] = lambda: None, last: int | None = None) -> None:
        self.warm_up, self.settle, self.last = warm_up, settle, last
        self.start = self.seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.warm_up:
            self.settle()
            self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == (self.last or state.max_steps):
            self.settle()
            self.seconds = time.perf_counter() - self.start


def marian_like(config: VaswaniTransformerConfig) -> nn.Module:
    """Return Transformers' MarianMTModel of the same shape, with random weights."""
    sides: dict[str, Any] = {
        f"{side}_{key}": value
        for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers))
        for key, value in (("attention_heads", config.num_heads), ("ffn_dim", config.d_ff), ("layers", layers))
    }
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    same = {name: getattr(config, name) for name in ("vocab_size", "d_model", "dropout")}
    other = {"activation_function": "relu", "scale_embedding": True, "max_position_embeddings": 512}
    settings: dict[str, Any] = {**sides, **ids, **same, **other, "forced_eos_token_id": None}
    return MarianMTModel(MarianConfig(**settings))


def make_pairs(count: int, vocab_size: int) -> Pairs:
    """Return pairs of random tokens; lengths are log-normal with mean 25, and so is a target's ratio to its source."""
    generator, sigma, ratio_sigma = torch.Generator().manual_seed(0), 0.6, 0.2
    normal = torch.randn(2, count, generator=generator, dtype=torch.float64)
    sources = MEAN_LENGTH * (sigma * normal[0] - sigma**2 / 2).exp()
    targets = sources * (ratio_sigma * normal[1] - ratio_sigma**2 / 2).exp()
    sides = []
    for lengths in (sources, targets):
        sizes = lengths.round().long().clamp(min=3).tolist()
        texts = torch.randint(4, vocab_size, (sum(sizes),), generator=generator).split(sizes)
        for text in texts:
            text[-1] = 2
        sides.append(texts)
    return [{"input_ids": source, "labels": target} for source, target in zip(*sides, strict=True)]


def random_sources(count: int, vocab_size: int) -> dict[str, Tensor]:
    """Return `count` random sources of 22 to 28 tokens, padded (B, S), and their mask."""
    generator = random.Random(count)
    rows = [[generator.randrange(4, vocab_size) for _ in range(generator.randint(22, 28))] for _ in range(count)]
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=1)
    return {"input_ids": tokens, "attention_mask": tokens.ne(1).long()}


def endless_search(num_beams: int, vocab_size: int, length: int = TARGET_LENGTH) -> GenerationConfig:
    """Return a search that writes `length` tokens, because its end token is outside of the vocabulary."""
    ids = {"decoder_start_token_id": 0, "pad_token_id": 1, "eos_token_id": vocab_size}
    return GenerationConfig(max_new_tokens=length, num_beams=num_beams, do_sample=False, **ids)


def endless_ctranslate2(translator: Any, batch: dict[str, Tensor], num_beams: int, length: int) -> Callable[[], int]:
    """Return the same search of CTranslate2, which returns the tokens that it writes."""
    rows: Iterator[tuple[Tensor, Tensor]] = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    texts = [[str(token) for token in row[is_token].tolist()] for row, is_token in rows]
    options = {"beam_size": num_beams, "max_decoding_length": length, "min_decoding_length": length}
    return lambda: min(len(result.hypotheses[0]) for result in translator.translate_batch(texts, **options))
