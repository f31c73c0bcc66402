"""Pictures of attention as in the paper's appendix, of positions, learning rate and loss, and a page to look around in.

N layers, H heads, S source, T target, Q queries, K keys. Layers, heads and words are counted from 1, as in the paper's
captions. The pictures are Matplotlib figures (`pip install "vaswani-transformer[figures]"`); the page needs a browser.
"""

import argparse
import colorsys
import html
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from .attention_weights import STACKS, Attentions, attentions_of
from .checked_loading import check_tokenizer_size, load_model, load_tokenizer
from .command_line import ArgumentParser, utf8_text
from .embeddings import sinusoids
from .errors import UserError, exit_on_user_error, one_line
from .files import write_errors
from .schedule import learning_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}
READINGS = {
    "encoder": "each source word above looks at source words below",
    "decoder": "to write a word above, the decoder looks at what it has written, below",
    "cross": "to write a word above, the decoder looks at source words below",
}
PAGE = Path(__file__).with_name("attention_page.html")
COLORS = ("#2f6fdb", "#e0700f", "#2b9a48", "#d03468", "#7d4fd6", "#0d93a5", "#b58a00", "#8a5a3c")
INK, MUTED, RULE = "#1c1d20", "#62646b", "#dcdde0"
CELLS = 0.8
"""The width of all heads' cells below a word's lines; words stand 1 apart."""

FAINTEST = {"all": 0.04, "one": 0.01}
FALLBACK_FONTS = ("Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Arabic", "Noto Sans Devanagari")


def head_colors(count: int) -> list[str]:
    """A colour a head, as "#rrggbb": those of `COLORS`, or for more heads as many hues around the wheel."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    wheel = (colorsys.hls_to_rgb((0.6 + index / count) % 1, 0.46, 0.62) for index in range(count))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in wheel]


def new_figure(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> "Figure":
    """An empty figure, in inches, that belongs to no window.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'Figures need Matplotlib, which is not installed; run pip install "vaswani-transformer[figures]".'
        ) from error
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def words_style() -> dict[str, Any]:
    """How words of a text are set: in fonts that hold them where they are installed, and never as formulas."""
    from matplotlib import font_manager, rcParams

    installed = set(font_manager.get_font_names())
    families = [*rcParams["font.family"], *(name for name in FALLBACK_FONTS if name in installed)]
    return {"fontfamily": families, "parse_math": False, "color": INK}


def clean(axes: "Axes") -> "Axes":
    """No frame but the two axes, light lines, ticks without marks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(which="both", length=0, pad=5, labelcolor=MUTED)
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)
    return axes


def counted_from_1(name: str, value: int, count: int) -> int:
    """The index of `value`, which is counted from 1."""
    if not 1 <= value <= count:
        raise ValueError(f"{name} ({value}) is none of the {count}; they are counted from 1 to {count}.")
    return value - 1


def index_of_word(words: Sequence[str], word: str | int) -> int:
    """Where a word stands, which is given as it is shown or by its number."""
    if isinstance(word, int):
        return counted_from_1("word", word, len(words))
    found = [index for index, shown in enumerate(words) if shown == word]
    if not found:
        raise ValueError(f"word ({word!r}) is none of {', '.join(words)}; give one of these, or its number.")
    if len(found) > 1:
        numbers = ", ".join(str(index + 1) for index in found)
        raise ValueError(f"word ({word!r}) stands at {numbers}; give one of these numbers.")
    return found[0]


def selected_heads(heads: Sequence[int] | int | None, count: int) -> list[int]:
    """Indices of the heads that are asked for; None asks for all."""
    numbers = range(1, count + 1) if heads is None else [heads] if isinstance(heads, int) else heads
    if not numbers:
        raise ValueError(f"heads ({heads}) names no head; give numbers from 1 to {count}, or None for all.")
    return [counted_from_1("head", head, count) for head in numbers]


def longest(*lists: Sequence[str]) -> int:
    """The sum of the characters of the longest word of each list."""
    return sum(max(map(len, words)) for words in lists)


def draw_lines(axes: "Axes", weights: np.ndarray, heads: Sequence[int], only: int | None) -> None:
    """Lines of the weights (H, Q, K) of some heads; those of neighbouring heads lie a little apart."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    colors = head_colors(weights.shape[0])
    gap = min(0.1, 0.6 / len(heads))
    gap_below = gap if only is None else CELLS / len(heads)
    for rank, head in enumerate(heads):
        place = rank - (len(heads) - 1) / 2
        shown = weights[head] > FAINTEST["all" if only is None else "one"]  # (Q, K)
        if only is not None:
            shown &= np.arange(len(shown))[:, None] == only
        places = np.argwhere(shown)
        strengths = weights[head][shown]
        lines = [((query + place * gap, 1.0), (key + place * gap_below, 0.0)) for query, key in places]
        rgba = [(*to_rgb(colors[head]), float(strength)) for strength in strengths]
        axes.add_collection(LineCollection(lines, colors=rgba, linewidths=1.6, capstyle="round"))


