"""MkDocs hook: formulas as MathML, which browsers draw without a script, and diagrams whose parts are links.

`pymdownx.arithmatex` marks what is between dollar signs in a page; here it becomes MathML. A picture
`images/figure-*.svg` becomes part of the page, so that links in it work.
"""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

IMAGES = Path(__file__).resolve().parents[1] / "images"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
DIAGRAM = re.compile(r'<img alt="[^"]*" src="[^"]*images/(figure-[\w-]+\.svg)" ?/?>')
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


def on_page_content(content: str, **context: Any) -> str:
    """Called by MkDocs with each page as HTML."""
    return DIAGRAM.sub(lambda match: diagram(match[1]), FORMULA.sub(to_mathml, content))
