"""Diagrams of the pages as SVG: `python -m docs.tools.pictures MODEL` draws them into docs/images.

MODEL is a trained English-German model, whose attention is drawn. Grays and blues are legible on white and
on black; `extra.css` lightens them in the dark theme.
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vaswani_transformer.figures.svg import BLUE, GRAY, Drawing
from vaswani_transformer.figures.tokens import display_tokens

IMAGES = Path(__file__).resolve().parents[1] / "images"
ORANGE = "#d9822b"
ENCODER, DECODER, CHOICE = "#d9d9ee", "#ffe0bd", "#d5ead3"  # of boxes, whose letters are black
SENTENCE, WORD, OTHER = "Tom lost his hat because it was too big.", "it", "hat"


class Diagram(Drawing):
    """A drawing with boxes, arrows and numbers as colors."""

    def box(self, x: float, y: float, width: float, height: float, lines: str, fill: str) -> None:
        """Draw a box with centered lines of text."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {place} rx="5" fill="{fill}" stroke="{GRAY}"/>')
        texts = lines.split("\n")
        for number, line in enumerate(texts):
            self.text(x + width / 2, y + height / 2 + 4.5 + 16 * (number - (len(texts) - 1) / 2), line, color="#111")

    def arrow(self, *points: tuple[float, float], color: str = GRAY, width: float = 1.3) -> None:
        name = f"{self.name}-{color[1:]}"
        if f'id="{name}"' not in self.definitions:
            place = 'viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" orient="auto"'
            place += ' markerWidth="9" markerHeight="9"'
            self.definitions += f'<marker id="{name}" {place}><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        self.line(*points, color=color, width=width, marker=f' marker-end="url(#{name})"')

    def cells(self, x: float, y: float, values: list[float], columns: int, size: float, opacity: float = 1.0) -> None:
        """Draw numbers from -1 to 1 as squares: blue above 0, orange below, the stronger the larger."""
        for number, value in enumerate(values):
            row, column = divmod(number, columns)
            place = f'x="{x + column * size:.1f}" y="{y + row * size:.1f}" width="{size}" height="{size}"'
            color = BLUE if value > 0 else ORANGE
            self.parts.append(f'<rect {place} fill="{color}" fill-opacity="{opacity * abs(value):.2f}"/>')
        place = f'x="{x:.1f}" y="{y:.1f}" width="{columns * size}" height="{-(-len(values) // columns) * size}"'
        self.parts.append(f'<rect {place} fill="none" stroke="{GRAY}" stroke-width="0.7"/>')


class Head(NamedTuple):
    """One head of an encoder layer on one sentence: S tokens, d_k numbers each."""

    layer: int
    number: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scores: torch.Tensor
    weights: torch.Tensor


def heads_of(model: Any, input_ids: torch.Tensor) -> list[Head]:
    """Return every head of the encoder, from what its projections return."""
    outputs: dict[tuple[int, str], torch.Tensor] = {}
    hooks = []
    for layer, module in enumerate(model.get_encoder().layers):
        for name in "qkv":
            place = (layer, name)
            projection = getattr(module.self_attn, f"{name}_proj")
            hooks.append(projection.register_forward_hook(lambda _, __, out, at=place: outputs.update({at: out[0]})))
    model.get_encoder()(input_ids)
    for hook in hooks:
        hook.remove()
    heads = []
    for layer in range(model.config.encoder_layers):
        query, key, value = (outputs[layer, name].unflatten(-1, (model.config.num_heads, -1)) for name in "qkv")
        for number in range(model.config.num_heads):
            q, k, v = query[:, number], key[:, number], value[:, number]  # (S, d_k)
            scores = q @ k.T / q.shape[-1] ** 0.5
            heads.append(Head(layer + 1, number + 1, q, k, v, scores, scores.softmax(-1)))
    return heads


