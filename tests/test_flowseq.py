"""FlowSeq against autograd, grids and long Monte Carlo runs: the flow's layers, densities, estimates, phases, errors.

B batch, T target, d latent width.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional

from tests.helpers import FLOAT32, random_tokens
from tests.nar_models import END, targets, tiny_flowseq
from vaswani_transformer import VaswaniFlowSeqForConditionalGeneration

NARROW: dict[str, Any] = {"d_model": 8, "num_heads": 2, "d_ff": 16}


def test_divergence_is_that_of_its_definition_and_the_loss_weighs_it() -> None:
    """The oracle is torch's normal distribution, place by place; tests/test_flow.py checks the flow's part."""
    model = tiny_flowseq(dropout=0.0, label_smoothing=0.0, word_dropout=0.0, length_loss_weight=0.5).train()
    source, labels, noise = random_tokens(2, 6), targets(5, 2), torch.randn(2, 5, 32)
    model.kl_scale = 0.25
    outputs = model(input_ids=source, labels=labels, latent_noise=noise, skip_logits=False)
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    mask = labels.ne(-100).long()
    mean, log_variance = model.encode_target(encoded, mask, labels.clamp(min=0))
    std = (log_variance / 2).exp()
    latents = mean + std * noise
    noise_of_flow, log_det = model.flow(latents, model.flow_inputs(encoded, mask))
    divergence = 0.0
    for row, length in enumerate((5, 2)):
        log_q = Normal(mean[row, :length], std[row, :length]).log_prob(latents[row, :length]).sum()
        log_p = Normal(0.0, 1.0).log_prob(noise_of_flow[row, :length]).sum() + log_det[row]
        divergence += (log_q - log_p) / 7
    torch.testing.assert_close(outputs.kl_loss, divergence, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs.log_determinant, log_det.sum() / 7, rtol=1e-4, atol=1e-4)
    expected = functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(outputs.token_loss, expected, **FLOAT32)
    total = outputs.token_loss + 0.25 * outputs.kl_loss + 0.5 * outputs.length_loss
    torch.testing.assert_close(outputs.loss, total, **FLOAT32)


def test_first_phase_decodes_the_posteriors_means_without_a_prior() -> None:
    model, source, labels = tiny_flowseq().train(), random_tokens(2, 6), targets(5, 2)
    model.flow.started.zero_()
    model.kl_scale = 0.0
    for module in model.modules():
        module.training = module is model or (module.training and not isinstance(module, torch.nn.Dropout))
    draws = torch.ones(2, 5)
    outputs = model(input_ids=source, labels=labels, word_draws=draws, skip_logits=False)
    assert outputs.kl_loss is outputs.log_determinant is None
    outputs.loss.backward()
    idle = {name.split(".")[0] for name, weight in model.named_parameters() if weight.grad is None}
    assert idle == {"flow", "posterior"}  # of the posterior its variance


def test_posterior_does_not_see_the_words_that_are_dropped() -> None:
    model, source, labels = tiny_flowseq(dropout=0.0).train(), random_tokens(1, 6), targets(4)
    other = labels.clone()
    other[0, 1] = labels[0, 1] % 50 + 5
    noise = torch.zeros(1, 4, 32)

    def divergence(words: Tensor, second: float) -> Tensor:
        draws = torch.tensor([[0.9, second, 0.9, 0.9]])
        return model(input_ids=source, labels=words, word_draws=draws, latent_noise=noise).kl_loss

    assert torch.equal(divergence(labels, 0.1), divergence(other, 0.1))
    assert not torch.equal(divergence(labels, 0.3), divergence(other, 0.3))
    encoded = model.eval().read_source(model.encode(source).last_hidden_state, None)
    mask, draws = torch.ones(1, 4, dtype=torch.long), torch.zeros(1, 4)
    assert torch.equal(*(model.encode_target(encoded, mask, labels, given)[0] for given in (None, draws)))


@torch.no_grad()
def test_log_likelihood_is_the_sum_over_the_words_of_each_target() -> None:
    model, tokens = tiny_flowseq(), random_tokens(2, 4)
    torch.manual_seed(0)
    states, mask = torch.randn(2, 4, 32), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    words = model.lm_head(states).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]  # (B, T)
    torch.testing.assert_close(model.log_likelihoods(states, tokens, mask), (words * mask).sum(1), **FLOAT32)


@pytest.mark.slow
@torch.no_grad()
def test_importance_weighted_estimate_is_that_of_a_long_monte_carlo_run() -> None:
    """Both within five standard errors, of the mean of weights of latents from the posterior, and from the prior."""
    model = tiny_flowseq(**NARROW, dropout=0.0)
    torch.manual_seed(0)
    source, answer, count = random_tokens(1, 4), torch.tensor([[7, END]]), 20_000
    model.start_flow(source.repeat(64, 1), torch.cat([random_tokens(64, 1), torch.full((64, 1), END)], dim=1))
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    mask, tokens = torch.ones(count, 2, dtype=torch.long), answer.repeat(count, 1)

    def likelihoods(latents: Tensor) -> Tensor:
        return model.log_likelihoods(model.run_decoder(encoded, mask, inputs_embeds=latents)[0], tokens, mask).double()

    from_prior = likelihoods(model.prior_latents(encoded, mask, 1.0)).exp()
    weights = model.estimate_log_probs(encoded, tokens, torch.full((count,), 2), 1).double().exp()
    errors = [float(values.std()) / math.sqrt(count) for values in (from_prior, weights)]
    assert errors[1] < 0.1 * float(weights.mean())  # otherwise anything would pass
    assert abs(float(weights.mean() - from_prior.mean())) < 5 * math.hypot(*errors)
    several = model.estimate_log_probs(encoded, answer, torch.tensor([2]), 2000).double().exp()
    assert abs(float(several) - float(from_prior.mean())) < 5 * math.hypot(errors[0], errors[1] * math.sqrt(10))


def test_decoding_without_temperature_draws_nothing() -> None:
    model, source = tiny_flowseq(), random_tokens(3, 6)
    before = torch.get_rng_state()
    tokens = model.generate(source, length_beam_size=3)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(tokens, model.generate(source, length_beam_size=3, latent_temperature=0))


def test_samples_are_ranked_by_estimate_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources with three lengths and two latents of each; the estimates are made up."""
    model, source = tiny_flowseq(), random_tokens(2, 6)
    estimates = torch.tensor([-9.0, -7.0, -8.0, -3.0, -5.0, -6.0, -1.0, -2.0, -9.0, -9.5, -40.0, -8.0])
    monkeypatch.setattr(model, "estimate_log_probs", lambda *_: estimates)
    settings: dict[str, Any] = {"length_beam_size": 3, "num_latent_samples": 2, "latent_temperature": 0.7}
    generated = model.generate(source, **settings, num_return_sequences=6, return_dict_in_generate=True)
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    log_probs, classes = encoded.length_logits.log_softmax(-1).topk(3)  # (2, 3)
    lengths = (6 + classes - 20).clamp(min=1).repeat_interleave(2, dim=1)
    scores = (estimates.view(2, 6) + log_probs.repeat_interleave(2, dim=1)) / lengths
    expected, order = scores.sort(dim=1, descending=True)
    torch.testing.assert_close(generated.sequences_scores.view(2, 6), expected, **FLOAT32)
    assert torch.equal(generated.lengths.view(2, 6), lengths.gather(1, order))


def test_settings_of_decoding_are_saved(tmp_path: Path) -> None:
    model, source = tiny_flowseq(), random_tokens(3, 6)
    settings: dict[str, Any] = {"length_beam_size": 2, "num_latent_samples": 3, "latent_temperature": 0.5}
    model.generation_config = model.config.make_generation_config(**settings)
    model.save_pretrained(tmp_path)
    again: Any = VaswaniFlowSeqForConditionalGeneration.from_pretrained(tmp_path)
    torch.manual_seed(0)
    expected = tiny_flowseq().generate(source, **settings)
    torch.manual_seed(0)
    assert torch.equal(again.generate(source), expected)
