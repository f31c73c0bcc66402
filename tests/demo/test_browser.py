"""The page in a browser: a translation with its steps, hostile texts as text, and no request beyond this machine."""

import contextlib
import re
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import PAIRS, model_of_pairs
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
    """Return a function that serves a model's page and opens it; at the end, no script ran and no request went out."""
    with contextlib.ExitStack() as stack:
        dialogs, addresses = [], []

        def open_page(model: Any, tokenizer: Any, name: str = "own/model") -> Any:
            served = make_page(model, tokenizer, name)
            stack.callback(served.close, verbose=False)
            _, address, _ = served.launch(**LAUNCH)
            page = browser.new_page(viewport={"width": 1000, "height": 1200})
            stack.callback(page.close)
            page.set_default_timeout(TIMEOUT)
            page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
            page.on("request", lambda request: addresses.append(request.url))
            page.goto(address)
            return page

        yield open_page
        assert not dialogs
        assert addresses
        assert not [address for address in addresses if not address.startswith(("http://127.0.0.1:", "data:", "blob:"))]


def translate(page: Any, text: str) -> None:
    page.get_by_label("Source").fill(text)
    page.get_by_role("button", name="Translate").click()


def attention(page: Any) -> Any:
    return page.frame_locator("iframe[title=Attention]")


def test_typed_sentence_is_translated_step_by_step_with_its_attention(open_page: OpenPage) -> None:
    page = open_page(*model_of_pairs())
    page.get_by_label("number input for Beams").fill("4")
    translate(page, "i love you")
    playwright.expect(attention(page).locator("h1")).to_have_text("i love you→te amo", timeout=TIMEOUT)
    assert page.get_by_label("Translation").input_value() == PAIRS["i love you"]
    playwright.expect(page.get_by_role("row", name=re.compile("^1 open te ")).first).to_be_visible(timeout=TIMEOUT)
    translate(page, "<script>alert(1)</script>")
    playwright.expect(attention(page).locator("h1")).to_contain_text("<script>alert(1)</script>→", timeout=TIMEOUT)
    translate(page, " ")
    playwright.expect(page.get_by_label("Note")).to_have_value("The source is empty; type a text.", timeout=TIMEOUT)
    assert page.get_by_label("Translation").input_value() == ""
