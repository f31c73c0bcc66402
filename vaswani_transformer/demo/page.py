"""Web page of a model, built from Gradio's components."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from ..figures.page import attention_page
from ..figures.search import best_finished
from ..parsing.constraint import tree_constraint
from ..parsing.linear import delinearize
from ..parsing.parser import is_parser
from ..parsing.trees import draw_tree_text
from ..parsing.words import split_plain
from ..support.errors import UserError, one_line
from ..support.loading import LoadOptions, find_file, load_model_and_tokenizer
from ..support.modes import is_non_autoregressive
from ..support.search_settings import MAX_ALPHA, Range
from ..translation.translator import TooLongError
from .steps import RecordingTranslator
from .view import html_settings, search_view

if TYPE_CHECKING:
    import gradio as gr

MAX_SOURCE_TOKENS = 128  # keeps tables and attention weights small
MAX_BEAMS = 16
MAX_TARGET_TOKENS = 512
FRAME = '<iframe title="Attention" sandbox="allow-scripts" style="width: 100%; height: 50rem" srcdoc="{}"></iframe>'
HEADING = """<style>
  @media (max-width: 640px) {
    #examples .gallery { flex-wrap: nowrap; overflow-x: auto; }
    #examples .gallery > * { flex: none; white-space: nowrap; }
  }
</style>
<h1 style="margin: 0; font-size: 1.5rem; overflow-wrap: anywhere">TITLE</h1>"""
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
    search: str = ""  # HTML of the drawing
    finished: list[tuple[str, str]] = field(default_factory=list)  # score and target, and target; best first


def page_content(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, **generate_kwargs: Any
) -> PageContent:
    """Return the search for a text's translation or tree, or a note; `generate_kwargs` override the settings.

    It shows a search even if the model's settings say `do_sample`.
    """
    text = text.encode(errors="replace").decode()  # JSON may contain lone surrogates
    if not text.strip():
        return PageContent("The source is empty; type a text.")
    words = split_plain(text) if is_parser(tokenizer) else []
    source = " ".join(words) or text
    constraint = tree_constraint(model, tokenizer)
    settings: dict[str, Any] = {"max_source_tokens": MAX_SOURCE_TOKENS, "too_long": "error", **generate_kwargs}
    if not is_non_autoregressive(model):
        settings["do_sample"] = False
    try:
        translator = RecordingTranslator(model, tokenizer, constraint=constraint, **settings)
        (translation,) = translator([source])
    except TooLongError as error:
        return PageContent(f"The source has {error.tokens} tokens, more than {error.limit}; shorten it.")
    except ValueError as error:
        return PageContent(one_line(error))

    # The choices of the list: a target, shown with its score.
    finished = []
    for candidate in best_finished(translator.steps):
        target = str(tokenizer.decode(list(candidate.tokens), skip_special_tokens=True))
        finished.append((f"{candidate.score:.4f}  {target}", target))
    return PageContent(
        note=translation.warning,
        source=source,
        target=translation.text,
        tree=draw_tree_text(delinearize(translation.text, words).tree) if words else "",
        search=search_view(model, tokenizer, translator, source),
        finished=finished,
    )


def attention_frame(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *texts: str, **settings: Any) -> str:
    """Return `attention_page` in a sandboxed frame."""
    return FRAME.format(html.escape(attention_page(model, tokenizer, *texts, **settings)))


def best_attention(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, content: PageContent, **settings: Any
) -> str:
    """Return the frame of the best target, or of the last pass of a non-autoregressive model; "" without a search."""
    if is_non_autoregressive(model):
        return attention_frame(model, tokenizer, content.source, **settings) if content.search else ""
    return attention_frame(model, tokenizer, content.source, content.finished[0][1]) if content.finished else ""


@dataclass(frozen=True)
class NumberField:
    """Number field of the page for a setting of `generate()`; `hint` follows the range in its label."""

    name: str
    value: float
    range: Range
    hint: str = ""

    def component(self) -> "gr.Number":
        """Return the field in Gradio, which does not check the range: its error would fill every output."""
        import gradio as gr

        least, most = self.range.least, self.range.most
        limits = f"\u00b1{most:g}" if least == -most else f"{least:g}-{most:g}"
        steps: dict[str, Any] = {"precision": 0} if self.range.is_whole else {"step": 0.1}
        return gr.Number(self.value, label=f"{self.name} ({limits}{self.hint})", min_width=80, **steps)

    def problem(self, value: float | None) -> str:
        """Return the problem with a value, or an empty string; an empty field stands for the model's setting."""
        if value is None or value in self.range:
            return ""
        return f"{self.name}: out of range; got {value:g}, expected {self.range}."


