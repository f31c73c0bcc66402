"""The pages of the paper in code: listings name existing code, examples print what the pages show, as the notebook."""

import inspect
import json
import math
import pkgutil
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from docs.tools import formulas
from docs.tools.float64 import float64_model
from docs.tools.listings import LISTING, names_in, source_of
from docs.tools.paper import EXERCISES, NOTEBOOK, PAGES, PICTURE, PYTHON, SOLUTION, run_page, to_notebook
from tests import ROOT
from tests.command_parsers import anchors_of
from tests.models import PAIRS
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
)

TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in PAGES}
NAMES = [name for text in TEXTS.values() for match in LISTING.finditer(text) for name in names_in(match[1])]
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
WIDEST = 87  # characters of a line of code on the site, on a screen of 1,280 pixels


def examples_of(text: str) -> list[tuple[str, str]]:
    """Return the examples of a page, each with what it prints."""
    return [(match[1], match[2] or "") for match in PYTHON.finditer(text)]


def assert_same_output(code: str, printed: str, expected: str) -> None:
    """Assert that a block prints what the page shows, numbers with a point within 2%, or 0.02 near zero.

    The pages' models compute in float64, so that they learn the same words on every machine.
    """
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", expected).split(), code
    for one, other in zip(NUMBER.findall(printed), NUMBER.findall(expected), strict=True):
        assert math.isclose(float(one), float(other), rel_tol=0.02, abs_tol=2e-2 if abs(float(other)) > 1e-2 else 1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the pages run, one after the other."""
    return tmp_path_factory.mktemp("pages")


def test_listing_is_the_source_of_what_it_names() -> None:
    for name in sorted(set(NAMES)):
        source = textwrap.dedent(inspect.getsource(pkgutil.resolve_name(name)))
        assert source_of(name) == source.rstrip("\n")


@pytest.mark.parametrize("name", ["figure-1.svg", "figure-2.svg"])
def test_part_of_a_diagram_leads_to_a_heading_of_a_page(name: str) -> None:
    drawing = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
    links = re.findall(r'href="\.\./([\w-]+)\.md#([\w-]+)"', drawing)
    assert len(links) == drawing.count("<a ") > 8
    assert all(anchor in anchors_of(TEXTS[page]) for page, anchor in links)
    page = formulas.on_page_content(f'<p><img alt="it" src="../images/{name}" /></p>')
    assert "<img" not in page
    assert ".md" not in page


def test_file_of_a_diagram_leads_to_the_pages_of_the_site(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    shutil.copy(ROOT / "docs" / "images" / "figure-1.svg", tmp_path / "images")
    formulas.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    drawing = (tmp_path / "images" / "figure-1.svg").read_text(encoding="utf-8")
    assert 'href="../paper-model/#' in drawing
    assert ".md" not in drawing


@pytest.mark.parametrize("name", ["figure-1.svg", "masks.svg"])
def test_picture_has_a_link_to_its_file(name: str) -> None:
    page = formulas.on_page_content(f'<p><img alt="it" src="../images/{name}" /></p>')
    assert f'<a class="whole-picture" href="../images/{name}">' in page


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page_opens_with_a_picture_and_three_sentences(path: Path) -> None:
    opening = TEXTS[path.stem].partition("```")[0]
    assert re.search(r"^!\[[^\]]*\]\(images/figure-[\w-]+\.svg\)$", opening, flags=re.MULTILINE)
    paragraphs = [text for text in opening.split("\n\n") if not text.startswith(("#", "!", "|"))]
    assert max(len(re.findall(r"[.:](?=\s|$)", text)) for text in paragraphs) >= 3


def test_model_of_the_pages_computes_in_float64_as_the_package_does_in_float32() -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([*PAIRS, *PAIRS.values()], vocab_size=300)
    config = VaswaniTransformerConfig(vocab_size=len(tokenizer), d_model=32, d_ff=64, num_heads=2)
    torch.manual_seed(0)
    exact = float64_model(config).eval()
    assert torch.get_default_dtype() == torch.float32
    plain = VaswaniTransformerForConditionalGeneration(config).eval()
    plain.load_state_dict(exact.float().state_dict())
    batch = tokenizer(["la casa es roja", "veo"], text_target=["the house", "i see"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = plain(**batch).logits
        logits = exact.double()(**batch).logits
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits.float(), expected, rtol=1e-4, atol=1e-4)
    positions = exact.get_encoder().input_embedding.positions(torch.tensor([[0, 7]]))
    assert positions[0, 1, 2].item() == pytest.approx(math.sin(7 * 10000 ** (-2 / 32)), abs=1e-14)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_line_of_code_is_wider_than_the_page(path: Path) -> None:
    lines = [line for code, printed in examples_of(TEXTS[path.stem]) for line in (code + printed).splitlines()]
    assert [line for line in lines if len(line) > WIDEST] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_pictures_are_files_and_drawn_by_the_block_above_them(path: Path) -> None:
    pictures = PICTURE.findall(TEXTS[path.stem])
    assert len(pictures) == len([code for code, _ in examples_of(TEXTS[path.stem]) if "picture = " in code]) >= 1
    assert all((path.parent / name).read_text(encoding="utf-8").endswith("</svg>\n") for name in pictures)


def test_notebooks_are_made_from_the_pages() -> None:
    """`python -m docs.tools.paper` writes them."""
    assert NOTEBOOK.read_text(encoding="utf-8") == to_notebook()
    assert EXERCISES.read_text(encoding="utf-8") == to_notebook(for_students=True)


def test_notebook_for_students_has_every_exercise_and_neither_solutions_nor_outputs() -> None:
    exercises = sum(len(re.findall(r"^#+ Exercise: ", text, flags=re.MULTILINE)) for text in TEXTS.values())
    solutions = [solution for text in TEXTS.values() for solution in SOLUTION.findall(text)]
    assert len(solutions) == exercises == 6
    cells = json.loads(to_notebook(for_students=True))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    assert sum("Exercise: " in source for source in sources) == sources.count("# your answer") == exercises
    assert not any(code.strip() in sources for text in solutions for code, _ in examples_of(text))
    assert not any(cell.get("outputs") for cell in cells)


def test_notebook_has_no_link_that_leads_nowhere_and_nothing_folded() -> None:
    """A notebook has no other pages or anchors, only pictures in its folder; a fold would end with its cell."""
    cells = json.loads(to_notebook())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    links = [link for text in texts for link in re.findall(r"\]\(([^)]*)\)", text)]
    others = [link for link in links if not (link.startswith("https://") and "OWNER" not in link)]
    assert [link for link in others if not (link.startswith("images/") and (NOTEBOOK.parent / link).is_file())] == []
    assert not any("<details" in text or "<summary" in text for text in texts)


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, Any]]:
    """Yield the variables of the notebook, whose pages share them and torch's settings."""
    default, is_enabled = torch.get_default_dtype(), torch.is_grad_enabled()
    yield {}
    torch.set_default_dtype(default)
    torch.set_grad_enabled(is_enabled)


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page_prints_what_it_shows_and_draws_its_pictures(
    path: Path, folder: Path, variables: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    text = TEXTS[path.stem]
    page = run_page(text, folder, variables)
    for (code, expected), (same_code, printed) in zip(examples_of(text), examples_of(page), strict=True):
        assert code == same_code
        assert_same_output(code, printed, expected)
    assert PYTHON.sub("", page) == PYTHON.sub("", text)
    assert all((folder / name).stat().st_size > 1000 for name in PICTURE.findall(text))
