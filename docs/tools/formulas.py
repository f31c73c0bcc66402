"""MkDocs hook: formulas as MathML, which browsers draw without a script, and diagrams whose parts are links.

`pymdownx.arithmatex` marks what is between dollar signs in a page; here it becomes MathML. A picture
`images/figure-*.svg` becomes part of the page, so that links in it work. Below each SVG is a link to its file, which a
phone shows.
"""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

IMAGES = Path(__file__).resolve().parents[1] / "images"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
PICTURE = re.compile(r'<img alt="[^"]*" src="([^"]*images/([\w-]+\.svg))" ?/?>')
PAGE_LINK = re.compile(r'href="\.\./([\w-]+)\.md(#[\w-]*)?"')


def to_mathml(match: re.Match[str]) -> str:
    """Return a formula that arithmatex marked, in MathML; a displayed one can be scrolled."""
    is_block = match[1] == "div"
    mathml = convert(html.unescape(match[2]).strip(), display="block" if is_block else "inline")
    return f'<div class="formula">{mathml}</div>' if is_block else mathml


def diagram(name: str) -> str:
    """Return a drawing as part of a page, whose links lead to the site's pages."""
    text = (IMAGES / name).read_text(encoding="utf-8")
    return PAGE_LINK.sub(lambda match: f'href="../{match[1]}/{match[2] or ""}"', text).strip()


def with_link(match: re.Match[str]) -> str:
    """Return a picture with a link to its file."""
    drawing = diagram(match[2]) if match[2].startswith("figure-") else match[0]
    return f'{drawing} <a class="whole-picture" href="{match[1]}">Open the picture, to enlarge it</a>'


def on_page_content(content: str, **context: Any) -> str:
    """Called by MkDocs with each page as HTML."""
    return PICTURE.sub(with_link, FORMULA.sub(to_mathml, content))


def on_post_build(config: Any, **context: Any) -> None:
    """Called by MkDocs after the build: lead links in the files of drawings to the site's pages."""
    for path in (Path(config.site_dir) / "images").glob("figure-*.svg"):
        path.write_text(diagram(path.name) + "\n", encoding="utf-8")
