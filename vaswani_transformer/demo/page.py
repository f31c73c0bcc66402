"""The page where a model runs, in Gradio's components, which show text as text; only `gr.HTML` takes markup."""

import html
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..parsing.parser import is_parser
from ..support.errors import UserError
from ..support.modes import is_non_autoregressive
from ..translation.loading import LoadOptions, load_model_and_tokenizer
from ..translation.options import MAX_ALPHA
from .content import CHANGED, COLUMNS, attention_frame, page_content

if TYPE_CHECKING:
    import gradio as gr

MAX_BEAMS = 16
MAX_NEW_TOKENS = 512
MAX_CHARACTERS = 10_000


def check_gradio() -> None:
    if find_spec("gradio") is None:
        raise UserError('The page needs Gradio, which is not installed; run pip install "vaswani-transformer[demo]".')


def setting_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Return Gradio's inputs for the settings of a model's `generate()`, with its own values, by their names."""
    import gradio as gr

    def count(name: str, label: str, most: int) -> gr.Slider:
        value = getattr(model.generation_config, name, None) or 1
        return gr.Slider(1, max(most, value), value, step=1, precision=0, label=label)

    def limit() -> dict[str, Any]:
        label = "Length limit (0: the model's)"
        return {"max_new_tokens": gr.Number(0, label=label, minimum=0, maximum=MAX_NEW_TOKENS, precision=0)}

    if is_non_autoregressive(model):
        iterations = {"num_iterations": count("num_iterations", "Iterations", MAX_BEAMS)} if model.refines else {}
        lengths = count("length_beam_size", "Lengths", min(MAX_BEAMS, model.num_length_classes))
        return iterations | {"length_beam_size": lengths} | limit()
    beams, alpha = count("num_beams", "Beams", MAX_BEAMS), getattr(model.generation_config, "length_penalty", None)
    penalty = gr.Number(
        1.0 if alpha is None else alpha, label="Alpha of lp(Y)", minimum=-MAX_ALPHA, maximum=MAX_ALPHA, step=0.1
    )
    return {"num_beams": beams, "length_penalty": penalty} | limit()


def page_outputs(writes_trees: bool, is_autoregressive: bool) -> dict[str, Any]:
    """Return Gradio's outputs, by their names; of how a target came to be only those of the model's family show."""
    import gradio as gr

    outputs: dict[str, Any] = {
        "note": gr.Textbox(label="Note", visible=False),
        "target": gr.Textbox(label="Linear tree" if writes_trees else "Translation"),
        "tree": gr.Code(label="Tree", visible=writes_trees, interactive=False),
    }
    with gr.Column(visible=not is_autoregressive):
        outputs["passes"] = gr.HighlightedText(
            label="After each iteration or layer; what changed is marked",
            color_map={CHANGED: "orange"},
            show_inline_category=False,
        )
    with gr.Column(visible=is_autoregressive):
        outputs["steps"] = gr.Dataframe(
            label="Beams and targets that ended, after each step",
            headers=list(COLUMNS),
            column_widths=["62px", "70px", "250px", "96px", "86px", "130px"],
            interactive=False,
            wrap=True,
            max_height=400,
        )
        outputs["ended"] = gr.Dropdown([], label="Targets that ended, the best first; choose one to see its attention")
    return outputs | {"attention": gr.HTML(), "read": gr.State("")}


def output_values(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return what the page's outputs show of a text, by their names; `read` is the source of the attention."""
    import gradio as gr

    content = page_content(model, tokenizer, text, **settings)
    best = content.finished[0][1] if content.finished else None
    attention = ""
    if content.passes:  # of a model without beams
        attention = attention_frame(model, tokenizer, content.source, **settings)
    elif best is not None:
        attention = attention_frame(model, tokenizer, content.source, best)
    return {
        "note": gr.Textbox(content.note, visible=bool(content.note)),
        "target": content.target,
        "tree": content.tree,
        "passes": content.passes,
        "steps": content.rows,
        "ended": gr.Dropdown(content.finished, value=best),
        "read": content.source,
        "attention": attention,
    }


def connect(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: Any, outputs: Any) -> None:
    """Let the events of the page call the model, one call at a time: its attention is switched while it is read."""
    button, source, settings = inputs

    def show(text: str, *values: Any) -> dict[Any, Any]:
        given = dict(zip(settings, values, strict=True))
        given["max_new_tokens"] = given["max_new_tokens"] or None
        given = {name: value for name, value in given.items() if value is not None}  # an empty field: the model's own
        return {outputs[name]: value for name, value in output_values(model, tokenizer, text, given).items()}

    def show_attention(text: str, chosen: str | None) -> str:
        return "" if chosen is None else attention_frame(model, tokenizer, text, chosen)

    for event in (button.click, source.submit):
        event(show, [source, *settings.values()], [*outputs.values()], concurrency_id="model")
    chosen = [outputs["read"], outputs["ended"]]
    outputs["ended"].input(show_attention, chosen, outputs["attention"], concurrency_id="model")


def make_page(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> "gr.Blocks":
    """Return the page of a model, which Gradio's `launch()` serves.

    Args:
        model: any model of this package that generates.
        tokenizer: its tokenizer.
        name: the heading.

    Raises:
        UserError: Gradio is not installed.
    """
    check_gradio()
    import gradio as gr

    writes_trees = is_parser(tokenizer)
    with gr.Blocks(title=name, analytics_enabled=False) as page:
        gr.HTML(f'<h1 style="overflow-wrap: anywhere">{html.escape(name)}</h1>')
        source = gr.Textbox(label="Source", lines=2, max_length=MAX_CHARACTERS)
        with gr.Row():
            settings = setting_inputs(model)
        button = gr.Button("Parse" if writes_trees else "Translate", variant="primary")
        outputs = page_outputs(writes_trees, not is_non_autoregressive(model))
        connect(model, tokenizer, (button, source, settings), outputs)
    return page


def load_page(model: str, **settings: Any) -> "gr.Blocks":
    """Return the page of a folder's model, or of one on the Hub; on a CPU the model is prepared for inference.

    Args:
        model: the folder, or the name on the Hub.
        **settings: `device`, `dtype`, `revision` and `trust_remote_code`, as the options of `vaswani-demo`.

    Raises:
        UserError: Gradio is not installed, or the model cannot be loaded.
    """
    check_gradio()
    return make_page(*load_model_and_tokenizer(LoadOptions(model, **settings)), model)
