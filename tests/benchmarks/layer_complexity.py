"""Table 1 of the paper, measured: time, memory and operations of a layer against n and d, next to the paper's O().

`python -m tests.benchmarks.layer_complexity --output table1` takes the layers in turn on the same random text, batch 1,
forward in evaluation mode and float32. It writes table1.json, table1.md and table1.svg into a new folder, and the
Markdown to standard output. Ctrl-C ends it and keeps what it has measured. The layers have width d:

  self-attention          equation (1) step by step ("eager"), heads of 64
  self-attention, fused   the same by torch's fused product, which stores no weights
  restricted              r positions to either side (`--reach`); on a GPU by flex attention
  recurrent               torch's LSTM or GRU (`--cell`)
  convolutional           one convolution over k positions (`--kernel`)

Seconds are medians over rounds: CPU time of the process with one thread, otherwise clock time. Memory is the peak of a
forward pass above what the process holds before it; on a CPU only Linux reports it. Operations are counted by formula,
two for a multiplication and its addition, with the projections, which the paper's column leaves out. A layer that would
need more than `--memory` GiB is skipped, and the table marks it.
"""

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.measuring import add_tiny, clock, in_turns, make_parser, peak_mib, seconds_of
from training.report.results import commit, versions
from vaswani_transformer import VaswaniTransformerConfig
from vaswani_transformer.attention import SelfAttention
from vaswani_transformer.figures import draw_layer_complexity
from vaswani_transformer.restricted import MIN_BLOCK, Window
from vaswani_transformer.support.command_line import positive_argument
from vaswani_transformer.support.errors import UserError, exit_on_user_error
from vaswani_transformer.support.files import atomic_folder, write_errors

LAYERS = ("self-attention", "self-attention, fused", "restricted", "recurrent", "convolutional")
PAPER = {  # complexity a layer, sequential operations, longest path
    "self-attention": ("O(n^2 d)", "O(1)", "O(1)"),
    "self-attention, fused": ("O(n^2 d)", "O(1)", "O(1)"),
    "restricted": ("O(r n d)", "O(1)", "O(n / r)"),
    "recurrent": ("O(n d^2)", "O(n)", "O(n)"),
    "convolutional": ("O(k n d^2)", "O(1)", "O(log_k n)"),
}
HEAD_DIM = 64
GATES = {"lstm": 4, "gru": 3}
Layer = Callable[[Tensor], Tensor]