def draw_query_key_value(model: Any, tokenizer: Any, sentence: str, word: str, other: str) -> Diagram:
    """Draw how one word attends, in the head in which it attends most to one other word."""
    input_ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
    words = [text.strip() for text in display_tokens(tokenizer, input_ids[0].tolist())]
    asks = words.index(word)
    head = max(heads_of(model, input_ids), key=lambda head: float(head.weights[asks, words.index(other)]))
    drawing = Diagram("qkv", f"Queries, keys and values of the word {word!r} in one head", 780, 400)
    left, step, size, columns = 118, (780 - 118) / len(words), 4, 12
    shown = columns * 4
    vectors = [head.query[asks], *head.key, *head.value]
    query, *rest = [(vector[:shown] / vector.abs().max()).tolist() for vector in vectors]
    keys, values = rest[: len(words)], rest[len(words) :]
    for y, label in ((40, "word"), (80, "its key"), (150, "q · k / √d_k"), (215, "weight"), (262, "its value")):
        drawing.text(8, y, label, anchor="start")
    for index, text in enumerate(words):
        x, weight = left + step * (index + 0.5), float(head.weights[asks, index])
        drawing.text(x, 40, text, color=BLUE if index == asks else GRAY, size=14)
        drawing.cells(x - columns * size / 2, 68, keys[index], columns, size)
        drawing.arrow((x, 88), (x, 134), width=1)
        drawing.text(x, 150, f"{head.scores[asks, index]:.1f}")
        place = f'x="{x - 12:.1f}" y="{200 - 44 * weight:.1f}" width="24" height="{44 * weight + 0.5:.1f}"'
        drawing.parts.append(f'<rect {place} fill="{BLUE}"/>')
        drawing.text(x, 215, f"{weight:.0%}")
        drawing.cells(x - columns * size / 2, 250, values[index], columns, size, opacity=0.5 + 0.5 * weight)
        drawing.line((x, 270), (x, 296), (449, 296), width=0.6 + 5 * weight)
    drawing.text(8, 106, f"query of “{word}”", anchor="start", color=BLUE)
    drawing.cells(8, 112, query, columns, size)
    drawing.arrow((449, 296), (449, 320))
    mixed = head.weights[asks] @ head.value
    drawing.cells(449 - 36, 324, (mixed[:shown] / mixed.abs().max()).tolist(), columns, 6)
    drawing.text(449, 366, f"what “{word}” gets: the values, mixed by the weights")
    title = f"Layer {head.layer}, head {head.number}. Each vector has d_k = {head.query.shape[-1]} numbers"
    drawing.text(449, 390, f"{title}: blue above 0, orange below.", size=12)
    return drawing


def draw_teacher_forcing() -> Diagram:
    """Draw how the targets are shifted for the decoder."""
    drawing = Diagram(
        "teacher-forcing", "Teacher forcing: the decoder's inputs are the labels, one place later", 780, 270
    )
    labels = ["the", "house", "is", "red", "</s>"]
    inputs = ["<s>", *labels[:-1]]
    drawing.box(20, 118, 150, 52, "Encoder", ENCODER)
    drawing.arrow((95, 216), (95, 172))
    drawing.text(95, 234, "la casa es roja </s>", size=14)
    drawing.arrow((170, 144), (258, 144))
    drawing.text(214, 136, "memory")
    drawing.text(252, 234, "input", anchor="end")
    drawing.text(252, 54, "label", anchor="end")
    for t, (given, label) in enumerate(zip(inputs, labels, strict=True)):
        x = 310 + 100 * t
        drawing.text(x, 234, given, size=15, color=GRAY if t == 0 else BLUE)
        drawing.text(x, 54, label, size=15, color=BLUE if t < len(labels) - 1 else GRAY)
        drawing.arrow((x, 216), (x, 172))
        drawing.arrow((x, 118), (x, 66))
        drawing.text(x, 20, f"t = {t}", size=12)
        if t < len(labels) - 1:
            drawing.arrow((x + 12, 66), (x + 50, 92), (x + 50, 198), (x + 88, 220), color=BLUE)
    text = "Decoder: position t sees the inputs up to t, and all of the source"
    drawing.box(260, 118, 500, 52, text, DECODER)  # over the blue lines
    drawing.text(510, 262, "Each label is also the next input: all positions are learned in one pass.", size=13)
    return drawing


def draw_training_step() -> Diagram:
    """Draw what a step of training computes."""
    drawing = Diagram("training-step", "A step of training: batch, logits, loss, gradient, Adam", 780, 178)
    parts = [
        "a batch of pairs\n(5.1)",
        "the model\npredicts each token",
        "the smoothed loss\n(5.4)",
        "its gradient\nfor each weight",
    ]
    for number, lines in enumerate(parts):
        x = 12 + 202 * number
        drawing.box(x, 16, 150, 52, lines, (ENCODER, DECODER, CHOICE, CHOICE)[number])
        if number:
            drawing.arrow((x - 52, 42), (x - 2, 42))
    drawing.box(214, 112, 352, 46, "Adam (5.3) moves the weights, by the rate of equation (3)", ENCODER)
    drawing.arrow((693, 68), (693, 135), (568, 135))
    drawing.arrow((289, 112), (289, 70), color=BLUE)
    drawing.text(300, 96, "the next step", anchor="start", color=BLUE)
    return drawing


def draw_one_pass() -> Diagram:
    """Draw decoding from left to right next to non-autoregressive decoding."""
    drawing = Diagram("one-pass", "Decoding from left to right, and in one pass", 780, 330)
    words = ["the", "house", "is", "red", "</s>"]
    drawing.text(195, 24, "Autoregressive: a pass for each token", size=15)
    drawing.text(590, 24, "Non-autoregressive: one pass", size=15)
    for step in range(len(words)):
        y = 48 + 50 * step
        drawing.text(28, y + 21, f"pass {step + 1}", size=12)
        for t, word in enumerate(words[: step + 1]):
            fill = CHOICE if t == step else "none"
            place = f'x="{60 + 62 * t}" y="{y}" width="56" height="30" rx="5" fill="{fill}" stroke="{GRAY}"'
            drawing.parts.append(f"<rect {place}/>")
            drawing.text(88 + 62 * t, y + 20, word, color="#111" if t == step else GRAY, size=14)
        if step:
            drawing.arrow((88 + 62 * (step - 1), y - 18), (88 + 62 * step - 8, y - 3), color=BLUE)
    drawing.text(215, 318, "Each word is chosen when the words before it are known.", size=13)
    drawing.box(460, 58, 260, 34, "length of the target: 5", ENCODER)
    drawing.arrow((590, 94), (590, 116))
    for t, word in enumerate(words):
        x = 440 + 62 * t
        drawing.parts.append(f'<rect x="{x}" y="120" width="56" height="30" rx="5" fill="none" stroke="{GRAY}"/>')
        drawing.text(x + 28, 140, "?", size=14)
        drawing.arrow((x + 28, 152), (x + 28, 172))
        drawing.arrow((x + 28, 212), (x + 28, 232))
        drawing.box(x, 236, 56, 30, word, CHOICE)
    drawing.box(440, 176, 304, 34, "Decoder: all positions see each other", DECODER)
    drawing.text(590, 292, "All words are chosen at once,", size=13)
    drawing.text(590, 310, "so no word knows which its neighbors become.", size=13)
    return drawing


