"""The pictures of the pages as PNG, for slides: `python -m docs.tools.png` writes one beside each SVG of docs/images.

It needs a browser, as `docs.tools.browser_pictures` does. The background is transparent.
"""

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from .pictures import IMAGES

SCALE = 2  # pixels of the PNG for each pixel of the drawing
COLORS = 256  # of a picture's palette, which makes it small


def main(images: Path = IMAGES) -> None:
    """Write the PNG files."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(
            viewport={"width": 1400, "height": 1000}, device_scale_factor=SCALE, reduced_motion="reduce"
        )
        for path in sorted(images.glob("*.svg")):
            tab.set_content(path.read_text(encoding="utf-8"))
            shot = tab.locator("svg").first.screenshot(omit_background=True)
            with Image.open(io.BytesIO(shot)) as picture:
                picture.quantize(COLORS, method=Image.Quantize.FASTOCTREE).save(path.with_suffix(".png"), optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
