"""IterativeVAE's discrete latents against loops and Monte Carlo: divergences, losses, noise, history.

B batch, T target, N layers, V vocabulary.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import FLOAT32, assert_dropped, padded_batch, random_tokens, targets
from tests.models import tiny_iterative_vae as tiny_of_any_latent
from vaswani_transformer import VaswaniIterativeVaeConfig, discrete
from vaswani_transformer.discrete import LatentPass, LatentStep, divergence, gumbel_noise, relaxed_divergence

tiny_iterative_vae = partial(tiny_of_any_latent, latent="discrete")
STILL: dict[str, Any] = {"dropout": 0.0, "latent_dropout": 0.0}


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discrete, "gumbel_noise", torch.zeros_like)


def make_step(temperature: float = 1.0, is_relaxed: bool = False) -> LatentStep:
    config = VaswaniIterativeVaeConfig(d_model=4, num_heads=2)
    return LatentStep(config, dropout=0.0, temperature=temperature, is_relaxed=is_relaxed)


@pytest.mark.parametrize(("temperature", "is_relaxed"), [(1.0, False), (1.0, True), (0.7, True)])
def test_step_equals_loops(temperature: float, is_relaxed: bool) -> None:
    """States, divergence and cross-entropy are compared over three tokens and a vocabulary of five."""
    step = make_step(temperature, is_relaxed).double()
    states, table = torch.randn(3, 4).double(), torch.randn(5, 4).double()
    logits, words, noise = states @ table.T, torch.tensor([0, 3, 4]), torch.randn(3, 5).double()
    mixed, tokens = step(states, logits, table, words, lambda _: noise, smoothing=0.1)
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


def test_dropout_applies_to_the_latent_and_not_to_the_state() -> None:
    step: Any = LatentStep(VaswaniIterativeVaeConfig(d_model=8, num_heads=2), dropout=0.25)
    step.norm = torch.nn.Identity()
    zeros, logits, table = torch.zeros(800, 8), torch.randn(800, 5), torch.randn(5, 8)
    complete, _ = step.eval()(zeros, logits, table)
    assert_dropped(step.train()(zeros, logits, table)[0], complete, 0.25)
    assert (step(zeros + 1, logits, torch.zeros(5, 8))[0] != 0).all()


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


@pytest.mark.parametrize("b", [2.0, 4.0, 6.0])
def test_no_bound_lies_below_the_entropy_of_uniform_words_but_that_of_a_relaxed_latent_at_the_price_of_words(
    b: float,
) -> None:
    """Words are uniform, whatever the source, and the reader is the best possible one: Bayes' rule."""
    count, size = 20_000, 50
    words, prior = torch.randint(0, size, (count,)), torch.zeros(count, size, dtype=torch.float64)
    hint = torch.tensor([[b]], dtype=torch.float64)
    price_of_words = float(divergence(prior[:1], words[:1, None], hint))

    def losses(log_odds: Tensor) -> Tensor:
        return -log_odds.log_softmax(1).gather(1, words[:, None])

    relaxed = losses(log_ratios(draw_latents(prior, words, b, is_relaxed=True), prior, b))
    discrete = losses(b * draw_latents(prior, words, b, is_relaxed=False))
    error = 5 * float(torch.maximum(relaxed.std(), discrete.std())) / math.sqrt(count)
    assert float(relaxed.mean()) + price_of_words < math.log(size) - 0.2 - error
    assert float(relaxed.mean()) + float(relaxed_divergence(hint)) > math.log(size)
    assert abs(float(discrete.mean()) + price_of_words - math.log(size)) < error


