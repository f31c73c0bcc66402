"""Pictures of the measured non-autoregressive models: `python -m docs.tools.measurements FOLDER` draws them.

FOLDER contains what `bench.family` keeps. One picture has quality against time: each dot is a search, with the mean
BLEU of its seeds and the 95% interval, and a line joins the searches of a model. The other one has BLEU and repeats
after each layer; a model that predicts words only after its last layer is a horizontal line. IterativeVAE is blue.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from bench.family_table import bootstrap, measurement, model_of, read_searches, shown_name, table_rows
from bench.measuring import Row
from vaswani_transformer.figures.svg import BLUE, GRAY, Drawing

from .pictures import IMAGES

HIGHLIGHTED = "IterativeVAE"
LEFT, RIGHT, TOP, BOTTOM = 60, 560, 24, 360  # of the area of the dots, in pixels
LABELS = 590  # where the names of the models begin
LINE_HEIGHT = 18
SAMPLES = 1000  # of the bootstrap

PANELS = {"BLEU": 60, "repeats, %": 450}  # the panels of the picture by layer, and where each begins
PANEL_WIDTH = 180


class Search(NamedTuple):
    """Time and quality of one search of one model."""

    milliseconds: float
    bleu: float
    lowest: float
    highest: float


def searches_of(folder: Path) -> dict[str, list[Search]]:
    """Return the searches of each model whose speed was measured, by time."""
    models = defaultdict(list)
    for row in table_rows(bootstrap(read_searches(folder), SAMPLES), measurement(folder)):
        name = row["model"].rpartition(", ")[0]
        lowest, highest = row["95% interval"].split(" to ")
        milliseconds = row["ms a sentence, median"]
        if milliseconds is not None:
            models[name].append(Search(milliseconds, float(row["BLEU"]), float(lowest), float(highest)))
    return {name: sorted(searches) for name, searches in models.items()}


def spread(heights: list[float], distance: float) -> list[float]:
    """Return increasing heights near the given increasing ones, so that neighbors are `distance` apart."""
    groups: list[list[float]] = []  # neighbors that touch, which are centered on the mean of their heights
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and first_height(groups[-1], distance) < last_height(groups[-2], distance) + distance:
            last = groups.pop()
            groups[-1] += last
    return [first_height(group, distance) + distance * place for group in groups for place in range(len(group))]


def first_height(group: list[float], distance: float) -> float:
    return sum(group) / len(group) - distance * (len(group) - 1) / 2


def last_height(group: list[float], distance: float) -> float:
    return first_height(group, distance) + distance * (len(group) - 1)


def draw_speed_quality(models: dict[str, list[Search]]) -> Drawing:
    """Draw BLEU over the milliseconds of a sentence, which are on a logarithmic axis."""
    drawing = Drawing("speed-quality", "BLEU of each search, and its time for a sentence", 780, 410)
    every = [search for searches in models.values() for search in searches]
    slowest = 1.1 * max(search.milliseconds for search in every)
    fastest = 0.9 * min(search.milliseconds for search in every)
    lowest = math.floor(min(search.lowest for search in every))
    highest = math.ceil(max(search.highest for search in every))

    def x_of(milliseconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(milliseconds / fastest) / math.log(slowest / fastest)

    def y_of(bleu: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (bleu - lowest) / (highest - lowest)

    # The axes.
    drawing.line((LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM), width=0.7)
    for bleu in range(lowest + lowest % 2, highest + 1, 2):
        drawing.text(LEFT - 8, y_of(bleu) + 4.5, str(bleu), anchor="end")
    for milliseconds in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200):
        if fastest <= milliseconds <= slowest:
            drawing.text(x_of(milliseconds), BOTTOM + 20, str(milliseconds))
    drawing.text(LEFT - 8, 14, "BLEU", anchor="end")
    drawing.text((LEFT + RIGHT) / 2, BOTTOM + 42, "milliseconds a sentence")

    # The searches of each model, and its name at the height of the slowest one.
    by_height = sorted(models, key=lambda name: y_of(models[name][-1].bleu))
    label_heights = spread([y_of(models[name][-1].bleu) for name in by_height], LINE_HEIGHT)
    for name, label_height in zip(by_height, label_heights, strict=True):
        color = BLUE if HIGHLIGHTED in name else GRAY
        dots = [(x_of(search.milliseconds), y_of(search.bleu)) for search in models[name]]
        for search, (x, y) in zip(models[name], dots, strict=True):
            drawing.line((x, y_of(search.lowest)), (x, y_of(search.highest)), color=color, width=0.8)
            drawing.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
        drawing.line(*dots, color=color, width=1.6)
        drawing.line(dots[-1], (LABELS - 6, label_height), color=color, width=0.4)
        drawing.text(LABELS, label_height + 4.5, name, anchor="start", color=color)
    return drawing


def layers_of(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return BLEU and repeats of each model of one pass after each of its layers, as means over its seeds."""
    measured = json.loads((folder / "decoding.json").read_text(encoding="utf-8"))
    single_pass = {row["model"] for row in measured["rows"] if row["passes"] == "1"}
    models: dict[str, dict[int, list[Row]]] = {}  # the rows of its seeds after each layer
    for row in measured["refinement"]:
        run, _, search = row["model"].partition(", ")
        name = f"{model_of(run)}, {search}"
        if name in single_pass:  # the others have iterations
            layers = models.setdefault(shown_name(name).rpartition(", ")[0], defaultdict(list))
            layers[row["iteration or layer"]].append(row)
    return {
        model: {panel: [mean_score(rows, panel) for rows in layers.values()] for panel in PANELS}
        for model, layers in models.items()
    }


