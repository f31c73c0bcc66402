"""The attention page needs no other file, shows the weights, and works in a real browser."""

import json
import re
from collections.abc import Callable, Generator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browsers import page_opener, started_browser
from tests.commands import error_line, run_main
from tests.figures.maps import random_attention_maps
from tests.models import PAIRS, model_of_pairs
from vaswani_transformer.figures import attention_page, render_page
from vaswani_transformer.figures.__main__ import main
from vaswani_transformer.figures.recording import record_search
from vaswani_transformer.figures.style import head_colors

NASTY = '<script>alert("x")</script> & {{payload}} <!-- </script><b> \' 🙂'


class Page(HTMLParser):
    """The elements of a page with their attributes and their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements = []
        self.open = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append({"tag": tag, "text": "", **dict(attrs)})
        if tag not in ("meta", "input", "link", "br", "img"):
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()["tag"] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element["text"] += data

    def all(self, tag: str, **attributes: str | None) -> list[dict[str, Any]]:
        """Return the elements with these attributes; `css_class` is one of their classes."""
        css_class = attributes.pop("css_class", None)
        return [
            element
            for element in self.elements
            if element["tag"] == tag
            and (css_class is None or css_class in element.get("class", "").split())
            and all(element.get(name) == value for name, value in attributes.items())
        ]

    def one(self, tag: str, **attributes: str | None) -> dict[str, Any]:
        (element,) = self.all(tag, **attributes)
        return element


@pytest.mark.parametrize("stack", ["encoder", "decoder", "cross"])
def test_page_has_the_words_and_the_weights_to_three_digits(stack: str) -> None:
    maps = random_attention_maps(source=["a", "<b>", "&amp;", "</script>"], target=("é", "🙂", "<!--"))
    stored = json.loads(Page(render_page(maps)).one("script", id="payload")["text"])["attention"]["stacks"][stack]
    assert stored["queries"] == maps.queries(stack)
    assert stored["keys"] == maps.keys(stack)
    weights = np.array(stored["weights"]).reshape(stored["layers"], stored["heads"], len(stored["queries"]), -1) / 1000
    np.testing.assert_allclose(weights, maps.weights(stack), atol=0.0005 + 1e-7)


def test_text_cannot_become_markup() -> None:
    model, tokenizer = model_of_pairs()
    plain = Page(attention_page(model, tokenizer, "hello", "hola"))
    page = Page(attention_page(model, tokenizer, NASTY, NASTY))
    assert [element["tag"] for element in page.elements] == [element["tag"] for element in plain.elements]
    assert page.one("title")["text"] == f"Attention: {NASTY}"
    assert [element["text"] for element in page.all("bdi")] == [NASTY, NASTY]
    assert json.loads(page.one("script", id="payload")["text"])["attention"]["stacks"]["cross"]["keys"][0] == "<"


def test_page_needs_no_other_file() -> None:
    text = attention_page(*model_of_pairs(), "hello")
    assert set(re.findall(r"https?://[^\s\"]*", text)) == {"http://www.w3.org/2000/svg"}
    page = Page(text)
    assert not page.all("link")
    assert not [name for element in page.elements for name in element if name in ("src", "href", "action", "srcset")]
    policy = page.one("meta", **{"http-equiv": "Content-Security-Policy"})["content"]
    assert policy.startswith("default-src 'none';")


def test_notebook_shows_a_page_in_a_frame() -> None:
    page = attention_page(*model_of_pairs(), "hello")
    frame = Page(page._repr_html_()).one("iframe")
    assert frame["srcdoc"] == page
    assert "allow-same-origin" not in frame["sandbox"]


def test_command_writes_a_page_and_prints_its_path(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "page.html"
    main([str(saved), "the cat is black", "--output", str(output)])
    assert capsys.readouterr().out == f"{output}\n"
    page = Page(output.read_text(encoding="utf-8"))
    assert [element["text"] for element in page.all("bdi")] == ["the cat is black", PAIRS["the cat is black"]]
    data = json.loads(page.one("script", id="payload")["text"])
    assert data["search"] == record_search(*model_of_pairs(), "the cat is black").data
    assert data["attention"]["stacks"]["cross"]["queries"][-1] == "</s>"
    main([str(saved), "the cat is black", "--target", "no", "--output", str(output), "--force"])
    assert Page(output.read_text(encoding="utf-8")).all("bdi")[1]["text"] == "no"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}", "hello", "--output", "{folder}/none/a.html"], "{folder}/none/a.html: cannot be written: No such"),
        (
            ["{folder}/none", "hello", "--output", "{folder}/page.html"],
            "{folder}/none: its tokenizer: cannot be loaded: ",
        ),
        (["{folder}", "hello", "--output", "{folder}/config.json"], "{folder}/config.json: the file exists; choose"),
    ],
)
def test_command_error_is_one_line(
    arguments: list[str], message: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(folder=saved) for argument in arguments]
    assert message.format(folder=saved) in error_line(run_main(main, given, capsys))
    assert not (saved / "page.html").exists()


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    with started_browser() as browser:
        yield browser


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Generator[Callable[..., Page]]:
    """Return a function that opens a page and returns it after `actions` on it, in which $ selects elements."""
    with page_opener(browser) as open_page:

        def opened(text: str, address: str = "", actions: str = "") -> Page:
            path = tmp_path / "page.html"
            path.write_text(text, encoding="utf-8")
            page = open_page(f"{path.as_uri()}{address}")
            page.evaluate(f"() => {{ const $ = (selector) => document.querySelectorAll(selector); {actions} }}")
            content = Page(page.content())
            page.close()
            return content

        yield opened


def words(page: Page, side: str) -> list[str]:
    return [element["text"] for element in page.all("button", css_class="word", **{"data-side": side})]


def strokes(page: Page) -> set[str]:
    return {element["stroke"] for element in page.all("path")}


def hidden_views(page: Page) -> list[str]:
    return [element["id"] for element in page.all("section") if "hidden" in element]


@pytest.mark.slow
def test_browser_shows_the_last_layer_of_cross_attention_and_markup_as_text(opened: Callable[..., Page]) -> None:
    maps = random_attention_maps()
    page = opened(render_page(maps))
    assert words(page, "query") == maps.output_tokens
    assert words(page, "key") == maps.source_tokens
    assert strokes(page) == set(head_colors(8))
    assert hidden_views(page) == ["heat-view", "overview"]
    assert page.one("div", id="layers")["text"] == "12"
    page = opened(attention_page(*model_of_pairs(), NASTY, NASTY))  # its words are text
    assert "".join(words(page, "query")).startswith("<s·c·r·i·p·t>")
    assert page.one("title")["text"] == f"Attention: {NASTY}"


@pytest.mark.slow
def test_address_says_what_is_shown(opened: Callable[..., Page]) -> None:
    maps = random_attention_maps()
    page = opened(render_page(maps), "#encoder-1&heads=2.5&query=4")
    assert words(page, "query") == maps.source_tokens
    assert strokes(page) == {head_colors(8)[1], head_colors(8)[4]}
    kept = page.one("button", **{"aria-pressed": "true"})
    assert (kept["data-side"], kept["data-index"]) == ("query", "3")
    starts = {line.split("L")[0] for path in page.all("path") for line in path["d"].split("M")[1:]}
    assert {round(float(start.split()[1]) - 0.5) for start in starts} == {3}
    means = maps.encoder[0][[1, 4], 3].mean(0)
    strongest = f"{maps.source_tokens[means.argmax()]} {100 * means.max():.0f}%"
    assert page.one("div", id="attention-status")["text"].startswith(f"{maps.source_tokens[3]} attends to {strongest}")


@pytest.mark.slow
def test_clicks_and_the_pointer_choose_what_is_shown(opened: Callable[..., Page]) -> None:
    acts = """
      const states = [];
      const status = $("#attention-status")[0];
      const record = () => states.push([location.hash, status.textContent, $(".word.is-active").length]);
      $("#stacks input")[0].click(); record();
      $("#layers input")[0].click(); record();
      $("#heads input")[0].click(); record();
      $("#heads label")[2].dispatchEvent(new MouseEvent("dblclick")); record();
      $(".word")[1].dispatchEvent(new PointerEvent("pointerenter", { pointerType: "mouse" })); record();
      $(".word")[1].click(); record();
      $(".word")[1].dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true })); record();
      $("#views input")[2].click(); record();
      $(".thumbnail")[9].click(); record();
      $("#all-heads")[0].click(); record();
      document.title = JSON.stringify(states);
    """
    maps = random_attention_maps()
    states = json.loads(opened(render_page(maps), "", acts).one("title")["text"])
    assert [address for address, *_ in states] == [
        "#encoder-2",
        "#encoder-1",
        "#encoder-1&heads=2.3.4.5.6.7.8",
        "#encoder-1&heads=3",
        "#encoder-1&heads=3",
        "#encoder-1&heads=3&query=2",
        "#encoder-1&heads=3",
        "#encoder-1&view=all&heads=3",
        "#encoder-2&heads=2",
        "#encoder-2",
    ]
    assert [active for *_, active in states] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert states[4][1].startswith("representation attends to ")
    assert states[4][1].endswith("(head 3)")
