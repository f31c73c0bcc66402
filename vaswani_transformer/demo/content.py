"""What the page shows, as text and rows: computed without Gradio."""

import html
from dataclasses import dataclass, field
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..figures.page import attention_page
from ..parsing.drawing import draw_tree_text
from ..support.errors import one_line
from ..translation.translator import TooLongError
from .steps import Candidate, DecodedText, decode_with_steps

COLUMNS = ("step", "", "target so far", "log P", "lp(Y)", "log P / lp(Y)")
CHANGED = "changed"
"""The mark of tokens that differ from the pass before."""
FRAME = '<iframe title="Attention" sandbox="allow-scripts" style="width: 100%; height: 46rem" srcdoc="{}"></iframe>'


@dataclass(frozen=True)
class PageContent:
    """What the page shows of a text; `note` alone if there is nothing else to show.

    note: a sentence for the reader; mostly empty.
    source, target: the texts that the model read and wrote.
    tree: a drawing of the tree, of a parser.
    rows: of `COLUMNS`, one for each open beam and finished target of each step.
    finished: the targets that ended, the best first: each with its score, and as text.
    passes: the target after each iteration or layer as texts with `CHANGED` or None.
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


def candidate_row(tokenizer: PreTrainedTokenizerBase, candidate: Candidate) -> list[str | int]:
    """Return the row of `COLUMNS` of a candidate."""
    numbers = (candidate.log_prob, candidate.length_penalty, candidate.score)
    state = "ended" if candidate.is_finished else "open"
    return [len(candidate.tokens), state, text_of(tokenizer, candidate), *(f"{number:.4f}" for number in numbers)]


def highlight_changes(passes: list[list[tuple[str, bool]]]) -> list[tuple[str, str | None]]:
    """Return the target after each pass on a numbered line."""
    spans: list[tuple[str, str | None]] = []
    for number, tokens in enumerate(passes, start=1):
        spans.append((f"{'' if number == 1 else chr(10)}{number}: ", None))
        spans += [(text, CHANGED if is_changed else None) for text, is_changed in tokens]
    return spans


def describe(tokenizer: PreTrainedTokenizerBase, result: DecodedText) -> PageContent:
    """Return what the page shows of a result."""
    words = result.translation.unknown_words
    return PageContent(
        note=f"Unknown words, whose results are guesses: {', '.join(map(repr, words))}." if words else "",
        source=result.source,
        target=result.translation.text,
        tree="" if result.tree is None else draw_tree_text(result.tree),
        rows=[candidate_row(tokenizer, candidate) for step in result.steps for candidate in step],
        finished=[
            (f"{each.score:.4f}  {text_of(tokenizer, each)}", text_of(tokenizer, each)) for each in result.finished
        ],
        passes=highlight_changes(result.passes),
    )


def page_content(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, **generate_kwargs: Any
) -> PageContent:
    """Return what the page shows of a text, which may be any; the arguments are those of `decode_with_steps`."""
    text = text.encode(errors="replace").decode()  # JSON can hold half a character
    if not text.strip():
        return PageContent("The source is empty; type a text.")
    try:
        return describe(tokenizer, decode_with_steps(model, tokenizer, text, **generate_kwargs))
    except TooLongError as error:
        return PageContent(f"The source has {error.tokens} tokens, more than {error.limit}; shorten it.")
    except ValueError as error:
        return PageContent(one_line(error))


def attention_frame(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, target: str) -> str:
    """Return the attention page of two texts in a frame, whose scripts cannot reach the page around it."""
    try:
        return FRAME.format(html.escape(attention_page(model, tokenizer, source, target)))
    except ValueError as error:
        return html.escape(one_line(error))
