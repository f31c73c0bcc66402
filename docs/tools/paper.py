"""Run the pages of the paper in code: `python -m docs.tools.paper` writes their output, pictures and notebooks.

A block of Python on a page continues those before it. What it prints is in the block of text below it; the picture
below it is the figure that it calls `picture`. The pages run in their order, in one folder.
"""

import contextlib
import inspect
import io
import json
import pkgutil
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import torch

from docs.tools.listings import LISTING, names_in

FOLDER = Path(__file__).resolve().parents[1]
PAGES = [FOLDER / f"{name}.md" for name in ("paper", "paper-model", "paper-training", "paper-decoding")]
NOTEBOOK, EXERCISES = FOLDER / "paper.ipynb", FOLDER / "paper-exercises.ipynb"
CODING_PAGE, CODING_NOTEBOOK = FOLDER / "coding-exercises.md", FOLDER / "coding-exercises.ipynb"
PYTHON = re.compile(r"^```python\n(.*?)^```$\n(?:\n```text\n(.*?)^```$\n)?", flags=re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"\n!\[[^\]]*\]\((images/(?!figure-)[\w-]+\.svg)\)\n")
DIAGRAM = re.compile(r"!\[([^\]]*)\]\((images/figure-[\w-]+\.svg)\)")
PIECES = re.compile(
    r"(^In the library: [^\n]*\n|^```python\n.*?^```$\n(?:\n```text\n.*?^```$\n)?)", flags=re.DOTALL | re.MULTILINE
)
PAGE_LINK = re.compile(r"\[([^\]]+)\]\((?:([\w-]+)\.(?:md|ipynb))?(#[\w-]+)?\)")
FILE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./([\w./-]+)(?:#\w+)?\)")
SOLUTION = re.compile(r"^<details[^>]*>\n<summary>See what happens</summary>.*?^</details>$", re.DOTALL | re.MULTILINE)
CODING_SOLUTION = re.compile(SOLUTION.pattern.replace("See what happens", "See a solution"), SOLUTION.flags)
ANSWER = "```python\n# your answer\n```"
DETAILS = re.compile(r"</?details[^>]*>\n?")
SUMMARY = re.compile(r"<summary>(.*?)</summary>")
URLS = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
GRAY, LINE = "#737680", "#8080804d"  # of letters and of thin lines, on white and on black
HAS_ADDRESS = "OWNER" not in URLS["Source"]  # until the first release the project has none, and nothing leads to it
TITLE = """Run the cells from top to bottom, which takes a few minutes on a CPU. The first one needs the project, and
the second defines `show`, which prints lines of its source.
"""
DRAW = """%matplotlib inline
%config InlineBackend.figure_formats = ["svg"]
"""
SHOW = """import inspect
import pkgutil


def show(*names):
    for name in names:
        print(inspect.getsource(pkgutil.resolve_name(name)))
"""


def execute(code: str, variables: dict[str, Any]) -> str:
    """Run a block in the variables of those before it, and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<page>", "exec"), variables)
    return printed.getvalue()


def run_page(page: str, pictures: Path, variables: dict[str, Any]) -> str:
    """Return the page with the output of its blocks, and write its pictures into a folder.

    Solutions of exercises leave variables and random numbers as they are, because the notebook for students lacks them.

    Args:
        page: the text of the page.
        pictures: the folder that gets `images/NAME.svg`.
        variables: what its blocks begin with; it gets what they define.
    """
    variables["__name__"] = "paper"
    solutions = [range(*match.span()) for match in SOLUTION.finditer(page)]
    blocks, position = [], 0
    for match in PYTHON.finditer(page):
        blocks.append(page[position : match.start()])
        position = match.end()
        if any(match.start() in solution for solution in solutions):
            with torch.random.fork_rng():
                printed = execute(match[1], dict(variables))
        else:
            printed = execute(match[1], variables)
        blocks.append(f"```python\n{match[1]}```\n" + (f"\n```text\n{printed}```\n" if printed else ""))
        if picture := PICTURE.match(page, position):
            save_picture(variables.pop("picture"), pictures / picture[1])
    return "".join([*blocks, page[position:]])


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure as SVG for light and dark pages, without a background; the same figure gives the same bytes."""
    from matplotlib import rc_context

    from vaswani_transformer.figures.style import INK, MUTED, RULE

    path.parent.mkdir(parents=True, exist_ok=True)
    drawing = io.StringIO()
    with rc_context({"svg.hashsalt": "paper", "svg.fonttype": "path"}):
        figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None})
    path.write_text(re.sub(f"{INK}|{MUTED}", GRAY, drawing.getvalue()).replace(RULE, LINE), encoding="utf-8")


