"""Figures of attention show the weights, and no text in them overlaps or is cut off."""

import sys
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.figures.maps import assert_legible, random_attention_maps, words_of
from vaswani_transformer.figures import draw_attention, draw_heat_maps
from vaswani_transformer.figures.style import head_colors


def lines_of(figure: Figure) -> dict[tuple[str, int, int], float]:
    """Return the opacity of each line of a figure by its head's color, query and key."""
    lines = {}
    for collection in figure.axes[0].collections:
        assert isinstance(collection, LineCollection)
        colors = np.asarray(collection.get_colors())
        for (start, end), color in zip(collection.get_segments(), colors, strict=True):
            lines[to_hex(color), round(start[0]), round(end[0])] = color[3]
    return lines


@pytest.mark.parametrize(("stack", "word"), [("encoder", None), ("decoder", 2), ("cross", None)])
def test_lines_are_as_opaque_as_their_weights(stack: str, word: int | None) -> None:
    maps = random_attention_maps()
    weights = maps.weights(stack)[0]
    lines = lines_of(draw_attention(maps, stack, layer=1, word=word))
    for head, query, key in np.ndindex(weights.shape):
        weight = weights[head, query, key]
        is_drawn = weight > 0.04 and word in (None, query + 1)
        line = (head_colors(8)[head], query, key)
        assert (line in lines) == is_drawn
        if is_drawn:
            assert lines[line] == pytest.approx(weight)


def test_heads_and_layer_choose_what_is_drawn() -> None:
    """The layer defaults to the last."""
    maps = random_attention_maps()
    colors = {color for color, _, _ in lines_of(draw_attention(maps, "cross", heads=[3, 5]))}
    assert colors == {head_colors(8)[2], head_colors(8)[4]}
    assert lines_of(draw_attention(maps)) == lines_of(draw_attention(maps, layer=2))
    assert lines_of(draw_attention(maps)) != lines_of(draw_attention(maps, layer=1))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layer": 0}, r"layer: out of range; got 0, expected 1 to 2\."),
        ({"word": 99}, r"word: out of range; got 99, expected 1 to 16"),
    ],
)
def test_unknown_stack_layer_head_or_word_is_an_error(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_attention(random_attention_maps(), **choice)


@pytest.mark.parametrize(("stack", "heads"), [("encoder", 16), ("decoder", 1), ("cross", 16)])
def test_words_of_an_attention_figure_do_not_overlap(stack: str, heads: int) -> None:
    maps = random_attention_maps(heads=heads)
    figure = draw_attention(maps, stack)
    assert_legible(figure)
    assert {*maps.queries(stack), *maps.keys(stack)} <= {text for text, _ in words_of(figure)}


@pytest.mark.parametrize(("stack", "heads"), [("encoder", 1), ("decoder", 3), ("cross", 8)])
def test_heat_maps_of_a_layer_are_its_weights(stack: str, heads: int) -> None:
    maps = random_attention_maps(heads=heads)
    figure = draw_heat_maps(maps, stack, layer=2)
    images: list[Any] = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert np.array_equal(images, maps.weights(stack)[1])
    assert_legible(figure)
    assert {*maps.queries(stack), *maps.keys(stack)} <= {text for text, _ in words_of(figure)}


def test_heads_have_different_colors() -> None:
    for count in (1, 8, 9, 16, 40):
        colors = head_colors(count)
        assert len(set(colors)) == count
        assert all(to_hex(color) == color for color in colors)


def test_missing_matplotlib_is_one_sentence_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'run pip install "vaswani-transformer\[figures\]"'):
        draw_attention(random_attention_maps())
