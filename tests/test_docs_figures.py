"""The drawings of the pages show the numbers that they are made of, and their words can be read."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from docs.tools import pictures
from docs.tools.figures import (
    draw_label_smoothing,
    draw_layer_complexity,
    draw_learning_rate,
    draw_masks,
    draw_positional_encoding,
    smoothed_loss,
)
from tests.figures.legible import assert_legible
from tests.helpers import paper_model_of_pairs, save
from vaswani_transformer.batching.schedule import learning_rate
from vaswani_transformer.embeddings import sinusoids


def test_positional_encoding_is_the_models() -> None:
    figure = draw_positional_encoding(50, 64)
    image: Any = figure.axes[0].images[0].get_array()
    assert np.array_equal(image, sinusoids(torch.arange(50), 64).numpy())
    assert_legible(figure)


def test_learning_rate_is_equation_3_with_its_peak() -> None:
    pairs = [(512, 4000), (1024, 8999), (3, 1)]
    axes = draw_learning_rate(pairs, steps=9000).axes[0]
    for (d_model, warmup), line in zip(pairs, axes.lines, strict=True):
        steps, rates = map(np.asarray, line.get_data())
        assert list(rates) == [learning_rate(int(step), d_model, warmup) for step in steps]
        assert max(rates) == learning_rate(warmup, d_model, warmup)
    assert_legible(draw_learning_rate())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_smoothed_loss_is_that_of_training(smoothing: float) -> None:
    """The oracle is torch's cross-entropy of logits that give the true token p and share the remainder evenly."""
    probability, entries = 0.7, 11
    probs = torch.full((1, entries), (1 - probability) / (entries - 1), dtype=torch.float64)
    probs[0, 4] = probability
    expected = torch.nn.functional.cross_entropy(probs.log(), torch.tensor([4]), label_smoothing=smoothing)
    assert smoothed_loss(np.array(probability), smoothing, entries) == pytest.approx(expected.item())


def test_points_of_label_smoothing_are_the_minima_of_their_curves() -> None:
    figure = draw_label_smoothing(vocab_size=100)
    assert_legible(figure)
    heights = [np.asarray(line.get_ydata()) for line in figure.axes[0].lines]
    curves = [line for line in heights if len(line) > 1]
    points = [line[0] for line in heights if len(line) == 1]
    assert [min(curve) for curve in curves[1:]] == pytest.approx(points, abs=1e-3)


def test_masks_show_which_query_attends_to_which_key() -> None:
    causal, padding = torch.ones(3, 3).tril().bool(), torch.tensor([[True, True, False, False]] * 3)
    target, source = ["<s>", "the", "cat"], ["el", "gato", "<pad>", "<pad>"]
    figure = draw_masks({"decoder": (causal, target, target), "cross": (padding, target, source)})
    assert_legible(figure)
    for axes, mask in zip(figure.axes, (causal, padding), strict=True):
        assert np.array_equal(np.asarray(axes.images[0].get_array()).astype(bool), mask.numpy())
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == source


def test_table_1_shows_the_measurements() -> None:
    rows = [
        {"layer": layer, "n": n, "d": d, "seconds": factor * n, "peak_mib": None, "operations": n * d}
        for layer, factor in (("one", 0.5), ("two", 2.0))
        for n in (16, 64)
        for d in (8, 32)
    ]
    axes = draw_layer_complexity(rows).axes[0]
    assert axes.get_title() == "seconds, d = 8"
    lines = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axes.lines}
    assert lines == {"one": [[16, 8], [64, 32]], "two": [[16, 32], [64, 128]]}


def test_diagrams_show_a_models_weights_and_its_best_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = paper_model_of_pairs()
    monkeypatch.setattr(pictures, "AMBIGUOUS", text := "the cat is black")
    tokens = tokenizer(text, return_tensors="pt")
    words = [each.strip() for each in pictures.display_tokens(tokenizer, tokens["input_ids"][0].tolist())]
    monkeypatch.setattr(pictures, "SENTENCE", text)
    monkeypatch.setattr(pictures, "WORD", words[0])
    monkeypatch.setattr(pictures, "OTHER", words[-2])
    pictures.main(str(save(tmp_path / "model", model, tokenizer)), tmp_path)
    names = ("qkv", "beam-tree", "teacher-forcing", "one-pass", "engines")
    drawings = {name: ElementTree.parse(tmp_path / f"figure-{name}.svg").getroot() for name in names}
    texts = {
        name: [each.text or "" for each in drawing.iter() if each.tag.endswith("text")]
        for name, drawing in drawings.items()
    }
    weights = [int(label.removesuffix("%")) for label in texts["qkv"] if re.fullmatch(r"\d+%", label)]
    assert len(weights) == len(words)
    assert sum(weights) == pytest.approx(100, abs=len(words) / 2)
    translation = tokenizer.decode(model.generate(**tokens, num_beams=3)[0], skip_special_tokens=True)
    assert f"Blue: the best target, “{translation}”. In parentheses: candidates that are dropped." in texts["beam-tree"]


@pytest.mark.parametrize("path", sorted(pictures.IMAGES.glob("figure-*.svg")), ids=lambda path: path.stem)
def test_ids_of_a_diagram_are_its_own_since_a_page_may_have_several(path: Path) -> None:
    others = "".join(other.read_text() for other in pictures.IMAGES.glob("figure-*.svg") if other != path)
    assert [name for name in re.findall(r' id="([^"]*)"', path.read_text()) if f' id="{name}"' in others] == []
