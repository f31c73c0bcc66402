"""Table 1 of the paper, measured: time, memory and operations of a layer against n and d.

`python -m bench.layer_complexity --output table1` measures the layers alternately on the same random text: batch 1,
forward pass, evaluation mode, float32. It prints a table of milliseconds, with the peak MiB in parentheses, and writes
table1.json and table1.svg into the new folder `--output`, with the operations too. If you press Ctrl-C, it keeps what
it has measured so far. The layers have width d:

  self-attention          equation (1) step by step ("eager"), heads of 64
  self-attention, fused   the same by torch's fused product, which stores no weights
  restricted              r positions to either side (`--reach`); on a GPU by flex attention
  recurrent               torch's LSTM or GRU (`--cell`)
  convolutional           one convolution over k positions (`--kernel`)

Seconds are medians over rounds: the process's CPU time with one thread, otherwise clock time. Memory is the peak of a
forward pass above the memory before it; on a CPU only Linux reports it. Operations are counted by formula, two for a
multiplication and its addition. They include the projections, which the paper's column leaves out. A layer that would
need more than `--memory` GiB is skipped, and the table says so.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor, nn

from bench.measuring import Row, about, clock, in_turns, make_parser, peak_mib, seconds_of, spell, table
from vaswani_transformer import VaswaniTransformerConfig
from vaswani_transformer.figures.style import INK, MUTED, RULE, head_colors, new_figure
from vaswani_transformer.layers import SelfAttention
from vaswani_transformer.restricted import MIN_BLOCK, window_mask

LAYERS = ("self-attention", "self-attention, fused", "restricted", "recurrent", "convolutional")
HEAD_DIM = 64
GATES = {"lstm": 4, "gru": 3}
PANELS = {"seconds": "seconds", "peak_mib": "peak memory (MiB)", "operations": "operations"}
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
        mask = None if reach is None else window_mask(config, text, None)
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
    count = 1

    def repeat() -> None:
        for _ in range(count):
            call()

    def measured() -> float:
        if device.type == "cpu":
            return seconds_of(repeat, clock())
        return seconds_of(repeat, time.perf_counter, torch.cuda.synchronize)

    while (taken := measured()) < 0.005:
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
    """Return one row for each layer. Every round measures all layers and begins with a different one."""
    # The layers for which there is memory.
    device = torch.device(options.device)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], object]] = {}
    text = torch.randn(1, n, d, device=device)
    for name in LAYERS:
        rows[name] = {"layer": name, "n": n, "d": d, "operations": operations(name, n, d, options)}
        if (needed := expected_gib(name, n, d, options)) > options.memory:
            rows[name]["skipped"] = f"needs about {needed:.2g} GiB, --memory is {options.memory:g}"
        else:
            calls[name] = functools.partial(make_layer(name, d, options), text)

    # A first call prepares kernels, a second shows the peak.
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


def by_length(measured: list[Row]) -> list[Row]:
    """Return a row for each width and length: the milliseconds of each layer, and its peak MiB in parentheses."""
    rows: dict[tuple[int, int], Row] = {}
    for measurement in measured:
        d = measurement["d"]
        n = measurement["n"]
        if "skipped" in measurement:
            cell = measurement["skipped"]
        else:
            cell = f"{spell(1000 * measurement['seconds'])} ({spell(measurement['peak_mib'])})"
        rows.setdefault((d, n), {"d": d, "n": n})[measurement["layer"]] = cell
    return [rows[size] for size in sorted(rows)]


def draw_field(axes: Axes, measured: list[Row], field: str, layers: list[str]) -> list[Any]:
    """Draw one field of every layer against n, both on logarithmic axes; numbers that are missing or 0 are left out."""
    lines = []
    for layer, color, marker in zip(layers, head_colors(len(layers)), "os^Dv", strict=False):
        rows = sorted((row["n"], row[field]) for row in measured if row["layer"] == layer and row.get(field))
        lengths = [n for n, _ in rows]
        numbers = [number for _, number in rows]
        lines += axes.plot(lengths, numbers, label=layer, color=color, marker=marker, markersize=3.5, linewidth=1.6)
    if any(row.get(field) for row in measured):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=6))

    # Only the two axis lines, light, and ticks without marks.
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(which="both", length=0, pad=5, labelcolor=MUTED)
    axes.tick_params(which="minor", labelleft=False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("n", color=MUTED)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    return lines


def draw(measured: list[Row]) -> Figure:
    """Draw one row of panels for each width d, with time, memory and operations against the length n."""
    widths = sorted({row["d"] for row in measured})
    layers = list(dict.fromkeys(row["layer"] for row in measured))
    figure = new_figure(10, 0.9 + 2.7 * len(widths))
    panels = figure.subplots(len(widths), len(PANELS), squeeze=False)
    handles = []
    for d, row in zip(widths, panels, strict=True):
        of_width = [measurement for measurement in measured if measurement["d"] == d]
        for axes, (field, label) in zip(row, PANELS.items(), strict=True):
            handles = draw_field(axes, of_width, field, layers)
            axes.set_title(f"{label}, d = {d}", fontsize=10, color=INK)
    figure.legend(handles=handles, loc="outside upper center", ncols=len(layers), frameon=False, labelcolor=INK)
    return figure


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    tiny = {"lengths": [8, 16], "widths": [16], "rounds": 1}
    parser = make_parser("layer_complexity", __doc__, tiny, rounds=3, threads=1)
    lengths = [2**power for power in range(4, 14)]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="n (16 to 8,192)")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512], help="d, an even number (64 512)")
    parser.add_argument("--reach", type=int, default=MIN_BLOCK, help=f"r of the window ({MIN_BLOCK})")
    parser.add_argument("--kernel", type=int, default=3, help="k of the convolution (3)")
    parser.add_argument("--cell", choices=GATES, default="lstm", help="the recurrent layer (lstm)")
    parser.add_argument("--memory", type=float, default=4.0, help="GiB that a layer may take (4)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table and write the folder `--output`."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.output is not None:
        options.output.mkdir(parents=True)  # if it exists, before time is spent

    # The shortest texts first, so that an interrupted run has the most.
    lengths = sorted(options.lengths)
    measured: list[Row] = []
    try:
        for n, d in itertools.product(lengths, options.widths):
            measured += measure(n, d, options)
    except KeyboardInterrupt:
        print(f"Interrupted after {len(measured)} measurements.", file=sys.stderr)

    if options.output is not None:
        settings: Row = {**vars(options), "output": str(options.output), "lengths": lengths}
        results = {"settings": settings, "about": about(), "measurements": measured}
        (options.output / "table1.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        draw(measured).savefig(options.output / "table1.svg")
    print(table(by_length(measured)))


if __name__ == "__main__":
    main()
