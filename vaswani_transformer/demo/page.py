"""Web page of a model, built from Gradio's components."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..figures.page import attention_page
from ..figures.tokens import token_texts
from ..parsing.constraint import tree_constraint
from ..parsing.linear import delinearize
from ..parsing.parser import is_parser
from ..parsing.trees import draw_tree_text
from ..parsing.words import split_plain
from ..support.checked_loading import find_file
from ..support.errors import UserError, one_line
from ..support.modes import is_non_autoregressive
from ..support.search_settings import MAX_ALPHA
from ..translation.loading import LoadOptions, load_model_and_tokenizer
from ..translation.translator import TooLongError
from .steps import RecordingTranslator

if TYPE_CHECKING:
    import gradio as gr

MAX_SOURCE_TOKENS = 128  # keeps tables and attention weights small
MAX_BEAMS = 16
COLUMNS = {"step": 62, "": 70, "target so far": 250, "log P": 96, "lp(Y)": 86, "log P / lp(Y)": 130}  # pixels
CHANGED = "changed"
FRAME = '<iframe title="Attention" sandbox="allow-scripts" style="width: 100%; height: 50rem" srcdoc="{}"></iframe>'
LANGUAGES = {
    "cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "fi": "Finnish", "fr": "French", "it": "Italian",
    "ja": "Japanese", "nl": "Dutch", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "zh": "Chinese",
}  # fmt: skip
EXAMPLES = {  # by the source's language
    "en": [
        "Where is the nearest station?",
        "My sister has lived in Berlin for three years.",
        "If it rains tomorrow, we will stay at home.",
        "I would like a cup of tea without milk.",
        "Tom lost his hat because it was too big.",
        "She asked me whether I could help her.",
    ],
}


@dataclass(frozen=True)
class PageContent:
    """Content of the page for one text."""

    note: str = ""
    source: str = ""
    target: str = ""
    tree: str = ""  # text drawing of a parser's tree
    rows: list[list[str | int]] = field(default_factory=list)  # of `COLUMNS`: open beams and finished targets
    finished: list[tuple[str, str]] = field(default_factory=list)  # score and target, and target; best first
    passes: list[tuple[str, str | None]] = field(default_factory=list)  # texts with `CHANGED` or None


def page_content(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, **generate_kwargs: Any
) -> PageContent:
    """Return the search for a text's translation or tree, or a note; `generate_kwargs` override the settings."""
    text = text.encode(errors="replace").decode()  # JSON may contain lone surrogates
    if not text.strip():
        return PageContent("The source is empty; type a text.")
    words = split_plain(text) if is_parser(tokenizer) else []
    source, constraint = " ".join(words) or text, tree_constraint(model, tokenizer)
    try:
        settings: dict[str, Any] = {"max_source_tokens": MAX_SOURCE_TOKENS, "too_long": "error"} | generate_kwargs
        translator = RecordingTranslator(model, tokenizer, constraint=constraint, **settings)
        (translation,) = translator([source])
    except TooLongError as error:
        return PageContent(f"The source has {error.tokens} tokens, more than {error.limit}; shorten it.")
    except ValueError as error:
        return PageContent(one_line(error))
    rows, finished = [], []
    for candidate in (candidate for step in translator.steps for candidate in step):
        target = str(tokenizer.decode(list(candidate.tokens), skip_special_tokens=True))
        log_prob, penalty, score = map("{:.4f}".format, (candidate.log_prob, candidate.length_penalty, candidate.score))
        state = "ended" if candidate.is_finished else "open"
        rows.append([len(candidate.tokens), state, target, log_prob, penalty, score])
        if candidate.is_finished:
            finished.append((candidate.score, f"{score}  {target}", target))
    finished.sort(key=lambda each: -each[0])
    return PageContent(
        note=translation.warning,
        source=source,
        target=translation.text,
        tree=draw_tree_text(delinearize(translation.text, words).tree) if words else "",
        rows=rows,
        finished=[(shown, target) for _, shown, target in finished],
        passes=mark_changes(tokenizer, translator.history),
    )


def mark_changes(tokenizer: PreTrainedTokenizerBase, history: list[list[int]]) -> list[tuple[str, str | None]]:
    """Return the target after each pass on a numbered line, with `CHANGED` at changed tokens."""
    spans: list[tuple[str, str | None]] = []
    for number, (before, tokens) in enumerate(zip([*history[:1], *history], history, strict=False), start=1):
        marks = [CHANGED if token != old else None for token, old in zip(tokens, before, strict=True)]
        spans += [(f"\n{number}: "[number == 1 :], None), *zip(token_texts(tokenizer, tokens), marks, strict=True)]
    return spans


def attention_frame(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *texts: str, **settings: Any) -> str:
    """Return `attention_page` in a sandboxed frame."""
    return FRAME.format(html.escape(attention_page(model, tokenizer, *texts, **settings)))