VERTICES = ("<s>", "das", "rot", "Haus", "ist", "ist", "das", "rot", "Haus", "</s>")
PATHS = ((0, 1, 3, 4, 7, 9), (0, 2, 5, 6, 8, 9))  # of two translations; the first is followed
EDGES = {  # the transitions of at least 5%
    **{(0, 1): 0.6, (0, 2): 0.4, (1, 3): 0.95, (1, 8): 0.05, (2, 5): 1.0, (3, 4): 0.9, (3, 5): 0.1},
    **{(4, 7): 1.0, (5, 6): 0.85, (5, 7): 0.15, (6, 8): 1.0, (7, 9): 1.0, (8, 9): 1.0},
}


def draw_graph() -> Diagram:
    """Draw a graph with the paths of two translations, of which lookahead follows one."""
    drawing = Diagram("graph", "A graph of words with the paths of two translations", 780, 300)
    drawing.text(390, 24, "“the house is red”: the decoder predicts all vertices and transitions at once", size=15)
    followed, other = PATHS
    places, width = {}, 54
    for vertex in range(len(VERTICES)):
        y = 130 if vertex in followed and vertex in other else 75 if vertex in followed else 185
        places[vertex] = (12 + 78 * vertex, y)
    for (start, end), probability in EDGES.items():
        (x, y), (x_end, y_end) = places[start], places[end]
        color = BLUE if (start, end) in pairwise(followed) else GRAY
        drawing.arrow((x + width, y + 17), (x_end - 1, y_end + 17), color=color, width=0.8 + 2 * probability)
        if probability < 1:
            above = (0, -6 if y < 130 else 50) if y == y_end else (18, 14)
            middle = (x + width + x_end) / 2 + above[0], (y + y_end) / 2 + above[1]
            drawing.text(*middle, f"{probability:.0%}", color=color, size=12)
    for vertex, word in enumerate(VERTICES):
        drawing.box(*places[vertex], width, 34, word, CHOICE if vertex in followed else ENCODER)
    drawing.text(390, 256, "Blue: the path with the best next transition times word, “das Haus ist rot”.", size=13)
    drawing.text(390, 276, "“rot ist das Haus” has a path of its own, so the two do not mix.", size=13)
    return drawing


def draw_engines() -> Diagram:
    """Draw which engine to decode with."""
    drawing = Diagram("engines", "Which engine decodes your model", 780, 400)
    choices = {
        "Do you decode on a GPU?": "generate() of the plain model",
        "Must the service do without torch?": "CTranslate2, or ONNX with your own search",
        "Must each token stay the same?": "prepare_for_inference(model, “float32”)",
        "Is each request one sentence?": "CTranslate2 int8",
    }
    for number, (question, answer) in enumerate(choices.items()):
        y = 20 + 84 * number
        drawing.box(30, y, 290, 44, question, ENCODER)
        drawing.box(440, y, 310, 44, answer, CHOICE)
        drawing.arrow((320, y + 22), (438, y + 22))
        drawing.text(378, y + 15, "yes")
        drawing.arrow((175, y + 44), (175, y + 82))
        drawing.text(184, y + 68, "no", anchor="start")
    drawing.box(30, 356, 290, 36, "prepare_for_inference(model, “int8”)", CHOICE)
    return drawing


@torch.no_grad()
def main(model_folder: str, images: Path = IMAGES) -> None:
    """Draw all diagrams; one shows the attention of a trained model of English to German."""
    tokenizer, model = AutoTokenizer.from_pretrained(model_folder), AutoModelForSeq2SeqLM.from_pretrained(model_folder)
    attention = draw_query_key_value(model, tokenizer, SENTENCE, WORD, OTHER)
    drawn = [draw_teacher_forcing(), draw_training_step(), draw_one_pass(), draw_graph(), draw_engines()]
    for drawing in [attention, *drawn]:
        path = images / f"figure-{drawing.name}.svg"
        path.write_text(drawing.svg(), encoding="utf-8")


if __name__ == "__main__":
    import vaswani_transformer  # noqa: F401 - registers the model

    main(sys.argv[1])
