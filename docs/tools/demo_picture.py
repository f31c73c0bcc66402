"""The picture of the demo page: `python -m docs.tools.demo_picture MODEL TEXT FILE.png`.

It needs the extra `dev` and a browser: `python -m playwright install chromium`, or a system's chromium.
"""

import shutil
import sys

from PIL import Image
from playwright.sync_api import sync_playwright

from vaswani_transformer.demo import load_page
from vaswani_transformer.demo.command import LAUNCH

COLORS = 64  # of the picture's palette, which makes it small


def take_picture(model: str, text: str, path: str) -> None:
    """Write a picture of a model's page after a text was typed."""
    page = load_page(model)
    _, address, _ = page.launch(**LAUNCH)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1100, "height": 1300})
        tab.goto(address)
        tab.get_by_label("Source").fill(text)
        tab.get_by_role("button", name="Translate").click()
        tab.frame_locator("iframe[title=Attention]").locator("h1").wait_for(timeout=120_000)
        tab.wait_for_timeout(2000)  # the frame's lines and the page's fades
        tab.screenshot(path=path)
        browser.close()
    page.close(verbose=False)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLORS).save(path, optimize=True)


if __name__ == "__main__":
    take_picture(*sys.argv[1:])
