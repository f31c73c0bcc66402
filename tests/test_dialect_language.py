"""Ways of decoding differ on the dialect language: some mix the two right answers, others give one of them."""

import functools
import random

import pytest
import torch
from torch import Tensor

from bench.dialects import (
    BATCH,
    HELD_OUT,
    MASK,
    SIZES,
    STEPS,
    answers_by_layer,
    answers_of,
    draw_batch,
    draw_sources,
    encode,
    pad,
    share_of_answers,
    share_of_words,
    share_right,
    target_in,
    train,
    train_iterative_vae,
)
from training.energy import Energy
from vaswani_transformer import (
    VaswaniCmlmConfig,
    VaswaniCmlmForConditionalGeneration,
    VaswaniNatConfig,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
)

pytestmark = pytest.mark.slow


@functools.cache
def trained_autoregressive() -> VaswaniTransformerForConditionalGeneration:
    """Return an autoregressive model of the language, which several tests share."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return train(VaswaniTransformerForConditionalGeneration(VaswaniTransformerConfig(**SIZES)))


def train_cmlm(steps: int) -> VaswaniCmlmForConditionalGeneration:
    config = VaswaniCmlmConfig(**SIZES, mask_token_id=MASK, max_target_length=30)
    return train(VaswaniCmlmForConditionalGeneration(config), steps)


def test_autoregressive_model_answers_in_one_dialect() -> None:
    assert share_right(trained_autoregressive(), max_new_tokens=20) > 0.9


def test_nat_mixes_the_dialects() -> None:
    """It has learned the words: nearly all are right, each in either dialect. Few sentences are right in one."""
    model = train(VaswaniNatForConditionalGeneration(VaswaniNatConfig(**SIZES)))
    sources = draw_sources(random.Random(2), HELD_OUT)
    answers = answers_of(model.generate(**encode(sources)))
    sentences, words = share_of_answers(sources, answers), share_of_words(sources, answers)
    print(f"share of sentences right {sentences:.3f}, of words {words:.3f}")
    assert words > 0.85
    assert sentences < 0.3


def test_glancing_answers_in_one_dialect_in_one_pass() -> None:
    model = VaswaniNatForConditionalGeneration(VaswaniNatConfig(**SIZES))
    assert share_right(train(model, glancing_ratio=lambda progress: 0.5 - 0.2 * progress)) > 0.75


def test_iterative_vae_settles_on_a_dialect_from_layer_to_layer() -> None:
    """The first layer mixes the dialects as NAT does, and the last one settles on one; the bound is far below NAT's."""
    model, sources = train_iterative_vae(kl_scale=1.0), draw_sources(random.Random(2), HELD_OUT)
    layers = answers_by_layer(model, sources)
    shares = [share_of_answers(sources, answers) for answers in layers]
    print("share right after each layer:", shares)
    assert all(share_of_words(sources, answers) > 0.85 for answers in layers)
    assert shares[0] < 0.5
    assert shares[2] > 0.8
    with torch.no_grad():
        assert float(model(**draw_batch(random.Random(3)), has_hint=True).bound) < 0.3


def test_cmlm_answers_in_one_dialect_after_four_iterations() -> None:
    model = train_cmlm(STEPS)
    assert share_right(model, num_iterations=4) > 0.9
    assert share_right(model) < share_right(model, num_iterations=4)


def test_engine_lowers_the_energy_of_the_likeliest_words_and_settles_on_a_dialect() -> None:
    """A CMLM with little training learns from an autoregressive teacher, without any word of a target."""
    energy, student = Energy(trained_autoregressive()), train_cmlm(300)
    optimizer, coins = torch.optim.Adam(student.parameters(), lr=5e-4), random.Random(5)

    def draw_batch(coins: random.Random, count: int) -> tuple[dict[str, Tensor], Tensor]:
        sources = draw_sources(coins, count)
        return encode(sources), pad([target_in(coins.randrange(2), source) for source in sources], -100)

    def held_out() -> float:
        """Return the energy of the likeliest words, a mean over tokens at the references' lengths."""
        batch, labels = draw_batch(random.Random(2), HELD_OUT)
        is_real = labels.ne(-100)
        with torch.no_grad():
            logits = student.eval()(**batch, decoder_attention_mask=is_real.long()).logits
        return float(energy.of_argmax(logits, is_real, **batch).sum() / is_real.sum())

    before, right = held_out(), share_right(student)
    student.train()
    for _ in range(150):
        batch, labels = draw_batch(coins, BATCH)
        is_real = labels.ne(-100)
        masks = {"decoder_input_ids": torch.where(is_real, MASK, 1), "target_lengths": is_real.sum(1)}
        outputs = student(**batch, **masks, labels=labels, skip_logits=False)
        (
            energy(outputs.logits, is_real, batch["input_ids"], batch["attention_mask"]).sum() / is_real.sum()
            + outputs.length_loss
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = held_out()
    print(f"energy {before:.3f} to {after:.3f}, share right {right:.3f} to {share_right(student):.3f}")
    assert after < 0.3 * before
    assert right < 0.2
    assert share_right(student) > 0.6
