"""Checks of the coding exercises accept solutions only, and the answers of the worksheet are right."""

import json
import math
import re
from typing import Any

import pytest
import torch

from docs.tools.paper import CODING_NOTEBOOK, CODING_PAGE, PYTHON, coding_notebook
from tests import ROOT

SECTIONS = CODING_PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
BLOCKS = {section.partition("\n")[0]: [match[1] for match in PYTHON.finditer(section)] for section in SECTIONS}
WORKSHEET = (ROOT / "docs" / "worksheet.html").read_text(encoding="utf-8")
WRONG = {  # for each exercise: a part of its solution, its replacement, and what the check says
    "Scaled dot-product attention": [
        (
            " / query.shape[1] ** 0.5",
            "",
            r"^mask all True, weights .*: yours .* \(sum 1\.00\), the library's .* \(sum 1\.00\)\.$",
        ),
        ("softmax(-1)", "softmax(0)", r"^mask all True, weights .*: yours [\d. ]*\(sum (?!1\.00)"),
        ("~mask", "mask", "^mask all True, weights .*: yours nan nan nan nan nan "),
        (
            ".masked_fill(~mask, -torch.inf)",
            "",
            r"^later keys masked, weights .*, the library's [\d. ]* 0\.00 0\.00 \(",
        ),
        (
            "masked_fill(~mask, -torch.inf).softmax(-1)",
            "softmax(-1) * mask",
            r"^later keys .*: yours [\d. ]* 0\.00 0\.00 \(sum 0",
        ),
        ("@ value", "@ value + 1", "^mask all True, weights "),
        ("@ value", "@ value, scores", r"^Return one tensor; got a tuple\.$"),
        (" @ value", "", r"^Return \(Q, d_v\), here \(3, 4\); got \(3, 5\)\.$"),
    ],
    "The learning rate": [
        ("min(", "max(", r"^Step 1: your learning rate 0\.0442, the library's 1\.75e-07\.$"),
        ("**-1.5", "**-1", r"^Step 1: your learning rate 1\.1e-05, the library's "),
    ],
    "Label smoothing": [
        ("smoothing * log_p.mean(-1)", "0", r"^smoothing 0\.1: yours \d\.\d{4}, the library's \d\.\d{4}\.$"),
        ("smoothing * log_p.mean(-1)", "smoothing * log_p.sum(-1)", r"^smoothing 0\.1: "),
        ("log_p.mean(-1)", "(log_p.sum(-1) - of_label) / (log_p.shape[1] - 1)", r"^smoothing 0\.1: "),  # V - 1 others
        ("return -(", "return (", r"^smoothing 0\.0: yours -"),
        (").mean()", ").sum()", r"^smoothing 0\.0: "),
        (").mean()", ")", r"^Return one number for all positions; got \(4,\)\.$"),
    ],
    "A step of beam search": [
        ("log_p[:, None] + ", "", r"^\(beam, token\): yours \[\(\d, .*, the library's \[\(\d, "),
        ("divmod(index, vocabulary)", "divmod(index, vocabulary)[::-1]", r"^\(beam, token\): "),
        (
            "(score, *place)",
            "(2 * score, *place)",
            r"^log P of target 1: yours -\d\.\d{3}, the library's -\d\.\d{3}\.$",
        ),
        ("(score, *place)", "place", r"^Return a list of tuples: log P, beam, token\.$"),
        ("return [", "return best  # [", r"^Return a list of tuples"),
    ],
}


def check(name: str, answer: str) -> None:
    """Run an answer and its check."""
    variables: dict[str, Any] = {"__name__": "exercise"}
    exec(answer, variables)
    exec(BLOCKS[name][1], variables)


def test_page_has_four_exercises() -> None:
    assert list(BLOCKS) == list(WRONG)
    assert all(len(blocks) == 3 for blocks in BLOCKS.values())


@pytest.mark.parametrize("name", WRONG)
def test_solution_is_right(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, BLOCKS[name][2])
    assert capsys.readouterr().out == "right\n"


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_filled_in_is_not_right(name: str) -> None:
    with pytest.raises(AssertionError, match="Replace the dots"):
        check(name, BLOCKS[name][0])


@pytest.mark.parametrize(
    ("name", "right", "wrong", "message"), [(name, *case) for name in WRONG for case in WRONG[name]]
)
def test_wrong_answer_is_told_where_it_differs(name: str, right: str, wrong: str, message: str) -> None:
    assert right in BLOCKS[name][2]
    with pytest.raises(AssertionError, match=message):
        check(name, BLOCKS[name][2].replace(right, wrong))


@pytest.mark.parametrize("name", ["Scaled dot-product attention", "Label smoothing", "A step of beam search"])
def test_check_shows_the_same_numbers_to_all(name: str) -> None:
    right, wrong, _ = WRONG[name][0]
    messages = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with pytest.raises(AssertionError) as error:
            check(name, BLOCKS[name][2].replace(right, wrong))
        messages.add(str(error.value))
    assert len(messages) == 1


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
    assert float(rows["weight"][3]) == pytest.approx(sum(map(float, rows["weight"][:3])))
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
