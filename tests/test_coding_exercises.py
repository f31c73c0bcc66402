"""Checks of the coding exercises accept solutions only, and the answers of the worksheet are right."""

import json
import math
import re
from typing import Any

import pytest

from docs.tools.paper import CODING_NOTEBOOK, CODING_PAGE, PYTHON, coding_notebook
from tests.helpers import ROOT

SECTIONS = CODING_PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
BLOCKS = {section.partition("\n")[0]: [match[1] for match in PYTHON.finditer(section)] for section in SECTIONS}
WORKSHEET = (ROOT / "docs" / "worksheet.html").read_text(encoding="utf-8")
ALMOST = {  # what each solution is without a part that matters
    "Scaled dot-product attention": (" / query.shape[1] ** 0.5", ""),
    "The learning rate": ("min(", "max("),
    "Label smoothing": ("smoothing * log_p.mean(-1)", "0"),
    "A step of beam search": ("log_p[:, None] + ", ""),
}


def check(name: str, answer: str) -> None:
    """Run an answer and its check."""
    variables: dict[str, Any] = {"__name__": "exercise"}
    exec(answer, variables)
    exec(BLOCKS[name][1], variables)


def test_page_has_four_exercises() -> None:
    assert list(BLOCKS) == list(ALMOST)
    assert all(len(blocks) == 3 for blocks in BLOCKS.values())


@pytest.mark.parametrize("name", ALMOST)
def test_solution_is_right(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, BLOCKS[name][2])
    assert capsys.readouterr().out == "right\n"


@pytest.mark.parametrize("name", ALMOST)
def test_what_is_not_filled_in_is_not_right(name: str) -> None:
    with pytest.raises(AssertionError, match="Replace the dots"):
        check(name, BLOCKS[name][0])


@pytest.mark.parametrize("name", ALMOST)
def test_almost_a_solution_is_not_right(name: str) -> None:
    part, other = ALMOST[name]
    assert part in BLOCKS[name][2]
    with pytest.raises(AssertionError):
        check(name, BLOCKS[name][2].replace(part, other))


def test_notebook_is_made_from_the_page_and_has_no_solutions() -> None:
    notebook = CODING_NOTEBOOK.read_text(encoding="utf-8")
    assert notebook == coding_notebook()
    assert "See a solution" not in notebook
    assert notebook.count("    ...") == 4


def test_notebook_needs_what_the_page_installs_and_no_drawings() -> None:
    (command,) = re.findall("^pip install .*$", CODING_PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    cells = ["".join(cell["source"]) for cell in json.loads(CODING_NOTEBOOK.read_text(encoding="utf-8"))["cells"]]
    assert cells[0].startswith("try:\n    import vaswani_transformer\n")
    assert f"Run {command} in a clone of the project first." in cells[0]
    assert "matplotlib" not in "".join(cells)


# The worksheet

KEYS = {"the": (1, 1, 0, 0), "cat": (0, 1, 1, 1), "sleeps": (1, 0, 1, 1)}
VALUES = {"the": (1, 0), "cat": (0, 2), "sleeps": (2, 1)}
QUERIES = {"sleeps": (1, 0, 1, 2), "cat": (2, 1, 0, 0)}


def rows_of(heading: str) -> dict[str, list[str]]:
    """Return the cells of the answers' table that begins with a heading, by the heading of their row."""
    answers = WORKSHEET.partition('id="answers"')[2]
    table = answers.partition(f"<tr><th>{heading}</th>")[2].partition("</table>")[0]
    rows = re.findall(r"<tr><th>(.*?)</th>(.*?)</tr>", table.replace("\u2212", "-"))
    return {name: re.findall(r"<td>(.*?)</td>", cells) for name, cells in rows}


def test_worksheet_gives_the_keys_values_and_queries_of_this_test() -> None:
    for word, key in KEYS.items():
        cells = "".join(f"<td>{', '.join(map(str, vector))}</td>" for vector in (key, VALUES[word]))
        assert f"<tr><th>{word}</th>{cells}</tr>" in WORKSHEET
    for word, query in QUERIES.items():
        assert re.search(rf'query of "{word}" is {re.escape(str(query))}', WORKSHEET)


@pytest.mark.parametrize("word", QUERIES)
def test_worksheet_answers_the_attention_head(word: str) -> None:
    products = [sum(map(math.prod, zip(QUERIES[word], key, strict=True))) for key in KEYS.values()]
    powers = [math.exp(product / 2) for product in products]
    weights = [power / sum(powers) for power in powers]
    rows = rows_of(f'query of "{word}"')
    assert rows["product"][:3] == [str(product) for product in products]
    assert rows["e<sup>x</sup>"][:3] == [f"{power:.2f}" for power in powers]
    assert rows["weight"][:3] == [f"{weight:.2f}" for weight in weights]
    output = [sum(w * value[column] for w, value in zip(weights, VALUES.values(), strict=True)) for column in (0, 1)]
    assert f'"{word}": ({output[0]:.2f}, {output[1]:.2f})' in WORKSHEET


def test_worksheet_answers_the_beam_step_and_its_ranking() -> None:
    beams = {"el gato": (-0.5, [-0.4, -1.4, -2.5]), "un gato": (-0.7, [-0.9, -0.7, -1.2])}
    rows = rows_of("")
    for beam, (log_p, steps) in beams.items():
        assert rows[beam] == [f"{log_p + step:.2f}" for step in steps]
    finished = {"un gato": (-1.9, 3), "el gato duerme": (-1.3, 4), "el gato duerme bien": (-1.35, 5)}
    scores = {text: log_p / ((5 + length) / 6) ** 0.6 for text, (log_p, length) in finished.items()}
    by_log_p = sorted(finished, key=lambda text: -finished[text][0])
    by_score = sorted(scores, key=lambda text: -scores[text])
    for text, cells in rows_of("translation").items():
        name = text.removesuffix(" &lt;/s&gt;")
        ranks = [str(1 + order.index(name)) for order in (by_log_p, by_score)]
        assert cells == [f"{scores[name]:.2f}", *ranks]
