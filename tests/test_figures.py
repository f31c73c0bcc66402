"""The figures show the numbers that they are made of, and nothing in them overlaps or is cut off."""

import itertools
import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.text import Text

from tests.builders import random_attentions
from tests.helpers import model_of_pairs, run_python
from vaswani_transformer.attention_weights import attentions_of
from vaswani_transformer.embeddings import sinusoids
from vaswani_transformer.figures import (
    draw_attention,
    draw_heat_maps,
    draw_learning_rate,
    draw_loss,
    draw_positional_encoding,
    head_colors,
)
from vaswani_transformer.schedule import learning_rate


def words_of(figure):
    """All texts that are seen in a figure, with the boxes in which they stand."""
    figure.draw_without_rendering()
    beyond = set()  # labels of ticks outside an axis, which are there and not drawn
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        beyond |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
        beyond |= {tick.label2 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    texts = [text for text in texts if text not in beyond]
    return [(text.get_text(), text.get_window_extent()) for text in texts]


def assert_legible(figure):
    """No text leaves the figure, and no two overlap by more than a pixel."""
    found = words_of(figure)
    assert found
    for text, box in found:
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert box.y1 <= figure.bbox.y1 + 1, text
    for (one, box), (other, second) in itertools.combinations(found, 2):
        width = min(box.x1, second.x1) - max(box.x0, second.x0)
        height = min(box.y1, second.y1) - max(box.y0, second.y0)
        assert min(width, height) < 1, (one, other)


def lines_of(figure):
    """The lines of an attention picture: (head's colour, query, key) and how opaque each is."""
    found = {}
    for collection in figure.axes[0].collections:
        for (start, end), color in zip(collection.get_segments(), collection.get_colors(), strict=True):
            found[to_hex(color), round(start[0]), round(end[0])] = color[3]
    return found


@pytest.mark.parametrize("stack", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("word", [None, 2])
def test_each_line_is_as_strong_as_its_weight(stack, word):
    attentions = random_attentions()
    weights = attentions.weights(stack)[0]
    lines = lines_of(draw_attention(attentions, stack, layer=1, word=word))
    for head, query, key in np.ndindex(weights.shape):
        weight = weights[head, query, key]
        is_drawn = weight > 0.04 if word is None else query == 1 and weight > 0.01
        place = (head_colors(8)[head], query, key)
        assert (place in lines) == is_drawn
        if is_drawn:
            assert lines[place] == pytest.approx(weight)


def test_only_the_heads_that_are_asked_for_are_drawn():
    colors = {color for color, _, _ in lines_of(draw_attention(random_attentions(), "cross", heads=[3, 5]))}
    assert colors == {head_colors(8)[2], head_colors(8)[4]}


def test_without_a_layer_it_is_the_last():
    attentions = random_attentions()
    assert lines_of(draw_attention(attentions)) == lines_of(draw_attention(attentions, layer=2))
    assert lines_of(draw_attention(attentions)) != lines_of(draw_attention(attentions, layer=1))


def test_a_word_is_found_by_its_name_or_its_number():
    attentions = random_attentions()
    by_name = lines_of(draw_attention(attentions, word="misunderstandings"))
    assert by_name == lines_of(draw_attention(attentions, word=5))
    assert {query for _, query, _ in by_name} == {4}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"stack": "both"}, "'both' is not an attention of the model"),
        ({"layer": 0}, r"layer \(0\) is none of the 2; they are counted from 1 to 2"),
        ({"layer": 3}, r"layer \(3\) is none of the 2"),
        ({"heads": 9}, r"head \(9\) is none of the 8"),
        ({"heads": []}, r"heads \(\[\]\) names no head"),
        ({"word": 99}, r"word \(99\) is none of the 16"),
        ({"word": "$"}, r"word \('\$'\) stands at 10, 13; give one of these numbers"),
        ({"word": "cat"}, r"word \('cat'\) is none of the, representation, .*; give one of these, or its number"),
    ],
)
def test_what_is_not_there_cannot_be_drawn(choice, message):
    with pytest.raises(ValueError, match=message):
        draw_attention(random_attentions(), **choice)


