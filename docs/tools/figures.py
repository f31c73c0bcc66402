"""The drawings of the pages: masks, positions, learning rate and label smoothing."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vaswani_transformer.batching.optimization import learning_rate
from vaswani_transformer.figures.style import INK, MUTED, RULE, head_colors, new_figure, words_style
from vaswani_transformer.layers import sinusoids


def style_axes(axes: Axes) -> Axes:
    """Show only the two axis lines, light, and ticks without marks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(which="both", length=0, pad=5, labelcolor=MUTED)
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)
    return axes


def new_curves(x_label: str, y_label: str, title: str) -> tuple[Figure, Axes]:
    figure = new_figure(7.2, 4)
    axes = style_axes(figure.subplots())
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_title(title, fontsize=11, color=INK)
    return figure, axes


def draw_positional_encoding(length: int, d_model: int) -> Figure:
    """Draw the sinusoids of section 3.5: one row per position, one column per dimension."""
    figure = new_figure(8.2, 4.2)
    axes = style_axes(figure.subplots())
    table = sinusoids(torch.arange(length), d_model).numpy()  # (length, d_model)
    image = axes.imshow(table, cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_xlabel("dimension")
    axes.set_ylabel("position")
    axes.set_title("Positional encoding (3.5)", fontsize=11, color=INK)
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=24, ticks=[-1, 0, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelcolor=MUTED)
    return figure


def draw_learning_rate(
    settings: Sequence[tuple[int, int]] = ((512, 4000), (512, 8000), (1024, 4000)), steps: int = 20_000
) -> Figure:
    """Draw equation (3) over the first `steps` steps, one curve per pair of d_model and warm-up steps."""
    figure, axes = new_curves("step", "learning rate", "Learning rate, equation (3)")
    shown_steps = sorted(
        {*np.linspace(1, steps, 1000).astype(int), *(warmup for _, warmup in settings if warmup <= steps)}
    )
    for (d_model, warmup), color in zip(settings, head_colors(len(settings)), strict=True):
        rates = [learning_rate(int(step), d_model, warmup) for step in shown_steps]
        axes.plot(shown_steps, rates, color=color, linewidth=2, label=f"d_model {d_model:,}, warm-up {warmup:,}")
    axes.set_xlim(0, steps)
    axes.set_ylim(0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    axes.yaxis.offsetText.set_color(MUTED)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def smoothed_loss(probability: np.ndarray, smoothing: float, vocab_size: int) -> np.ndarray:
    """Return the label-smoothed loss if the true entry has `probability` and the others share the remainder (5.4)."""
    other = (1 - probability) / (vocab_size - 1)
    share = smoothing / vocab_size
    return -(1 - smoothing + share) * np.log(probability) - (vocab_size - 1) * share * np.log(other)


def draw_label_smoothing(vocab_size: int, smoothings: Sequence[float] = (0.0, 0.1, 0.2)) -> Figure:
    """Draw the loss of a target token against the probability of the true entry, one curve a share eps_ls (5.4).

    The other entries share the remainder evenly. A point marks each curve's minimum: 1 - eps_ls + eps_ls / V.
    """
    figure, axes = new_curves("1 - probability of the true token", "loss (nats)", "Label smoothing (5.4)")
    remainders = np.geomspace(0.99, 1e-6, 600)
    for smoothing, color in zip(smoothings, head_colors(len(smoothings)), strict=True):
        losses = smoothed_loss(1 - remainders, smoothing, vocab_size)
        axes.plot(remainders, losses, color=color, linewidth=2, label=f"label smoothing {smoothing:g}")
        if smoothing:
            best = smoothing - smoothing / vocab_size
            axes.plot(best, smoothed_loss(np.array(1 - best), smoothing, vocab_size), "o", color=color)
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_ylim(0)
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def draw_masks(masks: Mapping[str, tuple[torch.Tensor, Sequence[str], Sequence[str]]]) -> Figure:
    """Draw masks side by side: rows are queries, columns keys, blue where a query may attend (3.2.3).

    Args:
        masks: for each title the mask (Q, K), true where a query may attend, and the words of queries and keys.
    """

    def longest(words: Sequence[str]) -> int:
        return max(map(len, words))

    widths = [0.32 * len(keys) + 0.1 * longest(queries) + 0.4 for _, queries, keys in masks.values()]
    heights = [0.32 * len(queries) + 0.1 * longest(keys) + 0.5 for _, queries, keys in masks.values()]
    figure = new_figure(sum(widths), max(heights) + 0.2)
    grid = figure.subplots(1, len(masks), squeeze=False, width_ratios=widths)
    style = words_style() | {"fontsize": 10}
    for axes, (title, (mask, queries, keys)) in zip(grid.flat, masks.items(), strict=True):
        axes.imshow(mask.float().numpy(), cmap="Blues", vmin=0, vmax=1.6, interpolation="nearest")
        axes.set_anchor("N")
        axes.set_title(title, fontsize=11, color=INK)
        axes.spines[:].set_color(RULE)
        axes.tick_params(which="both", length=0)
        axes.set_xticks(range(len(keys)), keys, rotation=90, **style)
        axes.set_yticks(range(len(queries)), queries, **style)
        axes.set_xticks(np.arange(-0.5, len(keys)), minor=True)
        axes.set_yticks(np.arange(-0.5, len(queries)), minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
    return figure
