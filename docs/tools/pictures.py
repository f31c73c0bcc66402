"""Diagrams of the pages as SVG: `python -m docs.tools.pictures MODEL` draws them into docs/images.

MODEL is a trained English-German model, whose attention and beams are drawn. Grays and blues are legible on white and
on black; `extra.css` lightens them in the dark theme.
"""

import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vaswani_transformer.figures.tokens import display_tokens
from vaswani_transformer.search import length_penalty

IMAGES = Path(__file__).resolve().parents[1] / "images"
GRAY, BLUE, ORANGE = "#7b7e87", "#2f6fdb", "#d9822b"
ENCODER, DECODER, CHOICE = "#d9d9ee", "#ffe0bd", "#d5ead3"  # of boxes, whose letters are black
SENTENCE, WORD, OTHER = "Tom lost his hat because it was too big.", "it", "hat"
AMBIGUOUS = "Tom has not seen the new teacher."


@dataclass
class Drawing:
    """An SVG picture in the making; places are in pixels from the upper left corner."""

    name: str
    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, anchor: str = "middle", color: str = GRAY, size: int = 13) -> None:
        attributes = f'fill="{color}" font-size="{size}" text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, lines: str, fill: str) -> None:
        """Draw a box with centered lines of text."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {place} rx="5" fill="{fill}" stroke="{GRAY}"/>')
        texts = lines.split("\n")
        for number, line in enumerate(texts):
            self.text(x + width / 2, y + height / 2 + 4.5 + 16 * (number - (len(texts) - 1) / 2), line, color="#111")

    def line(self, *points: tuple[float, float], color: str = GRAY, width: float = 1.3, arrow: bool = True) -> None:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        end = f' marker-end="url(#{self.name}-{color[1:]})"' if arrow else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width:.1f}"{end}/>')

    def cells(self, x: float, y: float, values: list[float], columns: int, size: float, opacity: float = 1.0) -> None:
        """Draw numbers from -1 to 1 as squares: blue above 0, orange below, the stronger the larger."""
        for number, value in enumerate(values):
            row, column = divmod(number, columns)
            place = f'x="{x + column * size:.1f}" y="{y + row * size:.1f}" width="{size}" height="{size}"'
            color = BLUE if value > 0 else ORANGE
            self.parts.append(f'<rect {place} fill="{color}" fill-opacity="{opacity * abs(value):.2f}"/>')
        place = f'x="{x:.1f}" y="{y:.1f}" width="{columns * size}" height="{-(-len(values) // columns) * size}"'
        self.parts.append(f'<rect {place} fill="none" stroke="{GRAY}" stroke-width="0.7"/>')

    def save(self, folder: Path) -> None:
        head = '<path d="M0 0L8 4L0 8z" fill="COLOR"/>'
        place = 'viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" orient="auto"'
        place += ' markerWidth="9" markerHeight="9"'
        markers = [
            f'<marker id="{self.name}-{color[1:]}" {place}>{head.replace("COLOR", color)}</marker>'
            for color in (GRAY, BLUE)
        ]
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        style = 'font-family="Helvetica, Arial, sans-serif" style="max-width: 100%; height: auto"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="{self.name}-title" {style}>',
            f'<title id="{self.name}-title">{escape(self.title)}</title>',
            f"<defs>{''.join(markers)}</defs>",
            *self.parts,
            "</svg>",
        ]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"figure-{self.name}.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")


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


def draw_query_key_value(model: Any, tokenizer: Any, sentence: str, word: str, other: str) -> Drawing:
    """Draw how one word attends, in the head in which it attends most to one other word."""
    input_ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
    words = [text.strip() for text in display_tokens(tokenizer, input_ids[0].tolist())]
    asks = words.index(word)
    head = max(heads_of(model, input_ids), key=lambda head: float(head.weights[asks, words.index(other)]))
    drawing = Drawing("qkv", f"Queries, keys and values of the word {word!r} in one head", 780, 400)
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
        drawing.line((x, 88), (x, 134), width=1)
        drawing.text(x, 150, f"{head.scores[asks, index]:.1f}")
        place = f'x="{x - 12:.1f}" y="{200 - 44 * weight:.1f}" width="24" height="{44 * weight + 0.5:.1f}"'
        drawing.parts.append(f'<rect {place} fill="{BLUE}"/>')
        drawing.text(x, 215, f"{weight:.0%}")
        drawing.cells(x - columns * size / 2, 250, values[index], columns, size, opacity=0.15 + 0.85 * weight)
        drawing.line((x, 270), (x, 296), (449, 296), width=0.6 + 5 * weight, arrow=False)
    drawing.text(8, 106, f"query of “{word}”", anchor="start", color=BLUE)
    drawing.cells(8, 112, query, columns, size)
    drawing.line((449, 296), (449, 320))
    mixed = head.weights[asks] @ head.value
    drawing.cells(449 - 36, 324, (mixed[:shown] / mixed.abs().max()).tolist(), columns, 6)
    drawing.text(449, 366, f"what “{word}” gets: the values, mixed by the weights")
    title = f"Layer {head.layer}, head {head.number}. Each vector has d_k = {head.query.shape[-1]} numbers"
    drawing.text(449, 390, f"{title}: blue above 0, orange below.", size=12)
    return drawing


def draw_teacher_forcing() -> Drawing:
    """Draw how the targets are shifted for the decoder."""
    drawing = Drawing(
        "teacher-forcing", "Teacher forcing: the decoder's inputs are the labels, one place later", 780, 270
    )
    labels = ["the", "house", "is", "red", "</s>"]
    inputs = ["<s>", *labels[:-1]]
    drawing.box(20, 118, 150, 52, "Encoder", ENCODER)
    drawing.line((95, 216), (95, 172))
    drawing.text(95, 234, "la casa es roja </s>", size=14)
    drawing.line((170, 144), (258, 144))
    drawing.text(214, 136, "memory")
    drawing.text(252, 234, "input", anchor="end")
    drawing.text(252, 54, "label", anchor="end")
    for t, (given, label) in enumerate(zip(inputs, labels, strict=True)):
        x = 310 + 100 * t
        drawing.text(x, 234, given, size=15, color=GRAY if t == 0 else BLUE)
        drawing.text(x, 54, label, size=15, color=BLUE if t < len(labels) - 1 else GRAY)
        drawing.line((x, 216), (x, 172))
        drawing.line((x, 118), (x, 66))
        drawing.text(x, 20, f"t = {t}", size=12)
        if t < len(labels) - 1:
            drawing.line((x + 12, 66), (x + 50, 92), (x + 50, 198), (x + 88, 220), color=BLUE)
    text = "Decoder: position t sees the inputs up to t, and all of the source"
    drawing.box(260, 118, 500, 52, text, DECODER)  # over the blue lines
    drawing.text(510, 262, "Each label is also the next input: all positions are learned in one pass.", size=13)
    return drawing


class Beam(NamedTuple):
    """A target of the search, the number of the beam that it continues, and whether the search keeps it."""

    tokens: list[int]
    log_p: float
    parent: int
    is_kept: bool


@torch.no_grad()
def search_steps(model: Any, tokenizer: Any, sentence: str, beams: int, most: int) -> list[list[Beam]]:
    """Return the best 2k candidates of each step of a beam search, of which the k best open ones are kept."""
    source, end = tokenizer(sentence, return_tensors="pt"), model.config.eos_token_id
    steps, kept = [], [Beam([model.config.bos_token_id], 0.0, 0, True)]
    finished = False
    while not finished and len(steps) < most:
        candidates = []
        for number, beam in enumerate(kept):
            logits = model(**source, decoder_input_ids=torch.tensor([beam.tokens])).logits[0, -1]
            best = logits.log_softmax(-1).topk(2 * beams)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                candidates.append(Beam([*beam.tokens, token], beam.log_p + value, number, True))
        candidates = sorted(candidates, key=lambda beam: -beam.log_p)[: 2 * beams]
        open_ones = [beam for beam in candidates if beam.tokens[-1] != end][:beams]
        finished = candidates[0].tokens[-1] == end
        steps.append([beam._replace(is_kept=beam in open_ones or beam.tokens[-1] == end) for beam in candidates])
        kept = open_ones
    return steps


def draw_beam_tree(model: Any, tokenizer: Any, sentence: str, beams: int = 3) -> Drawing:
    """Draw the candidates of each step of a search, and the way to the target with the best score."""
    steps = search_steps(model, tokenizer, sentence, beams, most=12)
    end, alpha = model.config.eos_token_id, model.generation_config.length_penalty
    shown = beams + 1
    width = 150 + 96 * len(steps)
    drawing = Drawing("beam-tree", f"Beam search with {beams} beams translates {sentence!r}", width, 90 + 54 * shown)
    drawing.text(12, 24, f"“{sentence}”, {beams} beams: log P of each target so far", anchor="start", size=14)
    drawing.text(46, 76, "<s>", size=14)
    finals = [beam for beam in steps[-1] if beam.tokens[-1] == end]
    winner = max(finals, key=lambda beam: beam.log_p / float(length_penalty(len(beam.tokens) - 1, alpha)))
    places: dict[tuple[int, ...], tuple[float, float]] = {tuple(winner.tokens[:1]): (46, 76)}
    for number, step in enumerate(steps):
        x = 130 + 96 * number
        for rank, beam in enumerate(step[:shown] if number + 1 < len(steps) else finals):
            y = 76 + 54 * rank
            is_best = winner.tokens[: len(beam.tokens)] == beam.tokens
            color = BLUE if is_best else GRAY
            word = display_tokens(tokenizer, [beam.tokens[-1]])[0].strip() or "␣"
            from_x, from_y = places[tuple(beam.tokens[:-1])]
            start, stop = (from_x + 34, from_y - 2), (x - 36, y - 2)
            drawing.line(start, stop, color=color, width=2.2 if is_best else 1 if beam.is_kept else 0.5, arrow=is_best)
            drawing.text(x, y, word if beam.is_kept else f"({word})", color=color, size=14)
            drawing.text(x, y + 15, f"{beam.log_p:.2f}", color=color, size=11)
            places[tuple(beam.tokens)] = (x, y)
    text = tokenizer.decode(winner.tokens, skip_special_tokens=True)
    y = 76 + 54 * shown
    drawing.text(
        12, y, f"Blue: the best target, “{text}”. In parentheses: candidates that are dropped.", anchor="start"
    )
    return drawing


def draw_one_pass() -> Drawing:
    """Draw decoding from left to right next to non-autoregressive decoding."""
    drawing = Drawing("one-pass", "Decoding from left to right, and in one pass", 780, 330)
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
            drawing.line((88 + 62 * (step - 1), y - 18), (88 + 62 * step - 8, y - 3), color=BLUE)
    drawing.text(215, 318, "Each word is chosen when the words before it are known.", size=13)
    drawing.box(460, 58, 260, 34, "length of the target: 5", ENCODER)
    drawing.line((590, 94), (590, 116))
    for t, word in enumerate(words):
        x = 440 + 62 * t
        drawing.parts.append(f'<rect x="{x}" y="120" width="56" height="30" rx="5" fill="none" stroke="{GRAY}"/>')
        drawing.text(x + 28, 140, "?", size=14)
        drawing.line((x + 28, 152), (x + 28, 172))
        drawing.line((x + 28, 212), (x + 28, 232))
        drawing.box(x, 236, 56, 30, word, CHOICE)
    drawing.box(440, 176, 304, 34, "Decoder: all positions see each other", DECODER)
    drawing.text(590, 292, "All words are chosen at once,", size=13)
    drawing.text(590, 310, "so no word knows which its neighbors become.", size=13)
    return drawing


def draw_engines() -> Drawing:
    """Draw which engine to decode with."""
    drawing = Drawing("engines", "Which engine decodes your model", 780, 400)
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
        drawing.line((320, y + 22), (438, y + 22))
        drawing.text(378, y + 15, "yes")
        drawing.line((175, y + 44), (175, y + 82))
        drawing.text(184, y + 68, "no", anchor="start")
    drawing.box(30, 356, 290, 36, "prepare_for_inference(model, “int8”)", CHOICE)
    return drawing


@torch.no_grad()
def main(model_folder: str, images: Path = IMAGES) -> None:
    """Draw all diagrams; a trained model of English to German draws two of them."""
    tokenizer, model = AutoTokenizer.from_pretrained(model_folder), AutoModelForSeq2SeqLM.from_pretrained(model_folder)
    attention = draw_query_key_value(model, tokenizer, SENTENCE, WORD, OTHER)
    beams = draw_beam_tree(model, tokenizer, AMBIGUOUS)
    for drawing in [attention, beams, draw_teacher_forcing(), draw_one_pass(), draw_engines()]:
        drawing.save(images)


if __name__ == "__main__":
    import vaswani_transformer  # noqa: F401 - registers the model

    main(sys.argv[1])
