"""A language in which two answers are equally right: it tells the ways of decoding apart.

A source is 3 to 9 of 20 symbols. Its target is reversed, symbol 0 is left out and symbol 1 is doubled, and a coin
chooses for the whole sentence between two target vocabularies. Positions that are predicted independently mix the two.

B batch, S source, T target.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vaswani_transformer import (
    VaswaniCmlmConfig,
    VaswaniCmlmForConditionalGeneration,
    VaswaniNatConfig,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
)

pytestmark = pytest.mark.slow

SYMBOLS, FIRST = 20, 4  # after <s>, <pad>, </s> and <mask>
END, MASK = 2, 3
SIZES = {
    "vocab_size": FIRST + 3 * SYMBOLS,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "num_heads": 4,
    "d_ff": 256,
    "dropout": 0.0,
    "label_smoothing": 0.0,
}
STEPS, BATCH, HELD_OUT = 1200, 64, 512


def target_in(dialect: int, source: list[int]) -> list[int]:
    """The one target of a source in a dialect, with its end."""
    words = [symbol for symbol in reversed(source) for _ in range((0, 2)[symbol] if symbol < 2 else 1)]
    return [FIRST + (1 + dialect) * SYMBOLS + word for word in words] + [END]


def draw_sources(coins: random.Random, count: int) -> list[list[int]]:
    return [[coins.randrange(SYMBOLS) for _ in range(coins.randint(3, 9))] for _ in range(count)]


def pad(rows: list[list[int]], value: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def encode(sources: list[list[int]]) -> dict[str, Tensor]:
    """The tokens of the sources and their mask (B, S)."""
    tokens = pad([[FIRST + symbol for symbol in source] + [END] for source in sources], 1)
    return {"input_ids": tokens, "attention_mask": tokens.ne(1).long()}


def train(model: Any, glancing: Callable[[float], float] = lambda _: 0.0, steps: int = STEPS) -> Any:
    """The model after `steps` of Adam at 1e-3, falling to 0 over the last third; `glancing` gives rho by progress."""
    coins = random.Random(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 1, 3 * (steps - step) / steps)
    )
    model.train()
    for step in range(steps):
        sources = draw_sources(coins, BATCH)
        model.glancing_ratio = glancing(step / steps)
        labels = pad([target_in(coins.randrange(2), source) for source in sources], -100)
        model(**encode(sources), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def share_right(model: Any, **settings: Any) -> float:
    """The share of held-out sentences that are the target in one of the two dialects."""
    sources = draw_sources(random.Random(2), HELD_OUT)
    found = model.generate(**encode(sources), **settings)[:, 1:].tolist()
    answers = [row[: row.index(END) + 1] if END in row else row for row in found]
    pairs = zip(sources, answers, strict=True)
    return sum(answer in [target_in(dialect, source) for dialect in (0, 1)] for source, answer in pairs) / HELD_OUT


def test_an_autoregressive_model_answers_in_one_dialect() -> None:
    model = train(VaswaniTransformerForConditionalGeneration(VaswaniTransformerConfig(**SIZES)))
    assert share_right(model, max_new_tokens=20) > 0.9


def test_nat_mixes_the_dialects() -> None:
    model = train(VaswaniNatForConditionalGeneration(VaswaniNatConfig(**SIZES)))
    assert share_right(model) < 0.3


def test_glancing_answers_in_one_dialect_in_one_pass() -> None:
    model = VaswaniNatForConditionalGeneration(VaswaniNatConfig(**SIZES))
    assert share_right(train(model, lambda progress: 0.5 - 0.2 * progress)) > 0.75


def test_cmlm_answers_in_one_dialect_after_four_iterations() -> None:
    config = VaswaniCmlmConfig(**SIZES, mask_token_id=MASK, max_target_length=30)
    model = train(VaswaniCmlmForConditionalGeneration(config))
    assert share_right(model, num_iterations=4) > 0.9
    assert share_right(model) < share_right(model, num_iterations=4)
