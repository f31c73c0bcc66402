"""Pictures of what a browser draws: `python -m docs.tools.browser_pictures MODEL` writes them into docs/images.

MODEL is a trained English-German model. The pictures are the tree of a beam search, the same search in motion, and the
page of the demo. They need the extra `dev` and a browser: `python -m playwright install chromium`, or the system's.
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from PIL import Image
from playwright.sync_api import sync_playwright
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vaswani_transformer.demo import load_site
from vaswani_transformer.figures import search_page
from vaswani_transformer.figures.recording import record_search
from vaswani_transformer.figures.svg import GRAY

from .animation import NAME, animation
from .pictures import IMAGES

AMBIGUOUS = "Tom has not seen the new teacher."
COLORS = 128  # of the palette of the demo's picture, which makes it small
NAMESPACE = "http://www.w3.org/2000/svg"


def drawn_search(
    browser: Any, model: Any, tokenizer: Any, sentence: str, beams: int, has_scores: bool
) -> tuple[ElementTree.Element, str]:
    """Return the page's drawing of a search as SVG, and the translation."""
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    tab.set_content(search_page(model, tokenizer, sentence, num_beams=beams))
    tab.get_by_label("Scores").set_checked(has_scores)
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Save as SVG").click()
    drawing = ElementTree.fromstring(Path(download.value.path()).read_text(encoding="utf-8"))
    translation = tab.locator("h1 bdi").last.inner_text()
    tab.close()
    return drawing, translation


def beam_tree(browser: Any, model: Any, tokenizer: Any, sentence: str, beams: int = 3) -> str:
    """Return the drawing of a search as SVG, with a heading above it and a legend below it."""
    drawing, translation = drawn_search(browser, model, tokenizer, sentence, beams, has_scores=True)
    width, height = (int(drawing.attrib[name]) for name in ("width", "height"))
    heading = f"“{sentence}”, {beams} beams: log P of each target so far, over lp(Y) where it ends"
    legend = f"Bold: the best target, “{translation}”. Blue: finished. In parentheses: dropped candidates."
    for y, text in ((-20, heading), (height + 22, legend)):
        attributes = {"x": "14", "y": str(y), "fill": GRAY, "font-size": "14"}
        ElementTree.SubElement(drawing, f"{{{NAMESPACE}}}text", attributes).text = text
    drawing.attrib |= {
        "viewBox": f"0 -44 {width} {height + 84}",
        "height": str(height + 84),
        "style": "max-width: 100%; height: auto",
    }
    ElementTree.register_namespace("", NAMESPACE)
    return ElementTree.tostring(drawing, encoding="unicode") + "\n"


def animated_search(browser: Any, model: Any, tokenizer: Any, sentence: str, beams: int = 3) -> str:
    """Return a search as an animated SVG."""
    drawing, _ = drawn_search(browser, model, tokenizer, sentence, beams, has_scores=False)
    return animation(drawing, record_search(model, tokenizer, sentence, num_beams=beams))


def demo_picture(browser: Any, model: str) -> bytes:
    """Return a PNG of the demo's page with its first example."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(load_site(model).single_file(), encoding="utf-8")
        tab = browser.new_page(viewport={"width": 1280, "height": 1560})
        tab.goto(path.as_uri())
        tab.locator("#lines path").first.wait_for(timeout=120_000)
        tab.locator("#took").evaluate("took => took.remove()")  # the milliseconds of one machine
        shot = tab.screenshot()
        tab.close()
    output = io.BytesIO()
    with Image.open(io.BytesIO(shot)) as picture:
        picture.convert("RGB").quantize(COLORS).save(output, "PNG", optimize=True)
    return output.getvalue()


def main(model: str, images: Path = IMAGES) -> None:
    """Write the pictures."""
    tokenizer, loaded = AutoTokenizer.from_pretrained(model), AutoModelForSeq2SeqLM.from_pretrained(model)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tree = beam_tree(browser, loaded, tokenizer, AMBIGUOUS)
        (images / "figure-beam-tree.svg").write_text(tree, encoding="utf-8")
        film = animated_search(browser, loaded, tokenizer, AMBIGUOUS)
        (images / f"figure-{NAME}.svg").write_text(film, encoding="utf-8")
        (images / "demo.png").write_bytes(demo_picture(browser, model))
        browser.close()


if __name__ == "__main__":
    import vaswani_transformer  # noqa: F401 - registers the model

    main(sys.argv[1])