def draw_words(axes: "Axes", queries: Sequence[str], keys: Sequence[str], only: int | None) -> None:
    """Upright words above and below; all but one of those above step back where that one is asked for."""
    style: dict[str, Any] = words_style() | {"rotation": 90, "ha": "center", "fontsize": 11}
    lower = -0.05 if only is None else -0.16
    for index, word in enumerate(queries):
        shown = axes.text(index, 1.05, word, va="bottom", **style)
        if only is not None:
            shown.set(color=INK if index == only else MUTED, fontweight="bold" if index == only else "normal")
    for index, word in enumerate(keys):
        axes.text(index, lower, word, va="top", **style)
    axes.set_xlim(-0.6, max(len(queries), len(keys)) - 0.4)
    axes.set_ylim(lower, 1.05)
    axes.set_axis_off()


def draw_cells(axes: "Axes", weights: np.ndarray, colors: Sequence[str]) -> None:
    """Between lines and words below, a cell a head as strong as its weight (H, K) of the one word above."""
    from matplotlib.patches import Rectangle

    width = CELLS / len(weights)
    for head, color in enumerate(colors):
        for key, weight in enumerate(weights[head]):
            place = (key - CELLS / 2 + head * width, -0.12)
            axes.add_patch(Rectangle(place, width, 0.1, color=color, alpha=float(min(1, weight)), linewidth=0))


def add_legend(figure: "Figure", title: str, heads: Sequence[int], count: int) -> None:
    """Below the picture, how to read it and which colour is which of the heads."""
    from matplotlib.patches import Patch

    colors = head_colors(count)
    handles = [
        Patch(color=colors[head], label=f"{'' if rank else 'head '}{head + 1}") for rank, head in enumerate(heads)
    ]
    legend = figure.legend(
        handles=handles, title=title, ncols=int(2 * figure.get_figwidth()) - 2, loc="outside lower center",
        frameon=False, handlelength=0.9, handleheight=0.9, handletextpad=0.4, columnspacing=1.2, fontsize=9,
        title_fontsize=9, labelcolor=MUTED,
    )  # fmt: skip
    legend.get_title().set_color(MUTED)


def draw_attention(
    attentions: Attentions,
    stack: str = "encoder",
    layer: int | None = None,
    heads: Sequence[int] | int | None = None,
    word: str | int | None = None,
) -> "Figure":
    """Words joined by lines, as in the paper's appendix (Figures 3 to 5): each word above looks at words below.

    The stronger a line, the larger the weight; a colour a head. Of the decoder the words above are those that it
    writes at its positions.

    Args:
        attentions: what `attentions_of` found.
        stack: "encoder", "decoder" or "cross".
        layer: its number, from 1; None: the last.
        heads: numbers of heads, from 1; None: all.
        word: the only word above whose lines are drawn, as it is shown or by its number, from 1; None: all words.

    Raises:
        ValueError: there is no such stack, layer, head or word, or the word stands more than once.
        ImportError: Matplotlib is not installed.
    """
    weights = attentions.weights(stack)
    layers, count = weights.shape[:2]
    index = layers - 1 if layer is None else counted_from_1("layer", layer, layers)
    chosen = selected_heads(heads, count)
    queries, keys = attentions.queries(stack), attentions.keys(stack)
    only = None if word is None else index_of_word(queries, word)
    width = max(5, 0.33 * max(len(queries), len(keys)) + 0.6)
    figure = new_figure(width, 2 + 0.06 * width + 0.085 * longest(queries, keys))
    axes = figure.subplots()
    draw_lines(axes, weights[index], chosen, only)
    draw_words(axes, queries, keys, only)
    if only is not None:
        draw_cells(axes, weights[index][chosen, only], [head_colors(count)[head] for head in chosen])
    figure.suptitle(f"{TITLES[stack]}, layer {index + 1} of {layers}", fontsize=11, color=INK)
    add_legend(figure, READINGS[stack], chosen, count)
    return figure


def draw_heat_map(axes: "Axes", weights: np.ndarray, title: str) -> Any:
    """Weights (Q, K) from 0, white, to 1, dark blue."""
    image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.spines[:].set_color(RULE)
    axes.set_title(title, fontsize=9, color=MUTED, pad=4)
    return image


