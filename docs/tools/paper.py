"""Run the examples of docs/paper.md: `python -m docs.tools.paper` writes their output, its pictures and the notebook.

A block of Python on that page continues those before it. What it prints stands in the block of text below it; the
picture below it is the figure that it calls `picture`. The last two need a quickstart run in runs/quickstart.
"""

import contextlib
import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1]
PAGE = FOLDER / "paper.md"
NOTEBOOK = FOLDER / "paper.ipynb"
PYTHON = re.compile(r"^```python\n(.*?)^```$\n(?:\n```text\n(.*?)^```$\n)?", flags=re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"\n!\[[^\]]*\]\((images/[\w-]+\.svg)\)\n")
SOURCE = re.compile(r"^```source\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
PIECES = re.compile(r"(^```(?:python|source)\n.*?^```$\n(?:\n```text\n.*?^```$\n)?)", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((\w[\w-]*)\.md")
OF_THE_PAGE = re.compile(r"^The same steps are a \[notebook\].*?\n\n", flags=re.DOTALL | re.MULTILINE)
OF_THE_NOTEBOOK = """Run the cells from top to bottom, which takes about a minute on a CPU. The first one installs the
package if it is missing. The second defines `show`, which prints lines of the package's source.

"""
URLS = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
NEEDS_RUN = "runs/quickstart"
INSTALL = f"""%matplotlib inline
try:
    import vaswani_transformer
except ImportError:
    %pip install -q "vaswani-transformer[figures] @ git+{URLS["Source"]}"
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
        exec(compile(code, str(PAGE), "exec"), variables)
    return printed.getvalue()


def run_page(page: str, pictures: Path, skip: tuple[str, ...] = ()) -> str:
    """Return the page with the output of its blocks, and write its pictures into a folder.

    Args:
        page: the text of the page.
        pictures: the folder that gets `images/NAME.svg`.
        skip: blocks with one of these texts are not run and stay as they are.
    """
    variables: dict[str, Any] = {"__name__": "paper"}
    blocks, position = [], 0
    for match in PYTHON.finditer(page):
        blocks.append(page[position : match.start()])
        position = match.end()
        if any(text in match[1] for text in skip):
            blocks.append(match[0])
            continue
        printed = execute(match[1], variables)
        blocks.append(f"```python\n{match[1]}```\n" + (f"\n```text\n{printed}```\n" if printed else ""))
        if picture := PICTURE.match(page, position):
            save_picture(variables.pop("picture"), pictures / picture[1])
    return "".join([*blocks, page[position:]])


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure as SVG; the same figure gives the same bytes."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "paper", "svg.fonttype": "path"}):
        figure.savefig(path, metadata={"Date": None})


def code_cell(code: str) -> dict[str, Any]:
    lines = code.strip("\n").splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": lines}


def text_cell(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)}


def absolute_links(text: str) -> str:
    """Return a text whose links to pages, and to places of this page, lead to the site."""
    site = URLS["Documentation"]
    text = LINK.sub(lambda match: f"]({site}{match[1]}/", text).replace("](#", f"]({site}paper/#")
    return text.replace("/index/", "/")


def notebook_cells(page: str) -> list[dict[str, Any]]:
    """Return the page as cells: text, code, and calls of `show` for listings; a picture is shown by its code."""
    cells = []
    for piece in PIECES.split(OF_THE_PAGE.sub(OF_THE_NOTEBOOK, page)):
        if match := SOURCE.match(piece):
            names = ",\n".join(f'    "{name}"' for name in match[1].split())
            cells.append(code_cell(f"show(\n{names},\n)"))
        elif match := PYTHON.match(piece):
            if NEEDS_RUN not in match[1]:
                cells.append(code_cell(match[1] + ("picture" if "picture = " in match[1] else "")))
        elif text := PICTURE.sub("\n", piece).strip():
            cells.append(text_cell(absolute_links(text)))
    return [cells[0], code_cell(INSTALL), code_cell(SHOW), *cells[1:]]


def to_notebook(page: str) -> str:
    """Return the page as a Jupyter notebook without outputs, up to the quickstart's heads."""
    cells = notebook_cells(page[: page.index("\nThe [quickstart's]")])
    cells.append(text_cell(f"[The page]({URLS['Documentation']}paper/) continues with the heads of a trained model."))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Update page, pictures and notebook; without a quickstart run its pictures stay as they are."""
    skip = () if Path(NEEDS_RUN).is_dir() else (NEEDS_RUN,)
    page = run_page(PAGE.read_text(encoding="utf-8"), FOLDER, skip)
    PAGE.write_text(page, encoding="utf-8")
    NOTEBOOK.write_text(to_notebook(page), encoding="utf-8")


if __name__ == "__main__":
    main()
