"""The page in a browser: translations, steps, alternatives, attention, one pass, and a sentence for all that fails."""

import re
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.browsers import OpenPage, page_opener, served, started_browser
from tests.commands import HOSTILE_TEXT
from tests.models import PAIRS, SOURCES, family_of_pairs, save
from vaswani_transformer.demo import load_site

pytestmark = pytest.mark.slow

REDUCED = {"reduced_motion": "reduce"}


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    with started_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Any) -> Generator[OpenPage]:
    with page_opener(browser) as open_page:
        yield open_page


@pytest.fixture(scope="module")
def site(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of the model of pairs, with a CTC model beside it."""
    folder = tmp_path_factory.mktemp("site")
    ctc = save(folder / "ctc-model", *family_of_pairs("ctc"))
    loaded = load_site(str(saved), str(ctc))
    loaded.examples[:] = SOURCES
    loaded.write(folder / "site")
    return folder / "site"


@pytest.fixture
def address(site: Path) -> Generator[str]:
    with served(site) as address:
        yield address


def translate(page: Any, text: str) -> None:
    page.get_by_label("Source", exact=True).fill(text)
    page.get_by_role("button", name="Translate").click()


def expect_translation(page: Any, text: str) -> None:
    page.wait_for_function("text => document.getElementById('translation').textContent === text", arg=text)


def words_of(page: Any, side: str) -> list[str]:
    return page.locator(f"#attention .word[data-side={side}]").all_inner_texts()


def expect_sentence(page: Any, pattern: str) -> None:
    page.locator("#message", has_text=re.compile(pattern)).wait_for()
    assert page.locator("#results").is_hidden()


def test_page_opens_with_an_example_and_translates_what_is_typed(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    expect_translation(page, PAIRS[SOURCES[0]])
    page.get_by_role("button", name="i love you").click()
    expect_translation(page, "te amo")
    assert page.get_by_label("Source", exact=True).input_value() == "i love you"
    page.wait_for_function("() => document.querySelector('#queries')?.textContent.includes('te')")
    assert [words_of(page, side)[-1] for side in ("query", "key")] == ["</s>", "</s>"]
    page.get_by_label("Source", exact=True).fill("good morning")
    page.get_by_label("Source", exact=True).press("Enter")
    expect_translation(page, PAIRS["good morning"])
    for text in ("<script>alert(1)</script>", HOSTILE_TEXT):
        translate(page, text)
        page.wait_for_function("text => document.querySelector('#drawing svg').ariaLabel.includes(text)", arg=text)
    assert page.locator("main img, main script").count() == 0


def test_address_of_a_part_opens_the_page_there(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#attention", viewport={"width": 390, "height": 500})
    page.wait_for_function("() => Math.abs(document.getElementById('attention').getBoundingClientRect().top) < 2")
    page.wait_for_load_state("networkidle")  # what is still loading when a page closes is an error in its console


def test_file_opens_without_a_server(open_page: OpenPage, saved: Path, tmp_path: Path) -> None:
    site = load_site(str(saved))
    site.examples.append(SOURCES[1])
    (tmp_path / "page.html").write_text(site.single_file(), encoding="utf-8")
    page = open_page((tmp_path / "page.html").as_uri())
    expect_translation(page, PAIRS[SOURCES[1]])
    assert page.locator("#ctc-section").is_hidden()


def test_step_is_drawn_and_described_and_the_picture_is_a_file_of_it(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    translate(page, "the cat is black")
    expect_translation(page, PAIRS["the cat is black"])
    slider = page.get_by_label("Step", exact=True)
    slider.press("Home")
    assert page.locator("#step-text").inner_text().startswith("1 of ")
    slider.press("ArrowRight")
    assert page.locator("#step-text").inner_text().startswith("2 of ")
    shown = {part.get_attribute("data-step") for part in page.locator("#drawing [data-step][display=inline]").all()}
    assert shown == {"1", "2"}
    page.get_by_text("This step as a table").click()
    assert page.locator("#step-caption").inner_text().startswith("Step 2 of ")
    assert "open" in page.locator("#step-rows").inner_text()
    height = page.locator("#drawing svg").bounding_box()["height"]
    page.get_by_label("Scores").press("Space")
    assert page.locator("#drawing svg").bounding_box()["height"] > 1.3 * height
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as SVG").press("Enter")
    picture = ElementTree.parse(download.value.path()).getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert {each.get("data-step") for each in picture.iter() if each.get("display") == "inline"} == {"1", "2"}

    # A control character, which no XML file may contain, is none in the file.
    translate(page, "the cat\a")
    page.wait_for_function("() => document.querySelector('#drawing svg').ariaLabel.includes('\\x07')")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as SVG").press("Enter")
    ElementTree.parse(download.value.path())


def test_search_plays_to_its_end_and_stops_on_request(open_page: OpenPage, address: str) -> None:
    page = open_page(address, **REDUCED)
    expect_translation(page, PAIRS[SOURCES[0]])
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("() => document.getElementById('step-text').textContent.startsWith('2 of')")
    assert page.evaluate("document.getAnimations().length") == 0
    page.get_by_role("button", name="Stop").click()
    assert page.locator("#step-text").inner_text().startswith("2 of")
    page.locator("#step").evaluate("slider => { slider.value = slider.max - 1 }")
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("() => document.getElementById('step-text').textContent.match(/^(\\d+) of \\1:/)")
    assert page.get_by_role("button", name="Play").is_visible()


def test_word_of_the_tree_has_alternatives_and_the_search_continues_from_one(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    translate(page, "i love you")
    expect_translation(page, "te amo")
    # The keyboard walks along the tree to the second word of the best target.
    first = page.locator("#drawing .node[data-step='1'][data-row='0']")
    first.focus()
    first.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.step") == "2"
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.row") == "1"
    page.keyboard.press("Enter")
    page.wait_for_selector("#alternatives:not([hidden])")
    choices = page.locator("#choices button")
    assert choices.count() == 5

    # If the slider hides the word that the tab key reached, it reaches one that is shown.
    slider = page.get_by_label("Step", exact=True)
    slider.press("Home")
    assert page.locator("#drawing .node[tabindex='0'][data-step='1']").count() == 1
    assert page.locator("#drawing .node[tabindex='0']").count() == 1
    slider.press("End")
    shares = [float(text.removesuffix("%")) for text in page.locator("#choices .share").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 101

    # A target from there begins with the chosen word.
    word = choices.nth(3).locator("bdi").inner_text()
    choices.nth(3).click()
    page.wait_for_selector("#prefix:not([hidden])")
    assert page.locator("#prefix-text").inner_text().endswith(word.removeprefix("·"))
    beginning = page.locator("#prefix-text").inner_text()
    assert all(text.startswith(beginning) for text in page.locator("#targets bdi").all_inner_texts())
    page.get_by_role("button", name="Remove").click()
    expect_translation(page, "te amo")


def test_beginning_that_is_chosen_for_a_text_is_not_that_of_the_next_text(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    translate(page, "i love you")
    expect_translation(page, "te amo")
    page.locator("#drawing .node[data-step='2'][data-row='0']").click()
    page.wait_for_selector("#alternatives:not([hidden])")
    page.evaluate("""() => {
      document.getElementById("source").value = "good morning";
      document.getElementById("form").requestSubmit();
      document.querySelector("#choices button:not([disabled])").click(); // before the answer comes
    }""")
    expect_translation(page, PAIRS["good morning"])
    assert page.locator("#prefix").is_hidden()


def test_finished_target_that_is_chosen_is_bold_and_has_its_attention(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    expect_translation(page, PAIRS[SOURCES[0]])
    page.get_by_label("Beams").fill("4")
    page.wait_for_function("() => document.querySelectorAll('#targets li').length > 1")
    page.wait_for_function("() => document.querySelectorAll('#queries li').length > 0")
    before = words_of(page, "query")
    page.locator("#targets button").nth(1).click()
    page.wait_for_function(f"() => document.querySelectorAll('#queries li').length !== {len(before)}"
                           f" || document.querySelector('#queries').textContent !== {''.join(before)!r}")  # fmt: skip
    assert page.locator("#targets button[aria-pressed=true]").count() == 1
    bold = page.locator("#drawing .node.bold text:first-of-type").all_text_contents()
    assert bold == words_of(page, "query")


def test_numbers_recompute_at_once_and_a_value_out_of_range_is_a_sentence(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    expect_translation(page, PAIRS[SOURCES[0]])
    page.get_by_label("Beams").fill("2")
    page.wait_for_function("() => document.querySelectorAll('#drawing .node[data-step=\"1\"]').length === 3")
    page.get_by_label("Beams").fill("1")
    page.wait_for_function("() => document.querySelectorAll('#targets li').length === 1")
    page.get_by_label("limit").fill("2")
    page.wait_for_function("() => document.getElementById('notes').textContent.includes('does not end')")
    assert "cut at 2 tokens" in page.locator("#notes").inner_text()
    for label, value, problem in (
        ("Beams", "100", "Beams: out of range; got 100, expected an integer from 1 to 16."),
        ("Length penalty", "-11.5", "Length penalty: out of range; got -11.5, expected a number from -10 to 10."),
        ("limit", "1.5", "Length limit: out of range; got 1.5, expected an integer from 1 to 512."),
    ):
        field = page.get_by_label(label)
        field.fill(value)
        expect_sentence(page, re.escape(problem))
        field.fill("3")
        page.wait_for_selector("#results:not([hidden])")


def test_source_that_is_empty_or_too_long_and_unknown_characters_get_a_sentence(
    open_page: OpenPage, address: str
) -> None:
    page = open_page(address)
    expect_translation(page, PAIRS[SOURCES[0]])
    translate(page, " ")
    expect_sentence(page, "^The source is empty; type a sentence.$")
    assert page.locator("#took").inner_text() == ""
    translate(page, "q" * 200)
    expect_sentence(page, r"^The source has 201 tokens, more than 128; shorten it\.$")
    page.get_by_label("limit").fill("3")
    translate(page, "i love 🙂 水")
    page.wait_for_selector("#notes p")
    assert page.locator("#notes p").first.inner_text().startswith("The vocabulary has 🙂 水 only as bytes")


def test_last_of_many_searches_counts(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    expect_translation(page, PAIRS[SOURCES[0]])
    page.get_by_label("Beams").fill("16")
    page.evaluate("""() => {
      const source = document.getElementById("source"), form = document.getElementById("form");
      for (const text of ["this is a book ".repeat(8), "what is your name", "i love you"]) {
        source.value = text;
        form.requestSubmit();
      }
    }""")
    expect_translation(page, "te amo")
    page.wait_for_timeout(1000)
    expect_translation(page, "te amo")

    # A sentence about what was typed last stays too.
    page.get_by_label("Source", exact=True).fill("this is a book " * 8)
    page.get_by_label("Source", exact=True).press("Enter")
    translate(page, "")
    page.wait_for_timeout(1000)
    expect_sentence(page, "^The source is empty")
    translate(page, "i love you")
    expect_translation(page, "te amo")
    assert page.locator("#drawing svg").get_attribute("aria-label") == "Beam search for “i love you”"


def test_one_pass_stands_beside_the_search(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    expect_translation(page, PAIRS[SOURCES[0]])
    page.wait_for_selector("#ctc-path li")
    slots = page.locator("#ctc-path li").count()
    assert slots == 2 * page.locator("#keys li").count()  # two for each source token
    assert re.fullmatch(r"\d+ ms for all words at once", page.locator("#ctc-time").inner_text())
    assert re.match(r"\d+ ms for \d+ steps", page.locator("#beam-time").inner_text())
    page.get_by_label("Beams").fill("3")
    page.wait_for_function("() => document.getElementById('ctc-search').textContent.includes('beam search of 3 beams')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_as_wide_as_a_phone_and_the_tree_begins_at_its_start(
    open_page: OpenPage, address: str, scheme: str
) -> None:
    page = open_page(address, viewport={"width": 390, "height": 844}, has_touch=True, color_scheme=scheme)
    page.get_by_role("button", name="what is your name").tap()
    expect_translation(page, PAIRS["what is your name"])
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    box = page.locator("#drawing")
    assert box.evaluate("box => box.scrollWidth > box.clientWidth && box.scrollLeft === 0")
    assert box.bounding_box()["y"] < 700
    slider = page.get_by_label("Step", exact=True)
    slider.press("Home")
    slider.press("End")
    assert box.evaluate("box => box.scrollLeft") > 0


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("model.safetensors", None, r"^model/model\.safetensors: cannot be loaded \(404\)\."),
        ("model.safetensors", b"html", r"^model\.safetensors: damaged; got 4 bytes"),
        ("tokenizer.json", b"<html>", r"^model/tokenizer\.json: damaged; it is not JSON\."),
    ],
)
def test_missing_or_damaged_file_is_a_sentence(
    open_page: OpenPage, site: Path, tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    broken = shutil.copytree(site, tmp_path / "site")
    (broken / "model" / name).unlink()
    if content is not None:
        (broken / "model" / name).write_bytes(content)
    with served(broken) as address:
        expect_sentence(open_page(address, errors=True), sentence)


def test_ctc_model_that_cannot_be_read_leaves_the_translation(open_page: OpenPage, site: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(site, tmp_path / "site")
    (broken / "ctc" / "model.safetensors").write_bytes(b"html")
    with served(broken) as address:
        page = open_page(address, errors=True)
        page.get_by_text("model.safetensors: damaged; got 4 bytes").wait_for()
        expect_translation(page, PAIRS[SOURCES[0]])
        assert page.locator("#results").is_visible()


def test_folder_that_is_opened_without_a_server_says_what_it_needs(open_page: OpenPage, site: Path) -> None:
    page = open_page((site / "index.html").as_uri(), errors=True)
    page.get_by_text("This page has not started.").wait_for()
    assert page.locator("#app").is_hidden()
