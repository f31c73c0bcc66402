"""The drawings of the pages show the numbers that they are made of, and their words can be read."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from docs.tools import animation, browser_pictures, measurements, paper, pictures
from docs.tools.figures import draw_learning_rate, smoothed_loss
from tests import ROOT
from tests.browsers import started_browser
from tests.figures.maps import assert_legible
from tests.models import model_of_pairs, paper_model_of_pairs, save
from vaswani_transformer.batching.optimization import learning_rate
from vaswani_transformer.figures.svg import BLUE, GRAY

DARK = "#1e2129"  # the background of the pages' dark theme


def test_learning_rate_is_equation_3_with_its_peak() -> None:
    pairs = [(512, 4000), (1024, 8999), (3, 1)]
    axes = draw_learning_rate(pairs, steps=9000).axes[0]
    for (d_model, warmup), line in zip(pairs, axes.lines, strict=True):
        steps, rates = map(np.asarray, line.get_data())
        assert list(rates) == [learning_rate(int(step), d_model, warmup) for step in steps]
        assert max(rates) == learning_rate(warmup, d_model, warmup)
    assert_legible(draw_learning_rate())


def test_smoothed_loss_is_that_of_training() -> None:
    """The oracle is torch's cross-entropy of logits that give the true token p and share the remainder evenly."""
    probability, entries, smoothing = 0.7, 11, 0.1
    probs = torch.full((1, entries), (1 - probability) / (entries - 1), dtype=torch.float64)
    probs[0, 4] = probability
    expected = torch.nn.functional.cross_entropy(probs.log(), torch.tensor([4]), label_smoothing=smoothing)
    assert smoothed_loss(np.array(probability), smoothing, entries) == pytest.approx(expected.item())


def test_diagrams_show_a_models_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = paper_model_of_pairs()
    text = "the cat is black"
    tokens = tokenizer(text, return_tensors="pt")
    words = [each.strip() for each in pictures.display_tokens(tokenizer, tokens["input_ids"][0].tolist())]
    monkeypatch.setattr(pictures, "SENTENCE", text)
    monkeypatch.setattr(pictures, "WORD", words[0])
    monkeypatch.setattr(pictures, "OTHER", words[-2])
    pictures.main(str(save(tmp_path / "model", model, tokenizer)), tmp_path)
    names = ("qkv", "teacher-forcing", "one-pass", "graph", "engines")
    drawings = {name: ElementTree.parse(tmp_path / f"figure-{name}.svg").getroot() for name in names}
    texts = {
        name: [each.text or "" for each in drawing.iter() if each.tag.endswith("text")]
        for name, drawing in drawings.items()
    }
    weights = [int(label.removesuffix("%")) for label in texts["qkv"] if re.fullmatch(r"\d+%", label)]
    assert len(weights) == len(words)
    assert sum(weights) == pytest.approx(100, abs=len(words) / 2)