def make_attention(d: int, implementation: str, reach: int | None, device: torch.device) -> Layer:
    """Return self-attention from a text (1, n, d) to the same shape, its mask included."""
    config = VaswaniTransformerConfig(
        vocab_size=8,
        d_model=d,
        num_heads=max(1, d // HEAD_DIM),
        attention_window=reach,
        attn_implementation=implementation,  # ty: ignore[unknown-argument] - every configuration takes it
    )
    attention = SelfAttention(config, layer_idx=0).eval().to(device)

    def run(text: Tensor) -> Tensor:
        mask = None if reach is None else Window(config, text).mask(None)
        return attention(text, mask)[0]

    return run


def make_layer(name: str, d: int, options: argparse.Namespace) -> Layer:
    """Return a layer of width d, as a function of a text (1, n, d)."""
    device = torch.device(options.device)
    if name == "restricted":
        return make_attention(d, "sdpa" if device.type == "cpu" else "flex_attention", options.reach, device)
    if name.startswith("self-attention"):
        return make_attention(d, "sdpa" if "fused" in name else "eager", None, device)
    if name == "recurrent":
        cell = {"lstm": nn.LSTM, "gru": nn.GRU}[options.cell](d, d, batch_first=True).eval().to(device)
        return lambda text: cell(text)[0]
    convolution = nn.Conv1d(d, d, options.kernel, padding="same").eval().to(device)
    return lambda text: convolution(text.transpose(1, 2)).transpose(1, 2)


def operations(name: str, n: int, d: int, options: argparse.Namespace) -> int:
    """Return the operations of a layer, two for each multiplication and its addition."""
    if name == "recurrent":
        return 2 * GATES[options.cell] * n * 2 * d * d  # from the input and from the state
    if name == "convolutional":
        return 2 * options.kernel * n * d * d
    keys = min(n, 2 * options.reach + 1) if name == "restricted" else n
    return 2 * (4 * n * d * d + 2 * n * keys * d)  # four projections, the scores and the values


def expected_gib(name: str, n: int, d: int, options: argparse.Namespace) -> float:
    """Estimate the memory of a forward pass: scores and weights of every pair of positions, and eight texts."""
    heads = max(1, d // HEAD_DIM)
    pairs = 2 * heads * n * n if name == "self-attention" else 0
    return 4 * (pairs + 8 * n * d) / 2**30


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call; a short one is repeated until all take five milliseconds."""
    now, settle = (clock(), lambda: None) if device.type == "cpu" else (time.perf_counter, torch.cuda.synchronize)
    count = 1

    def repeat() -> None:
        for _ in range(count):
            call()

    while (taken := seconds_of(repeat, now, settle)) < 0.005:
        count *= 4
    return taken / count


def peak_on(device: torch.device, call: Callable[[], object]) -> float | None:
    """Return the MiB of the peak of one call above the memory before it, or None if the system does not report it."""
    if device.type == "cpu":
        return peak_mib(call)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


@torch.no_grad()
def measure(n: int, d: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row a layer. Every round measures all layers in turn and begins with another one."""
    device = torch.device(options.device)
    rows: dict[str, dict[str, Any]] = {
        name: {"layer": name, "n": n, "d": d, "operations": operations(name, n, d, options)} for name in LAYERS
    }
    calls: dict[str, Callable[[], object]] = {}
    text = torch.randn(1, n, d, device=device)
    for name, row in rows.items():
        if (needed := expected_gib(name, n, d, options)) > options.memory:
            row["skipped"] = f"needs about {needed:.2g} GiB, --memory is {options.memory:g}"
        else:
            calls[name] = functools.partial(make_layer(name, d, options), text)
    for name in list(calls):
        try:
            calls[name]()
            rows[name]["peak_mib"] = peak_on(device, calls[name])
        except (MemoryError, RuntimeError) as error:
            if "memory" not in str(error).lower():
                raise
            rows[name]["skipped"] = "out of memory"
            del calls[name]
    timed = {name: functools.partial(seconds, call, device) for name, call in calls.items()}
    for name, taken in in_turns(timed, options.rounds).items():
        rows[name] |= {"seconds": statistics.median(taken), "rounds": taken}
    return list(rows.values())


def growth(rows: list[dict[str, Any]], field: str) -> str:
    """Return the exponent of n between the two longest texts."""
    known = [row for row in rows if row.get(field)]
    if len(known) < 2:
        return "-"
    before, last = known[-2:]
    return f"n^{math.log(last[field] / before[field]) / math.log(last['n'] / before['n']):.2f}"


def cell(row: dict[str, Any], field: str, form: Callable[[float], str]) -> str:
    """Return a number of the table, or the reason why it is missing."""
    if row.get(field) is None:
        return "skipped" if "skipped" in row else "-"
    return form(row[field])


def table(rows: list[dict[str, Any]], field: str, form: Callable[[float], str]) -> list[str]:
    """Return a table with one line a length, one column a layer, and the growth below."""
    lengths = sorted({row["n"] for row in rows})
    cells = {(row["layer"], row["n"]): row for row in rows}
    lines = [f"| n | {' | '.join(LAYERS)} |", "| ---: |" + " ---: |" * len(LAYERS)]
    lines += [f"| {n:,} | " + " | ".join(cell(cells[name, n], field, form) for name in LAYERS) + " |" for n in lengths]
    columns = [[cells[name, n] for n in lengths] for name in LAYERS]
    return [*lines, f"| growth | {' | '.join(growth(column, field) for column in columns)} |"]


def markdown(results: dict[str, Any]) -> str:
    """Return the paper's Table 1, and a table of time, memory and operations for each width."""
    settings = results["settings"]
    lines = ["| layer | complexity | sequential operations | longest path |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {' | '.join(columns)} |" for name, columns in PAPER.items()]
    lines += ["", f"r = {settings['reach']}, k = {settings['kernel']}, recurrent: {settings['cell'].upper()}."]
    for d in settings["widths"]:
        rows = [row for row in results["measurements"] if row["d"] == d]
        if not rows:
            continue
        lines += ["", f"d = {d}, milliseconds:", "", *table(rows, "seconds", lambda value: f"{1000 * value:,.2f}")]
        lines += ["", f"d = {d}, peak MiB:", "", *table(rows, "peak_mib", lambda value: f"{value:,.1f}")]
        lines += [
            "",
            f"d = {d}, million operations:",
            "",
            *table(rows, "operations", lambda value: f"{value / 1e6:,.1f}"),
        ]
        lines += [f"\n{row['layer']}, n = {row['n']:,}: {row['skipped']}." for row in rows if "skipped" in row]
    return "\n".join(lines) + "\n"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = make_parser("tests.benchmarks.layer_complexity", __doc__, rounds=3, threads=1)
    lengths = [2**power for power in range(4, 14)]
    parser.add_argument("--lengths", type=positive_argument, nargs="+", default=lengths, help="n (16 to 8,192)")
    parser.add_argument("--widths", type=positive_argument, nargs="+", default=[64, 512], help="d, even (64 512)")
    parser.add_argument("--reach", type=positive_argument, default=MIN_BLOCK, help=f"r of the window ({MIN_BLOCK})")
    parser.add_argument("--kernel", type=positive_argument, default=3, help="k of the convolution (3)")
    parser.add_argument("--cell", choices=GATES, default="lstm", help="the recurrent layer (lstm)")
    parser.add_argument("--memory", type=float, default=4.0, help="GiB that a layer may take (4)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--output", type=Path, default=Path("table1"), help="a new folder (table1)")
    add_tiny(parser, lengths=[8, 16], widths=[16], rounds=1)
    options = parser.parse_args(arguments)
    if odd := [d for d in options.widths if d % 2 or (d > HEAD_DIM and d % (d // HEAD_DIM))]:
        parser.error(f"--widths: no whole heads; got {odd}, expected even numbers below 64 or multiples of 64.")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write the folder when all is measured."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    settings: dict[str, Any] = vars(options) | {"output": str(options.output), "lengths": sorted(options.lengths)}
    results: dict[str, Any] = {
        "settings": settings,
        "commit": commit(),
        "versions": versions(),
        "paper": PAPER,
        "measurements": [],
    }
    with exit_on_user_error(), atomic_folder(options.output) as folder:
        try:
            for n, d in itertools.product(settings["lengths"], options.widths):
                results["measurements"] += measure(n, d, options)
        except KeyboardInterrupt:
            print(f"interrupted after {len(results['measurements'])} measurements", file=sys.stderr)
        if not results["measurements"]:
            raise UserError(f"{options.output}: nothing is measured yet; let the command run longer.")
        with write_errors(options.output, "make room, or give another --output"):
            (folder / "table1.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            (folder / "table1.md").write_text(markdown(results), encoding="utf-8")
            draw_layer_complexity(results["measurements"]).savefig(folder / "table1.svg")
    print(markdown(results), end="")


if __name__ == "__main__":
    main()