def add_color_bar(figure: "Figure", image: Any, grid: np.ndarray) -> None:
    shrink = min(0.9, 2.4 / figure.get_figheight())
    bar = figure.colorbar(image, ax=grid, shrink=shrink, aspect=22, pad=0.02, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=9, labelcolor=MUTED)


def draw_one_layer(
    weights: np.ndarray, heads: Sequence[int], queries: Sequence[str], keys: Sequence[str], title: str
) -> "Figure":
    """Heat maps of weights (H, Q, K), in rows of at most four and 16 inches, with words at the left and lower edges."""
    width, height = 0.19 * len(keys) + 0.3, 0.19 * len(queries) + 0.45
    columns = max(1, min(4, len(heads), int(16 / width)))
    rows = math.ceil(len(heads) / columns)
    label_width, label_height = 0.085 * longest(queries), 0.085 * longest(keys)
    figure = new_figure(columns * width + label_width + 1.2, rows * height + label_height + 0.5, "compressed")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    style = words_style() | {"fontsize": 9}
    for place, axes in enumerate(grid.flat):
        if place >= len(heads):
            axes.set_axis_off()
            continue
        image = draw_heat_map(axes, weights[heads[place]], f"head {heads[place] + 1}")
        is_lowest = place + columns >= len(heads)
        axes.tick_params(length=0, labelbottom=is_lowest, labelleft=place % columns == 0)
        axes.set_xticks(range(len(keys)), keys, rotation=90, **style)
        axes.set_yticks(range(len(queries)), queries, **style)
    add_color_bar(figure, image, grid)
    figure.suptitle(title, fontsize=11, color=INK)
    return figure


def draw_all_layers(weights: np.ndarray, heads: Sequence[int], title: str) -> "Figure":
    """Small heat maps of weights (N, H, Q, K), a row a layer and a column a head."""
    layers, _, queries, keys = weights.shape
    side = 1.15 / max(queries, keys)
    figure = new_figure(len(heads) * (keys * side + 0.15) + 1.5, layers * (queries * side + 0.15) + 0.8, "compressed")
    grid = figure.subplots(layers, len(heads), squeeze=False)
    for layer in range(layers):
        for column, head in enumerate(heads):
            axes = grid[layer, column]
            image = draw_heat_map(axes, weights[layer, head], f"head {head + 1}" if layer == 0 else "")
            axes.set_xticks([])
            axes.set_yticks([])
        grid[layer, 0].set_ylabel(f"layer {layer + 1}", fontsize=9, color=MUTED)
    add_color_bar(figure, image, grid)
    figure.suptitle(title, fontsize=11, color=INK)
    return figure


def draw_heat_maps(
    attentions: Attentions, stack: str = "encoder", layer: int | None = None, heads: Sequence[int] | int | None = None
) -> "Figure":
    """The weights of one layer's heads side by side, or without `layer` those of all layers, small.

    Rows look at columns.

    Args:
        attentions: what `attentions_of` found.
        stack: "encoder", "decoder" or "cross".
        layer: its number, from 1; None: all layers, one below the other, without words.
        heads: numbers of heads, from 1; None: all.

    Raises:
        ValueError: there is no such stack, layer or head.
        ImportError: Matplotlib is not installed.
    """
    weights = attentions.weights(stack)
    chosen = selected_heads(heads, weights.shape[1])
    title = TITLES[stack]
    if layer is None:
        return draw_all_layers(weights, chosen, title)
    index = counted_from_1("layer", layer, len(weights))
    title = f"{title}, layer {layer} of {len(weights)}"
    return draw_one_layer(weights[index], chosen, attentions.queries(stack), attentions.keys(stack), title)