def mean_score(rows: list[Row], panel: str) -> float:
    """Return the mean of the numbers that a panel shows, such as that of "repeats" for "repeats, %"."""
    column = panel.removesuffix(", %")
    return statistics.mean(float(row[column].rstrip("%")) for row in rows)


def draw_layers(models: dict[str, dict[str, list[float]]]) -> Drawing:
    """Draw BLEU and repeats over the number of the layer, a panel each."""
    drawing = Drawing("layers", "BLEU and repeats after each layer", 800, 330)
    for panel, left in PANELS.items():
        draw_panel(drawing, {name: scores[panel] for name, scores in models.items()}, panel, left)
    return drawing


def draw_panel(drawing: Drawing, models: dict[str, list[float]], title: str, left: float) -> None:
    """Draw the values of each model, one for each layer, and the names on the right."""
    values = [value for by_layer in models.values() for value in by_layer]
    lowest = math.floor(min(values))
    highest = math.ceil(max(values))
    layers = max(len(by_layer) for by_layer in models.values())
    bottom = 270
    right = left + PANEL_WIDTH

    def x_of(layer: int) -> float:
        return left + PANEL_WIDTH * layer / (layers + 1)

    def y_of(value: float) -> float:
        return bottom - (bottom - TOP) * (value - lowest) / (highest - lowest)

    # The axes.
    drawing.line((left, TOP), (left, bottom), (right, bottom), width=0.7)
    for value in range(lowest, highest + 1, 2):
        drawing.text(left - 8, y_of(value) + 4.5, str(value), anchor="end")
    for layer in range(1, layers + 1):
        drawing.text(x_of(layer), bottom + 20, str(layer))
    drawing.text(left, 14, title)
    drawing.text(left + PANEL_WIDTH / 2, bottom + 42, "layer")

    # Each model, with its name at the height of its last value.
    by_height = sorted(models, key=lambda name: y_of(models[name][-1]))
    label_heights = spread([y_of(models[name][-1]) for name in by_height], LINE_HEIGHT)
    for name, label_height in zip(by_height, label_heights, strict=True):
        color = BLUE if HIGHLIGHTED in name else GRAY
        dots = [(x_of(layer), y_of(value)) for layer, value in enumerate(models[name], start=1)]
        if len(dots) == 1:
            dots = [(left, dots[0][1]), (x_of(layers), dots[0][1])]
        else:
            for x, y in dots:
                drawing.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
        drawing.line(*dots, color=color, width=1.6)
        drawing.line(dots[-1], (right - 6, label_height), color=color, width=0.4)
        drawing.text(right, label_height + 4.5, name, anchor="start", color=color)


def main(folder: Path, images: Path = IMAGES) -> None:
    """Draw the searches and the layers of a comparison."""
    for drawing in (draw_speed_quality(searches_of(folder)), draw_layers(layers_of(folder))):
        (images / f"figure-{drawing.name}.svg").write_text(drawing.svg(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