@pytest.mark.parametrize("weight", [0.0, 1e-30, 1e-3, 0.7, 20.0, 88.7, 88.8, 100.0, 1000.0])
def test_divergence_is_exact_and_has_a_gradient_for_any_hint(weight: float) -> None:
    """In float32 against the sum over the vocabulary in float64: for words likely, unlikely and certain to be wrong.

    The bound is ten roundings of log-probabilities up to 1,000.
    """
    prior = torch.tensor([0.0, 1.0, 5.0, 30.0, 1000.0])[:, None] * torch.tensor([1.0, 0.5, 0.0, -0.3])  # (5, 4)
    prior, words = prior.repeat(2, 1).requires_grad_(), torch.tensor([0] * 5 + [3] * 5)
    hint = torch.full((10, 1), weight, requires_grad=True)
    actual = divergence(prior, words[:, None], hint)
    actual.sum().backward()
    log_prior = prior.detach().double().log_softmax(1)
    log_q = log_prior.scatter_add(1, words[:, None], hint.detach().double()).log_softmax(1)
    expected = (log_q.exp() * (log_q - log_prior)).sum(1, keepdim=True)
    torch.testing.assert_close(actual.detach().double(), expected, rtol=1e-5, atol=1e-6 * max(1.0, weight))
    for values in (prior, hint):
        assert values.grad is not None
        assert bool(values.grad.isfinite().all())


def test_samples_are_drawn_by_their_probabilities_at_each_position() -> None:
    """The word of z is v with probability softmax(s)_v: four standard errors over 20,000 positions."""
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    torch.manual_seed(0)
    shares = make_step().embed(scores, torch.eye(4), gumbel_noise).mean(0)
    expected = scores[0].softmax(0)
    assert bool(((shares - expected).abs() < 4 * (expected * (1 - expected) / 20_000).sqrt()).all())


def test_kl_weights_are_the_squares_that_fall_to_one_or_those_given() -> None:
    assert VaswaniIterativeVaeConfig(decoder_layers=6, latent="discrete").layer_kl_weights == [25, 16, 9, 4, 1]
    assert VaswaniIterativeVaeConfig(decoder_layers=3, kl_weights=[2.0, 0.5]).layer_kl_weights == [2.0, 0.5]


@pytest.mark.usefixtures("no_noise")
def test_training_loss_is_the_sum_of_the_layers_losses_weighted_divergences_and_length() -> None:
    """The cross-entropy after each layer comes from the hidden states."""
    model = tiny_iterative_vae(**STILL, decoder_layers=3, length_loss_weight=0.5, kl_weights=[3.0, 0.5]).train()
    model.kl_scale = 0.25
    source, labels = random_tokens(3, 6), targets(5, 1, 4)
    outputs = model(input_ids=source, labels=labels, output_hidden_states=True)
    for states, loss in zip(outputs.decoder_hidden_states[1:], outputs.layer_losses, strict=True):
        expected = torch.nn.functional.cross_entropy(model.lm_head(states).flatten(0, 1), labels.flatten())
        torch.testing.assert_close(loss, expected, **FLOAT32)
    assert torch.equal(outputs.layer_losses[-1], outputs.token_loss)
    kl = 3.0 * outputs.layer_kl[0] + 0.5 * outputs.layer_kl[1]
    torch.testing.assert_close(outputs.kl_loss, kl, **FLOAT32)
    total = outputs.layer_losses.sum() + 0.25 * kl + 0.5 * outputs.length_loss
    torch.testing.assert_close(outputs.loss, total, **FLOAT32)


