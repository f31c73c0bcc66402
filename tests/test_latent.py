"""A latent step against loops, finite differences and Monte Carlo: its sample, its divergence, its noise.

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


def make_step(temperature: float = 1.0, is_relaxed: bool = False) -> LatentStep:
    sizes: dict[str, Any] = TINY | {"d_model": 4, "num_heads": 2}
    return LatentStep(VaswaniIterativeVaeConfig(**sizes), temperature, 0.0, is_relaxed)


@pytest.mark.parametrize(("temperature", "is_relaxed"), [(1.0, False), (1.0, True), (0.7, True)])
def test_step_equals_loops(temperature: float, is_relaxed: bool) -> None:
    """States, divergence and cross-entropy are compared over three tokens and a vocabulary of five."""
    step = make_step(temperature, is_relaxed).double()
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
        noisy = [x + float(g) for x, g in zip(s, noise[i], strict=True)]
        z = [float(x == max(noisy)) for x in noisy]
        if is_relaxed:
            kl, z = b - 1 + math.exp(-b), [math.exp(x / temperature) for x in noisy]
        e = sum((z[v] / sum(z)) * table[v] for v in range(5)) * 2.0  # sqrt(d_model)
        expected = torch.nn.functional.layer_norm(gate * states[i] + (1 - gate) * e, (4,), eps=1e-6)
        torch.testing.assert_close(mixed[i], expected)
        expected = {"kl": kl, "losses": -0.9 * p[words[i]] - 0.1 * sum(p) / 5, "prior_weights": a, "hint_weights": b}
        for name, value in expected.items():
            assert math.isclose(float(getattr(tokens, name)[i].detach()), value, rel_tol=1e-9), name


def test_gradient_of_a_relaxed_step_equals_finite_differences() -> None:
    """In float64, with fixed noise, through states, projection, embeddings and the weights of the mixture."""
    step, noise = make_step(0.8, is_relaxed=True).double(), torch.randn(3, 5).double()
    words = torch.tensor([0, 3, -100])

    def run(states: Tensor, table: Tensor, projection: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        values = {"mixing.weight": weight, "mixing.bias": bias}
        inputs = (states, states @ projection.T, table, words, True, lambda _: noise, 0.1)
        mixed, tokens = torch.func.functional_call(step, values, inputs)
        return mixed, tokens.losses, tokens.kl, tokens.prior_weights, tokens.hint_weights

    shapes = [(3, 4), (5, 4), (5, 4), (3, 4), (3,)]
    inputs = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    assert torch.autograd.gradcheck(run, inputs)


def test_discrete_latent_is_the_embedding_of_one_word_with_the_gradient_of_the_relaxed_one() -> None:
    """The gradient is that of z, not of the table; without noise or gradient the word is looked up."""
    scores, table, noise = torch.randn(6, 9, requires_grad=True), torch.randn(9, 4), torch.randn(6, 9)
    discrete, relaxed = (make_step(0.7, is_relaxed).embed for is_relaxed in (False, True))
    embedded, weights = discrete(scores, table, lambda _: noise), torch.randn(6, 4)
    words = (scores + noise).argmax(1)
    torch.testing.assert_close(embedded, table[words])
    gradients = [
        torch.autograd.grad((values * weights).sum(), scores)[0]
        for values in (embedded, relaxed(scores, table, lambda _: noise))
    ]
    torch.testing.assert_close(*gradients, **FLOAT32)
    assert torch.equal(discrete(scores, table, None), table[scores.argmax(1)])
    with torch.no_grad():
        assert torch.equal(discrete(scores, table, lambda _: noise), table[words])


def draw_latents(prior: Tensor, words: Tensor, b: float, is_relaxed: bool) -> Tensor:
    """Return z (n, V) of a step whose prior has these logits (n, V), under a hint of weight b at `words` (n,)."""
    scores = prior.scatter_add(1, words[:, None], prior.new_full((len(words), 1), b))
    torch.manual_seed(0)
    return make_step(is_relaxed=is_relaxed).embed(scores, torch.eye(prior.shape[1]).to(prior), gumbel_noise)


def log_ratios(latents: Tensor, prior: Tensor, b: float) -> Tensor:
    """Return (n, V), for a hint at each word the log-ratio of the densities of relaxed `latents` with and without it.

    From Maddison et al. 2017, equation 10, at tau 1.
    """
    return b - latents.shape[1] * ((prior - latents.log()).softmax(1) * math.expm1(b)).log1p()


@pytest.mark.parametrize(("surprise", "b"), [(1.0, 2.0), (6.0, 4.6), (15.0, 12.0)])
def test_relaxed_latent_passes_on_more_than_the_divergence_of_words_and_no_more_than_it_is_charged(
    surprise: float, b: float
) -> None:
    """By Monte Carlo against b + V E log(1 - r (1 - exp(-b))), r ~ Beta(1, V - 1), a formula without the prior."""
    count, size = 4000, 50
    words, hint = torch.zeros(count, dtype=torch.long), torch.tensor([[b]], dtype=torch.float64)
    others = math.log(math.expm1(surprise) / (size - 1))  # relative to the word, whose probability is exp(-surprise)
    prior = torch.full((1, size), others, dtype=torch.float64).index_fill(1, words[:1], 0.0)
    passed = log_ratios(draw_latents(prior.repeat(count, 1), words, b, is_relaxed=True), prior, b)[:, 0]
    uniform = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    beta = 1 - uniform ** (1 / (size - 1))
    formula = b + size * float((beta * math.expm1(-b)).log1p().mean())
    assert abs(float(passed.mean()) - formula) < 5 * float(passed.std()) / math.sqrt(count)
    step = make_step()
    assert float(step.divergence(prior, words[:1, None], hint)) < 0.8 * formula
    assert formula < float(step.relaxed_divergence(hint)) < 1.05 * formula


@pytest.mark.parametrize("b", [2.0, 4.0, 6.0])
def test_no_bound_lies_below_the_entropy_of_uniform_words_but_that_of_a_relaxed_latent_at_the_price_of_words(
    b: float,
) -> None:
    """Words are uniform, whatever the source, and the reader is the best possible one: Bayes' rule."""
    count, size = 20_000, 50
    words, prior = torch.randint(0, size, (count,)), torch.zeros(count, size, dtype=torch.float64)
    step, hint = make_step(), torch.tensor([[b]], dtype=torch.float64)
    price_of_words = float(step.divergence(prior[:1], words[:1, None], hint))

    def losses(log_odds: Tensor) -> Tensor:
        return -log_odds.log_softmax(1).gather(1, words[:, None])

    relaxed = losses(log_ratios(draw_latents(prior, words, b, is_relaxed=True), prior, b))
    discrete = losses(b * draw_latents(prior, words, b, is_relaxed=False))
    error = 5 * float(torch.maximum(relaxed.std(), discrete.std())) / math.sqrt(count)
    assert float(relaxed.mean()) + price_of_words < math.log(size) - 0.2 - error
    assert float(relaxed.mean()) + float(step.relaxed_divergence(hint)) > math.log(size)
    assert abs(float(discrete.mean()) + price_of_words - math.log(size)) < error


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
    step.is_relaxed = True  # whose samples are all different
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
