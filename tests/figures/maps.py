"""Random attention maps, and the words of a figure, none of which may overlap a different one or be cut off."""

import itertools

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from vaswani_transformer.figures import AttentionMaps

LONG_SENTENCE = [
    *("the", "representation", "of", "institutionalised", "misunderstandings", "remains", ",", "however", ","),
    *("$", "5", "and", "$", "6", ".", "</s>"),
]


def words_of(figure: Figure) -> list[tuple[str, Bbox]]:
    """Return all visible texts of a figure with their boxes."""
    figure.draw_without_rendering()
    beyond = set()  # labels of ticks outside an axis exist but are not drawn
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        outside = [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
        beyond |= {label for tick in outside for label in (tick.label1, tick.label2)}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent()) for text in texts if text not in beyond]


def assert_legible(figure: Figure) -> None:
    """Assert that no text leaves the figure and no two overlap by more than a pixel."""
    words = words_of(figure)
    assert words
    for text, box in words:
        assert min(box.x0, box.y0) >= -1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert box.y1 <= figure.bbox.y1 + 1, text
    for (one, box), (other, second) in itertools.combinations(words, 2):
        width = min(box.x1, second.x1) - max(box.x0, second.x0)
        height = min(box.y1, second.y1) - max(box.y0, second.y0)
        assert min(width, height) < 1, (one, other)


def random_attention_maps(
    heads: int = 8, layers: int = 2, source: list[str] = LONG_SENTENCE, target: tuple[str, ...] = ("el", "gato", "</s>")
) -> AttentionMaps:
    """Return random weights of a sentence with long words, a repeated word and signs of a formula."""
    generator = np.random.default_rng(0)

    def rows(queries: int, keys: int) -> np.ndarray:
        return generator.dirichlet(np.full(keys, 0.3), (layers, heads, queries)).astype(np.float32)

    size, length = len(source), len(target)
    return AttentionMaps(
        " ".join(source), " ".join(target), list(source), ["<s>", *target[:-1]], list(target),
        rows(size, size), np.tril(rows(length, length)), rows(length, size),
    )  # fmt: skip
