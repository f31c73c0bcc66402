"""The page in a browser: the steps of a search, hostile texts as text, no error and no request beyond this machine."""

import contextlib
import re
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.commands import HOSTILE_TEXT
from tests.models import PAIRS, family_of_pairs, model_of_pairs
from vaswani_transformer.demo.command import LAUNCH
from vaswani_transformer.demo.page import make_page

pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT = 120_000  # milliseconds

OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    with playwright.sync_playwright() as started:
        installed = [started.chromium.executable_path, *filter(None, map(shutil.which, BROWSERS))]
        path = next((path for path in installed if Path(path).exists()), None)
        if path is None:
            pytest.skip("no browser is installed; run python -m playwright install chromium")
        browser = started.chromium.launch(executable_path=path, timeout=TIMEOUT, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Generator[OpenPage]:
    """Return a function that serves a model's page and opens it; no text runs as a script, no request goes out."""
    with contextlib.ExitStack() as stack:
        dialogs, addresses, errors = [], [], []

        def open_page(model: Any, tokenizer: Any, width: int = 1000, height: int = 1200) -> Any:
            served = make_page(model, tokenizer, "own/model", examples=list(PAIRS))
            stack.callback(served.close, verbose=False)
            _, address, _ = served.launch(**LAUNCH)
            page = browser.new_page(viewport={"width": width, "height": height})
            stack.callback(page.close)
            page.set_default_timeout(TIMEOUT)
            page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda message: message.type == "error" and errors.append(message.text))
            page.on("request", lambda request: addresses.append(request.url))
            page.goto(address)
            return page

        yield open_page
        assert (dialogs, errors) == ([], [])
        assert addresses
        assert not [address for address in addresses if not address.startswith(("http://127.0.0.1:", "data:", "blob:"))]


def translate(page: Any, text: str) -> None:
    page.get_by_label("Source").fill(text)
    page.get_by_role("button", name="Translate").click()


def attention(page: Any) -> Any:
    return page.frame_locator("iframe[title=Attention]")


def test_typed_sentence_is_translated_step_by_step_with_its_attention(open_page: OpenPage) -> None:
    page = open_page(*model_of_pairs())
    page.get_by_label("Beams").fill("4")
    translate(page, "i love you")
    playwright.expect(attention(page).locator("h1")).to_have_text("i love you→te amo", timeout=TIMEOUT)
    assert page.get_by_label("Translation").input_value() == PAIRS["i love you"]
    playwright.expect(page.locator("output")).to_have_text(re.compile(r"^(\d+) of \1: te amo$"), timeout=TIMEOUT)
    for text in ("<script>alert(1)</script>", HOSTILE_TEXT):
        translate(page, text)
        playwright.expect(attention(page).locator("h1")).to_contain_text(f"{text}→", timeout=TIMEOUT)
    translate(page, " ")
    playwright.expect(page.get_by_label("Note")).to_have_value("The source is empty; type a text.", timeout=TIMEOUT)
    assert page.get_by_label("Translation").input_value() == ""


def test_keyboard_walks_through_the_steps_and_the_picture_is_a_file_of_the_step(open_page: OpenPage) -> None:
    page = open_page(*model_of_pairs())
    translate(page, "the cat is black")
    slider = page.get_by_label("Step")
    playwright.expect(slider).to_be_visible(timeout=TIMEOUT)
    slider.press("Home")
    playwright.expect(page.locator("output")).to_have_text(re.compile(r"^1 of \d+: "))
    slider.press("ArrowRight")
    playwright.expect(page.locator("output")).to_have_text(re.compile(r"^2 of \d+: "))
    assert {part.get_attribute("data-step") for part in page.locator("[display=inline][data-step]").all()} == {"1", "2"}
    numbers = page.locator("[data-step='1'] .numbers text").first
    playwright.expect(numbers).to_be_hidden()
    heights = [page.locator(".drawing svg").bounding_box()["height"]]
    page.get_by_label("Scores").press("Space")
    playwright.expect(numbers).to_be_visible()
    heights.append(page.locator(".drawing svg").bounding_box()["height"])
    assert heights[0] < 0.7 * heights[1]  # rows are closer without scores
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as SVG").press("Enter")
    picture = ElementTree.parse(download.value.path()).getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    shown = {
        part.get("data-step")
        for part in picture.iter()
        if part.get("display") == "inline" and "data-step" in part.attrib
    }
    assert shown == {"1", "2"}


@pytest.mark.parametrize(
    ("family", "steps"), [("autoregressive", "Step"), ("cmlm", "Iteration"), ("iterative_vae", "Layer")]
)
def test_page_is_as_wide_as_a_phone_and_the_drawing_scrolls_to_its_step(
    open_page: OpenPage, family: str, steps: str
) -> None:
    page = open_page(*family_of_pairs(family), width=390)
    if family == "cmlm":
        page.get_by_label("Iterations").fill("3")
    translate(page, "what is your name")
    slider = page.get_by_label(steps, exact=True)
    playwright.expect(slider).to_be_visible(timeout=TIMEOUT)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    box = page.locator(".drawing")
    assert box.evaluate("box => box.scrollWidth > box.clientWidth")
    newest = box.evaluate("box => box.scrollLeft")
    assert newest > 0
    slider.press("Home")
    slider.press("End")
    assert box.evaluate("box => box.scrollLeft") == newest
    assert page.get_by_label("Scores").is_visible() == (family == "autoregressive")


def test_note_replaces_the_drawing_that_was_scrolled(open_page: OpenPage) -> None:
    page = open_page(*model_of_pairs(), width=390)
    translate(page, "what is your name")
    playwright.expect(page.locator("output")).to_be_visible(timeout=TIMEOUT)
    page.get_by_label("Beams").fill("100")
    translate(page, "what is your name")
    note = "Beams: out of range; got 100, expected an integer from 1 to 16."
    playwright.expect(page.get_by_label("Note")).to_have_value(note, timeout=TIMEOUT)
    playwright.expect(page.locator("output")).to_have_count(0)
    assert page.get_by_text("Error").count() == 0


def test_first_screen_of_a_phone_shows_the_source_the_slider_and_half_of_the_tree(open_page: OpenPage) -> None:
    page = open_page(*model_of_pairs(), width=390, height=844)
    page.get_by_label("Beams").fill("4")
    translate(page, "what is your name")
    playwright.expect(attention(page).locator("h1")).to_contain_text("what is your name", timeout=TIMEOUT)
    assert page.evaluate("scrollY") == 0
    for part in (page.get_by_label("Source"), page.get_by_label("Step"), page.get_by_role("button", name="Save")):
        box = part.bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] < 844
    tree = page.locator(".drawing").bounding_box()
    assert tree["y"] + tree["height"] / 2 < 844


def test_one_pass_has_no_slider(open_page: OpenPage) -> None:
    page = open_page(*family_of_pairs("nat"))
    translate(page, "i love you")
    playwright.expect(page.locator("output")).to_have_text(re.compile("^1 of 1: "), timeout=TIMEOUT)
    playwright.expect(page.get_by_text("pass 1")).to_be_visible()
    playwright.expect(page.locator(".controls [type=range]")).to_be_hidden()
