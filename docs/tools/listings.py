"""MkDocs hook: replace each line that links to the library by the source of what it names.

On GitHub a line in a page such as

    In the library: [`AddAndNorm`](../vaswani_transformer/layers.py), [`SelfAttention.project`](...)

leads to the files. On the site it becomes a folded box with the class and the method, below the line that opens its
class, and with their places in the repository. The files are parsed and not imported.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LISTING = re.compile(r"^In the library: (\[`.*\.py\))$", flags=re.MULTILINE)
NAME = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+)\.py\)")


def names_in(links: str) -> list[str]:
    """Return the full names that the links of a line lead to."""
    return [f"{path.replace('/', '.')}.{name}" for name, path in NAME.findall(links)]


def find_file(name: str) -> tuple[Path, list[str]]:
    """Return the module's file and the path of names in it.

    Raises:
        ValueError: no module has such a name.
    """
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if (path := ROOT.joinpath(*parts[:count]).with_suffix(".py")).is_file():
            return path, parts[count:]
    raise ValueError(f"{name}: no file defines it; give the full name of a class, function or method.")


def find_nodes(tree: ast.Module, names: list[str]) -> list[Any]:
    """Return the definitions along a path of names, outermost first.

    Raises:
        ValueError: one is missing.
    """
    nodes: list[Any] = []
    body: list[ast.stmt] = tree.body
    for name in names:
        matches = [node for node in body if getattr(node, "name", None) == name]
        if not matches:
            raise ValueError(f"{'.'.join(names)}: {name} is not defined there; give another name.")
        nodes.append(matches[-1])
        body = matches[-1].body
    return nodes


def lines_of(name: str) -> tuple[int, int]:
    """Return the first and the last line of a class, function or method in its file."""
    path, names = find_file(name)
    node = find_nodes(ast.parse(path.read_text(encoding="utf-8")), names)[-1]
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.end_lineno


def source_of(name: str) -> str:
    """Return the source of a class, function or method, without the indent of its place."""
    first, last = lines_of(name)
    lines = find_file(name)[0].read_text(encoding="utf-8").splitlines()
    return textwrap.dedent("\n".join(lines[first - 1 : last]))


def class_line(name: str) -> str | None:
    """Return the line that opens the class of a method; None for anything else."""
    path, names = find_file(name)
    text = path.read_text(encoding="utf-8")
    if len(names) < 2:
        return None
    return text.splitlines()[find_nodes(ast.parse(text), names)[-2].lineno - 1]


def in_its_class(name: str) -> str:
    """Return the source of a name, a method below the line that opens its class."""
    header, source = class_line(name), source_of(name)
    return source if header is None else f"{header}\n{textwrap.indent(source, '    ')}"


def listing(names: list[str]) -> str:
    """Return a folded box with a block for each name: its file, its lines there and its source."""
    titles = ", ".join(f"`{'.'.join(find_file(name)[1])}`" for name in names)
    blocks = []
    for name in names:
        file, (first, last) = find_file(name)[0].relative_to(ROOT).as_posix(), lines_of(name)
        blocks.append(f'```python title="{file}, lines {first} to {last}"\n{in_its_class(name)}\n```\n')
    return f'??? quote "In the library: {titles}"\n\n{textwrap.indent(chr(10).join(blocks), "    ")}'


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return LISTING.sub(lambda match: listing(names_in(match[1])), markdown)
