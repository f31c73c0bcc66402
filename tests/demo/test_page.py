"""The page: its content for any text, its heading and its settings."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.builders import tiny_nat
from tests.helpers import HOSTILE_TEXT, PAIRS, model_of_pairs, tiny_model
from vaswani_transformer import VaswaniTransformerTokenizer, attention_page
from vaswani_transformer.demo import page as page_module
from vaswani_transformer.demo.page import (
    CHANGED,
    EXAMPLES,
    PageContent,
    attention_frame,
    make_page,
    mark_changes,
    page_content,
    title_and_examples,
)
from vaswani_transformer.translation.loading import LoadOptions

gr: Any = pytest.importorskip("gradio")
RECIPE = {"data": {"source": "en", "target": "de"}}


@pytest.mark.parametrize(
    ("text", "settings", "note"),
    [
        ("", {}, "The source is empty; type a text."),
        (" \n\u3000", {}, "The source is empty; type a text."),
        ("a " * 200, {}, "The source has 401 tokens, more than 128; shorten it."),
        ("a", {"num_beams": 0}, "num_beams: "),
    ],
)
def test_text_without_a_translation_gets_one_sentence(text: str, settings: dict[str, int], note: str) -> None:
    content = page_content(*model_of_pairs(), text, **settings)
    assert content.note.startswith(note)
    assert content == PageContent(content.note)


def test_text_beyond_learned_positions_gets_one_sentence_and_half_a_character_is_a_question_mark() -> None:
    tokenizer = model_of_pairs()[1]
    model = tiny_model(vocab_size=len(tokenizer), position_embedding="learned", max_position_embeddings=20)
    content = page_content(model, tokenizer, "a " * 12)
    assert content == PageContent("The source has 25 tokens, more than 20; shorten it.")
    assert page_content(model, tokenizer, "a \ud800").source == "a ?"


def test_rows_end_in_the_translation_and_list_what_ended() -> None:
    model, tokenizer = model_of_pairs()
    content = page_content(model, tokenizer, "i love you", num_beams=4, length_penalty=0.6, length_penalty_type="gnmt")
    assert (content.note, content.source, content.target) == ("", "i love you", PAIRS["i love you"])
    (best,) = [row for row in content.rows if row[1:3] == ["ended", content.target]]
    assert content.finished[0] == (f"{best[-1]}  {content.target}", content.target)
    assert len(content.finished) == sum(row[1] == "ended" for row in content.rows)
    assert [row[0] for row in content.rows] == sorted(row[0] for row in content.rows)


def test_unknown_words_are_named() -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["hello world"], vocab_size=60, algorithm="wordpiece")
    content = page_content(tiny_model(vocab_size=len(tokenizer)), tokenizer, "hello zebra", max_new_tokens=3)
    assert content.note == "Unknown words, whose results are guesses: 'zebra'."


def test_passes_are_numbered_lines_with_marks_against_the_pass_before() -> None:
    tokenizer = model_of_pairs()[1]
    spans = mark_changes(tokenizer, [tokenizer(text)["input_ids"] for text in ("el gato", "el gato", "te gato")])
    assert "".join(text for text, _ in spans) == "1: el gato</s>\n2: el gato</s>\n3: te gato</s>"
    assert [text for text, mark in spans if mark == CHANGED] == ["te"]
    assert mark_changes(tokenizer, []) == []


def page_in(frame: str) -> str:
    """Return the page in a frame that is one element, from whose attribute the page cannot break out."""
    (page,) = re.findall(r'^<iframe title="Attention" sandbox="allow-scripts" style="[^"]*" srcdoc="([^"]*)"><', frame)
    return html.unescape(page)


def test_attention_of_a_hostile_text_stays_in_its_frame() -> None:
    model, tokenizer = model_of_pairs()
    frame = attention_frame(model, tokenizer, HOSTILE_TEXT, HOSTILE_TEXT)
    assert page_in(frame) == attention_page(model, tokenizer, HOSTILE_TEXT, HOSTILE_TEXT)


def test_non_autoregressive_model_shows_its_last_pass_under_the_pages_settings() -> None:
    tokenizer = model_of_pairs()[1]
    model = tiny_nat(vocab_size=len(tokenizer))
    frame = attention_frame(model, tokenizer, "i love you", max_new_tokens=2)
    assert page_in(frame) == attention_page(model, tokenizer, "i love you", max_new_tokens=2)
    assert page_content(model, tokenizer, "i love you", max_new_tokens=2).passes


@pytest.mark.parametrize(
    ("results", "title", "examples"),
    [
        ({"recipe": RECIPE}, "English to German", EXAMPLES["en"]),
        ({"recipe": RECIPE, "test": {"examples": [{"source": "Hi."}]}}, "English to German", ["Hi."]),
        ([], None, []),
        (None, None, []),
    ],
)
def test_page_has_the_languages_and_examples_of_the_run_or_else_the_models_name(
    tmp_path: Path, results: Any, title: str | None, examples: list[str]
) -> None:
    if results is not None:
        (tmp_path / "results.json").write_text(json.dumps(results))
    assert title_and_examples(LoadOptions(str(tmp_path))) == (title or str(tmp_path), examples)


def test_page_offers_its_examples() -> None:
    page = make_page(*model_of_pairs(), "a model", ["i love you", "good morning"])
    (samples,) = [block.samples for block in page.blocks.values() if isinstance(block, gr.Dataset)]
    assert samples == [["i love you"], ["good morning"]]


def test_empty_field_leaves_the_setting_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio")
    settings: list[dict[str, Any]] = []
    monkeypatch.setattr(page_module, "page_content", lambda *_, **given: settings.append(given) or PageContent("note"))
    show: Any = make_page(*model_of_pairs(), "a model").fns[0].fn
    show("a text", 4, None, 0)
    show("a text", 1, 0.0, 7)
    assert settings == [{"num_beams": 4}, {"num_beams": 1, "length_penalty": 0.0, "max_new_tokens": 7}]
