"""MkDocs hook: the demo as a part of the site, if the environment variable SITE_DEMO names a folder with its page.

`vaswani-demo models/tatoeba-en-de --output DIR` writes such a folder, and the docs workflow sets SITE_DEMO. The picture
of the demo on a page then becomes a button that loads the demo in its place, and a link to the description of the demo
whose text has the word "search" or "attention" leads to this part of it. Without SITE_DEMO, pages stay as they are on
GitHub: a picture, the command, and links to the description.
"""

import os
import re
from pathlib import Path
from typing import Any

FOLDER = "demo"  # of the site
PICTURE = re.compile(r'<p>(<img alt="[^"]*" src="([^"]*)images/demo\.png" ?/?>)</p>')
LINK = re.compile(r"\[([^\]]*\b(search|attention)\b[^\]]*)\]\(translate\.md#the-demo\)")
LIVE = """<div class="demo">
{picture}
<button type="button" class="md-button md-button--primary" data-page="{address}">Translate here ({size} to
load)</button>
</div>
<p>The model then runs on this page, and nothing that you type leaves your browser. You can also open the demo as <a
href="{address}">a separate page</a>.</p>"""


def demo_folder() -> Path | None:
    """Return the folder that SITE_DEMO names.

    Raises:
        ValueError: it has no page.
    """
    name = os.environ.get("SITE_DEMO", "")
    if name and not Path(name, "index.html").is_file():
        command = "vaswani-demo models/tatoeba-en-de --output DIR"
        raise ValueError(f"SITE_DEMO: {name} contains no index.html; write the folder with {command}.")
    return Path(name) if name else None


def files_of(folder: Path) -> list[Path]:
    """Return the files of the page, without the README.md of a Space."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")


def size_of(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in files_of(folder)) / 1e6:.0f} MB"


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs with the files of docs/: add those of the demo."""
    from mkdocs.structure.files import File

    folder = demo_folder()
    if folder is None:
        return files
    for path in files_of(folder):
        place = f"{FOLDER}/{path.relative_to(folder).as_posix()}"
        files.append(File.generated(config, place, abs_src_path=str(path.resolve())))
    return files


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Called by MkDocs with the text of each page: lead links into the demo."""
    if demo_folder() is None:
        return markdown
    return LINK.sub(rf"[\1]({FOLDER}/index.html#\2)", markdown)


def on_page_content(content: str, **context: Any) -> str:
    """Called by MkDocs with each page as HTML: make the picture of the demo a button."""
    folder = demo_folder()
    if folder is None:
        return content
    size = size_of(folder)
    return PICTURE.sub(lambda match: LIVE.format(picture=match[1], address=f"{match[2]}{FOLDER}/", size=size), content)
