"""Figures show the numbers that they are made of, and no text in them overlaps or is cut off."""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tests.builders import random_attention_maps
from tests.helpers import model_of_pairs
from vaswani_transformer.batching.schedule import learning_rate
from vaswani_transformer.embeddings import sinusoids
from vaswani_transformer.figures import (
    attention_maps,
    draw_attention,
    draw_heat_maps,
    draw_label_smoothing,
    draw_learning_rate,
    draw_loss,
    draw_masks,
    draw_positional_encoding,
)
from vaswani_transformer.figures.curves import smoothed_loss
from vaswani_transformer.figures.style import head_colors


def words_of(figure: Figure) -> list[tuple[str, Bbox]]:
    """Return all visible texts of a figure with their boxes."""
    figure.draw_without_rendering()
    beyond = set()  # labels of ticks outside an axis exist but are not drawn
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        beyond |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
        beyond |= {tick.label2 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    texts = [text for text in texts if text not in beyond]
    return [(text.get_text(), text.get_window_extent()) for text in texts]


def assert_legible(figure: Figure) -> None:
    """Assert that no text leaves the figure and no two overlap by more than a pixel."""
    words = words_of(figure)
    assert words
    for text, box in words:
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert box.y1 <= figure.bbox.y1 + 1, text
    for (one, box), (other, second) in itertools.combinations(words, 2):
        width = min(box.x1, second.x1) - max(box.x0, second.x0)
        height = min(box.y1, second.y1) - max(box.y0, second.y0)
        assert min(width, height) < 1, (one, other)


def lines_of(figure: Figure) -> dict[tuple[str, int, int], float]:
    """Return the opacity of each line of a figure by its head's color, query and key."""
    lines = {}
    for collection in figure.axes[0].collections:
        assert isinstance(collection, LineCollection)
        colors = np.asarray(collection.get_colors())
        for (start, end), color in zip(collection.get_segments(), colors, strict=True):
            lines[to_hex(color), round(start[0]), round(end[0])] = color[3]
    return lines


@pytest.mark.parametrize("stack", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("word", [None, 2])
def test_lines_are_as_opaque_as_their_weights(stack: str, word: int | None) -> None:
    maps = random_attention_maps()
    weights = maps.weights(stack)[0]
    lines = lines_of(draw_attention(maps, stack, layer=1, word=word))
    for head, query, key in np.ndindex(weights.shape):
        weight = weights[head, query, key]
        is_drawn = weight > 0.04 if word is None else query == 1 and weight > 0.01
        line = (head_colors(8)[head], query, key)
        assert (line in lines) == is_drawn
        if is_drawn:
            assert lines[line] == pytest.approx(weight)


def test_heads_layer_and_word_choose_what_is_drawn() -> None:
    """The layer defaults to the last; a word is given by its text or its number."""
    maps = random_attention_maps()
    colors = {color for color, _, _ in lines_of(draw_attention(maps, "cross", heads=[3, 5]))}
    assert colors == {head_colors(8)[2], head_colors(8)[4]}
    assert lines_of(draw_attention(maps)) == lines_of(draw_attention(maps, layer=2))
    assert lines_of(draw_attention(maps)) != lines_of(draw_attention(maps, layer=1))
    by_name = lines_of(draw_attention(maps, word="misunderstandings"))
    assert by_name == lines_of(draw_attention(maps, word=5))
    assert {query for _, query, _ in by_name} == {4}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"stack": "both"}, "stack: no such attention; got 'both', expected one of encoder"),
        ({"layer": 0}, r"layer: out of range; got 0, expected 1 to 2\."),
        ({"layer": 3}, r"layer: out of range; got 3"),
        ({"heads": 9}, r"head: out of range; got 9, expected 1 to 8"),
        ({"heads": []}, r"heads: no head is named; got \[\]"),
        ({"word": 99}, r"word: out of range; got 99, expected 1 to 16"),
        ({"word": "$"}, r"word: '\$' occurs more than once; give one of the numbers 10, 13"),
        (
            {"word": "cat"},
            r"word: not in the sentence; got 'cat', expected one of the, representation, .*, or a number",
        ),
    ],
)
def test_unknown_stack_layer_head_or_word_is_an_error(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_attention(random_attention_maps(), **choice)


@pytest.mark.parametrize("stack", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("word", [None, 1])
@pytest.mark.parametrize("heads", [1, 16])
def test_words_of_an_attention_figure_do_not_overlap(stack: str, word: int | None, heads: int) -> None:
    figure = draw_attention(random_attention_maps(heads=heads), stack, word=word)
    assert_legible(figure)
    words = [text for text, _ in words_of(figure)]
    for shown in random_attention_maps().queries(stack) + random_attention_maps().keys(stack):
        assert shown in words


@pytest.mark.parametrize(("stack", "heads"), [("encoder", 1), ("decoder", 3), ("cross", 8)])
def test_heat_maps_of_a_layer_are_its_weights(stack: str, heads: int) -> None:
    maps = random_attention_maps(heads=heads)
    figure = draw_heat_maps(maps, stack, layer=2)
    images: list[Any] = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert np.array_equal(images, maps.weights(stack)[1])
    assert_legible(figure)
    words = [text for text, _ in words_of(figure)]
    assert all(shown in words for shown in maps.queries(stack) + maps.keys(stack))


def test_heat_maps_of_all_layers_have_a_row_per_layer_and_a_column_per_head() -> None:
    maps = random_attention_maps(heads=5, layers=3)
    figure = draw_heat_maps(maps, "cross", heads=[1, 5])
    images: list[Any] = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert np.array_equal(images, maps.cross[:, [0, 4]].reshape(6, *maps.cross.shape[2:]))
    assert_legible(figure)
    assert {"layer 1", "layer 2", "layer 3", "head 1", "head 5"} <= {text for text, _ in words_of(figure)}


def test_attention_of_a_real_model_is_legible() -> None:
    maps = attention_maps(*model_of_pairs(), "the cat is black")
    assert_legible(draw_attention(maps, "cross"))
    assert_legible(draw_heat_maps(maps, "decoder", layer=1))


@given(st.integers(1, 40))
def test_heads_have_different_colors(count: int) -> None:
    colors = head_colors(count)
    assert len(set(colors)) == count
    assert all(to_hex(color) == color for color in colors)


@pytest.mark.parametrize("wavelengths", [False, True])
def test_positional_encoding_is_the_model_s(wavelengths: bool) -> None:
    figure = draw_positional_encoding(50, 64, wavelengths)
    image: Any = figure.axes[0].images[0].get_array()
    assert np.array_equal(image, sinusoids(torch.arange(50), 64).numpy())
    assert_legible(figure)


def test_wavelengths_are_those_of_the_sinusoids() -> None:
    (axes,) = [axes for axes in draw_positional_encoding(50, 16, True).axes if axes.get_ylabel().startswith("wave")]
    lengths = np.asarray(axes.lines[0].get_ydata())
    for dimension in range(16):
        assert lengths[dimension] == pytest.approx(2 * np.pi * 10000 ** (dimension // 2 * 2 / 16))


@settings(max_examples=5)
@given(st.lists(st.tuples(st.integers(1, 2048), st.integers(1, 9000)), min_size=1, max_size=4))
def test_learning_rate_is_equation_3_with_its_peak(pairs: list[tuple[int, int]]) -> None:
    axes = draw_learning_rate(pairs, steps=9000).axes[0]
    for (d_model, warmup), line in zip(pairs, axes.lines, strict=True):
        steps, rates = map(np.asarray, line.get_data())
        assert list(rates) == [learning_rate(int(step), d_model, warmup) for step in steps]
        assert max(rates) == learning_rate(warmup, d_model, warmup)
    assert_legible(draw_learning_rate())


LOG = [
    {"loss": 6.0, "learning_rate": 0.1, "step": 10},
    {"eval_loss": 5.0, "eval_bleu": 3.5, "step": 20},
    {"loss": 3.0, "step": 20},
    {"eval_loss": 2.0, "eval_bleu": 30.0, "step": 40},
    {"train_runtime": 9.0, "train_loss": 4.0, "step": 40},
]


def write_log(folder: Path, log: list[dict[str, float]], name: str = "log_history") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("results.json" if name == "curve" else "trainer_state.json")).write_text(json.dumps({name: log}))


def curves(figure: Figure) -> dict[str, list[list[float]]]:
    return {
        str(line.get_label()): [list(np.asarray(data)) for data in line.get_data()]
        for axes in figure.axes
        for line in axes.lines
    }


def test_loss_of_a_run_is_drawn_with_its_bleu(tmp_path: Path) -> None:
    write_log(tmp_path, LOG)
    figure = draw_loss(tmp_path)
    assert curves(figure) == {
        "training loss": [[10, 20], [6.0, 3.0]],
        "validation loss": [[20, 40], [5.0, 2.0]],
        "validation BLEU": [[20, 40], [3.5, 30.0]],
    }
    assert_legible(figure)


@pytest.mark.parametrize("subfolder", ["checkpoints", "."])
def test_unfinished_run_is_drawn_up_to_its_newest_checkpoint(subfolder: str, tmp_path: Path) -> None:
    for step in (9, 10, 100):
        write_log(tmp_path / subfolder / f"checkpoint-{step}", [{"loss": 1.0, "step": step}])
    (tmp_path / subfolder / "checkpoint-200").mkdir()  # being written
    write_log(tmp_path / subfolder / "checkpoint-best", [{"loss": 2.0, "step": 200}])  # names no step
    assert curves(draw_loss(tmp_path)) == {"training loss": [[100], [1.0]]}


def test_loss_is_drawn_from_results_json_too(tmp_path: Path) -> None:
    write_log(tmp_path / "run", LOG)
    write_log(tmp_path / "results", LOG[:-1], name="curve")
    assert curves(draw_loss(str(tmp_path / "results"))) == curves(draw_loss(tmp_path / "run"))


def test_folder_without_a_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no trainer_state.json, checkpoint or results.json; give"):
        draw_loss(tmp_path)


def test_missing_matplotlib_is_one_sentence_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    draws = [draw_positional_encoding, draw_learning_rate, lambda: draw_attention(random_attention_maps())]
    for draw in [*draws, lambda: draw_heat_maps(random_attention_maps())]:
        with pytest.raises(ImportError, match=r'run pip install "vaswani-transformer\[figures\]"'):
            draw()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_smoothed_loss_is_that_of_training(smoothing: float) -> None:
    """The oracle is torch's cross-entropy of logits that give the true token p and share the remainder evenly."""
    probability, entries = 0.7, 11
    probs = torch.full((1, entries), (1 - probability) / (entries - 1), dtype=torch.float64)
    probs[0, 4] = probability
    expected = torch.nn.functional.cross_entropy(probs.log(), torch.tensor([4]), label_smoothing=smoothing)
    assert smoothed_loss(np.array(probability), smoothing, entries) == pytest.approx(expected.item())


def test_points_of_label_smoothing_are_the_minima_of_their_curves() -> None:
    figure = draw_label_smoothing((0.0, 0.1, 0.2), vocab_size=100)
    assert_legible(figure)
    heights = [np.asarray(line.get_ydata()) for line in figure.axes[0].lines]
    curves = [line for line in heights if len(line) > 1]
    points = [line[0] for line in heights if len(line) == 1]
    assert [min(curve) for curve in curves[1:]] == pytest.approx(points, abs=1e-3)
    assert min(curves[0]) == pytest.approx(0, abs=1e-5)


def test_masks_show_which_query_attends_to_which_key() -> None:
    causal, padding = torch.ones(3, 3).tril().bool(), np.array([[True, True, False, False]] * 3)
    target, source = ["<s>", "the", "cat"], ["el", "gato", "<pad>", "<pad>"]
    figure = draw_masks({"decoder": (causal, target, target), "cross": (padding, target, source)})
    assert_legible(figure)
    for axes, mask in zip(figure.axes, (causal.numpy(), padding), strict=True):
        assert np.array_equal(np.asarray(axes.images[0].get_array()).astype(bool), mask)
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == source


@pytest.mark.parametrize(
    ("draw", "arguments", "message"),
    [
        *[(draw_positional_encoding, sizes, "must be at least 1") for sizes in ((0, 64), (10, 7), (10, 0))],
        (draw_learning_rate, ((),), "must be positive; give at least one pair"),
        (draw_learning_rate, (((512, 0),),), "must be positive; give at least one pair"),
        (draw_learning_rate, (((512, 4000),), 0), "must be positive; give at least one pair"),
        *[(draw_label_smoothing, given, "must lie in") for given in (((), 100), ((1.0,), 100), ((0.1,), 1))],
        (draw_masks, ({},), "masks: there is nothing"),
        (draw_masks, ({"decoder": (np.eye(3), ["a"], ["a", "b", "c"])},), r"decoder: got \(3, 3\), expected 1 queries"),
    ],
)
def test_figure_that_cannot_be_drawn_is_an_error(
    draw: Callable[..., Figure], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        draw(*arguments)
