"""Drawings of a search: the tree of a beam search, and the passes of a non-autoregressive model.

Each part of a drawing says when the search adds it (`data-step`) and when it was last part of a target (`data-last`).
It is blue until then and gray afterwards, which lets a page show every step of the search with one drawing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .svg import BLUE, GRAY, Drawing, text_width
from .tokens import Target, display_tokens, token_labels

START = 36  # pixels before the first line
GAP = 36  # pixels between two steps
ROW = 43  # pixels from a row to the next
PASS_ROW = 34

Point = tuple[float, float]
"""Pixels to the right and down."""


@dataclass(frozen=True)
class Candidate:
    """Target of an autoregressive search after one of its steps."""

    tokens: Target  # new tokens
    log_prob: float  # log P(Y | X) in nats
    length_penalty: float  # lp(Y)
    is_finished: bool = False  # ended with an end token or at its limit
    is_kept: bool = True  # False: the best candidate that the step drops

    @property
    def score(self) -> float:
        """Score of finished targets: log P(Y | X) / lp(Y)."""
        return self.log_prob / self.length_penalty

    @property
    def numbers(self) -> list[str]:
        """Lines with log P of an open beam, or the score of a finished target and its terms."""
        if not self.is_finished:
            return [f"{self.log_prob:.2f}"]
        return [f"{self.log_prob:.2f} / {self.length_penalty:.2f}", f"= {self.score:.2f}"]


def best_finished(steps: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """Return the finished targets of a search, best first."""
    finished = (candidate for step in steps for candidate in step if candidate.is_finished and candidate.is_kept)
    return sorted(finished, key=lambda candidate: -candidate.score)


def last_steps(steps: Sequence[Sequence[Candidate]]) -> dict[Target, int]:
    """Return for each target the last step after which it or a continuation of it is open.

    If one of them finishes, that is the last step of all. The end of the search drops the beams that are still open.
    """
    last: dict[Target, int] = {}
    for number in range(len(steps), 0, -1):
        for candidate in steps[number - 1]:
            alive = len(steps) if candidate.is_finished else min(number, len(steps) - 1)
            target = candidate.tokens
            parent = target[:-1]
            last[target] = max(last.get(target, 0), alive if candidate.is_kept else 0)
            last[parent] = max(last.get(parent, 0), last[target])
    return last


def part(step: int, last: int, steps: int) -> str:
    """Return the opening tag of a part in the color that it has after the last of the steps."""
    return f'<g data-step="{step}" data-last="{last}" color="{BLUE if last >= steps else GRAY}">'


def draw_beam_tree(
    tokenizer: PreTrainedTokenizerBase, steps: Sequence[Sequence[Candidate]], source: str, top: int = 0, bottom: int = 0
) -> Drawing:
    """Draw the candidates of each step of a search, best first, with bold lines to the target with the best score.

    Args:
        tokenizer: the tokenizer of the targets.
        steps: the candidates after each step; the best dropped one is in parentheses.
        source: the source, for the title.
        top, bottom: pixels above and below the tree that stay empty.
    """
    # The words, and the width of each step's column.
    candidates = [candidate for step in steps for candidate in step]
    labels = token_labels(tokenizer, [candidate.tokens for candidate in candidates])
    words = {}
    for candidate in candidates:
        label = labels[candidate.tokens]
        words[candidate.tokens] = label if candidate.is_kept else f"({label})"

    def width_of(candidate: Candidate) -> int:
        return max(text_width(words[candidate.tokens]), 5 * len(candidate.numbers[0]))

    widths = [max(map(width_of, step)) for step in steps]
    width = START + sum(widths) + GAP * len(steps)
    height = top + ROW * max(map(len, steps)) + bottom
    best = next((candidate.tokens for candidate in best_finished(steps)), ())
    title = f"Beam search for {source!r}: {tokenizer.decode(list(best), skip_special_tokens=True)!r}"
    drawing = Drawing("beam-tree", title, width, height)

    # A column for each step. `ends` are the points where the lines to the continuations of a target begin.
    last = last_steps(steps)
    x = START
    drawing.text(8, top + 18, "<s>", anchor="start", size=14)
    ends: dict[Target, list[Point]] = {(): [(START, top + 13)]}
    for number, (step, column_width) in enumerate(zip(steps, widths, strict=True), start=1):
        x += GAP
        # Lines that stay longer cover the others, and bold ones all.
        order = sorted(enumerate(step), key=lambda pair: (last[pair[1].tokens], pair[1].tokens == best[:number]))
        for row, candidate in order:
            target = candidate.tokens
            y = top + 18 + ROW * row
            line_width = 1.2 if candidate.is_kept else 0.6
            if target == best[:number]:
                line_width = 2.4
            drawing.parts.append(part(number, last[target], len(steps)))
            drawing.line(*ends[target[:-1]], (x - 5, y - 5), color="currentColor", width=line_width)
            draw_candidate(drawing, candidate, words[target], (x, y))
            drawing.parts.append("</g>")
            ends[target] = [(x + text_width(words[target]) + 6, y - 5), (x + column_width + 6, y - 5)]
        x += column_width
    return drawing


def draw_candidate(drawing: Drawing, candidate: Candidate, word: str, point: Point) -> None:
    """Draw the last word of a candidate at a point, and its numbers below."""
    x, y = point
    drawing.text(x, y, word, anchor="start", color="currentColor", size=14)
    drawing.parts.append('<g class="numbers">')
    for index, line in enumerate(candidate.numbers):
        drawing.text(x, y + 13 + 11 * index, line, anchor="start", color="currentColor", size=11)
    drawing.parts.append("</g>")


def draw_passes(
    tokenizer: PreTrainedTokenizerBase, history: Sequence[Sequence[int]], source: str, name: str
) -> Drawing:
    """Draw the target after each pass in a row, with a box around each changed word; `name` is that of a pass."""
    rows = [display_tokens(tokenizer, tokens) for tokens in history]
    widths = [max(map(text_width, column)) + 18 for column in zip(*rows, strict=True)]
    left = text_width(f"{name} {len(rows)}") + 18
    drawing = Drawing("passes", f"Each {name} for {source!r}", left + sum(widths), PASS_ROW * len(rows))
    for number, (tokens, words) in enumerate(zip(history, rows, strict=True), start=1):
        x = left
        y = PASS_ROW * number - 12
        drawing.parts.append(part(number, 0, len(rows)))
        drawing.text(8, y, f"{name} {number}", anchor="start")
        drawing.parts.append("</g>")
        for position, (token, word, width) in enumerate(zip(tokens, words, widths, strict=True)):
            # The word stays until a later pass changes it.
            changes = (later for later in range(number, len(rows)) if history[later][position] != token)
            last = next(changes, len(rows))
            drawing.parts.append(part(number, last, len(rows)))
            if number > 1 and history[number - 2][position] != token:
                corner = f'x="{x + 1}" y="{y - 18}" width="{width - 2}" height="26" rx="5"'
                drawing.parts.append(f'<rect {corner} fill="none" stroke="currentColor"/>')
            drawing.text(x + width / 2, y, word, color="currentColor", size=14)
            drawing.parts.append("</g>")
            x += width
    return drawing
