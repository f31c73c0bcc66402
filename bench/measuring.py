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
SHAPES: dict[str, dict[str, Any]] = {  # what differs from the paper's base model
    "base": {},
    "small": {
        "vocab_size": 10_000,
        "d_model": 256,
        "num_heads": 4,
        "d_ff": 1024,
        "encoder_layers": 3,
        "decoder_layers": 3,
    },
    "tiny": {
        "vocab_size": 500,
        "d_model": 32,
        "num_heads": 2,
        "d_ff": 64,
        "encoder_layers": 1,
        "decoder_layers": 1,
    },
}


class Tiny(argparse.Action):
    """An option that gives others the sizes of a run of seconds; options after it replace them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        vars(namespace).update(self.const)


def make_parser(module: str, description: str | None, tiny: Row, **defaults: int) -> argparse.ArgumentParser:
    """Return a command's parser with the options `--tiny` and `--output`.

    `defaults` adds `--rounds` or `--threads`, each with its default.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = "use tiny sizes, to test that the command runs"
    parser.add_argument("--tiny", action=Tiny, nargs=0, const=tiny, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures to this JSON file")
    for name, default in defaults.items():
        meaning = {"rounds": "rounds of each measurement", "threads": "CPU threads"}[name]
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} ({default})")
    return parser


def processor_name() -> str:
    """Return the processor's model name; elsewhere than on Linux the name that Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def about() -> Row:
    """Return the commit, the processor and the versions that figures belong to."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit or "unknown",
        "cpu": processor_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def spell(value: Any) -> str:
    """Return the text of a value in a cell of a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value).replace("|", "\\|").replace("\n", " ")
    if math.isfinite(value) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table with the columns of all of them, in order of appearance."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        lines.append([spell(row.get(column)) for column in columns])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def report(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print what was measured, and where, as a table; write both to `--output`."""
    machine = about()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), table(rows), sep="\n\n", flush=True)
    if options.output is not None:
        tree = {"about": machine, "options": vars(options), "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(tree, indent=2, default=str) + "\n", encoding="utf-8")


def report_more(name: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print one more table, and add it to `--output` by its name."""
    print(f"\n{name.capitalize()}:\n", table(rows), sep="\n", flush=True)
    if options.output is not None:
        tree = json.loads(options.output.read_text(encoding="utf-8"))
        tree[name] = rows
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


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Return the median of the ratios of two lists, one by one."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(numerator / denominator for numerator, denominator in pairs)


def resident_mib(pid: int | str = "self") -> dict[str, float]:
    """Return a process's resident memory ("now") and its largest so far ("peak"); nothing if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    sizes = {}
    for name, field in (("now", "VmRSS"), ("peak", "VmHWM")):
        if match := re.search(rf"{field}:\s+(\d+) kB", status):  # a process that is ending has none
            sizes[name] = int(match[1]) / 1024
    return sizes


def peak_mib(call: Callable[[], object]) -> float | None:
    """Return the peak of a call above this process's memory before it; None where the system does not report it."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise the call could use memory that is freed but kept
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        return None
    before = resident_mib()["now"]
    call()
    return max(0.0, resident_mib()["peak"] - before)


def marian_like(config: VaswaniTransformerConfig) -> nn.Module:
    """Return Transformers' MarianMTModel of the same shape, with random weights."""
    marian_config = MarianConfig(
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.num_heads,
        decoder_attention_heads=config.num_heads,
        encoder_ffn_dim=config.d_ff,
        decoder_ffn_dim=config.d_ff,
        dropout=config.dropout,
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=512,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    return MarianMTModel(marian_config)


def make_pairs(count: int, vocab_size: int) -> Pairs:
    """Return pairs of random tokens; lengths are log-normal with mean 25, and so is a target's ratio to its source."""
    # Lengths: log-normal numbers of mean 1 scale the mean length, and then each source's.
    generator = torch.Generator().manual_seed(0)
    sigma = 0.6
    ratio_sigma = 0.2
    normal = torch.randn(2, count, generator=generator, dtype=torch.float64)
    source_lengths = MEAN_LENGTH * (sigma * normal[0] - sigma**2 / 2).exp()
    target_lengths = source_lengths * (ratio_sigma * normal[1] - ratio_sigma**2 / 2).exp()

    # Tokens, and the end of each text.
    sides = []
    for lengths in (source_lengths, target_lengths):
        sizes = lengths.round().long().clamp(min=3).tolist()
        texts = torch.randint(4, vocab_size, (sum(sizes),), generator=generator).split(sizes)
        for text in texts:
            text[-1] = 2
        sides.append(texts)
    return [{"input_ids": source, "labels": target} for source, target in zip(*sides, strict=True)]


def lengths_of(pairs: Pairs) -> tuple[list[int], list[int]]:
    """Return the number of tokens of each source and of each target."""
    sources = [len(pair["input_ids"]) for pair in pairs]
    targets = [len(pair["labels"]) for pair in pairs]
    return sources, targets


def pad(rows: Iterable[Tensor | list[int]], value: int) -> Tensor:
    """Return rows as (B, longest), padded with `value` on the right."""
    return nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=value)


def sources_of(rows: Iterable[Tensor | list[int]]) -> dict[str, Tensor]:
    """Return sources and their mask, both (B, S)."""
    tokens = pad(rows, 1)
    return {"input_ids": tokens, "attention_mask": tokens.ne(1).long()}


def collate(pairs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return sources, their mask and labels, (B, S), (B, S) and (B, T)."""
    batch = sources_of(pair["input_ids"] for pair in pairs)
    batch["labels"] = pad((pair["labels"] for pair in pairs), -100)
    return batch


def random_sources(count: int, vocab_size: int) -> dict[str, Tensor]:
    """Return `count` random sources of 22 to 28 tokens, padded (B, S), and their mask."""
    generator = random.Random(count)
    sources = []
    for _ in range(count):
        length = generator.randint(22, 28)
        sources.append([generator.randrange(4, vocab_size) for _ in range(length)])
    return sources_of(sources)


def endless_search(num_beams: int, vocab_size: int, length: int = TARGET_LENGTH) -> GenerationConfig:
    """Return a search that writes `length` tokens, because its end token is outside of the vocabulary."""
    ids = {"decoder_start_token_id": 0, "pad_token_id": 1, "eos_token_id": vocab_size}
    return GenerationConfig(max_new_tokens=length, num_beams=num_beams, do_sample=False, **ids)


def endless_ctranslate2(translator: Any, batch: dict[str, Tensor], num_beams: int, length: int) -> Callable[[], int]:
    """Return the same search in CTranslate2, as a function that returns how many tokens it wrote."""
    texts = []
    for row, is_token in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        texts.append([str(token) for token in row[is_token].tolist()])
    options = {"beam_size": num_beams, "max_decoding_length": length, "min_decoding_length": length}
    return lambda: min(len(result.hypotheses[0]) for result in translator.translate_batch(texts, **options))
