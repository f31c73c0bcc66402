"""MkDocs hook: replace each block of dotted names by the source of what they name.

A block in a page

    ```source
    vaswani_transformer.layers.AddAndNorm
    vaswani_transformer.attention.SelfAttention.project
    ```

becomes the class and the method, below the line that opens its class. The files are parsed and not imported, so that
building the site needs no torch.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```source\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


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


def source_of(name: str) -> str:
    """Return the source of a class, function or method, without the indent of its place."""
    path, names = find_file(name)
    text = path.read_text(encoding="utf-8")
    node = find_nodes(ast.parse(text), names)[-1]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def class_line(name: str) -> str | None:
    """Return the line that opens the class of a method; None for anything else."""
    path, names = find_file(name)
    text = path.read_text(encoding="utf-8")
    if len(names) < 2:
        return None
    return text.splitlines()[find_nodes(ast.parse(text), names)[-2].lineno - 1]


def listing(names: list[str]) -> str:
    """Return one Markdown block a file with the source of names in it; methods stand in their class."""
    blocks: dict[str, list[str]] = {}
    opened = None
    for name in names:
        file = find_file(name)[0].relative_to(ROOT).as_posix()
        lines = blocks.setdefault(file, [])
        header, source = class_line(name), source_of(name)
        if header is not None:
            source = textwrap.indent(source, "    ")
            source = source if header == opened else f"{header}\n{source}"
        gap = "\n" if header is not None and header == opened else "\n\n"
        lines.append(f"{gap if lines else ''}{source}\n")
        opened = header
    return "\n".join(f'```python title="{file}"\n{"".join(lines)}```' for file, lines in blocks.items())


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return BLOCK.sub(lambda match: listing(match[1].split()), markdown)