def draw_wavelengths(axes: "Axes", length: int, d_model: int) -> None:
    """2 pi 10000^(2i / d_model) positions, the wavelength of dimensions 2i and 2i + 1 (3.5)."""
    dimensions = np.arange(d_model)
    axes.semilogy(dimensions, 2 * np.pi * 10000 ** (dimensions // 2 * 2 / d_model), color=COLORS[0], linewidth=2)
    axes.axhline(length, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(f"{length} positions", (0.01, length), xycoords=("axes fraction", "data"), xytext=(0, 4),
        textcoords="offset points", color=MUTED, fontsize=9)  # fmt: skip
    axes.set_ylabel("wavelength (positions)")
    axes.grid(axis="y", color=RULE, linewidth=0.6)


def draw_positional_encoding(length: int = 100, d_model: int = 128, wavelengths: bool = False) -> "Figure":
    """The sinusoids of section 3.5, a row a position and a column a dimension; sines and cosines take turns.

    Args:
        length: how many positions.
        d_model: how many dimensions.
        wavelengths: whether a second picture shows each dimension's wavelength, from 2 pi to 10000 * 2 pi positions.

    Raises:
        ValueError: d_model is odd, or one of the numbers is not positive.
        ImportError: Matplotlib is not installed.
    """
    if length < 1 or d_model < 2 or d_model % 2:
        raise ValueError(f"length ({length}) must be at least 1, and d_model ({d_model}) even and at least 2.")
    figure = new_figure(8.2, 6.4 if wavelengths else 4.2)
    heights = [2, 1] if wavelengths else [1]
    parts = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)
    axes = clean(parts[0, 0])
    table = sinusoids(torch.arange(length), d_model).numpy()  # (P, d_model)
    image = axes.imshow(table, cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_ylabel("position")
    axes.set_title("Positional encoding (3.5)", fontsize=11, color=INK)
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=24, ticks=[-1, 0, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelcolor=MUTED)
    if wavelengths:
        draw_wavelengths(clean(parts[1, 0]), length, d_model)
    parts[-1, 0].set_xlabel("dimension")
    return figure


def draw_learning_rate(
    settings: Sequence[tuple[int, int]] = ((512, 4000), (512, 8000), (1024, 4000)), steps: int = 20_000
) -> "Figure":
    """Equation (3) over the first `steps` steps, a curve for each pair of d_model and warm-up steps.

    Raises:
        ValueError: there is no pair, or one of the numbers is not positive.
        ImportError: Matplotlib is not installed.
    """
    if not settings or min(steps, *(number for pair in settings for number in pair)) < 1:
        raise ValueError(f"settings ({settings}) and steps ({steps}) must be positive; give at least one pair.")
    figure = new_figure(7.2, 4)
    axes = clean(figure.subplots())
    counted = sorted({*np.linspace(1, steps, 1000).astype(int), *(warmup for _, warmup in settings if warmup <= steps)})
    for (d_model, warmup), color in zip(settings, head_colors(len(settings)), strict=True):
        rates = [learning_rate(int(step), d_model, warmup) for step in counted]
        axes.plot(counted, rates, color=color, linewidth=2, label=f"d_model {d_model:,}, warm-up {warmup:,}")
    axes.set_xlim(0, steps)
    axes.set_ylim(0)
    axes.set_xlabel("step")
    axes.set_ylabel("learning rate")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    axes.yaxis.offsetText.set_color(MUTED)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.legend(frameon=False, labelcolor=INK)
    axes.set_title("Learning rate, equation (3)", fontsize=11, color=INK)
    return figure


def read_log(run: Path) -> list[dict[str, Any]]:
    """What was logged along a run, up to its end or to its newest checkpoint, or the curve in its `results.json`.

    Raises:
        FileNotFoundError: the folder holds none of them.
    """
    states = [path for folder in (run, run / "checkpoints") for path in folder.glob("checkpoint-*/trainer_state.json")]
    steps = {path: path.parent.name.removeprefix("checkpoint-") for path in states}
    states = sorted((path for path in states if steps[path].isdigit()), key=lambda path: -int(steps[path]))
    for path in (run / "trainer_state.json", *states):
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))["log_history"]
    if (run / "results.json").is_file():
        return json.loads((run / "results.json").read_text(encoding="utf-8"))["curve"]
    raise FileNotFoundError(
        f"{run}: holds no trainer_state.json, checkpoint or results.json; give the folder of a run or of a checkpoint."
    )


def draw_curve(axes: "Axes", log: Sequence[dict[str, Any]], name: str, label: str, **style: Any) -> list[Any]:
    """The logged values of one name against their steps, where there are any."""
    points = [(entry["step"], entry[name]) for entry in log if name in entry and "step" in entry]
    return axes.plot(*zip(*points, strict=True), label=label, **style) if points else []


def draw_bleu(axes: "Axes", log: Sequence[dict[str, Any]]) -> list[Any]:
    """Validation BLEU on a second axis, in the curve's colour."""
    second = clean(axes.twinx())
    second.spines["bottom"].set_visible(False)
    style = {"color": COLORS[2], "linewidth": 2, "marker": "s", "markersize": 4}
    curve = draw_curve(second, log, "eval_bleu", "validation BLEU", **style)
    second.set_ylim(0)
    second.set_ylabel("BLEU", color=COLORS[2])
    second.tick_params(labelcolor=COLORS[2])
    return curve


def draw_loss(run: str | Path) -> "Figure":
    """The training and validation loss of a run, finished or not, and on an axis of its own its validation BLEU.

    Training loss is what the optimiser sees, with label smoothing and dropout; validation loss is without either.

    Args:
        run: the folder of a run of `training.train`, of any Trainer, or of a checkpoint.

    Raises:
        FileNotFoundError: the folder holds no log.
        ImportError: Matplotlib is not installed.
    """
    log = read_log(Path(run))
    figure = new_figure(7.2, 4)
    axes = clean(figure.subplots())
    draw_curve(axes, log, "loss", "training loss", color=COLORS[0], linewidth=1.4, alpha=0.85)
    draw_curve(axes, log, "eval_loss", "validation loss", color=COLORS[1], linewidth=2, marker="o", markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a target token)")
    axes.set_ylim(0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    handles = axes.get_legend_handles_labels()[0]
    if any("eval_bleu" in entry for entry in log):
        handles += draw_bleu(axes, log)
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, labelcolor=INK)
    return figure


def payload(attentions: Attentions) -> str:
    """The words, weights in thousandths and colours as JSON in which no "<" can end the script that holds it."""
    stacks = {}
    for stack in STACKS:
        weights = attentions.weights(stack)
        stacks[stack] = {
            "queries": attentions.queries(stack),
            "keys": attentions.keys(stack),
            "layers": weights.shape[0],
            "heads": weights.shape[1],
            "weights": np.rint(1000 * weights).astype(int).ravel().tolist(),
        }
    colors = head_colors(max(attentions.weights(stack).shape[1] for stack in STACKS))
    text = json.dumps({"stacks": stacks, "colors": colors}, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_of(attentions: Attentions) -> str:
    """The page of weights that are there already, rounded to three digits."""
    layers, heads = attentions.encoder.shape[:2]
    parts = {
        "title": html.escape(attentions.source),
        "source": html.escape(attentions.source),
        "target": html.escape(attentions.target),
        "model": f"Attention in {layers} encoder and {len(attentions.decoder)} decoder layers of {heads} heads",
        "payload": payload(attentions),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], PAGE.read_text(encoding="utf-8"))


def attention_page(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, target: str | None = None
) -> str:
    """One HTML page that shows every head of every layer at work on a sentence; see `attentions_of` for the arguments.

    It is whole: it loads nothing, keeps nothing and needs no network. Its address says what it shows, for example
    `page.html#cross-2&heads=1.3&query=4`.
    """
    return page_of(attentions_of(model, tokenizer, source, target))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command's arguments; an output that cannot be written ends it with status 2."""
    parser = ArgumentParser(
        prog="python -m vaswani_transformer.figures",
        description="Write one HTML page that shows a model's attention on a sentence.",
    )
    parser.add_argument("model", help="the folder or the Hub name of a model with its tokenizer")
    parser.add_argument("source", metavar="sentence", type=utf8_text, help="the sentence to translate")
    parser.add_argument("--target", type=utf8_text, help="its translation (what the model itself translates)")
    parser.add_argument("--output", type=Path, default=Path("attention.html"), help="the page (attention.html)")
    parser.add_argument("--force", action="store_true", help="replace the file that --output names")
    options = parser.parse_args(arguments)
    if not options.output.absolute().parent.is_dir():
        parser.error(f"{options.output}: there is no folder {options.output.absolute().parent}; make it first.")
    if options.output.is_dir():
        parser.error(f"{options.output}: a folder; name a file.")
    if options.output.is_file() and not options.force:
        parser.error(f"{options.output}: is there already; give another --output, or replace it with --force.")
    return options


def main(arguments: list[str] | None = None) -> None:
    """The command line: write the page of a sentence, and its path to standard output.

    What cannot be drawn ends it with one line and exit status 2.
    """
    options = parse(arguments)
    logging.disable_progress_bar()
    with exit_on_user_error():
        tokenizer, model = load_tokenizer(options.model), load_model(options.model)
        check_tokenizer_size(model, tokenizer, options.model)
        try:
            page = attention_page(model, tokenizer, options.source, options.target)
        except ValueError as error:
            raise UserError(f"{options.model}: {one_line(error)}") from error
        with write_errors(options.output, "make room, or give another --output"):
            options.output.write_text(page, encoding="utf-8")
    sys.stdout.write(f"{options.output}\n")


__all__ = [
    "Attentions",
    "attention_page",
    "attentions_of",
    "draw_attention",
    "draw_heat_maps",
    "draw_learning_rate",
    "draw_loss",
    "draw_positional_encoding",
    "page_of",
]

if __name__ == "__main__":
    main()
