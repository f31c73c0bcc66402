"""HTML of a search: its drawing, a slider over its steps, and the best target after each step."""

import html
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..figures.search import ROW, best_finished, draw_beam_tree, draw_passes
from ..figures.svg import BLUE, GRAY
from ..support.modes import is_non_autoregressive
from .steps import RecordingTranslator

TREE_LEGEND = (
    "Best first. Blue: still open, or finished; bold leads to the best target. Gray: died. With k beams, a step keeps "
    "the k best open ones, and the targets that finish among its k best candidates; in parentheses is the best "
    "candidate that it drops. Scores: log P of open beams, log P / lp(Y) of finished targets."
)
PASSES_LEGEND = "Boxes: words that the {} changed. Gray: words that a later one changes."
VIEW = """<div class="controls">
  <label {step_hidden}>{name} <input type="range" min="1" max="{steps}" value="{steps}"></label>
  <label {scores_hidden}><input type="checkbox"> Scores</label>
  <button type="button">Save as SVG</button>
  <output data-texts="{texts}"></output>
</div>
<div class="drawing" role="region" aria-label="Search" tabindex="0">{drawing}</div>
<p class="legend" {step_hidden}>{legend}</p>
"""


def html_settings() -> dict[str, Any]:
    """Return the arguments of Gradio's HTML component that shows a `search_view`."""
    folder = Path(__file__).parent
    return {
        "js_on_load": (folder / "view.js").read_text(encoding="utf-8"),
        "css_template": (folder / "view.css").read_text(encoding="utf-8"),
        "apply_default_css": False,
        "row": ROW,
        "blue": BLUE,
        "gray": GRAY,
    }


def pass_name(model: PreTrainedModel, passes: int) -> str:
    """Return the word for a pass of a non-autoregressive model."""
    if "num_iterations" in getattr(model, "family_settings", ()):
        return "iteration"
    return "layer" if passes > 1 else "pass"


def search_view(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recorded: RecordingTranslator, source: str
) -> str:
    """Return the drawing of a recorded search for a source, and its controls."""
    if is_non_autoregressive(model):
        name = pass_name(model, len(recorded.history))
        drawing = draw_passes(tokenizer, recorded.history, source, name)
        targets: list[Any] = recorded.history
        legend = PASSES_LEGEND.format(name)
    else:
        name = "step"
        drawing = draw_beam_tree(tokenizer, recorded.steps, source)
        targets = [step[0].tokens for step in recorded.steps[:-1]]
        targets.append(best_finished(recorded.steps)[0].tokens)
        legend = TREE_LEGEND
    texts = [str(tokenizer.decode(list(target), skip_special_tokens=True)) for target in targets]
    shown = [f"{number} of {len(texts)}: {text}" for number, text in enumerate(texts, start=1)]
    return VIEW.format(
        name=name.title(),
        steps=len(texts),
        texts=html.escape(json.dumps(shown)),
        drawing=drawing.svg(),
        legend=legend,
        step_hidden="hidden" if len(texts) == 1 else "",
        scores_hidden="hidden" if is_non_autoregressive(model) else "",
    )
