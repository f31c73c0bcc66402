"""IterativeVAE against loops and finite differences: latents, divergences, losses of every layer, noise, history.

B batch, T target, N layers, V vocabulary.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import FLOAT32, TINY, padded_batch, random_tokens
from tests.nar_models import targets, tiny_iterative_vae
from vaswani_transformer import VaswaniIterativeVaeConfig, latent
from vaswani_transformer.latent import LatentPass, LatentStep, gumbel_noise

STILL: dict[str, Any] = {"dropout": 0.0, "latent_dropout": 0.0}


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "gumbel_noise", torch.zeros_like)


def make_step(temperature: float = 1.0, dropout: float = 0.0) -> LatentStep:
    sizes: dict[str, Any] = TINY | {"d_model": 4, "num_heads": 2}
    return LatentStep(VaswaniIterativeVaeConfig(**sizes), temperature, dropout)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kl_weights": [1.0, 2.0]}, r"kl_weights .* must be 1 finite"),
        ({"kl_weights": [-1.0]}, "kl_weights"),
        ({"kl_weights": [float("nan")]}, "kl_weights"),
        ({"gumbel_temperature": 0.0}, "gumbel_temperature"),
        ({"latent_dropout": 1.0}, "latent_dropout"),
    ],
    ids=str,
)
def test_bad_field_is_an_error_that_names_it(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        VaswaniIterativeVaeConfig(**{**TINY, **fields})


def test_kl_weights_are_the_squares_that_fall_to_one_or_those_given() -> None:
    assert VaswaniIterativeVaeConfig(decoder_layers=6).layer_kl_weights == [25, 16, 9, 4, 1]
    assert VaswaniIterativeVaeConfig(decoder_layers=3, kl_weights=[2.0, 0.5]).layer_kl_weights == [2.0, 0.5]


# One latent step


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


# The model


@pytest.mark.usefixtures("no_noise")
def test_training_loss_equals_loops_over_layers_and_tokens() -> None:
    """From the hidden states, loops compute cross-entropy after each layer, weighted divergences, and the length."""
    model = tiny_iterative_vae(**STILL, decoder_layers=3, length_loss_weight=0.5, kl_weights=[3.0, 0.5]).train()
    model.kl_scale = 0.25
    source, labels, lengths = random_tokens(3, 6), targets(5, 1, 4), (5, 1, 4)
    outputs = model(input_ids=source, labels=labels, output_hidden_states=True)
    states = outputs.decoder_hidden_states[1:]
    losses, kls = [0.0] * 3, [0.0] * 2
    for row, m in enumerate(lengths):
        for i in range(m):
            log_probs = [model.lm_head(layer[row, i]).log_softmax(-1) for layer in states]
            for layer in range(3):
                losses[layer] -= float(log_probs[layer][labels[row, i]].detach())
            for layer in range(2):
                a, b, _ = model.model.decoder.latent_steps[layer].mixing(states[layer][row, i])
                prior = torch.nn.functional.softplus(a) * log_probs[layer]
                hint = torch.nn.functional.softplus(b) * torch.eye(99)[labels[row, i]]
                log_q = (prior + hint).log_softmax(-1)
                kls[layer] += float((log_q.exp() * (log_q - prior.log_softmax(-1))).sum().detach())
    expected = {"layer_losses": [loss / 10 for loss in losses], "layer_kl": [kl / 10 for kl in kls]}
    for name, values in expected.items():
        torch.testing.assert_close(outputs[name].detach(), torch.tensor(values), **FLOAT32)
    assert float(outputs.layer_losses[-1].detach()) == float(outputs.token_loss.detach())
    kl = (3.0 * kls[0] + 0.5 * kls[1]) / 10
    total = sum(losses) / 10 + 0.25 * kl + 0.5 * float(outputs.length_loss.detach())
    torch.testing.assert_close(float(outputs.loss.detach()), total, **FLOAT32)


def test_evaluation_has_neither_hint_nor_noise() -> None:
    model, source, labels = tiny_iterative_vae(), random_tokens(3, 6), targets(5, 1, 4)
    outputs = model(input_ids=source, labels=labels)
    assert torch.equal(outputs.layer_kl, torch.zeros(1))
    assert float(outputs.kl_loss) == 0
    torch.testing.assert_close(outputs.loss, outputs.token_loss + outputs.length_loss, **FLOAT32)
    other_words = labels.masked_fill(labels.ne(-100), 50)
    assert torch.equal(model(input_ids=source, labels=other_words).logits, outputs.logits)


@pytest.mark.usefixtures("no_noise")
def test_padding_of_the_target_changes_no_training_loss() -> None:
    model = tiny_iterative_vae(**STILL).train()
    tokens, mask = padded_batch([3, 7], "left")
    labels = targets(4, 3)
    wide = torch.nn.functional.pad(labels, (0, 3), value=-100)
    narrow_outputs, wide_outputs = (model(input_ids=tokens, attention_mask=mask, labels=y) for y in (labels, wide))
    for name in ("loss", "layer_losses", "layer_kl", "prior_weights", "hint_weights"):
        torch.testing.assert_close(wide_outputs[name], narrow_outputs[name], **FLOAT32)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_kl_scale_is_finite_and_not_negative(value: float) -> None:
    model = tiny_iterative_vae()
    with pytest.raises(ValueError, match=r"^kl_scale: .* got .*, expected a finite number of at least 0\."):
        model.kl_scale = value
    assert model.kl_scale == 1


def test_hint_reaches_the_loss_in_training_and_kl_scale_is_never_counted() -> None:
    model, source, labels = tiny_iterative_vae(**STILL).train(), random_tokens(3, 6), targets(5, 1, 4)
    losses = {}
    for scale in (0.0, 1.0):
        model.kl_scale = scale
        torch.manual_seed(0)
        losses[scale] = model(input_ids=source, labels=labels)
        assert model.kl_scale == scale
    torch.testing.assert_close(losses[1.0].loss - losses[0.0].loss, losses[0.0].kl_loss, **FLOAT32)
    assert float(losses[0.0].kl_loss.detach()) > 0


def test_backward_pass_recomputes_the_latent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the size tokens times vocabulary is kept, and the gradient is that without recomputation."""
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

    shapes, gradients = gradient()
    assert (10, 99) not in shapes
    monkeypatch.setattr(latent, "checkpoint", lambda run, *inputs, use_reentrant: run(*inputs))
    shapes, expected = gradient()
    assert (10, 99) in shapes
    for gradient_of_one, value in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient_of_one, value, **FLOAT32)