def setting_fields(model: PreTrainedModel) -> dict[str, NumberField]:
    """Return the fields for the settings of a model's `generate()`, by the name of the setting."""

    def count(setting: str, name: str, largest: int) -> NumberField:
        value = getattr(model.generation_config, setting, None) or 1
        return NumberField(name, value, Range(1, max(largest, value), is_whole=True))

    fields: dict[str, NumberField] = {}
    if is_non_autoregressive(model):
        if "num_beams" in model.family_settings:
            fields["num_beams"] = count("num_beams", "Beams", MAX_BEAMS)
        if "num_iterations" in model.family_settings:
            fields["num_iterations"] = count("num_iterations", "Iterations", MAX_BEAMS)
        if model.num_length_classes > 1:
            fields["length_beam_size"] = count("length_beam_size", "Lengths", min(MAX_BEAMS, model.num_length_classes))
    else:
        fields["num_beams"] = count("num_beams", "Beams", MAX_BEAMS)
        alpha = model.generation_config.length_penalty
        penalties = Range(-MAX_ALPHA, MAX_ALPHA)
        fields["length_penalty"] = NumberField("Length penalty", 1.0 if alpha is None else alpha, penalties)
    limits = Range(0, MAX_TARGET_TOKENS, is_whole=True)
    fields["max_new_tokens"] = NumberField("Length limit", 0, limits, "; 0: model's")
    return fields


def make_page(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, title: str, examples: Sequence[str] = ()
) -> "gr.Blocks":
    """Return the Gradio page of a model that generates, with a heading and example sources."""
    import gradio as gr

    writes_trees = is_parser(tokenizer)
    with gr.Blocks(title=title, analytics_enabled=False, fill_width=True) as page:
        # Inputs.
        gr.HTML(HEADING.replace("TITLE", html.escape(title)))
        with gr.Row():
            source = gr.Textbox(label="Source", max_length=10_000, scale=2, min_width=240)
            button = gr.Button("Parse" if writes_trees else "Translate", variant="primary", scale=0, min_width=110)
            fields = setting_fields(model)
            numbers = [setting.component() for setting in fields.values()]
        if examples:
            gr.Examples([[example] for example in examples], source, elem_id="examples")

        # Outputs.
        note = gr.Textbox(label="Note", visible=False)
        target = gr.Textbox(label="Linear tree" if writes_trees else "Translation")
        tree = gr.Code(label="Tree", visible=writes_trees, interactive=False)
        search = gr.HTML(**html_settings())
        label = "Finished targets, best first; choose one to see its attention"
        finished = gr.Dropdown([], label=label, visible=not is_non_autoregressive(model))
        attention = gr.HTML()
        attended_source = gr.State("")  # differs from `source` once the user types the next text

        def show(text: str, *values: Any) -> dict[Any, Any]:
            # An empty field stands for the model's setting, and so does a limit of 0.
            arguments = {name: value for name, value in zip(fields, values, strict=True) if value is not None}
            if arguments.get("max_new_tokens") == 0:
                del arguments["max_new_tokens"]
            problem = next(filter(None, map(NumberField.problem, fields.values(), values)), "")
            content = PageContent(problem) if problem else page_content(model, tokenizer, text, **arguments)
            return {
                note: gr.Textbox(content.note, visible=bool(content.note)),
                target: content.target,
                tree: content.tree,
                search: content.search,
                finished: gr.Dropdown(content.finished, value=content.finished[0][1] if content.finished else None),
                attended_source: content.source,
                attention: best_attention(model, tokenizer, content, **arguments),
            }

        def show_attention(text: str, chosen: str | None) -> str:
            return "" if chosen is None else attention_frame(model, tokenizer, text, chosen)

        # One call at a time, since recording the weights changes the attention implementation.
        outputs = [note, target, tree, search, finished, attended_source, attention]
        for event in (button.click, source.submit):
            event(show, [source, *numbers], outputs, concurrency_id="model")
        finished.input(show_attention, [attended_source, finished], attention, concurrency_id="model")
    return page


def title_and_examples(options: LoadOptions) -> tuple[str, list[str]]:
    """Return the heading and example sources of a model's page, from the `results.json` of its run.

    The heading is its languages, such as "English to German", or the model's name if the run does not name them. The
    sources are those of the run's example translations, or else sentences of its source language.
    """
    path = find_file(options.model, "results.json", options.revision)
    try:
        results = {} if path is None else json.loads(path.read_bytes())
        data = results["recipe"]["data"]
        names = (("source_language", "source"), ("target_language", "target"))
        codes = [str(data.get(language) or data[column]) for language, column in names]
        examples = [str(example["source"]) for example in results.get("test", {}).get("examples", [])]
    except (ValueError, KeyError, TypeError, AttributeError):  # missing or of a different tool
        return options.model, []

    title = options.model
    if any(code in LANGUAGES for code in codes):
        title = " to ".join(LANGUAGES[code].title() if code in LANGUAGES else code for code in codes)
    return title, examples or EXAMPLES.get(codes[0], [])


def load_page(model: str, **settings: Any) -> "gr.Blocks":
    """Return the Gradio page of a model in a folder or on the Hub; on a CPU it is prepared for inference.

    `settings` are `device`, `dtype`, `revision` and `trust_remote_code`, as the options of `vaswani-demo`. A ValueError
    is raised if Gradio is not installed or the model cannot be loaded.
    """
    if find_spec("gradio") is None:
        raise UserError('The page needs Gradio, which is not installed; run pip install "vaswani-transformer[demo]".')
    options = LoadOptions(model, **settings)
    return make_page(*load_model_and_tokenizer(options), *title_and_examples(options))
