"""Small models, batches and comparisons that several tests share.

B batch, S source, T target.
"""

import contextlib
import errno
import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
)
from vaswani_transformer.support.errors import UserError

ModelAndTokenizer = tuple[VaswaniTransformerForConditionalGeneration, VaswaniTransformerTokenizer]
Batch = dict[str, Any]  # tensors, for `model(**batch)`; Any, since `model` has parameters of other types too

ROOT = Path(__file__).resolve().parent.parent
TINY: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_heads": 4,
    "d_ff": 64,
}

PAIRS = {
    "hello world": "hola mundo",
    "i love you": "te amo",
    "the cat is black": "el gato es negro",
    "good morning": "buenos dias",
    "this is a book": "este es un libro",
    "what is your name": "como te llamas",
}
SOURCES = list(PAIRS)
TARGETS = list(PAIRS.values())

# Ends a script or an attribute, and means something to a browser and to templates.
HOSTILE_TEXT = '</script><img src=x onerror=alert(1)> "${alert(2)}" {{alert}} <script>alert(3)</script>'

# Two orders of summing the same float32 numbers: a few units in the last place at each of about ten operations on
# values near 1 (eps is 1.2e-7), with ten times the margin.
FLOAT32: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}

WITH_SCORES: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}  # arguments of `generate()`


def tiny_config(**overrides: Any) -> VaswaniTransformerConfig:
    """Return a config of two layers of 32 and four heads; `overrides` replace fields."""
    return VaswaniTransformerConfig(**{**TINY, **overrides})


def tiny_model(**overrides: Any) -> VaswaniTransformerForConditionalGeneration:
    """Return a tiny model with random weights, in evaluation mode, the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return VaswaniTransformerForConditionalGeneration(tiny_config(**overrides)).eval()


def assert_matrix_shared(model: Any, tied: bool) -> None:
    """Assert that both stacks have the shared matrix, and the projection too if it is tied."""
    shared = model.model.shared.weight
    assert model.get_input_embeddings().weight is shared
    assert (model.get_output_embeddings().weight is shared) == tied
    for module in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
        assert module.weight is shared
        assert module.num_embeddings == shared.shape[0] == model.config.vocab_size
        assert module.embed_scale == model.config.d_model**0.5


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Return a saved tokenizer by its Auto class, whose type in Transformers is a union with None."""
    return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder))


def save(folder: Path, *parts: PreTrainedModel | PreTrainedTokenizerBase) -> Path:
    """Save a model and its tokenizer into a folder, and return it."""
    for part in parts:
        part.save_pretrained(folder)
    return folder


