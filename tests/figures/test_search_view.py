"""The drawing of a search in a browser: what each step adds, what has died, and texts that stay texts."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.browsers import page_opener, started_browser
from tests.commands import HOSTILE_TEXT
from tests.models import family_of_pairs, model_of_pairs
from vaswani_transformer.figures import search_page
from vaswani_transformer.figures.page import make_page
from vaswani_transformer.figures.recording import Candidate, beams_data, passes_data
from vaswani_transformer.figures.svg import BLUE, GRAY

END = 2
# Two beams. "7" dies in step 2, and its last word with the search; "6 9" ends, but "6 8" ends with a better score.
STEPS = [
    [Candidate((6,), -0.5, 1), Candidate((7,), -1.0, 1), Candidate((8,), -3.0, 1, is_kept=False)],
    [Candidate((6, 8), -0.75, 2), Candidate((6, 9), -1.5, 2), Candidate((7, 8), -4.0, 2, is_kept=False)],
    [Candidate((6, 8, END), -1.0, 4, True), Candidate((6, 9, END), -2.0, 4, True), Candidate((6, 8, 8), -6.0, 4)],
]
PARTS = """() => [...document.querySelectorAll("#drawing [data-step]")].map((part) => ({
  step: part.dataset.step, row: part.dataset.row, last: part.dataset.last, color: part.getAttribute("color"),
  texts: [...part.querySelectorAll("text")].map((text) => text.textContent),
  boxes: part.querySelectorAll("rect[stroke]").length,
  isShown: part.getAttribute("display") === "inline", isBold: part.classList.contains("bold"),
}))"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    with started_browser() as browser:
        yield browser


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Generator[Callable[..., Any]]:
    """Return a function that opens the page of a recording."""
    with page_opener(browser) as open_page:

        def opened(text: str, **context: Any) -> Any:
            (tmp_path / "page.html").write_text(text, encoding="utf-8")
            return open_page((tmp_path / "page.html").as_uri(), **context)

        yield opened


def page_of(**search: Any) -> str:
    return make_page("Search", "a source", "a target", "a model", search={"source": "a source", **search})


def test_targets_live_until_no_continuation_is_open_and_the_best_one_is_bold(opened: Callable[..., Any]) -> None:
    _, tokenizer = model_of_pairs()
    page = opened(page_of(start="<s>", steps=beams_data(tokenizer, (0,), STEPS)))
    page.get_by_label("Scores").check()
    parts = {(int(part["step"]), int(part["row"])): part for part in page.evaluate(PARTS)}
    assert {place: int(part["last"]) for place, part in parts.items()} == {
        (1, 0): 3,
        (1, 1): 1,
        (1, 2): 0,
        (2, 0): 3,
        (2, 1): 3,
        (2, 2): 0,
        (3, 0): 3,
        (3, 1): 3,
        (3, 2): 2,
    }
    assert all((part["color"] == BLUE) == (part["last"] == "3") for part in parts.values())
    assert [place for place, part in sorted(parts.items()) if part["isBold"]] == [(1, 0), (2, 0), (3, 0)]
    assert parts[1, 0]["texts"][1:] == ["-0.50"]
    assert parts[3, 0]["texts"][1:] == ["-1.00 / 4.00", "= -0.25"]
    assert [place for place, part in parts.items() if part["texts"][0].startswith("(")] == [(1, 2), (2, 2)]

    # After its first step, "7" is open.
    page.get_by_label("Step", exact=True).press("Home")
    first = [part for part in page.evaluate(PARTS) if part["isShown"]]
    assert {(part["step"], part["row"], part["color"]) for part in first} == {
        ("1", "0", BLUE),
        ("1", "1", BLUE),
        ("1", "2", GRAY),
    }


def test_pass_marks_what_it_changes_and_a_word_is_gray_when_a_later_one_changes_it(opened: Callable[..., Any]) -> None:
    _, tokenizer = model_of_pairs()
    history = [tokenizer(text)["input_ids"] for text in ("el gato", "el gato", "te gato")]
    parts = opened(page_of(name="iteration", passes=passes_data(tokenizer, history))).evaluate(PARTS)
    words = {(part["texts"][0], part["step"]): (part["last"], part["color"]) for part in parts}
    assert (words["el", "1"], words["te", "3"]) == (("2", GRAY), ("3", BLUE))
    assert {words["iteration 1", "1"], words["iteration 3", "3"]} == {("0", GRAY)}
    assert sum(part["boxes"] for part in parts) == 1


@pytest.mark.parametrize(("family", "name"), [("autoregressive", "Step"), ("cmlm", "Iteration"), ("nat", "Pass")])
def test_search_of_every_family_is_shown_and_hostile_text_is_text(
    opened: Callable[..., Any], family: str, name: str
) -> None:
    model, tokenizer = family_of_pairs(family)
    settings: dict[str, Any] = {"num_iterations": 3} if family == "cmlm" else {}
    settings |= {"num_beams": 3, "max_new_tokens": 6} if family == "autoregressive" else {}
    page = opened(search_page(model, tokenizer, HOSTILE_TEXT, **settings), viewport={"width": 390, "height": 844})
    assert page.locator("h1 bdi").first.inner_text() == HOSTILE_TEXT
    assert page.locator("#drawing [data-step]").count() > 0
    assert page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.get_by_label(name, exact=True).is_visible() == (family != "nat")  # one pass has no slider
    assert page.get_by_label("Scores").is_visible() == (family == "autoregressive")
