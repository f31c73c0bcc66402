"""What the page shows, as text and rows: computed without Gradio."""

import html
from dataclasses import dataclass, field
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..figures.page import attention_page
from ..figures.tokens import token_texts
from ..parsing.constraint import tree_constraint
from ..parsing.linear import delinearize
from ..parsing.parser import is_parser
from ..parsing.trees import draw_tree_text
from ..parsing.words import split_plain
from ..support.errors import one_line
from ..translation.translator import TooLongError, Translator
from .steps import Candidate, RecordingEngine

MAX_SOURCE_TOKENS = 128  # more would make tables that nobody reads, and attention weights by the million
COLUMNS = ("step", "", "target so far", "log P", "lp(Y)", "log P / lp(Y)")
CHANGED = "changed"
FRAME = '<iframe title="Attention" sandbox="allow-scripts" style="width: 100%; height: 46rem" srcdoc="{}"></iframe>'


@dataclass(frozen=True)
class PageContent:
    """What the page shows of a text.

    note: a sentence for the reader; mostly empty.
    source, target: the texts that the model read and wrote.
    tree: a parser's tree, drawn as text.
    rows: of `COLUMNS`, for each open beam and finished target of each step.
    finished: the targets that ended, the best first: each with its score, and as text.
    passes: the target after each iteration or layer, as texts with `CHANGED` or None.
    """

    note: str = ""
    source: str = ""
    target: str = ""
    tree: str = ""
    rows: list[list[str | int]] = field(default_factory=list)
    finished: list[tuple[str, str]] = field(default_factory=list)
    passes: list[tuple[str, str | None]] = field(default_factory=list)


def text_of(tokenizer: PreTrainedTokenizerBase, candidate: Candidate) -> str:
    return cast(str, tokenizer.decode(list(candidate.tokens), skip_special_tokens=True))


def row_of(tokenizer: PreTrainedTokenizerBase, candidate: Candidate) -> list[str | int]:
    numbers = (candidate.log_prob, candidate.length_penalty, candidate.score)
    state = "ended" if candidate.is_finished else "open"
    return [len(candidate.tokens), state, text_of(tokenizer, candidate), *(f"{number:.4f}" for number in numbers)]


def mark_changes(tokenizer: PreTrainedTokenizerBase, history: list[list[int]]) -> list[tuple[str, str | None]]:
    """Return the target after each pass on a numbered line, with `CHANGED` at tokens that the pass changed."""
    spans: list[tuple[str, str | None]] = []
    for number, (before, tokens) in enumerate(zip([*history[:1], *history], history, strict=False), start=1):
        marks = [CHANGED if token != old else None for token, old in zip(tokens, before, strict=True)]
        spans += [(f"\n{number}: "[number == 1 :], None), *zip(token_texts(tokenizer, tokens), marks, strict=True)]
    return spans


def search_content(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, **generate_kwargs: Any
) -> PageContent:
    """Return what the page shows of a text; raise ValueError where it or a setting has no translation."""
    engine = RecordingEngine(model, cast(int, tokenizer.pad_token_id), **generate_kwargs)
    limit, constraint = min(MAX_SOURCE_TOKENS, engine.max_source_tokens()), tree_constraint(model, tokenizer)
    translator = Translator(engine, tokenizer, limit, too_long="error", constraint=constraint)
    words = split_plain(text) if is_parser(tokenizer) else []
    source = " ".join(words) or text
    (translation,) = translator([source])
    unknown = ", ".join(map(repr, translation.unknown_words))
    return PageContent(
        note=f"Unknown words, whose results are guesses: {unknown}." if unknown else "",
        source=source,
        target=translation.text,
        tree=draw_tree_text(delinearize(translation.text, words).tree) if words else "",
        rows=[row_of(tokenizer, candidate) for step in engine.steps for candidate in step],
        finished=[
            (f"{each.score:.4f}  {text_of(tokenizer, each)}", text_of(tokenizer, each)) for each in engine.finished
        ],
        passes=mark_changes(tokenizer, engine.history),
    )


def page_content(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, **generate_kwargs: Any
) -> PageContent:
    """Return what the page shows of any text: the search for its translation or tree, or a sentence.

    `generate_kwargs` override the model's settings.
    """
    text = text.encode(errors="replace").decode()  # JSON can hold half a character
    if not text.strip():
        return PageContent("The source is empty; type a text.")
    try:
        return search_content(model, tokenizer, text, **generate_kwargs)
    except TooLongError as error:
        return PageContent(f"The source has {error.tokens} tokens, more than {error.limit}; shorten it.")
    except ValueError as error:
        return PageContent(one_line(error))


def attention_frame(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | None = None,
    **generate_kwargs: Any,
) -> str:
    """Return the page of `attention_page` in a frame, whose scripts cannot reach the page around it."""
    try:
        return FRAME.format(html.escape(attention_page(model, tokenizer, source, target, **generate_kwargs)))
    except ValueError as error:
        return html.escape(one_line(error))