def setting_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Return Gradio's inputs for the settings of a model's `generate()`, by name."""
    import gradio as gr

    sliders, inputs = {"num_beams": ("Beams", MAX_BEAMS)}, {}
    if is_non_autoregressive(model):
        sliders = {"num_iterations": ("Iterations", MAX_BEAMS)} if "num_iterations" in model.family_settings else {}
        sliders["length_beam_size"] = ("Candidate lengths", min(MAX_BEAMS, model.num_length_classes))
    for name, (label, most) in sliders.items():
        value = getattr(model.generation_config, name, None) or 1
        inputs[name] = gr.Slider(1, max(most, value), value, step=1, precision=0, label=label)
    if not is_non_autoregressive(model):
        alpha = model.generation_config.length_penalty
        alpha = 1.0 if alpha is None else alpha
        inputs["length_penalty"] = gr.Number(
            alpha, label="Length penalty (alpha)", minimum=-MAX_ALPHA, maximum=MAX_ALPHA, step=0.1
        )
    label = "Length limit (0: the model's)"
    return inputs | {"max_new_tokens": gr.Number(0, label=label, minimum=0, maximum=512, precision=0)}


def make_page(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, title: str, examples: Sequence[str] = ()
) -> "gr.Blocks":
    """Return the Gradio page of a model that generates, with a heading and example sources."""
    import gradio as gr

    writes_trees, has_passes = is_parser(tokenizer), is_non_autoregressive(model)
    with gr.Blocks(title=title, analytics_enabled=False) as page:
        gr.HTML(f'<h1 style="overflow-wrap: anywhere">{html.escape(title)}</h1>')
        source = gr.Textbox(label="Source", lines=2, max_length=10_000)
        if examples:
            gr.Examples([[example] for example in examples], source)
        with gr.Row():
            settings = setting_inputs(model)
        button = gr.Button("Parse" if writes_trees else "Translate", variant="primary")
        note = gr.Textbox(label="Note", visible=False)
        target = gr.Textbox(label="Linear tree" if writes_trees else "Translation")
        tree = gr.Code(label="Tree", visible=writes_trees, interactive=False)
        with gr.Column(visible=has_passes):
            passes = gr.HighlightedText(
                label="After each iteration or layer; what changed is marked",
                color_map={CHANGED: "orange"},
                show_inline_category=False,
            )
        with gr.Column(visible=not has_passes):
            steps = gr.Dataframe(
                label="Beam search, step by step",
                headers=list(COLUMNS),
                column_widths=[f"{width}px" for width in COLUMNS.values()],
                interactive=False,
                wrap=True,
                max_height=400,
            )
            ended = gr.Dropdown([], label="Finished outputs, best first; choose one to see its attention")
        attention, read = gr.HTML(), gr.State("")  # `read`: the source of the attention weights

        def show(text: str, *values: Any) -> dict[Any, Any]:
            given = dict(zip(settings, values, strict=True))
            given["max_new_tokens"] = given["max_new_tokens"] or None
            given = {name: value for name, value in given.items() if value is not None}  # else the model's setting
            content = page_content(model, tokenizer, text, **given)
            best, frame = content.finished[0][1] if content.finished else None, ""
            if content.passes:
                frame = attention_frame(model, tokenizer, content.source, **given)
            elif best is not None:
                frame = attention_frame(model, tokenizer, content.source, best)
            return {
                note: gr.Textbox(content.note, visible=bool(content.note)),
                target: content.target,
                tree: content.tree,
                passes: content.passes,
                steps: content.rows,
                ended: gr.Dropdown(content.finished, value=best),
                read: content.source,
                attention: frame,
            }

        def show_attention(text: str, chosen: str | None) -> str:
            return "" if chosen is None else attention_frame(model, tokenizer, text, chosen)

        # One call at a time, since recording the weights changes the attention implementation.
        outputs = [note, target, tree, passes, steps, ended, read, attention]
        for event in (button.click, source.submit):
            event(show, [source, *settings.values()], outputs, concurrency_id="model")
        ended.input(show_attention, [read, ended], attention, concurrency_id="model")
    return page


def title_and_examples(options: LoadOptions) -> tuple[str, list[str]]:
    """Return the heading and example sources of a model's page, from the `results.json` of its run.

    The heading is its languages, such as "English to German", or else the model's name. The sources are those of the
    run's example translations, or else sentences of its source language.
    """
    path = find_file(options.model, "results.json", options.revision)
    try:
        results = {} if path is None else json.loads(path.read_bytes())
        data, translated = results["recipe"]["data"], results.get("test", {}).get("examples", [])
        title = f"{LANGUAGES[data['source']]} to {LANGUAGES[data['target']]}"
        return title, [str(each["source"]) for each in translated] or EXAMPLES.get(data["source"], [])
    except (ValueError, KeyError, TypeError, AttributeError):
        return options.model, []


def load_page(model: str, **settings: Any) -> "gr.Blocks":
    """Return the Gradio page of a model in a folder or on the Hub; on a CPU it is prepared for inference.

    `settings` are `device`, `dtype`, `revision` and `trust_remote_code`, as the options of `vaswani-demo`. A ValueError
    is raised if Gradio is not installed or the model cannot be loaded.
    """
    if find_spec("gradio") is None:
        raise UserError('The page needs Gradio, which is not installed; run pip install "vaswani-transformer[demo]".')
    options = LoadOptions(model, **settings)
    return make_page(*load_model_and_tokenizer(options), *title_and_examples(options))
