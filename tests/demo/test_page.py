"""The page: its content for any text, its heading and its settings."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import HOSTILE_TEXT
from tests.models import PAIRS, model_of_pairs, tiny_model, tiny_nat
from vaswani_transformer import VaswaniTransformerTokenizer, attention_page
from vaswani_transformer.demo import page as page_module
from vaswani_transformer.demo.page import (
    EXAMPLES,
    PageContent,
    attention_frame,
    make_page,
    page_content,
    title_and_examples,
)
from vaswani_transformer.support.loading import LoadOptions

gr: Any = pytest.importorskip("gradio")


def results_of(source: str, target: str, *examples: str, **data: str) -> dict[str, Any]:
    """Return the `results.json` of a run with these languages and example translations."""
    test = {"test": {"examples": [{"source": text} for text in examples]}} if examples else {}
    return {"recipe": {"data": {"source": source, "target": target, **data}}, **test}


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


def test_drawing_and_finished_targets_are_those_of_the_search() -> None:
    model, tokenizer = model_of_pairs()
    content = page_content(model, tokenizer, "i love you", num_beams=4, length_penalty=0.6, length_penalty_type="gnmt")
    assert (content.note, content.source, content.target) == ("", "i love you", PAIRS["i love you"])
    assert [target for _, target in content.finished].index(content.target) == 0
    assert content.search.count("&lt;/s&gt;</text>") >= len(content.finished)
    assert f"Beam search for &#x27;i love you&#x27;: &#x27;{content.target}&#x27;" in content.search


def test_model_that_samples_shows_a_search() -> None:
    tokenizer = model_of_pairs()[1]
    model = tiny_model(vocab_size=len(tokenizer))
    expected = page_content(model, tokenizer, "i love you", max_new_tokens=5)
    model.generation_config.do_sample = True
    assert expected.target
    assert page_content(model, tokenizer, "i love you", max_new_tokens=5) == expected


def test_note_names_unknown_words_and_an_unfinished_translation() -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["hello world"], vocab_size=60, algorithm="wordpiece")
    content = page_content(tiny_model(vocab_size=len(tokenizer)), tokenizer, "hello zebra", max_new_tokens=3)
    unknown = "Out-of-vocabulary words (their translations are guesses): 'zebra'."
    assert content.note == f"{unknown} Unfinished: the translation reached the length limit, or repeats itself."


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
    assert "1 of 1: " in page_content(model, tokenizer, "i love you", max_new_tokens=2).search


@pytest.mark.parametrize(
    ("results", "title", "examples"),
    [
        (results_of("en", "de"), "English to German", EXAMPLES["en"]),
        (results_of("en", "de", "Hi."), "English to German", ["Hi."]),
        (results_of("sv", "de_CH", "Hej."), "Swedish to de_CH", ["Hej."]),
        (results_of("source", "target", "Hi."), None, ["Hi."]),
        (results_of("src", "tgt", source_language="en", target_language="it"), "English to Italian", EXAMPLES["en"]),
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


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ((0, 1.0, 0), "Beams: out of range; got 0, expected an integer from 1 to 16."),
        ((100, 1.0, 0), "Beams: out of range; got 100, expected an integer from 1 to 16."),
        ((4, -11.5, 0), "Length penalty: out of range; got -11.5, expected a number from -10 to 10."),
        ((4, 1.0, 513), "Length limit: out of range; got 513, expected an integer from 0 to 512."),
    ],
)
def test_number_out_of_range_is_a_note_that_names_its_field(values: tuple[float, ...], note: str) -> None:
    page: Any = make_page(*model_of_pairs(), "a model")
    numbers = [block for block in page.blocks.values() if isinstance(block, gr.Number)]
    labels = ["Beams (1-16)", "Length penalty (\u00b110)", "Length limit (0-512; 0: model's)"]
    assert [number.label for number in numbers] == labels
    read = [number.preprocess(value) for number, value in zip(numbers, values, strict=True)]  # as Gradio reads a field
    shown = page.fns[0].fn("i love you", *read).values()
    assert [update.value for update in shown if isinstance(update, gr.Textbox)] == [note]
