"""The drawings of a search: what each step adds, what has died, and texts that stay texts."""

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.commands import HOSTILE_TEXT
from tests.models import family_of_pairs, model_of_pairs
from vaswani_transformer.figures.search import Candidate, best_finished, draw_beam_tree, draw_passes, last_steps
from vaswani_transformer.figures.svg import BLUE, GRAY, Drawing, text_width

END = 2
# Two beams. "7" dies in step 2, and its last word with the search; "6 9" ends, but "6 8" ends with a better score.
STEPS = [
    [Candidate((6,), -0.5, 1), Candidate((7,), -1.0, 1), Candidate((8,), -3.0, 1, is_kept=False)],
    [Candidate((6, 8), -0.75, 2), Candidate((6, 9), -1.5, 2), Candidate((7, 8), -4.0, 2, is_kept=False)],
    [Candidate((6, 8, END), -1.0, 4, True), Candidate((6, 9, END), -2.0, 4, True), Candidate((6, 8, 8), -6.0, 4)],
]


def parts_of(drawing: Drawing) -> list[tuple[list[str], tuple[str, ...]]]:
    """Return the texts of each part and its step, last step and color."""
    parts = [each for each in ElementTree.fromstring(drawing.svg()).iter() if "data-step" in each.attrib]
    names = ("data-step", "data-last", "color")
    return [
        (
            [text.text or "" for text in each.iter() if text.tag.endswith("text")],
            tuple(each.attrib[name] for name in names),
        )
        for each in parts
    ]


def test_targets_live_until_no_continuation_is_open_and_finished_ones_to_the_end() -> None:
    expected = {
        (6,): 3,
        (7,): 1,
        (8,): 0,
        (6, 8): 3,
        (6, 9): 3,
        (7, 8): 0,
        (6, 8, END): 3,
        (6, 9, END): 3,
        (6, 8, 8): 2,
    }
    assert {target: last for target, last in last_steps(STEPS).items() if target} == expected
    assert [candidate.tokens for candidate in best_finished(STEPS)] == [(6, 8, END), (6, 9, END)]


def test_tree_has_each_candidate_with_its_numbers_and_the_color_of_the_end() -> None:
    _, tokenizer = model_of_pairs()
    parts = parts_of(draw_beam_tree(tokenizer, STEPS, "a source"))
    assert len(parts) == sum(map(len, STEPS))
    found = {tuple(texts[1:]): attributes for texts, attributes in parts}
    assert found["-0.50",] == ("1", "3", BLUE)
    assert found["-1.00",] == ("1", "1", GRAY)
    assert found["-1.00 / 4.00", "= -0.25"] == ("3", "3", BLUE)
    assert found["-6.00",] == ("3", "2", GRAY)
    assert [texts[0][0] == "(" for texts, _ in parts].count(True) == 2


def test_best_target_is_bold_from_the_start_to_its_end() -> None:
    _, tokenizer = model_of_pairs()
    svg = draw_beam_tree(tokenizer, STEPS, "a source").svg()
    bold = re.findall(r'd="M([\d.]+) [^"]*?([\d.]+) [\d.]+" fill="none" stroke="currentColor" stroke-width="2.4"', svg)
    assert len(bold) == 3
    assert all(float(before[1]) < float(after[0]) for before, after in pairwise(bold))


def test_pass_marks_what_it_changes_and_a_word_is_gray_when_a_later_one_changes_it() -> None:
    _, tokenizer = model_of_pairs()
    history = [tokenizer(text)["input_ids"] for text in ("el gato", "el gato", "te gato")]
    drawing = draw_passes(tokenizer, history, "a source", "iteration")
    words = {(texts[0], attributes[0]): attributes[1:] for texts, attributes in parts_of(drawing)}
    assert (words["el", "1"], words["te", "3"]) == (("2", GRAY), ("3", BLUE))
    assert {words["iteration 1", "1"], words["iteration 3", "3"]} == {("0", GRAY)}
    assert drawing.svg().count("<rect") == 1


@pytest.mark.parametrize("family", ["autoregressive", "cmlm"])
def test_hostile_text_is_text(family: str) -> None:
    _, tokenizer = family_of_pairs(family)
    tokens = tokenizer(HOSTILE_TEXT)["input_ids"]
    steps = [[Candidate(tuple(tokens[:end]), -1.0, 1, end == len(tokens))] for end in range(1, len(tokens) + 1)]
    drawings: list[Any] = [
        draw_beam_tree(tokenizer, steps, HOSTILE_TEXT),
        draw_passes(tokenizer, [tokens], HOSTILE_TEXT, "pass"),
    ]
    for drawing in drawings:
        elements = {each.tag.partition("}")[2] for each in ElementTree.fromstring(drawing.svg()).iter()}
        assert elements <= {"svg", "title", "g", "path", "rect", "text"}


def test_characters_of_chinese_are_twice_as_wide() -> None:
    assert text_width("水") == text_width("ab")
