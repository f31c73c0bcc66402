"""docs/paper.md: its listings name existing code, and its examples and notebook print the output on the page."""

import inspect
import json
import math
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest

from docs.tools.listings import BLOCK, listing, on_page_markdown, source_of
from docs.tools.paper import (
    NEEDS_RUN,
    NOTEBOOK,
    PAGE,
    PICTURE,
    PYTHON,
    execute,
    notebook_cells,
    run_page,
    to_notebook,
)
from tests.helpers import model_of_pairs

TEXT = PAGE.read_text(encoding="utf-8")
NAMES = [name for match in BLOCK.finditer(TEXT) for name in match[1].split()]
BLOCKS = [(match[1], match[2] or "") for match in PYTHON.finditer(TEXT)]
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def assert_same_output(code: str, printed: str, expected: str) -> None:
    """Assert that a block prints what the page shows, numbers with a point within 2%, or 0.02 near zero.

    The page's model computes in float64, so that it learns the same words on every machine.
    """
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", expected).split(), code
    for one, other in zip(NUMBER.findall(printed), NUMBER.findall(expected), strict=True):
        assert math.isclose(float(one), float(other), rel_tol=0.02, abs_tol=2e-2 if abs(float(other)) > 1e-2 else 1e-3)


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for running the page, with a small model in runs/quickstart."""
    model, tokenizer = model_of_pairs()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / NEEDS_RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_page_lists_each_section() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 18
    assert len(BLOCKS) >= 25


@pytest.mark.parametrize("name", NAMES)
def test_listing_is_the_source_of_what_it_names(name: str) -> None:
    source = textwrap.dedent(inspect.getsource(pkgutil.resolve_name(name)))
    assert source_of(name) == source.rstrip("\n")


def test_listing_puts_methods_below_the_line_of_their_class() -> None:
    text = listing(
        ["training.recipe.fields.Recipe.model_config", "vaswani_transformer.batching.schedule.learning_rate"]
    )
    first, second = text.split("\n```python ")
    assert first.startswith('```python title="training/recipe/fields.py"\nclass Recipe:\n    def model_config(')
    assert second.startswith('title="vaswani_transformer/batching/schedule.py"\ndef learning_rate(')


@pytest.mark.parametrize("name", ["vaswani_transformer.layers.NoSuch", "nowhere.at.all"])
def test_listing_of_a_name_that_does_not_exist_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"not defined there|no file defines it"):
        on_page_markdown(f"```source\n{name}\n```\n")


def test_page_without_listings_stays_as_it_is() -> None:
    assert on_page_markdown("# A page\n\n```python\nprint(1)\n```\n") == "# A page\n\n```python\nprint(1)\n```\n"


def test_pictures_are_files_and_drawn_by_the_block_above_them() -> None:
    pictures = PICTURE.findall(TEXT)
    assert len(pictures) == len([code for code, _ in BLOCKS if "picture = " in code]) == 7
    assert all((PAGE.parent / name).read_text(encoding="utf-8").endswith("</svg>\n") for name in pictures)


def test_notebook_is_made_from_the_page() -> None:
    """`python -m docs.tools.paper` writes it."""
    assert NOTEBOOK.read_text(encoding="utf-8") == to_notebook(TEXT)


def test_notebook_has_the_examples_of_the_page_in_their_order() -> None:
    notebook = json.loads(to_notebook(TEXT))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    examples = [code for code, _ in BLOCKS if NEEDS_RUN not in code]
    shown = [cell.removesuffix("\npicture") for cell in cells[2:] if not cell.startswith("show(")]
    assert shown == [code.rstrip("\n") for code in examples]
    assert sum(cell.startswith("show(") for cell in cells) == len(BLOCK.findall(TEXT))
    assert all({"id", "cell_type", "metadata", "source"} <= cell.keys() for cell in notebook["cells"])


def test_notebook_has_no_link_that_leads_nowhere() -> None:
    """In a notebook there are no other pages, and no anchors of this one."""
    texts = ["".join(cell["source"]) for cell in notebook_cells(TEXT) if cell["cell_type"] == "markdown"]
    links = [link for text in texts for link in re.findall(r"\]\(([^)]*)\)", text)]
    assert links
    assert all(link.startswith("https://") for link in links)
    assert "Run the cells from top to bottom" in texts[0]


@pytest.mark.slow
def test_page_prints_what_it_shows_and_draws_its_pictures(run_folder: Path) -> None:
    page = run_page(TEXT, run_folder)
    for (code, expected), match in zip(BLOCKS, PYTHON.finditer(page), strict=True):
        assert match[1] == code
        assert_same_output(code, match[2] or "", expected)
    assert PYTHON.sub("", page) == PYTHON.sub("", TEXT)
    assert all((run_folder / name).stat().st_size > 1000 for name in PICTURE.findall(TEXT))


@pytest.mark.slow
def test_notebook_runs_from_top_to_bottom_and_prints_the_same() -> None:
    """The cells run in order, without a kernel and without the cell that installs the package."""
    variables, expected = {"__name__": "notebook"}, dict(BLOCKS)
    cells = ["".join(cell["source"]) for cell in notebook_cells(TEXT) if cell["cell_type"] == "code"]
    for code in cells[1:]:
        printed = execute(code, variables)
        example = code.removesuffix("\npicture") + "\n"
        if example in expected:
            assert_same_output(code, printed, expected[example])
        elif code.startswith("show("):
            assert printed.count("\n") > 5