@torch.no_grad()
def test_bound_equals_the_enumeration_of_all_latents_and_lies_above_the_negative_log_likelihood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tokens, five words, two latent steps: 625 latents. The mean over samples is within five standard errors."""
    sizes: dict[str, Any] = {"vocab_size": 5, "d_model": 4, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 3}
    model: Any = tiny_iterative_vae(**sizes, d_ff=8).double()
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.normal_()
    source, labels = torch.tensor([[3, 4, 3, 2]]), torch.tensor([[4, 3]])
    latents = torch.cartesian_prod(*[torch.arange(5)] * 4).view(625, 2, 2)  # (rows, step, place)
    forced = iter(latents.unbind(1))
    noise = lambda scores: 1e9 * torch.nn.functional.one_hot(next(forced).flatten(), 5).to(scores)  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(discrete, "gumbel_noise", noise)
        patched.setattr(discrete, "chunk_size", lambda device: 2 * 625)
        settings: dict[str, Any] = {"has_hint": True, "output_hidden_states": True}
        outputs = model(input_ids=source, labels=labels.repeat(625, 1), **settings)

    def log_prob(scores: Tensor, words: Tensor) -> Tensor:
        return scores.log_softmax(-1).gather(-1, words[..., None]).sum((1, 2))  # (625,)

    log_prior = log_q = torch.zeros(625, dtype=torch.float64)
    for step, states, words in zip(
        model.model.decoder.latent_steps, outputs.decoder_hidden_states[1:-1], latents.unbind(1), strict=True
    ):
        a, b, _ = step.mixing(states).split(1, dim=-1)
        prior = torch.nn.functional.softplus(a) * model.lm_head(states)
        hint = torch.nn.functional.softplus(b) * torch.nn.functional.one_hot(labels, 5)
        log_prior, log_q = log_prior + log_prob(prior, words), log_q + log_prob(prior + hint, words)
    log_likelihoods = log_prob(outputs.logits, labels.repeat(625, 1))
    bound = float((log_q.exp() * (log_q - log_prior - log_likelihoods)).sum())
    negative_log_likelihood = -float((log_prior + log_likelihoods).logsumexp(0))
    assert float(log_q.exp().sum()) == pytest.approx(1)
    assert bound > negative_log_likelihood + 0.01
    samples = [2 * float(model(input_ids=source, labels=labels.repeat(500, 1), has_hint=True).bound) for _ in range(20)]
    mean, deviation = torch.tensor(samples).mean(), torch.tensor(samples).std()
    assert abs(float(mean) - bound) < 5 * float(deviation) / math.sqrt(20)


def test_without_a_hint_training_feeds_the_words_that_inference_feeds() -> None:
    """There is neither noise nor divergence, and no sample at inference (DSLP, Huang et al. 2022)."""
    model, source, labels = tiny_iterative_vae(**STILL, hint=False), random_tokens(3, 6), targets(5, 1, 4)
    expected = model(input_ids=source, labels=labels)
    outputs = model.train()(input_ids=source, labels=labels)
    torch.testing.assert_close(outputs.layer_losses, expected.layer_losses, **FLOAT32)
    assert float(outputs.kl_loss.detach()) == 0
    assert torch.equal(outputs.bound, outputs.token_loss)
    with pytest.raises(ValueError, match=r"^do_sample: .* got True, expected False"):
        model.generate(source, do_sample=True)


@pytest.mark.usefixtures("no_noise")
def test_words_that_glancing_shows_have_neither_hint_nor_loss_in_any_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden words' losses are those of the shown input, and another word at a shown place changes only that."""
    model, source, labels = tiny_iterative_vae(**STILL, decoder_layers=3).train(), random_tokens(1, 6), targets(5)
    seen = torch.tensor([[True, False, True, False, False]])
    monkeypatch.setattr(type(model), "glance", lambda *_, **__: (seen, torch.zeros(())))
    model.glancing_ratio = 0.5
    outputs = model(input_ids=source, labels=labels)
    encoded = model.read_source(model.encode(source)[0], None)
    copy = torch.where(seen[..., None], model.model.decoder.embed_tokens(labels), encoded.memory[:, [0, 1, 2, 3, 4]])
    hidden = labels.masked_fill(seen, -100)
    given = LatentPass(model.lm_head, labels=hidden, is_sampled=True)
    states = model.model.decoder.run(encoded, torch.ones_like(labels), inputs_embeds=copy, latent=given)[0]
    last = torch.nn.functional.cross_entropy(model.lm_head(states)[0], hidden[0], reduction="sum") / 5
    layers = [tokens.losses.sum() / 5 for tokens in given.tokens]
    torch.testing.assert_close(outputs.layer_losses, torch.stack([*layers, last]), **FLOAT32)
    for tokens, kl in zip(given.tokens, outputs.layer_kl, strict=True):
        assert tokens.losses.count_nonzero() == tokens.kl.count_nonzero() == 3
        torch.testing.assert_close(kl, tokens.kl.sum() / 5, **FLOAT32)


def test_evaluation_has_neither_hint_nor_noise() -> None:
    model, source, labels = tiny_iterative_vae(), random_tokens(3, 6), targets(5, 1, 4)
    outputs = model(input_ids=source, labels=labels)
    assert torch.equal(outputs.layer_kl, torch.zeros(1))
    assert float(outputs.kl_loss) == 0
    torch.testing.assert_close(outputs.loss, outputs.token_loss + outputs.length_loss, **FLOAT32)
    other_words = labels.masked_fill(labels.ne(-100), 50)
    assert torch.equal(model(input_ids=source, labels=other_words).logits, outputs.logits)


