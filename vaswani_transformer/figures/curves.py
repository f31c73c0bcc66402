"""Curves and tables: positional encoding (3.5), learning rate (equation 3), and the loss of a run.

P positions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..batching.schedule import learning_rate
from ..embeddings import sinusoids
from ..support.files import read_json
from .style import COLORS, INK, MUTED, RULE, head_colors, new_curves, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCORES = {"eval_bleu": "BLEU", "eval_f1": "F1"}
"""The scores of evaluations that `draw_loss` draws, by their names in the log."""


def draw_wavelengths(axes: "Axes", length: int, d_model: int) -> None:
    """Draw 2 pi 10000^(2i / d_model) positions, the wavelength of dimensions 2i and 2i + 1 (3.5)."""
    dimensions = np.arange(d_model)
    axes.semilogy(dimensions, 2 * np.pi * 10000 ** (dimensions // 2 * 2 / d_model), color=COLORS[0], linewidth=2)
    axes.axhline(length, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(f"{length} positions", (0.01, length), xycoords=("axes fraction", "data"), xytext=(0, 4),
        textcoords="offset points", color=MUTED, fontsize=9)  # fmt: skip
    axes.set_ylabel("wavelength (positions)")
    axes.grid(axis="y", color=RULE, linewidth=0.6)


def draw_positional_encoding(length: int = 100, d_model: int = 128, wavelengths: bool = False) -> "Figure":
    """Draw the sinusoids of section 3.5: one row per position, one column per dimension, sine and cosine alternating.

    Args:
        length: number of positions.
        d_model: number of dimensions.
        wavelengths: show each dimension's wavelength below, from 2 pi to 10000 * 2 pi positions.

    Raises:
        ValueError: d_model is odd, or one of the numbers is not positive.
        ImportError: Matplotlib is not installed.
    """
    if length < 1 or d_model < 2 or d_model % 2:
        raise ValueError(f"length ({length}) must be at least 1, and d_model ({d_model}) even and at least 2.")
    figure = new_figure(8.2, 6.4 if wavelengths else 4.2)
    heights = [2, 1] if wavelengths else [1]
    panels = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)
    axes = style_axes(panels[0, 0])
    table = sinusoids(torch.arange(length), d_model).numpy()  # (P, d_model)
    image = axes.imshow(table, cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_ylabel("position")
    axes.set_title("Positional encoding (3.5)", fontsize=11, color=INK)
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=24, ticks=[-1, 0, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelcolor=MUTED)
    if wavelengths:
        draw_wavelengths(style_axes(panels[1, 0]), length, d_model)
    panels[-1, 0].set_xlabel("dimension")
    return figure


def draw_learning_rate(
    settings: Sequence[tuple[int, int]] = ((512, 4000), (512, 8000), (1024, 4000)), steps: int = 20_000
) -> "Figure":
    """Draw equation (3) over the first `steps` steps, one curve per pair of d_model and warm-up steps.

    Raises:
        ValueError: there is no pair, or one of the numbers is not positive.
        ImportError: Matplotlib is not installed.
    """
    if not settings or min(steps, *(number for pair in settings for number in pair)) < 1:
        raise ValueError(f"settings ({settings}) and steps ({steps}) must be positive; give at least one pair.")
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


def draw_label_smoothing(smoothings: Sequence[float] = (0.0, 0.1, 0.2), vocab_size: int = 37_000) -> "Figure":
    """Draw the loss of a target token against the probability of the true entry, one curve a share eps_ls (5.4).

    The other entries share the remainder evenly. A point marks each curve's minimum: 1 - eps_ls + eps_ls / V.

    Raises:
        ValueError: there is no share, one is outside [0, 1), or the vocabulary has fewer than two entries.
        ImportError: Matplotlib is not installed.
    """
    if not smoothings or not all(0 <= smoothing < 1 for smoothing in smoothings) or vocab_size < 2:
        raise ValueError(f"smoothings ({smoothings}) must lie in [0, 1), and vocab_size ({vocab_size}) be at least 2.")
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


def read_log(run: Path) -> list[dict[str, Any]]:
    """Return the log of a run, up to its end or to its newest checkpoint, or the curve in its `results.json`."""
    states = [path for folder in (run, run / "checkpoints") for path in folder.glob("checkpoint-*/trainer_state.json")]
    steps = {path: path.parent.name.removeprefix("checkpoint-") for path in states}
    states = sorted((path for path in states if steps[path].isdigit()), key=lambda path: -int(steps[path]))
    for path in (run / "trainer_state.json", *states):
        if path.is_file():
            return read_json(path, "restore it.", log_history=list)["log_history"]
    if (run / "results.json").is_file():
        return read_json(run / "results.json", "restore it.", curve=list)["curve"]
    raise FileNotFoundError(
        f"{run}: no trainer_state.json, checkpoint or results.json; give the folder of a run or of a checkpoint."
    )


def draw_curve(axes: "Axes", log: Sequence[dict[str, Any]], name: str, label: str, **style: Any) -> list[Any]:
    """Draw the logged values of one name against their steps, if there are any."""
    points = [(entry["step"], entry[name]) for entry in log if name in entry and "step" in entry]
    return axes.plot(*zip(*points, strict=True), label=label, **style) if points else []


def draw_score(axes: "Axes", log: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """Draw a validation score, a key of `SCORES`, on a second axis, in the curve's color."""
    second = style_axes(axes.twinx())
    second.spines["bottom"].set_visible(False)
    style = {"color": COLORS[2], "linewidth": 2, "marker": "s", "markersize": 4}
    curve = draw_curve(second, log, name, f"validation {SCORES[name]}", **style)
    second.set_ylim(0)
    second.set_ylabel(SCORES[name], color=COLORS[2])
    second.tick_params(labelcolor=COLORS[2])
    return curve


def draw_loss(run: str | Path) -> "Figure":
    """Draw training and validation loss of a run, finished or not, and on a second axis its validation BLEU or F1.

    Training loss is the optimizer's, with label smoothing and dropout; validation loss has neither.

    Args:
        run: the folder of a run of `training.train`, of any Trainer, or of a checkpoint.

    Raises:
        FileNotFoundError: the folder holds no log.
        ImportError: Matplotlib is not installed.
    """
    log = read_log(Path(run))
    figure, axes = new_curves("step", "loss (nats per target token)")
    draw_curve(axes, log, "loss", "training loss", color=COLORS[0], linewidth=1.4, alpha=0.85)
    draw_curve(axes, log, "eval_loss", "validation loss", color=COLORS[1], linewidth=2, marker="o", markersize=4)
    axes.set_ylim(0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    handles = axes.get_legend_handles_labels()[0]
    for name in SCORES:
        if any(name in entry for entry in log):
            handles += draw_score(axes, log, name)
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, labelcolor=INK)
    return figure