@pytest.mark.slow
def test_picture_of_a_search_shows_its_best_target() -> None:
    model, tokenizer = model_of_pairs()
    with started_browser() as browser:
        text = browser_pictures.beam_tree(browser, model, tokenizer, "the cat is black")
    drawing = ElementTree.fromstring(text)
    texts = [each.text or "" for each in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "<s>"
    assert "el gato es negro" in texts[-1]
    assert drawing.attrib["role"] == "img"
    assert "class" not in {name for each in drawing.iter() for name in each.attrib}


ANIMATED = pictures.IMAGES / f"figure-{animation.NAME}.svg"


def test_animated_search_shows_its_end_to_readers_who_prefer_no_motion() -> None:
    drawing = ElementTree.parse(ANIMATED).getroot()
    style = drawing.findtext("{http://www.w3.org/2000/svg}style") or ""
    still, _, moving = style.partition("@media (prefers-reduced-motion:no-preference)")
    assert "@keyframes" not in still
    assert "animation" not in still
    frames = set(re.findall(r"@keyframes (\w+)", moving))
    styles = [each.attrib["style"] for each in drawing.iter() if each.attrib.get("style", "").startswith("animation")]
    used = {name for style in styles for name in style.removeprefix("animation-name:").split(",")}
    assert used
    assert used <= frames
    texts = [each for each in drawing if each.tag.endswith("text") and each.attrib.get("opacity") != "0"]
    title = drawing.findtext("{http://www.w3.org/2000/svg}title") or ""
    assert title == f"Beam search translates “{texts[0].text}” as “{texts[1].text}”"
    assert len(texts) == 2


def test_animated_search_is_readable_in_both_themes_and_asks_no_host() -> None:
    text = ANIMATED.read_text(encoding="utf-8")
    light, _, dark = text.partition("@media (prefers-color-scheme:dark)")
    assert dark
    for theme in (light, dark):
        colors = dict(re.findall(r"--(\w+):(#\w{6});", theme.partition("}")[0]))
        for name in ("ink", "gray", "blue"):
            assert contrast(colors[name], colors["ground"]) >= 4.5
    addresses = set(re.findall(r"https?://[^\s\"<]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a request
    assert not re.search(r"<(script|image|foreignObject|use)|url\(|@import|href", text)


@pytest.mark.slow
def test_search_is_animated_step_by_step() -> None:
    model, tokenizer = model_of_pairs()
    with started_browser() as browser:
        text = browser_pictures.animated_search(browser, model, tokenizer, "the cat is black")
    drawing = ElementTree.fromstring(text)
    texts = [each.text or "" for each in drawing if each.tag.endswith("text")]
    assert texts[0] == "the cat is black"
    assert texts[-1] == "el gato es negro"
    styles = {each.attrib.get("style", "") for each in drawing.iter("{http://www.w3.org/2000/svg}g")}
    assert {f"step{step}" for step in range(1, len(texts))} <= set(re.findall(r"step\d+", " ".join(styles)))


def test_pictures_of_the_non_autoregressive_models_are_drawn_from_the_kept_measurements(tmp_path: Path) -> None:
    measurements.main(ROOT / "training/recipes/results/multi30k-sixty-minutes", tmp_path)
    for name in ("figure-speed-quality.svg", "figure-layers.svg"):
        assert (tmp_path / name).read_text() == (pictures.IMAGES / name).read_text()


def test_scores_after_each_layer_are_means_over_the_seeds(tmp_path: Path) -> None:
    scores = {"iterative-vae-revealed": (30, 34), "iterative-vae-revealed-2018": (32, 37), "cmlm": (20, 25)}
    refinement = [
        {"model": f"{run}, 5 lengths", "iteration or layer": layer, "BLEU": f"{bleu:.2f}", "repeats": f"{layer}.50%"}
        for run, of_layers in scores.items()
        for layer, bleu in enumerate(of_layers, start=1)
    ]
    rows = [{"model": "iterative-vae-revealed, 5 lengths", "passes": "1"}, {"model": "cmlm, 5 lengths", "passes": "10"}]
    (tmp_path / "decoding.json").write_text(json.dumps({"rows": rows, "refinement": refinement}))
    assert measurements.layers_of(tmp_path) == {"IterativeVAE": {"BLEU": [31, 35.5], "repeats, %": [1.5, 2.5]}}


def test_names_of_models_do_not_overlap() -> None:
    assert measurements.spread([0, 1, 10], 5) == [-2, 3, 10]
    assert measurements.spread([0, 1, 4, 30], 4) == pytest.approx([5 / 3 - 4, 5 / 3, 5 / 3 + 4, 30])


def test_every_picture_is_also_a_png_of_twice_its_size() -> None:
    for path in pictures.IMAGES.glob("*.svg"):
        box = ElementTree.parse(path).getroot().attrib["viewBox"].split()
        unit = 1 if path.stem.startswith("figure-") else 4 / 3  # Matplotlib counts in points
        with Image.open(path.with_suffix(".png")) as picture:
            assert picture.size == pytest.approx([2 * unit * float(length) for length in box[2:]], abs=4), path


@pytest.mark.parametrize("path", sorted(pictures.IMAGES.glob("figure-*.svg")), ids=lambda path: path.stem)
def test_ids_of_a_diagram_are_its_own_since_a_page_may_have_several(path: Path) -> None:
    others = "".join(other.read_text() for other in pictures.IMAGES.glob("figure-*.svg") if other != path)
    assert [name for name in re.findall(r' id="([^"]*)"', path.read_text()) if f' id="{name}"' in others] == []


def contrast(color: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2 between two colors "#rrggbb"."""
    luminances = []
    for text in (color, other):
        channels = [int(text[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


@pytest.mark.parametrize("gray", [GRAY, paper.GRAY])
def test_gray_of_letters_is_readable_on_white_and_legible_on_the_dark_theme(gray: str) -> None:
    assert contrast(gray, "#ffffff") >= 4.5
    assert contrast(gray, DARK) >= 3


@pytest.mark.parametrize("sheet", ["docs/stylesheets/extra.css", "vaswani_transformer/figures/web/search.css"])
def test_dark_themes_lighten_the_gray_and_the_blue_of_drawings(sheet: str) -> None:
    text = (ROOT / sheet).read_text(encoding="utf-8")
    for color in (GRAY, BLUE):
        (lighter,) = set(re.findall(rf'\[color="{color}"\] {{ color: (#\w{{6}}); }}', text))
        assert contrast(lighter, DARK) >= 4.5


def test_gray_letters_of_diagrams_are_lighter_in_the_dark_theme() -> None:
    assert f'[fill="{GRAY}"]' in (ROOT / "docs" / "stylesheets" / "extra.css").read_text(encoding="utf-8")


def test_figure_1_says_where_queries_keys_and_values_come_from() -> None:
    drawing = ElementTree.parse(pictures.IMAGES / "figure-1.svg")
    places = {each.text: float(each.attrib["y"]) for each in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert places["memory (B, S, d_model): keys and values"] < places["queries"] < places["Masked Multi-Head"]
