"""Web page with the attention weights of every layer and head for one sentence."""

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .style import head_colors
from .weights import STACKS, AttentionMaps, attention_maps

FOLDER = Path(__file__).parent


def payload(maps: AttentionMaps) -> str:
    """Return words, weights in thousandths and colors as JSON, without characters that mean something in HTML."""
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
    fields = {"stacks": stacks, "colors": colors, "isAutoregressive": maps.is_autoregressive}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def render_page(maps: AttentionMaps) -> str:
    """Return the HTML page of attention maps, with weights rounded to three digits."""
    layers, heads = maps.encoder.shape[:2]
    source = html.escape(maps.source)
    fields = {
        "title": source,
        "source": source,
        "target": html.escape(maps.target),
        "model": f"Attention in {layers} encoder and {len(maps.decoder)} decoder layers of {heads} heads",
        "payload": payload(maps),
        "style": (FOLDER / "page.css").read_text(encoding="utf-8"),
        "script": (FOLDER / "page.js").read_text(encoding="utf-8"),
    }
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], template)


def attention_page(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | None = None,
    **generate_kwargs: Any,
) -> str:
    """Return an HTML page with the attention weights of every layer and head; arguments as in `attention_maps`.

    The page is self-contained. The fragment of its address selects the view, for example
    `page.html#cross-2&heads=1.3&query=4`.
    """
    return render_page(attention_maps(model, tokenizer, source, target, **generate_kwargs))