def test_untied_projection_and_embeddings_both_shape_the_latent() -> None:
    model = tiny_iterative_vae(tie_word_embeddings=False, **STILL).train()
    model(input_ids=random_tokens(3, 6), labels=targets(5, 1, 4)).layer_losses[-1].backward()
    assert model.lm_head.weight is not model.model.decoder.embed_tokens.weight
    words_only = model.model.decoder.embed_tokens.weight.grad
    assert float(words_only.abs().sum()) > 0


def test_embedding_with_a_hook_gives_the_same_states() -> None:
    """Adapters and offloading wrap the embeddings, so that the latent reads them through the module."""
    model, inputs = tiny_iterative_vae(), {"input_ids": random_tokens(3, 6), "labels": targets(5, 1, 4)}
    expected, calls = model(**inputs).logits, []
    model.model.decoder.embed_tokens.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(model(**inputs).logits, expected, **FLOAT32)
    assert calls


# Decoding


def test_history_has_the_words_after_every_layer_and_ends_with_the_output() -> None:
    model, source = tiny_iterative_vae(decoder_layers=4), random_tokens(5, 6)
    settings: dict[str, Any] = {"return_dict_in_generate": True, "length_beam_size": 3}
    generated: Any = model.generate(source, return_history=True, **settings)
    assert generated.history.shape == (4, *generated.sequences.shape)
    assert torch.equal(generated.history[-1], generated.sequences)
    plain: Any = model.generate(source, **settings)
    assert torch.equal(plain.sequences, generated.sequences)
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


def test_more_than_one_iteration_is_an_error_of_one_line() -> None:
    with pytest.raises(ValueError, match=r"^num_iterations: .* one pass; got 2\. Give 1"):
        tiny_iterative_vae().generate(random_tokens(2, 5), num_iterations=2)
