"""Web pages of one sentence in one file: the search for its target, and the attention of every layer and head."""

import html
from typing import Any

import numpy as np
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .assets import FOLDER, fill_template, inline_modules, json_for_html, modules_of, read
from .recording import record_search
from .style import head_colors
from .weights import STACKS, AttentionMaps, attention_maps

FRAME = '<iframe sandbox="allow-scripts allow-downloads" style="width: 100%; height: 40rem; border: 0" srcdoc="{}">'


class Page(str):
    """HTML of a page, which a notebook shows in a frame."""

    def _repr_html_(self) -> str:
        return f"{FRAME.format(html.escape(self))}</iframe>"


def attention_data(maps: AttentionMaps) -> dict[str, Any]:
    """Return words, weights in thousandths and colors, as web/attention-view.js shows them."""
    stacks: dict[str, dict[str, Any]] = {}
    for stack in STACKS:
        weights = maps.weights(stack)  # (N, H, Q, K)
        layers, heads, *_ = weights.shape
        stacks[stack] = {
            "queries": maps.queries(stack),
            "keys": maps.keys(stack),
            "layers": layers,
            "heads": heads,
            "weights": np.rint(1000 * weights).astype(int).ravel().tolist(),
        }
    colors = head_colors(max(stack["heads"] for stack in stacks.values()))
    return {"stacks": stacks, "colors": colors, "isAutoregressive": maps.is_autoregressive}


def make_page(title: str, source: str, target: str, model: str, **data: Any) -> Page:
    """Return a page with `search` and `attention` data."""
    views = [name for name in ("search", "attention") if name in data]
    sections = []
    for name in views:
        content = read(FOLDER / f"{name}.html")
        sections.append(f'<section aria-label="{name.title()}">\n{content}</section>\n')
    fields = {
        "title": html.escape(f"{title}: {source}"),
        "source": html.escape(source),
        "target": html.escape(target),
        "model": html.escape(model),
        "style": "".join(read(FOLDER / f"{name}.css") for name in ("base", "page", *views)),
        "content": f"<main>\n{''.join(sections)}</main>\n",
        "payload": json_for_html(data),
        "script": inline_modules(modules_of([FOLDER]), "page"),
    }
    return Page(fill_template(read(FOLDER / "page.html"), fields))


def describe_model(maps: AttentionMaps) -> str:
    layers, heads = maps.encoder.shape[:2]
    return f"Attention in {layers} encoder and {len(maps.decoder)} decoder layers of {heads} heads"


def render_page(maps: AttentionMaps) -> Page:
    """Return the HTML page of attention maps, with weights rounded to three digits."""
    return make_page("Attention", maps.source, maps.target, describe_model(maps), attention=attention_data(maps))


def attention_page(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | None = None,
    **generate_kwargs: Any,
) -> Page:
    """Return an HTML page with the attention weights of every layer and head; arguments as in `attention_maps`.

    The page is self-contained, and a notebook shows it. The fragment of its address selects the view, for example
    `page.html#cross-2&heads=1.3&query=4`.
    """
    return render_page(attention_maps(model, tokenizer, source, target, **generate_kwargs))


def search_page(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, **generate_kwargs: Any
) -> Page:
    """Return an HTML page that shows the search for a source's target, step by step; a notebook shows it.

    That is the tree of a beam search, or the target after each iteration or layer of a non-autoregressive model. The
    page is self-contained. `generate_kwargs` override the model's settings.
    """
    recorded = record_search(model, tokenizer, source, **generate_kwargs)
    return make_page("Search", source, recorded.target, "The search, step by step", search=recorded.data)


def search_and_attention_page(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, **generate_kwargs: Any
) -> Page:
    """Return an HTML page with the search for a source's target and the attention weights of that target."""
    recorded = record_search(model, tokenizer, source, **generate_kwargs)
    is_searched = "steps" in recorded.data
    target = recorded.target if is_searched else None
    maps = attention_maps(model, tokenizer, source, target, **({} if is_searched else generate_kwargs))
    data = {"search": recorded.data, "attention": attention_data(maps)}
    return make_page("Search and attention", source, maps.target, describe_model(maps), **data)
