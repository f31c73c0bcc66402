"""What the measuring commands share: options, tables, rounds, memory, random pairs and sources, searches, Marian.

It needs none of the extras. B batch, S source, T target.
"""

import argparse
import ctypes
import json
import math
import platform
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from vaswani_transformer import VaswaniTransformerConfig

T = TypeVar("T")
Row = dict[str, Any]
Pairs = list[dict[str, Tensor]]
ROOT = Path(__file__).resolve().parent.parent
TARGET_LENGTH = 27  # tokens that every search writes
MEAN_LENGTH = 25  # tokens of a source or target
SIZES = ("vocab_size", "d_model", "num_heads", "d_ff", "encoder_layers", "decoder_layers")
SHAPES: dict[str, dict[str, Any]] = {  # what differs from the paper's base model
    "base": {},
    "small": dict(zip(SIZES, (10_000, 256, 4, 1024, 3, 3), strict=True)),
    "tiny": dict(zip(SIZES, (500, 32, 2, 64, 1, 1), strict=True)),
}


class Tiny(argparse.Action):
    """An option that gives others the sizes of a run of seconds; options after it replace them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        vars(namespace).update(self.const)


def make_parser(module: str, description: str | None, tiny: Row, **defaults: int) -> argparse.ArgumentParser:
    """Return a command's parser, with `--tiny`, `--output`, and of `--rounds` and `--threads` those in `defaults`."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{module}", description=description, formatter_class=layout, allow_abbrev=False
    )
    text = "tiny sizes, for a test that the command runs"
    parser.add_argument("--tiny", action=Tiny, nargs=0, const=tiny, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", help="a JSON file for the figures")
    for name, default in defaults.items():
        meaning = {"rounds": "rounds of each measurement", "threads": "threads of the CPU"}[name]
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} ({default})")
    return parser


def about() -> Row:
    """Return the commit, the processor and the versions that figures belong to."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "commit": commit or "unknown",
        "cpu": next(names, platform.processor() or platform.machine()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def spell(value: Any) -> str:
    """Return the text of a value in a cell of a table."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value).replace("|", "\\|").replace("\n", " ")
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table with the columns of all of them, in order of appearance."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    lines += [f"| {' | '.join(spell(row.get(column)) for column in columns)} |" for row in rows]
    return "\n".join(lines)


def report(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print what was measured, and where, as a table; write both to `--output`."""
    machine = about()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), table(rows), sep="\n\n", flush=True)
    if options.output is not None:
        tree = {"about": machine, "options": vars(options), "rows": rows}
        options.output.write_text(json.dumps(tree, indent=2, default=str) + "\n", encoding="utf-8")


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
    return {name: int(size[1]) / 1024 for name, size in sizes.items() if size is not None}


def peak_mib(call: Callable[[], object]) -> float | None:
    """Return the peak of a call above this process's memory before it; None where the system does not report it."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise the call could use memory that is freed but kept
        Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    except OSError:
        return None
    before = resident_mib()["now"]
    call()
    return max(0.0, resident_mib()["peak"] - before)


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
    generator = torch.Generator().manual_seed(0)
    sigma = 0.6
    ratio_sigma = 0.2
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


def lengths_of(pairs: Pairs) -> tuple[list[int], list[int]]:
    """Return the number of tokens of each source and of each target."""
    return [len(pair["input_ids"]) for pair in pairs], [len(pair["labels"]) for pair in pairs]


def pad(rows: Iterable[Tensor | list[int]], value: int) -> Tensor:
    """Return rows as (B, longest), padded with `value` on the right."""
    return nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=value)


def sources_of(rows: Iterable[Tensor | list[int]]) -> dict[str, Tensor]:
    """Return sources and their mask, both (B, S)."""
    tokens = pad(rows, 1)
    return {"input_ids": tokens, "attention_mask": tokens.ne(1).long()}


def collate(pairs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return sources, their mask and labels, (B, S), (B, S) and (B, T)."""
    return {**sources_of(pair["input_ids"] for pair in pairs), "labels": pad((pair["labels"] for pair in pairs), -100)}


def random_sources(count: int, vocab_size: int) -> dict[str, Tensor]:
    """Return `count` random sources of 22 to 28 tokens, padded (B, S), and their mask."""
    generator = random.Random(count)
    return sources_of(
        [generator.randrange(4, vocab_size) for _ in range(generator.randint(22, 28))] for _ in range(count)
    )


def endless_search(num_beams: int, vocab_size: int, length: int = TARGET_LENGTH) -> GenerationConfig:
    """Return a search that writes `length` tokens, because its end token is outside of the vocabulary."""
    ids = {"decoder_start_token_id": 0, "pad_token_id": 1, "eos_token_id": vocab_size}
    return GenerationConfig(max_new_tokens=length, num_beams=num_beams, do_sample=False, **ids)


def endless_ctranslate2(translator: Any, batch: dict[str, Tensor], num_beams: int, length: int) -> Callable[[], int]:
    """Return the same search of CTranslate2, which returns the tokens that it writes."""
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    texts = [[str(token) for token in row[is_token].tolist()] for row, is_token in rows]
    options = {"beam_size": num_beams, "max_decoding_length": length, "min_decoding_length": length}
    return lambda: min(len(result.hypotheses[0]) for result in translator.translate_batch(texts, **options))
