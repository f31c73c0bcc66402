"""On the dialect language, where two answers are right, glancing, latents, passes and ENGINE settle on one of them."""

import random
from dataclasses import replace

import pytest
import torch

from bench.dialects import MASK, Language, answers_by_layer
from training.energy import Energy

pytestmark = pytest.mark.slow

LANGUAGE = Language(symbols=6, lengths=(2, 5), encoder_layers=1, decoder_layers=2, steps=200, learning_rate=3e-3)
TWO_SLOTS = {"upsampling": 2}  # per source token: the time of a step grows with them


def test_glancing_answers_in_one_dialect_in_one_pass() -> None:
    """Without glancing, NAT answers .37 rightly."""
    share = LANGUAGE.share_right(LANGUAGE.train_family("glat"))
    print("share right:", share)
    assert share > 0.5


def test_ctc_with_glancing_answers_in_one_dialect_in_one_pass() -> None:
    """It needs more steps than GLAT, since it also learns where blanks stand; plain CTC answers .26 rightly."""
    share = LANGUAGE.share_right(replace(LANGUAGE, steps=400).train_family("ctc-glat", **TWO_SLOTS))
    print("share right:", share)
    assert share > 0.4


def test_dag_with_glancing_answers_in_one_dialect_in_one_pass() -> None:
    """Each dialect has its own path."""
    share = LANGUAGE.share_right(replace(LANGUAGE, steps=300).train_family("dag", **TWO_SLOTS))
    print("share right:", share)
    assert share > 0.5


@pytest.mark.parametrize(("latent", "steps"), [("iterative_vae", 200), ("discrete", 400)])
def test_iterative_vae_settles_on_a_dialect_from_layer_to_layer(latent: str, steps: int) -> None:
    """The first layer mixes the dialects as NAT does, and the last one settles on one; NAT's loss is .56 a token."""
    model = replace(LANGUAGE, decoder_layers=3, steps=steps).train_family(latent)
    sources = LANGUAGE.held_out_sources()
    layers = answers_by_layer(model, sources)
    shares = [LANGUAGE.share_of_answers(sources, answers) for answers in layers]
    print("share right after each layer:", shares)
    assert all(LANGUAGE.share_of_words(sources, answers) > 0.85 for answers in layers)
    assert shares[2] > 0.6
    assert shares[0] < 0.75 * shares[2]
    with torch.no_grad():
        bound = float(model(**LANGUAGE.draw_batch(random.Random(3)), has_hint=True).bound)
    print("bound:", bound)
    assert bound < 0.45


def test_cmlm_answers_in_one_dialect_after_four_iterations() -> None:
    model = replace(LANGUAGE, steps=250).train_family("cmlm")
    shares = [LANGUAGE.share_right(model, num_iterations=iterations) for iterations in (1, 4)]
    print("share right after one and four iterations:", shares)
    assert shares[1] > 0.8
    assert shares[0] < shares[1]


def test_engine_lowers_the_energy_of_the_likeliest_words_and_settles_on_a_dialect() -> None:
    """A CMLM with little training learns from an autoregressive teacher, without any word of a target."""
    language = replace(LANGUAGE, symbols=10, lengths=(2, 6), encoder_layers=2, steps=300, warm_up=1 / 3)
    energy = Energy(language.train_family("autoregressive"))
    student = replace(language, steps=150, warm_up=2 / 3).train_family("cmlm")
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    coins = random.Random(5)

    def held_out() -> float:
        """Return the energy of the likeliest words, a mean over tokens at the references' lengths."""
        batch = language.draw_batch(random.Random(2), language.held_out)
        labels = batch.pop("labels")
        is_real = labels.ne(-100)
        with torch.no_grad():
            logits = student.eval()(**batch, decoder_attention_mask=is_real.long()).logits
        return float(energy.of_argmax(logits, is_real, **batch).sum() / is_real.sum())

    before = held_out()
    right = language.share_right(student)
    student.train()
    for _ in range(140):
        batch = language.draw_batch(coins)
        labels = batch.pop("labels")
        is_real = labels.ne(-100)
        masked = torch.where(is_real, MASK, 1)
        outputs = student(
            **batch, decoder_input_ids=masked, target_lengths=is_real.sum(1), labels=labels, skip_logits=False
        )
        energies = energy(outputs.logits, is_real, batch["input_ids"], batch["attention_mask"])
        (energies.sum() / is_real.sum() + outputs.length_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = held_out()
    print(f"energy {before:.3f} to {after:.3f}, share right {right:.3f} to {language.share_right(student):.3f}")
    assert after < 0.3 * before
    assert right < 0.5
    assert language.share_right(student) > 0.8