def code_cell(code: str, printed: str = "", picture: str | None = None) -> dict[str, Any]:
    """Return a cell of code with what it prints, and the drawing in a file of docs/ that it shows."""
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if picture is not None:
        drawing = (FOLDER / picture).read_text(encoding="utf-8")
        data = {"image/svg+xml": drawing.splitlines(keepends=True)}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    lines = code.strip("\n").splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs, "source": lines}


def install_cell(package: str, target: str, before: str = "") -> dict[str, Any]:
    """Return the first cell, which checks that the project is installed, or installs it once it has an address.

    Args:
        package: a package that is there only if it is.
        target: what pip installs.
        before: the cell's first lines.
    """
    missing = f"    raise SystemExit('Run pip install {target} jupyterlab in a clone of the project first.')"
    if HAS_ADDRESS:
        missing = f"    !git clone --quiet {URLS['Source']} project\n    %cd project\n    %pip install --quiet {target}"
    return code_cell(f"{before}try:\n    import {package}\nexcept ImportError:\n{missing}")


def text_cell(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)}


def for_notebook(text: str, page: str) -> str:
    """Return a page's text for a notebook: links lead to the site and the repository, and nothing is folded."""
    site, source = URLS["Documentation"], f"{URLS['Source']}/blob/main"
    text = SUMMARY.sub(lambda match: f"**{match[1]}**", DETAILS.sub("", PICTURE.sub("\n", text)))
    text = DIAGRAM.sub(lambda match: f"![{match[1]}]({site if HAS_ADDRESS else ''}{match[2]})", text)
    text = PAGE_LINK.sub(lambda match: link(match[1], f"{site}{match[2] or page}/{match[3] or ''}"), text)
    return FILE_LINK.sub(lambda match: link(match[1], f"{source}/{match[2]}"), text).replace("/index/", "/").strip()


def link(text: str, address: str) -> str:
    return f"[{text}]({address})" if HAS_ADDRESS else text


def page_cells(page: str, name: str) -> list[dict[str, Any]]:
    """Return a page as cells: text, code, and calls of `show` for listings; a picture is shown by its code."""
    cells, position = [], 0
    for piece in PIECES.split(page):
        position += len(piece)
        if match := LISTING.match(piece):
            names = names_in(match[1])
            arguments = ",\n".join(f'    "{name}"' for name in names)
            cells.append(code_cell(f"show(\n{arguments},\n)", "".join(f"{shown_source(name)}\n" for name in names)))
        elif match := PYTHON.match(piece):
            picture = PICTURE.match(page, position)
            code = match[1] + ("picture" if picture else "")
            cells.append(code_cell(code, match[2] or "", picture[1] if picture else None))
        elif text := for_notebook(piece, name):
            cells.append(text_cell(text))
    return cells


def shown_source(name: str) -> str:
    """Return what `show` prints of a name: its source with the indent of its place."""
    return inspect.getsource(pkgutil.resolve_name(name))


def to_notebook(for_students: bool = False) -> str:
    """Return the pages as one Jupyter notebook; for students, without solutions of exercises and without outputs."""
    cells = [text_cell(TITLE), install_cell("training", '-e ".[figures,train]"', DRAW), code_cell(SHOW)]
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        cells += page_cells(SOLUTION.sub(lambda _: ANSWER, page) if for_students else page, path.stem)
    for cell in cells:
        if for_students and cell["cell_type"] == "code":
            cell["outputs"] = []
    return as_notebook(cells)


def coding_notebook() -> str:
    """Return the coding exercises as a notebook without solutions."""
    page = CODING_SOLUTION.sub("", CODING_PAGE.read_text(encoding="utf-8"))
    return as_notebook([install_cell("vaswani_transformer", "-e ."), *page_cells(page, CODING_PAGE.stem)])


def as_notebook(cells: list[dict[str, Any]]) -> str:
    """Return the text of a notebook with numbered cells."""
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Update the pages, their pictures and the notebooks."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for path in PAGES:
            path.write_text(run_page(path.read_text(encoding="utf-8"), FOLDER, {}), encoding="utf-8")
    NOTEBOOK.write_text(to_notebook(), encoding="utf-8")
    EXERCISES.write_text(to_notebook(for_students=True), encoding="utf-8")
    CODING_NOTEBOOK.write_text(coding_notebook(), encoding="utf-8")


if __name__ == "__main__":
    main()