@pytest.mark.usefixtures("no_noise")
def test_padding_of_the_target_and_chunks_change_no_training_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_iterative_vae(**STILL).train()
    tokens, mask = padded_batch([3, 7], "left")
    labels = targets(4, 3)
    expected = model(input_ids=tokens, attention_mask=mask, labels=labels)
    wide = torch.nn.functional.pad(labels, (0, 3), value=-100)
    monkeypatch.setattr(discrete, "chunk_size", lambda device: 2)
    outputs = model(input_ids=tokens, attention_mask=mask, labels=wide)
    for name in ("loss", "layer_losses", "layer_kl", "prior_weights", "hint_weights"):
        torch.testing.assert_close(outputs[name], expected[name], **FLOAT32)


def test_backward_pass_recomputes_large_latent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no tensor of the size tokens times vocabulary is kept; the gradient is that without recomputation."""
    source, labels = random_tokens(3, 6), targets(5, 1, 4)

    def gradient() -> tuple[set[tuple[int, ...]], list[Tensor]]:
        model, shapes = tiny_iterative_vae(decoder_layers=3).train(), set()

        def keep(saved: Tensor) -> Tensor:
            shapes.add(tuple(saved.shape))
            return saved

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            loss = model(input_ids=source, labels=labels).loss
        loss.backward()
        return shapes, [weight.grad for weight in model.parameters()]

    shapes, expected = gradient()
    assert (10, 99) in shapes
    monkeypatch.setattr(discrete, "RECOMPUTED", 10 * 99 - 1)
    shapes, gradients = gradient()
    assert (10, 99) not in shapes
    torch.testing.assert_close(gradients, expected, **FLOAT32)


def test_history_has_the_words_after_every_layer_and_ends_with_the_output() -> None:
    model, source = tiny_iterative_vae(decoder_layers=4), random_tokens(5, 6)
    generated: Any = model.generate(source, return_history=True, return_dict_in_generate=True, length_beam_size=3)
    assert generated.history.shape == (4, *generated.sequences.shape)
    assert torch.equal(generated.history[-1], generated.sequences)
    mask = generated.sequences[:, 1:].ne(1).long()
    states = model(input_ids=source, decoder_attention_mask=mask, output_hidden_states=True).decoder_hidden_states
    for layer, words in enumerate(generated.history):
        logits = model.lm_head(states[layer + 1]).index_fill(2, torch.tensor([0, 1, 2]), float("-inf"))
        inner = mask.cumsum(1) < mask.sum(1, keepdim=True)
        assert torch.equal(logits.argmax(-1)[inner], words[:, 1:][inner])


def test_do_sample_turns_the_noise_on_and_a_seed_repeats_it() -> None:
    model: Any = tiny_iterative_vae()
    source = random_tokens(5, 6)
    plain = model.generate(source)
    assert torch.equal(model.generate(source), plain)
    torch.manual_seed(3)
    sampled = model.generate(source, do_sample=True)
    torch.manual_seed(3)
    assert torch.equal(model.generate(source, do_sample=True), sampled)
    assert not torch.equal(sampled, plain)


@pytest.mark.parametrize("is_relaxed", [False, True])
def test_word_without_a_label_is_no_hint(is_relaxed: bool) -> None:
    """Such as a word that glancing shows: its state is that of a step without any words."""
    step = make_step(is_relaxed=is_relaxed)
    states, logits, table = torch.randn(4, 4), torch.randn(4, 99), torch.randn(99, 4)
    expected, _ = step(states, logits, table, noise=torch.zeros_like)
    words = torch.tensor([-100, 5, -100, 6])
    step.mixing.bias.data[1] = 50.0  # a hint that decides
    mixed, tokens = step(states, logits, table, words, torch.zeros_like)
    assert torch.equal(mixed[[0, 2]], expected[[0, 2]])
    assert not bool(torch.isclose(mixed[[1, 3]], expected[[1, 3]]).all())
    assert tokens is not None
    assert tokens.kl[[0, 2]].tolist() == [0, 0]