@pytest.mark.parametrize("stack", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("word", [None, 1])
@pytest.mark.parametrize("heads", [1, 16])
def test_no_word_of_an_attention_picture_overlaps_another_or_is_cut_off(stack, word, heads):
    figure = draw_attention(random_attentions(heads=heads), stack, word=word)
    assert_legible(figure)
    words = [text for text, _ in words_of(figure)]
    for shown in random_attentions().queries(stack) + random_attentions().keys(stack):
        assert shown in words


@pytest.mark.parametrize(("stack", "heads"), [("encoder", 1), ("decoder", 3), ("cross", 8)])
def test_a_layer_s_heat_maps_are_its_weights_head_by_head(stack, heads):
    attentions = random_attentions(heads=heads)
    figure = draw_heat_maps(attentions, stack, layer=2)
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert np.array_equal(images, attentions.weights(stack)[1])
    assert_legible(figure)
    words = [text for text, _ in words_of(figure)]
    assert all(shown in words for shown in attentions.queries(stack) + attentions.keys(stack))


def test_heat_maps_of_all_layers_are_in_rows_and_columns():
    attentions = random_attentions(heads=5, layers=3)
    figure = draw_heat_maps(attentions, "cross", heads=[1, 5])
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert np.array_equal(images, attentions.cross[:, [0, 4]].reshape(6, *attentions.cross.shape[2:]))
    assert_legible(figure)
    assert {"layer 1", "layer 2", "layer 3", "head 1", "head 5"} <= {text for text, _ in words_of(figure)}


def test_a_sentence_s_attention_is_drawn_from_the_model_itself():
    found = attentions_of(*model_of_pairs(), "the cat is black")
    assert_legible(draw_attention(found, "cross"))
    assert_legible(draw_heat_maps(found, "decoder", layer=1))


@given(st.integers(1, 40))
def test_each_head_has_a_colour_of_its_own(count):
    colors = head_colors(count)
    assert len(set(colors)) == count
    assert all(to_hex(color) == color for color in colors)


@pytest.mark.parametrize("wavelengths", [False, True])
def test_the_positional_encoding_is_the_model_s(wavelengths):
    figure = draw_positional_encoding(50, 64, wavelengths)
    assert np.array_equal(figure.axes[0].images[0].get_array(), sinusoids(torch.arange(50), 64).numpy())
    assert_legible(figure)


def test_wavelengths_are_those_of_the_sinusoids():
    (axes,) = [axes for axes in draw_positional_encoding(50, 16, True).axes if axes.get_ylabel().startswith("wave")]
    lengths = axes.lines[0].get_ydata()
    for dimension in range(16):
        assert lengths[dimension] == pytest.approx(2 * np.pi * 10000 ** (dimension // 2 * 2 / 16))


@pytest.mark.parametrize("sizes", [(0, 64), (10, 7), (10, 0)])
def test_positions_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        draw_positional_encoding(*sizes)


@settings(max_examples=5)
@given(st.lists(st.tuples(st.integers(1, 2048), st.integers(1, 9000)), min_size=1, max_size=4))
def test_the_learning_rate_is_equation_3_with_its_peak(pairs):
    axes = draw_learning_rate(pairs, steps=9000).axes[0]
    for (d_model, warmup), line in zip(pairs, axes.lines, strict=True):
        steps, rates = line.get_data()
        assert list(rates) == [learning_rate(int(step), d_model, warmup) for step in steps]
        assert max(rates) == learning_rate(warmup, d_model, warmup)


def test_the_learning_rate_is_legible():
    assert_legible(draw_learning_rate())


@pytest.mark.parametrize("choice", [{"settings": ()}, {"settings": ((512, 0),)}, {"steps": 0}])
def test_a_learning_rate_without_steps_is_refused(choice):
    with pytest.raises(ValueError, match="must be positive; give at least one pair"):
        draw_learning_rate(**choice)


LOG = [
    {"loss": 6.0, "learning_rate": 0.1, "step": 10},
    {"eval_loss": 5.0, "eval_bleu": 3.5, "step": 20},
    {"loss": 3.0, "step": 20},
    {"eval_loss": 2.0, "eval_bleu": 30.0, "step": 40},
    {"train_runtime": 9.0, "train_loss": 4.0, "step": 40},
]


def write_log(folder, log, name="log_history"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("results.json" if name == "curve" else "trainer_state.json")).write_text(json.dumps({name: log}))


def curves(figure):
    return {line.get_label(): [list(data) for data in line.get_data()] for axes in figure.axes for line in axes.lines}


def test_the_loss_of_a_run_is_drawn_with_its_bleu(tmp_path):
    write_log(tmp_path, LOG)
    figure = draw_loss(tmp_path)
    assert curves(figure) == {
        "training loss": [[10, 20], [6.0, 3.0]],
        "validation loss": [[20, 40], [5.0, 2.0]],
        "validation BLEU": [[20, 40], [3.5, 30.0]],
    }
    assert_legible(figure)


@pytest.mark.parametrize("place", ["checkpoints", "."])
def test_a_run_that_is_not_finished_is_drawn_up_to_its_newest_checkpoint(place, tmp_path):
    for step in (9, 10, 100):
        write_log(tmp_path / place / f"checkpoint-{step}", [{"loss": 1.0, "step": step}])
    (tmp_path / place / "checkpoint-200").mkdir()  # being written
    assert curves(draw_loss(tmp_path)) == {"training loss": [[100], [1.0]]}


def test_results_alone_are_enough(tmp_path):
    write_log(tmp_path / "run", LOG)
    write_log(tmp_path / "results", LOG[:-1], name="curve")
    assert curves(draw_loss(str(tmp_path / "results"))) == curves(draw_loss(tmp_path / "run"))


def test_a_folder_that_is_called_like_a_checkpoint_and_has_no_step_is_left_aside(tmp_path):
    write_log(tmp_path / "checkpoint-9", LOG[:1])
    write_log(tmp_path / "checkpoint-10", LOG)
    write_log(tmp_path / "checkpoint-best", LOG[:1])
    assert len(curves(draw_loss(tmp_path))["training loss"][0]) == 2


def test_a_folder_without_a_log_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no trainer_state.json, checkpoint or results.json; give"):
        draw_loss(tmp_path)


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    draws = [draw_positional_encoding, draw_learning_rate, lambda: draw_attention(random_attentions())]
    for draw in [*draws, lambda: draw_heat_maps(random_attentions())]:
        with pytest.raises(ImportError, match=r'run pip install "vaswani-transformer\[figures\]"'):
            draw()


@pytest.mark.slow
def test_matplotlib_is_imported_when_something_is_drawn_and_no_window_opens():
    code = """
import sys
import vaswani_transformer.figures as figures
assert "matplotlib" not in sys.modules
figures.draw_learning_rate()
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    assert run_python(code) == ""
