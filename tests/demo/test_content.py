"""What the page shows: sentences for texts that have no translation, rows, marks, and hostile texts as text."""

from html.parser import HTMLParser

import pytest

from tests.helpers import HOSTILE_TEXT, PAIRS, model_of_pairs, tiny_model
from tests.nar_models import tiny_nat
from vaswani_transformer import VaswaniTransformerTokenizer, attention_page
from vaswani_transformer.demo.content import CHANGED, PageContent, attention_frame, mark_changes, page_content


@pytest.mark.parametrize(
    ("text", "settings", "note"),
    [
        ("", {}, "The source is empty; type a text."),
        (" \n\u3000", {}, "The source is empty; type a text."),
        ("a " * 200, {}, "The source has 401 tokens, more than 128; shorten it."),
        ("a", {"num_beams": 0}, "num_beams: not a number of beams or tokens; got 0, expected a whole number of at "),
    ],
)
def test_text_without_a_translation_gets_one_sentence(text: str, settings: dict[str, int], note: str) -> None:
    content = page_content(*model_of_pairs(), text, **settings)
    assert content.note.startswith(note)
    assert content == PageContent(content.note)


def test_half_a_character_is_a_question_mark() -> None:
    assert page_content(*model_of_pairs(), "a \ud800").source == "a ?"


def test_text_beyond_learned_positions_gets_one_sentence() -> None:
    tokenizer = model_of_pairs()[1]
    model = tiny_model(vocab_size=len(tokenizer), position_embedding="learned", max_position_embeddings=20)
    content = page_content(model, tokenizer, "a " * 12)
    assert content == PageContent("The source has 25 tokens, more than 20; shorten it.")


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


class Tags(HTMLParser):
    """The tags of a text with their attributes, and its text outside of tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_attention_of_a_hostile_text_stays_in_its_frame() -> None:
    model, tokenizer = model_of_pairs()
    frame = Tags(attention_frame(model, tokenizer, HOSTILE_TEXT, HOSTILE_TEXT))
    ((tag, attributes),) = frame.tags
    assert (tag, attributes["sandbox"], frame.text) == ("iframe", "allow-scripts", "")
    assert attributes["srcdoc"] == attention_page(model, tokenizer, HOSTILE_TEXT, HOSTILE_TEXT)


def test_model_of_all_words_at_once_shows_its_last_pass_under_the_page_s_settings() -> None:
    tokenizer = model_of_pairs()[1]
    model = tiny_nat(vocab_size=len(tokenizer))
    ((_, attributes),) = Tags(attention_frame(model, tokenizer, "i love you", max_new_tokens=2)).tags
    assert attributes["srcdoc"] == attention_page(model, tokenizer, "i love you", max_new_tokens=2)
    assert page_content(model, tokenizer, "i love you", max_new_tokens=2).passes


def test_attention_that_cannot_be_shown_is_a_sentence() -> None:
    tokenizer = model_of_pairs()[1]
    shown = Tags(attention_frame(tiny_nat(vocab_size=len(tokenizer)), tokenizer, "a", "<b>"))
    assert not shown.tags
    assert "reads no target; got '<b>'" in shown.text