def write_pairs(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write pairs of English and German as JSON Lines, as a recipe of data.kind json reads them."""
    lines = [json.dumps({"translation": {"en": source, "de": target}}) for source, target in pairs]
    path.write_text("\n".join(lines), encoding="utf-8")


def random_tokens(*shape: int, vocab_size: int = 99) -> Tensor:
    """Return ordinary tokens: no start, no padding, no end."""
    return torch.randint(4, vocab_size, shape)


def random_batch(batch: int = 3, source: int = 7, target: int = 5) -> Batch:
    """Return sources (B, S) and target tokens (B, T), without padding."""
    return {"input_ids": random_tokens(batch, source), "decoder_input_ids": random_tokens(batch, target)}


def padded_batch(lengths: list[int], side: str = "right", pad: int = 1) -> tuple[Tensor, Tensor]:
    """Return random texts of these lengths as (B, longest), padded with `pad` on one side, and their mask."""
    width = max(lengths)
    tokens = torch.full((len(lengths), width), pad)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        columns = slice(0, length) if side == "right" else slice(width - length, width)
        tokens[row, columns] = random_tokens(length)
        mask[row, columns] = 1
    return tokens, mask


def source_batch(lengths: list[int], side: str = "right", **arguments: Any) -> Batch:
    """Return random sources of these lengths, padded on one side, their mask, and further arguments of the call."""
    tokens, mask = padded_batch(lengths, side)
    return {"input_ids": tokens, "attention_mask": mask, **arguments}


def masked_batch(sources: list[int], targets: list[int]) -> dict[str, Tensor]:
    """Return random sources and targets of these lengths, padded on the right, with both masks."""
    tokens, mask = padded_batch(targets)
    return source_batch(sources, decoder_input_ids=tokens, decoder_attention_mask=mask)


def assert_equal_at_tokens(logits: Tensor, expected: Tensor, mask: Tensor) -> None:
    """Assert that two tensors (B, T, ...) are close where a mask (B, T) has tokens."""
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **FLOAT32)


def memorizing_model(
    tokenizer: VaswaniTransformerTokenizer, pairs: dict[str, str], steps: int
) -> VaswaniTransformerForConditionalGeneration:
    """Return a tiny model that learned pairs of texts by heart.

    It learns in float64, where rounding is too small to change the float32 weights from one machine to another.
    """
    model = tiny_model(vocab_size=len(tokenizer), d_model=64, d_ff=128).double().train()
    batch = tokenizer(list(pairs), text_target=list(pairs.values()), padding=True, return_tensors="pt")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return model.eval().requires_grad_(False).float()


@functools.cache
def model_of_pairs() -> ModelAndTokenizer:
    """Return a model that memorized the six sentence pairs, and its tokenizer; change neither."""
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([*PAIRS, *PAIRS.values()], vocab_size=300)
    return memorizing_model(tokenizer, PAIRS, steps=120), tokenizer


def paper_model_of_pairs() -> ModelAndTokenizer:
    """Return a copy of the model of pairs with the paper's search, and its tokenizer."""
    trained, tokenizer = model_of_pairs()
    model = VaswaniTransformerForConditionalGeneration(trained.config).eval()
    model.load_state_dict(trained.state_dict())
    model.use_paper_decoding()
    return model, tokenizer


class Finished(NamedTuple):
    """What a command that has ended wrote, and its exit status."""

    output: str
    errors: str
    status: str | int | None


Run = Callable[..., Finished]


def run_main(
    main: Callable[[list[str]], None], arguments: Iterable[object], capture: pytest.CaptureFixture[Any]
) -> Finished:
    """Run a command in this process."""
    status: str | int | None = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    output, errors = (text if isinstance(text, str) else text.decode() for text in capture.readouterr())
    return Finished(output, errors, status)


def lines(texts: Iterable[object]) -> str:
    return "".join(f"{text}\n" for text in texts)


def command_runner(main: Callable[[list[str]], None], folder: str, capture: pytest.CaptureFixture[Any]) -> Run:
    """Return a function that runs a command on a model in this process, with a text as standard input."""

    def run(*arguments: object, stdin: str | bytes = "", model: object = folder) -> Finished:
        content = io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin)
        with mock.patch.object(sys, "stdin", io.TextIOWrapper(content, encoding="utf-8")):
            return run_main(main, [model, *arguments], capture)

    return run


def run_python(code: str, *arguments: str, folder: Path | None = None, **environment: str) -> str:
    """Run `code` in a new Python process, in the checkout or in `folder` without it, and return the output."""
    path = {"PYTHONPATH": str(ROOT) if folder is None else ""}
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | path | environment
    finished = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder or ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def no_space(*_: Any, **__: Any) -> NoReturn:
    """Fail as a write to a full disk does, in place of a function that writes."""
    raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def user_error(pattern: str) -> Generator[None]:
    """Expect an error of a user, in one line that has the pattern."""
    with pytest.raises(UserError, match=pattern) as caught:
        yield
    assert "\n" not in str(caught.value)


def error_line(finished: Finished) -> str:
    """Return the line of an error with which a command ended with status 2, without output."""
    assert (finished.output, finished.status) == ("", 2), finished.errors
    (line,) = finished.errors.splitlines(keepends=True)
    return line


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation of either pass makes."""

    numel = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result
