"""MkDocs hook: links to files of the repository, such as `../tests/test_layers.py#test_norm_comes_last`.

On GitHub they lead to the file. On the site they lead to the file at the repository's address, and to the line of the
function or the heading that they name; without an address the site shows their text. The changelog and the security
policy become pages of the site.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
LINK = re.compile(r"\[([^\]]+)\]\(\.\./([\w./-]+)(?:#([\w-]+))?\)")


def line_of(path: str, function: str) -> int:
    """Return the line where a file defines a function.

    Raises:
        ValueError: it defines none of that name.
    """
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if re.match(rf" *def {function}\(", line)]
    if not numbers:
        raise ValueError(f"{path}: no function of this name; got {function}. Name one that the file defines.")
    return numbers[0]


def link(text: str, path: str, name: str | None, repository: str) -> str:
    """Return a link to a file, or its text where the repository has no address; the site has some of the files."""
    if path in PAGES:
        return f"[{text}]({PAGES[path]})"
    if not (ROOT / path).exists():
        raise ValueError(f"{path}: a page links to it, but there is no such file; correct the link.")
    anchor = "" if name is None else f"#L{line_of(path, name)}" if path.endswith(".py") else f"#{name}"
    return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{anchor})" if repository else text


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs with the files of docs/: add the pages that are in the root of the repository."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        content = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, config: Any, **context: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return LINK.sub(lambda match: link(match[1], match[2], match[3], config.repo_url or ""), markdown)
