"""A latent step against loops and finite differences: its divergence, its noise.

B batch, T target, V vocabulary.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import FLOAT32, TINY
from vaswani_transformer import VaswaniIterativeVaeConfig, latent
from vaswani_transformer.latent import LatentPass, LatentStep, gumbel_noise


def make_step(temperature: float = 1.0, dropout: float = 0.0) -> LatentStep:
    sizes: dict[str, Any] = TINY | {"d_model": 4, "num_heads": 2}
    return LatentStep(VaswaniIterativeVaeConfig(**sizes), temperature, dropout)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_step_equals_loops(temperature: float) -> None:
    """States, divergence and cross-entropy are compared over three tokens and a vocabulary of five."""
    step = make_step(temperature).double()
    states, table = torch.randn(3, 4).double(), torch.randn(5, 4).double()
    logits, words, noise = states @ table.T, torch.tensor([0, 3, 4]), torch.randn(3, 5).double()
    mixed, tokens = step(states, logits, table, words, has_hint=True, noise=lambda _: noise, smoothing=0.1)
    for i in range(3):
        a, b, gate = step.mixing(states[i]).tolist()
        a, b, gate = math.log1p(math.exp(a)), math.log1p(math.exp(b)), 1 / (1 + math.exp(-gate))
        p = [float(x - logits[i].logsumexp(0)) for x in logits[i]]
        s = [a * p[v] + b * (v == int(words[i])) for v in range(5)]
        log_q = [x - math.log(sum(map(math.exp, s))) for x in s]
        log_prior = [a * x - math.log(sum(math.exp(a * y) for y in p)) for x in p]
        kl = sum(math.exp(q) * (q - prior) for q, prior in zip(log_q, log_prior, strict=True))
        z = [math.exp((x + float(g)) / temperature) for x, g in zip(s, noise[i], strict=True)]
        e = sum((z[v] / sum(z)) * table[v] for v in range(5)) * 2.0  # sqrt(d_model)
        expected = torch.nn.functional.layer_norm(gate * states[i] + (1 - gate) * e, (4,), eps=1e-6)
        torch.testing.assert_close(mixed[i], expected)
        expected = {"kl": kl, "losses": -0.9 * p[words[i]] - 0.1 * sum(p) / 5, "prior_weights": a, "hint_weights": b}
        for name, value in expected.items():
            assert math.isclose(float(getattr(tokens, name)[i].detach()), value, rel_tol=1e-9), name


def test_gradient_of_a_step_equals_finite_differences() -> None:
    """In float64, with fixed noise, through states, projection, embeddings and the weights of the mixture."""
    step, words, noise = make_step(0.8).double(), torch.tensor([0, 3, 4]), torch.randn(3, 5).double()

    def run(states: Tensor, table: Tensor, projection: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        values = {"mixing.weight": weight, "mixing.bias": bias}
        inputs = (states, states @ projection.T, table, words, True, lambda _: noise, 0.1)
        mixed, tokens = torch.func.functional_call(step, values, inputs)
        return mixed, tokens.losses, tokens.kl, tokens.prior_weights, tokens.hint_weights

    shapes = [(3, 4), (5, 4), (5, 4), (3, 4), (3,)]
    inputs = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    assert torch.autograd.gradcheck(run, inputs)


def test_divergence_without_a_hint_is_exactly_zero() -> None:
    """The formula gives 0 for b = 0, and so does a step without words; a hint gives more than 0."""
    step, states, table = make_step(), torch.randn(7, 4), torch.randn(9, 4)
    words = torch.arange(7)
    arguments = (states, states @ table.T, table, words)
    assert torch.equal(step(*arguments)[1].kl, torch.zeros(7))
    assert bool((step(*arguments, has_hint=True)[1].kl > 0).all())
    step.mixing.bias.data[1] = -200.0  # softplus of it is 0 in float32
    assert torch.equal(step(*arguments, has_hint=True)[1].kl, torch.zeros(7))


@pytest.mark.parametrize("weight", [0.0, 1e-30, 1e-3, 0.7, 20.0, 88.7, 88.8, 100.0, 1000.0])
def test_divergence_is_exact_and_has_a_gradient_for_any_hint(weight: float) -> None:
    """In float32 against the sum over the vocabulary in float64: for words likely, unlikely and certain to be wrong.

    The bound is ten roundings of log-probabilities up to 1,000.
    """
    prior = torch.tensor([0.0, 1.0, 5.0, 30.0, 1000.0])[:, None] * torch.tensor([1.0, 0.5, 0.0, -0.3])  # (5, 4)
    prior, words = prior.repeat(2, 1).requires_grad_(), torch.tensor([0] * 5 + [3] * 5)
    hint = torch.full((10, 1), weight, requires_grad=True)
    divergence = make_step().divergence(prior, words[:, None], hint)
    divergence.sum().backward()
    log_prior = prior.detach().double().log_softmax(1)
    log_q = log_prior.scatter_add(1, words[:, None], hint.detach().double()).log_softmax(1)
    expected = (log_q.exp() * (log_q - log_prior)).sum(1, keepdim=True)
    torch.testing.assert_close(divergence.detach().double(), expected, rtol=1e-5, atol=1e-6 * max(1.0, weight))
    for values in (prior, hint):
        assert values.grad is not None
        assert bool(values.grad.isfinite().all())


def test_samples_are_drawn_by_their_probabilities_at_each_position() -> None:
    """The likeliest word of z is v with probability softmax(s)_v: four standard errors over 20,000 equal positions."""
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    torch.manual_seed(0)
    shares = torch.bincount((scores + gumbel_noise(scores)).argmax(1), minlength=4) / 20_000
    expected = scores[0].softmax(0)
    assert bool(((shares - expected).abs() < 4 * (expected * (1 - expected) / 20_000).sqrt()).all())


def test_noise_differs_from_sentence_to_sentence_and_from_position_to_position() -> None:
    """Equal states at all positions of two equal sentences give equal results without noise, different ones with it."""
    step, table = make_step(), torch.randn(9, 4)
    states = torch.randn(4).expand(2, 3, 4)
    plain = LatentPass(lambda states: states @ table.T)
    noisy = LatentPass(lambda states: states @ table.T, has_noise=True)
    assert len(plain.apply(step, states, table).flatten(0, 1).unique(dim=0)) == 1
    assert len(noisy.apply(step, states, table).flatten(0, 1).unique(dim=0)) == 6


def test_chunks_and_padding_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step, table, states = make_step(), torch.randn(9, 4), torch.randn(3, 5, 4)
    is_real = torch.arange(5) < torch.tensor([5, 1, 3])[:, None]
    labels = torch.randint(0, 9, (3, 5)).masked_fill(~is_real, -100)

    def run() -> tuple[Tensor, Any]:
        settings = LatentPass(lambda states: states @ table.T, is_real, labels, has_hint=True)
        return settings.apply(step, states, table), settings.tokens[0]

    in_one, tokens = run()
    assert torch.equal(in_one[~is_real], states[~is_real])
    assert tokens.kl.shape == (9,)
    monkeypatch.setattr(latent, "chunk_size", lambda device: 2)
    chunked, chunked_tokens = run()
    torch.testing.assert_close(chunked, in_one, **FLOAT32)
    torch.testing.assert_close(chunked_tokens.kl, tokens.kl, **FLOAT32)
