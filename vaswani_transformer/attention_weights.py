"""What a model's attention does with one sentence: its weights, and the words that they stand between.

N layers, H heads, S source, T target, Q queries, K keys.
"""

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .tokenizer import text_encoder

STACKS = {
    "encoder": ("source_pieces", "source_pieces"),
    "decoder": ("written_pieces", "read_pieces"),
    "cross": ("written_pieces", "source_pieces"),
}
"""The three uses of attention (3.2.3), each with the words that look and the words that are looked at."""

UNDECODED = "\ufffd"
FRACTION_SLASH = "\u2044"
ABOVE = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
BELOW = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
FRACTION = re.compile(f"[⁰¹²³⁴⁵⁶⁷⁸⁹]+{FRACTION_SLASH}[₀₁₂₃₄₅₆₇₈₉]+")


def shared_length(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def fraction(part: int, count: int) -> str:
    """As "¹⁄₂", which no text is taken for."""
    return str(part).translate(ABOVE) + FRACTION_SLASH + str(count).translate(BELOW)


def spelt(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """The text of each token, in the place where it stands; together they are the whole text.

    A character that several tokens spell, as the bytes of an emoji may be, is told at each: "🙂¹⁄₂", "🙂²⁄₂".
    """
    pieces: list[str] = []
    opened: list[int] = []  # the tokens of a character that is not spelt to its end
    before = ""
    for end in range(1, len(token_ids) + 1):
        text = cast(str, tokenizer.decode(list(token_ids[:end]), clean_up_tokenization_spaces=False))
        whole = text.rstrip(UNDECODED)
        piece = whole[shared_length(before, whole) :]
        if opened and piece:
            count = len(opened) + 1
            for part, index in enumerate(opened, start=1):
                pieces[index] += piece[0] + fraction(part, count)
            piece = piece[0] + fraction(count, count) + piece[1:]
            opened = []
        pieces.append(piece)
        if len(whole) < len(text):
            opened.append(end - 1)
        before = whole
    for index in opened:
        pieces[index] += UNDECODED
    return pieces


def visible(piece: str, before: str = "") -> str:
    """A piece as it is shown: without the space that begins a word, with "·" where it goes on the word `before`.

    Other spaces become "␣", line breaks "⏎", and what cannot be seen its escape.
    """
    goes_on = before[-1:].isalnum() and piece[:1].isalnum()
    text = piece[1:] if piece.startswith(" ") and len(piece) > 1 else piece
    text = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    text = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda found: ascii(found[0])[1:-1], text)
    if not any(character.isprintable() for character in FRACTION.sub("", text)):
        text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return f"·{text}" if goes_on else text


def readable_pieces(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Each token as a word of a picture; see `spelt` and `visible`. One that spells nothing has its own name."""
    pieces = spelt(tokenizer, token_ids)
    names = cast(list[str], tokenizer.convert_ids_to_tokens(list(token_ids)))
    befores = ["", *pieces]
    return [visible(piece, before) or name for piece, before, name in zip(pieces, befores, names, strict=False)]


@dataclass(frozen=True, eq=False)
class Attentions:
    """What a model's attention does with one sentence.

    A position of the decoder reads a piece of the target and writes the next, so the target stands here twice.
    """

    source: str
    """The source text."""
    target: str
    """The target text."""
    source_pieces: list[str]
    """The S pieces of the source, `</s>` the last."""
    read_pieces: list[str]
    """The T pieces that the decoder reads, its start token the first."""
    written_pieces: list[str]
    """The T pieces that it writes, one behind the other list."""
    encoder: np.ndarray
    """(N, H, S, S), float32: how much each source piece looks at each."""
    decoder: np.ndarray
    """(N, H, T, T): how much each position of the target looks at what it has read; 0 for what comes later."""
    cross: np.ndarray
    """(N, H, T, S): how much each position of the target looks at each source piece."""

    def queries(self, stack: str) -> list[str]:
        """The Q words that look: of the decoder those that it writes at its positions."""
        return getattr(self, STACKS[stack][0])

    def keys(self, stack: str) -> list[str]:
        """The K words that are looked at."""
        return getattr(self, STACKS[stack][1])

    def weights(self, stack: str) -> np.ndarray:
        """(N, H, Q, K) weights of "encoder", "decoder" or "cross" attention.

        Raises:
            ValueError: there is no attention of that name.
        """
        if stack not in STACKS:
            raise ValueError(f"{stack!r} is not an attention of the model; choose one of {', '.join(STACKS)}.")
        return getattr(self, stack)


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Generator[None]:
    """No dropout, for as long as the context lasts; every module is then put back as it was."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def attention_with_weights(model: PreTrainedModel) -> Generator[None]:
    """Equation (1) itself, which alone returns its weights; every configuration is then put back as it was."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def translate(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The (1, T) tokens that the model's own search writes for a source, up to the first `</s>`."""
    generator = cast(Any, model)
    sequences = generator.generate(**batch, num_return_sequences=1, return_dict_in_generate=False)  # (1, 1 + T)
    written = sequences[:, 1:]
    ends = generator.generation_config.eos_token_id
    if ends is not None:
        is_end = torch.isin(written[0], torch.tensor(ends, device=written.device)).nonzero()
        written = written[:, : int(is_end[0]) + 1] if len(is_end) else written
    return written


def stacked(layers: Sequence[torch.Tensor | None] | None) -> np.ndarray:
    """The weights (1, H, Q, K) of N layers as (N, H, Q, K)."""
    tensors = [layer for layer in layers or () if layer is not None]
    if not tensors:
        raise ValueError("The model returned no attention weights; give an encoder-decoder that has eager attention.")
    return torch.cat(tensors).float().cpu().numpy()


@torch.no_grad()
def attentions_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, target: str | None = None
) -> Attentions:
    """The attention weights of one sentence, in evaluation mode; the model is left as it was, whatever happens.

    Args:
        model: an encoder-decoder with a projection to the vocabulary.
        tokenizer: its tokenizer.
        source: the sentence.
        target: its translation; None: the one that `model.generate` finds, by the model's own settings.

    Raises:
        ValueError: the model writes no text, or returns no attention weights; what it or the tokenizer itself refuses.
    """
    if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise ValueError(f"{type(model).__name__} writes no text; load the model with AutoModelForSeq2SeqLM.")
    encode = text_encoder(tokenizer)
    batch = {name: tensor.to(model.device) for name, tensor in encode(source, return_tensors="pt").items()}
    with evaluation_mode(model):
        if target is None:
            labels = translate(model, batch)  # (1, T)
        else:
            labels = encode(text_target=target, return_tensors="pt")["input_ids"].to(model.device)  # (1, T)
        read = cast(Any, model).prepare_decoder_input_ids_from_labels(labels)  # (1, T)
        with attention_with_weights(model):
            outputs = model(**batch, decoder_input_ids=read, output_attentions=True, use_cache=False, return_dict=True)
    written_ids = labels[0].tolist()
    return Attentions(
        source=source,
        target=cast(str, tokenizer.decode(written_ids, skip_special_tokens=True)) if target is None else target,
        source_pieces=readable_pieces(tokenizer, batch["input_ids"][0].tolist()),
        read_pieces=readable_pieces(tokenizer, read[0].tolist()),
        written_pieces=readable_pieces(tokenizer, written_ids),
        encoder=stacked(outputs.encoder_attentions),
        decoder=stacked(outputs.decoder_attentions),
        cross=stacked(outputs.cross_attentions),
    )


__all__ = ["STACKS", "Attentions", "attentions_of"]
