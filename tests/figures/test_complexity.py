"""The figure of Table 1 shows what it is given."""

import numpy as np
import pytest

from vaswani_transformer import draw_layer_complexity


def test_figure_shows_the_measurements() -> None:
    rows = [
        {"layer": layer, "n": n, "d": d, "seconds": factor * n, "peak_mib": None, "operations": n * d}
        for layer, factor in (("one", 0.5), ("two", 2.0))
        for n in (16, 64)
        for d in (8, 32)
    ]
    figure = draw_layer_complexity(rows)
    assert [axes.get_title() for axes in figure.axes[:3]] == [
        "seconds, d = 8",
        "peak memory (MiB), d = 8",
        "operations, d = 8",
    ]
    lines = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in figure.axes[0].lines}
    assert lines == {"one": [[16, 8], [64, 32]], "two": [[16, 32], [64, 128]]}
    with pytest.raises(ValueError, match="measurements: nothing to draw"):
        draw_layer_complexity([])
