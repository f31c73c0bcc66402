"""IterativeVAE against loops and finite differences: latents, divergences, losses of every layer, noise, history.

B batch, T target, N layers, V vocabulary.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import FLOAT32, padded_batch, random_tokens
from tests.nar_models import targets, tiny_iterative_vae
from vaswani_transformer import VaswaniIterativeVaeConfig, latent
from vaswani_transformer.latent import LatentPass

STILL: dict[str, Any] = {"dropout": 0.0, "latent_dropout": 0.0}


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "gumbel_noise", torch.zeros_like)


def test_kl_weights_are_the_squares_that_fall_to_one_or_those_given() -> None:
    assert VaswaniIterativeVaeConfig(decoder_layers=6).layer_kl_weights == [25, 16, 9, 4, 1]
    assert VaswaniIterativeVaeConfig(decoder_layers=3, kl_weights=[2.0, 0.5]).layer_kl_weights == [2.0, 0.5]


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
        patched.setattr(latent, "gumbel_noise", noise)
        patched.setattr(latent, "chunk_size", lambda device: 2 * 625)
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
    given = LatentPass(model.lm_head, labels=hidden, has_hint=True)
    states = model.run_decoder(encoded, torch.ones_like(labels), inputs_embeds=copy, latent=given)[0]
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
