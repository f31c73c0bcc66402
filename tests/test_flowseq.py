"""FlowSeq against autograd, grids and long Monte Carlo runs: flow, densities, estimates, phases, errors.

B batch, T target, d latent width.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional

from tests.batches import END, FLOAT32, assert_dropped, padded_batch, random_tokens, targets
from tests.models import tiny_config, tiny_flowseq
from vaswani_transformer import VaswaniFlowSeqForConditionalGeneration, prepare_for_inference
from vaswani_transformer.flowseq import ActNorm, Coupling, FlowError, FlowInputs, HeadLinear, LatentEmbedding
from vaswani_transformer.nar_decoder import canvas

NARROW: dict[str, Any] = {"d_model": 8, "num_heads": 2, "d_ff": 16}


def uneven_flow(**overrides: Any) -> Any:
    """Return a narrow FlowSeq in float64 whose flow is far from the identity."""
    model = tiny_flowseq(**NARROW, **overrides).double()
    generator = torch.Generator().manual_seed(0)
    for weight in model.flow.parameters():
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return model


def flow_inputs(model: Any, *lengths: int) -> FlowInputs:
    """Return the inputs of the flow for targets of these lengths, one of each of some sources with padding."""
    return inputs_over(model, *padded_batch([3, 6, 4][: len(lengths)], "left"), *lengths)


def inputs_over(model: Any, tokens: Tensor, mask: Tensor | None, *lengths: int) -> FlowInputs:
    """Return the inputs of the flow for targets of these lengths of the sources `tokens`."""
    source = model.read_source(model.encode(tokens, mask).last_hidden_state, mask)
    return model.flow_inputs(source, canvas(torch.tensor(lengths)))


@torch.no_grad()
def test_log_determinant_of_every_layer_and_of_the_whole_is_that_of_autograds_jacobian() -> None:
    """Of a target of three places in a batch with padding: 24 numbers in, 24 out."""
    model = uneven_flow()
    inputs, latents = flow_inputs(model, 5, 3), torch.randn(2, 5, 8, dtype=torch.float64)
    kinds = {type(layer) for layer in model.flow.layers}
    assert kinds == {ActNorm, HeadLinear, Coupling}
    for layer in [*model.flow.layers, model.flow]:

        def outputs_of(row: Tensor, layer: Any = layer) -> Tensor:
            return layer(torch.stack([latents[0], torch.cat([row, latents[1, 3:]])]), inputs)[0][1, :3]

        jacobian: Any = torch.autograd.functional.jacobian(outputs_of, latents[1, :3])
        expected = jacobian.reshape(24, 24).det().abs().log()
        log_det = layer(latents, inputs)[1]
        by_place = log_det[:, None] / 3 if layer is model.flow else log_det
        log_det = by_place.expand(2, 5)[1, :3].sum()
        torch.testing.assert_close(log_det, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_every_layer_and_the_whole_are_inverted() -> None:
    model = uneven_flow()
    inputs, latents = flow_inputs(model, 5, 1, 3), torch.randn(3, 5, 8, dtype=torch.float64)
    for layer in [*model.flow.layers, model.flow]:
        again, _ = layer(layer(latents, inputs)[0], inputs, inverts=True)
        torch.testing.assert_close(again, latents, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(layer(latents, inputs)[0], latents)


@torch.no_grad()
def test_padding_and_other_rows_change_neither_density_nor_inverse() -> None:
    """Of a target and its source by themselves as of the same in a batch, whatever stands at padding."""
    model, lengths = uneven_flow(), (5, 1, 3)
    latents = torch.randn(3, 5, 8, dtype=torch.float64)
    tokens, mask = padded_batch([3, 6, 4], "left")
    inputs = inputs_over(model, tokens, mask, *lengths)
    log_probs, inverse = model.flow.log_prob(latents, inputs)[0], model.flow(latents, inputs, inverts=True)[0]
    for row, length in enumerate(lengths):
        single, own = inputs_over(model, tokens[row, mask[row].bool()][None], None, length), latents[row, :length][None]
        torch.testing.assert_close(model.flow.log_prob(own, single)[0][0], log_probs[row], rtol=1e-9, atol=1e-9)
        again = model.flow(own, single, inverts=True)[0][0]
        torch.testing.assert_close(again, inverse[row, :length], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_start_gives_every_actnorms_output_mean_0_and_variance_1_over_tokens() -> None:
    model = uneven_flow()
    model.flow.started.zero_()
    inputs, latents = flow_inputs(model, 5, 1, 3), 3 + 2 * torch.randn(3, 5, 8, dtype=torch.float64)
    model.flow.start(latents, inputs)
    assert float(model.flow.started) == 1
    is_real = inputs.is_real.bool().squeeze(-1)
    for layer in model.flow.layers:
        latents = layer(latents, inputs)[0]
        if isinstance(layer, ActNorm):
            torch.testing.assert_close(latents[is_real].mean(0), torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-9)
            variance = latents[is_real].var(0, correction=0)
            torch.testing.assert_close(variance, torch.ones(8, dtype=torch.float64), rtol=1e-4, atol=0)


@torch.no_grad()
def test_flow_and_posterior_start_as_their_initialization_says() -> None:
    """Couplings scale by sigmoid(2) and shift by nothing, matrices rotate, and the posterior's weights are small."""
    model, latents = tiny_flowseq(), torch.randn(2, 5, 32)
    inputs = flow_inputs(model, 5, 3)
    for layer in model.flow.layers:
        if isinstance(layer, Coupling):
            scale, ones = 1 / (1 + math.exp(-2)), layer(torch.ones_like(latents), inputs)[0]
            torch.testing.assert_close(layer(latents, inputs)[0], latents * ones)
            assert sorted({round(x, 5) for x in ones.unique().tolist()}) == pytest.approx([scale, 1.0], abs=1e-4)
        elif isinstance(layer, HeadLinear):
            torch.testing.assert_close(layer.weight @ layer.weight.T, torch.eye(len(layer.weight)), **FLOAT32)
    for linear in (model.posterior.mean, model.posterior.log_variance):
        assert 0 < linear.weight.abs().max() <= 0.1 * math.sqrt(6 / 64)  # a tenth of Glorot's bound


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda flow: flow.started.zero_(),
            r"^flow: its ActNorm layers are not initialized, .*; got started 0, expected 1\. Call",
        ),
        (
            lambda flow: flow.layers[4].weight.data[:, 1].zero_(),
            r"^flow: its log-determinant is not finite; got 2 NaN or infinite numbers, expected none\. Use",
        ),
    ],
    ids=["not initialized", "singular"],
)
def test_flow_that_has_no_density_ends_training_by_name(damage: Callable[[Any], Any], message: str) -> None:
    model = tiny_flowseq().train()
    damage(model.flow)
    started = float(model.flow.started)
    with pytest.raises(FlowError, match=message) as error:
        model(input_ids=random_tokens(2, 5), labels=targets(4, 2))
    assert "\n" not in str(error.value)
    assert float(model.flow.started) == started  # no forward pass starts it
    if started:
        model.eval()
        with pytest.raises(FlowError, match="inverse is not finite"):
            model.generate(random_tokens(2, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flow_stays_in_float32_in_every_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_flowseq()
    expected = {name: tensor.clone() for name, tensor in model.flow.state_dict().items()}
    model.save_pretrained(tmp_path)
    loaded: Any = VaswaniFlowSeqForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    for half in (model.to(dtype), loaded):
        assert half.model.encoder.layers[0].feed_forward.fc1.weight.dtype == dtype
        assert all(torch.equal(tensor, expected[name]) for name, tensor in half.flow.state_dict().items())
        outputs = half.train()(input_ids=random_tokens(2, 5), labels=targets(4, 2))
        assert outputs.kl_loss.dtype == torch.float32
        half.eval().generate(random_tokens(2, 5))


def test_flow_of_a_prepared_copy_stays_in_float32() -> None:
    model, source = tiny_flowseq().requires_grad_(False), random_tokens(2, 5)
    mask = canvas(torch.tensor([4, 2]))
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    for dtype in ("bfloat16", "int8"):
        latents = prepare_for_inference(model, dtype).decoder_input(encoded, mask)
        torch.testing.assert_close(latents, model.decoder_input(encoded, mask), **FLOAT32)


@torch.no_grad()
def test_flow_computes_in_float32_in_mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model, source, mask = uneven_flow().float(), random_tokens(2, 5), canvas(torch.tensor([4, 2]))
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    posterior, noise = (torch.randn(2, 4, 8), torch.randn(2, 4, 8)), torch.randn(2, 4, 8)

    def results() -> tuple[Tensor, ...]:
        return *model.sample(encoded, mask, posterior, noise), model.decoder_input(encoded, mask)

    started: list[bool] = []
    monkeypatch.setattr(model.flow, "start", lambda *_: started.append(torch.is_autocast_enabled("cpu")))
    expected = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(results(), expected, **FLOAT32)
        model.start_flow(source, targets(4, 2), latent_noise=noise)
    assert started == [False]


def test_divergence_is_that_of_its_definition_and_the_loss_weighs_it() -> None:
    """The oracle is torch's normal distribution, place by place; other tests check the flow."""
    model = tiny_flowseq(dropout=0.0, label_smoothing=0.0, word_dropout=0.0, length_loss_weight=0.5).train()
    source, labels, noise = random_tokens(2, 6), targets(5, 2), torch.randn(2, 5, 32)
    model.kl_scale = 0.25
    outputs = model(input_ids=source, labels=labels, latent_noise=noise, skip_logits=False)
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    mask = labels.ne(-100).long()
    mean, log_variance = model.encode_target(encoded, mask, labels.clamp(min=0))
    std = (log_variance / 2).exp()
    latents = mean + std * noise
    inputs = model.flow_inputs(encoded, mask)
    noise_of_flow, log_det = model.flow(latents, inputs)
    divergence = 0.0
    for row, length in enumerate((5, 2)):
        log_q = Normal(mean[row, :length], std[row, :length]).log_prob(latents[row, :length]).sum()
        log_p = Normal(0.0, 1.0).log_prob(noise_of_flow[row, :length]).sum() + log_det[row]
        divergence += (log_q - log_p) / 7
        torch.testing.assert_close(model.flow.log_prob(latents, inputs)[0][row], log_p, rtol=1e-4, atol=1e-4)
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
def test_noise_of_the_prior_is_scaled_by_the_temperature() -> None:
    model, source = uneven_flow(), random_tokens(2, 4)
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    mask = canvas(torch.tensor([20, 20]))

    def noise(temperature: float) -> Tensor:
        torch.manual_seed(3)
        return model.flow(model.decoder_input(encoded, mask, temperature), model.flow_inputs(encoded, mask))[0]

    torch.testing.assert_close(noise(0.3), 0.3 * noise(1.0), rtol=1e-9, atol=1e-9)
    assert 0.8 < float(noise(1.0).std()) < 1.2  # five standard deviations of that of 320 numbers are 0.2


@torch.no_grad()
def test_estimate_is_the_mean_weight_of_samples_of_the_posterior() -> None:
    """The oracle draws the same two samples; another test checks their divergence."""
    model, source = uneven_flow(), random_tokens(2, 4)
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    lengths, tokens = torch.tensor([5, 3]), random_tokens(2, 5)
    mask = canvas(lengths)
    torch.manual_seed(3)
    estimates = model.estimate_log_probs(encoded, tokens, lengths, 2)
    torch.manual_seed(3)
    posterior = model.encode_target(encoded, mask, tokens)
    log_weights = []
    for _ in range(2):
        latents, divergence, _ = model.sample(encoded, mask, posterior)
        logits = model(input_ids=source, decoder_inputs_embeds=latents, decoder_attention_mask=mask).logits
        log_probs = logits.log_softmax(-1).gather(2, tokens[..., None]).squeeze(2)
        log_weights.append((log_probs * mask).sum(1) - divergence)
    expected = torch.stack(log_weights).exp().mean(0).log()
    torch.testing.assert_close(estimates, expected, rtol=1e-9, atol=1e-9)


def test_dropout_applies_to_latents() -> None:
    latents = torch.randn(1, 200, 32)
    embedding = LatentEmbedding(tiny_config(dropout=0.25)).train()
    assert_dropped(embedding(latents, torch.arange(200)[None]), latents, 0.25)


@pytest.mark.slow
@torch.no_grad()
def test_importance_weighted_estimate_is_that_of_a_long_monte_carlo_run() -> None:
    """Both within five standard errors, of the mean of weights of latents from the posterior, and from the prior."""
    model = tiny_flowseq(**NARROW, dropout=0.0)
    torch.manual_seed(0)
    source, answer, count = random_tokens(1, 4), torch.tensor([[7, END]]), 5_000
    model.start_flow(source.repeat(64, 1), torch.cat([random_tokens(64, 1), torch.full((64, 1), END)], dim=1))
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    mask, tokens = torch.ones(count, 2, dtype=torch.long), answer.repeat(count, 1)

    def likelihoods(latents: Tensor) -> Tensor:
        return model.log_likelihoods(model.first_pass(encoded, mask, latents), tokens, mask).double()

    from_prior = likelihoods(model.decoder_input(encoded, mask, 1.0)).exp()
    weights = model.estimate_log_probs(encoded, tokens, torch.full((count,), 2), 1).double().exp()
    errors = [float(values.std()) / math.sqrt(count) for values in (from_prior, weights)]
    assert errors[1] < 0.1 * float(weights.mean())  # otherwise anything would pass
    assert abs(float(weights.mean() - from_prior.mean())) < 5 * math.hypot(*errors)
    several = model.estimate_log_probs(encoded, answer, torch.tensor([2]), 400).double().exp()
    assert abs(float(several) - float(from_prior.mean())) < 5 * math.hypot(
        errors[0], errors[1] * math.sqrt(count / 400)
    )


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
    used: list[float] = []
    decoder_input = model.decoder_input

    def draw(source: Any, mask: Tensor, temperature: float) -> Tensor:
        used.append(temperature)
        return decoder_input(source, mask, temperature)

    def estimate(source: Any, tokens: Tensor, lengths: Tensor, samples: int) -> Tensor:
        used.append(samples)
        return estimates

    monkeypatch.setattr(model, "decoder_input", draw)
    monkeypatch.setattr(model, "estimate_log_probs", estimate)
    settings: dict[str, Any] = {"length_beam_size": 3, "num_latent_samples": 2, "latent_temperature": 0.7}
    generated = model.generate(source, **settings, num_return_sequences=6, return_dict_in_generate=True)
    assert used == [0.7, 2]
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    log_probs, classes = encoded.length_logits.log_softmax(-1).topk(3)  # (2, 3)
    lengths = (6 + classes - 20).clamp(min=1).repeat_interleave(2, dim=1)
    scores = (estimates.view(2, 6) + log_probs.repeat_interleave(2, dim=1)) / lengths
    expected, order = scores.sort(dim=1, descending=True)
    torch.testing.assert_close(generated.sequences_scores.view(2, 6), expected, **FLOAT32)
    assert torch.equal(generated.lengths.view(2, 6), lengths.gather(1, order))
