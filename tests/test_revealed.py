"""Revealed latents against loops and enumeration: sets, the bound, losses, committed words, history.

B batch, T target, N layers, V vocabulary.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import FLOAT32, assert_dropped, padded_batch, random_tokens, targets
from tests.models import tiny_iterative_vae
from vaswani_transformer import VaswaniIterativeVaeConfig, iterative_vae, prepare_for_inference
from vaswani_transformer.iterative_vae import CommittedWords, RevealedStep, nested_positions
from vaswani_transformer.nar_decoder import canvas

STILL: dict[str, Any] = {"dropout": 0.0, "latent_dropout": 0.0}


def random_weights(model: Any, seed: int = 0) -> Any:
    """Return the model with normal weights, so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    for weight in model.parameters():
        weight.data.normal_()
    return model


def draws_of(levels: Tensor, layers: int) -> Tensor:
    """Return draws (B, T) that reveal each word before the layer in `levels` (B, T); N + 1: never."""
    return (levels - 1.5) / layers  # a word is in S_i if its u is below (i - 1) / N


@pytest.fixture
def model() -> Any:
    """A model of five words, of which two targets have 25 forms, and three layers."""
    sizes: dict[str, Any] = {"vocab_size": 5, "d_model": 4, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 3}
    return random_weights(tiny_iterative_vae(**sizes, d_ff=8, pad_token_id=None).double())


SOURCE = torch.tensor([[3, 4, 3, 2]])
LEVELS = list(itertools.product((2, 3, 4), repeat=2))  # the layer before which each of two words is revealed


def log_probs(model: Any, words: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Return log p(y | x, m) (B,) of `words` (B, T), revealed in this order, from the output's logits."""
    draws = draws_of(torch.tensor([levels] * len(words)), 3)
    logits = model(input_ids=SOURCE, labels=words, has_hint=True, reveal_draws=draws).logits
    return logits.log_softmax(-1).gather(-1, words[..., None]).sum((1, 2))


# The bound


@torch.no_grad()
@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_every_order_of_revealing_is_a_distribution_over_targets(model: Any, levels: tuple[int, ...]) -> None:
    """The probabilities of all targets sum to 1, so no layer sees a word that it predicts."""
    words = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    assert float(log_probs(model, words, levels).exp().sum()) == pytest.approx(1)


@torch.no_grad()
def test_bound_equals_the_sum_over_all_sets_and_lies_above_the_negative_log_likelihood(model: Any) -> None:
    """The mean over random sets is within five standard errors of the exact sum."""
    labels = torch.tensor([[4, 3]])
    likelihoods = torch.cat([log_probs(model, labels, levels) for levels in LEVELS])  # all are equally likely
    bound = -likelihoods.mean()
    negative_log_likelihood = math.log(len(LEVELS)) - likelihoods.logsumexp(0)
    assert float(bound) > float(negative_log_likelihood) + 0.01
    torch.manual_seed(1)
    settings: dict[str, Any] = {"input_ids": SOURCE, "labels": labels.repeat(500, 1), "has_hint": True}
    samples = torch.tensor([2 * float(model(**settings).bound) for _ in range(20)])
    assert abs(float(samples.mean() - bound)) < 5 * float(samples.std()) / math.sqrt(20)


@torch.no_grad()
@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_bound_is_the_divergences_and_the_loss_of_the_last_layer(model: Any, levels: tuple[int, ...]) -> None:
    """K_i is -log p of the words that become known before layer i, by the layer before; the loss adds the length's."""
    labels = torch.tensor([[4, 3]])
    settings: dict[str, Any] = {"reveal_draws": draws_of(torch.tensor([levels]), 3), "output_hidden_states": True}
    outputs = model(input_ids=SOURCE, labels=labels, has_hint=True, **settings)
    expected = torch.zeros(3)
    for place, level in enumerate(levels):
        states = outputs.decoder_hidden_states[level - 1 if level < 4 else -1]  # after the last layer without the word
        expected[level - 2] -= model.lm_head(states)[0, place].log_softmax(-1)[labels[0, place]].float() / 2
    torch.testing.assert_close(outputs.layer_losses.float(), expected, **FLOAT32)
    assert torch.equal(outputs.layer_kl, outputs.layer_losses[:-1])
    torch.testing.assert_close(outputs.bound.float(), expected.sum(), **FLOAT32)
    assert torch.equal(outputs.token_loss, outputs.bound)
    torch.testing.assert_close(outputs.loss, outputs.bound + outputs.length_loss)


def test_sets_are_nested_and_grow_by_equal_shares() -> None:
    """Of a hundred thousand words, with four layers; padding is in no set."""
    is_real = torch.ones(1, 100_001, dtype=torch.bool)
    is_real[0, -1] = False
    draws = torch.rand(is_real.shape)
    for share, expected in ((None, [0.25, 0.5, 0.75]), (torch.tensor([[0.6]]), [0.2, 0.4, 0.6])):
        sets = nested_positions(is_real, draws, 4, share)
        assert [float(one[:, :-1].float().mean()) for one in sets] == pytest.approx(expected, abs=0.01)
        assert not any(one[0, -1] for one in sets)
        assert all(bool((later | ~earlier).all()) for earlier, later in itertools.pairwise(sets))


# Training


def test_step_equals_loops() -> None:
    step = random_weights(RevealedStep(VaswaniIterativeVaeConfig(d_model=4, num_heads=2), dropout=0.0))
    states, table, words = torch.randn(1, 3, 4), torch.randn(5, 4), torch.tensor([[0, 3, 4]])
    mixed = step(states, words, torch.tensor([[True, False, True]]), table)
    for i, latent in enumerate((2 * table[0], step.empty, 2 * table[4])):
        gate = (states[0, i] @ step.gate.weight[0] + step.gate.bias[0]).sigmoid()
        expected = step.norm(gate * states[0, i] + (1 - gate) * latent)
        torch.testing.assert_close(mixed[0, i], expected, **FLOAT32)


def test_dropout_applies_to_the_latent_and_not_to_the_state() -> None:
    step: Any = random_weights(RevealedStep(VaswaniIterativeVaeConfig(d_model=8, num_heads=2), dropout=0.25))
    step.norm = torch.nn.Identity()
    words, known = torch.randint(5, (1, 800)), torch.rand(1, 800) < 0.5
    zeros, table = torch.zeros(1, 800, 8), torch.randn(5, 8)
    complete = step.eval()(zeros, words, known, table)
    assert_dropped(step.train()(zeros, words, known, table), complete, 0.25)
    step.empty.data.zero_()
    assert (step(zeros + 1, words, known & False, table) != 0).all()


def test_training_loss_is_the_loss_of_each_word_after_the_last_layer_without_it_and_the_length() -> None:
    """The cross-entropy after each layer comes from the hidden states; it is smoothed and divided by all tokens."""
    fields: dict[str, Any] = {"decoder_layers": 4, "length_loss_weight": 0.5, "label_smoothing": 0.1}
    model = tiny_iterative_vae(**STILL, **fields).train()
    source, labels = random_tokens(3, 6), targets(5, 1, 4)
    levels = torch.tensor([[2, 3, 4, 5, 5], [5, 9, 9, 9, 9], [4, 2, 2, 3, 9]])
    draws = draws_of(levels, 4)
    outputs = model(input_ids=source, labels=labels, reveal_draws=draws, output_hidden_states=True, skip_logits=False)
    total = torch.zeros(())
    states = [*outputs.decoder_hidden_states[1:4], None]
    for layer, (state, loss) in enumerate(zip(states, outputs.layer_losses, strict=True), start=1):
        logits = outputs.logits if state is None else model.lm_head(state)
        predicted = labels.masked_fill(levels != layer + 1, -100)
        summed = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), predicted.flatten(), label_smoothing=0.1, reduction="sum"
        )
        torch.testing.assert_close(loss, summed.detach() / 10, **FLOAT32)
        total = total + summed / 10
    torch.testing.assert_close(outputs.bound, total, **FLOAT32)
    torch.testing.assert_close(outputs.loss, total + 0.5 * outputs.length_loss, **FLOAT32)
    weights = list(model.parameters())
    gradients = [
        torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
        for loss in (outputs.loss, total + 0.5 * outputs.length_loss)
    ]
    torch.testing.assert_close(*gradients, **FLOAT32)


def test_padding_of_the_target_changes_no_training_loss() -> None:
    model = tiny_iterative_vae(**STILL, decoder_layers=3).train()
    tokens, mask = padded_batch([3, 7], "left")
    labels, draws = targets(4, 3), torch.rand(2, 4)
    expected = model(input_ids=tokens, attention_mask=mask, labels=labels, reveal_draws=draws)
    wide, wide_draws = torch.nn.functional.pad(labels, (0, 3), value=-100), torch.nn.functional.pad(draws, (0, 3))
    outputs = model(input_ids=tokens, attention_mask=mask, labels=wide, reveal_draws=wide_draws)
    for name in ("loss", "bound", "layer_losses", "layer_kl"):
        torch.testing.assert_close(outputs[name], expected[name], **FLOAT32)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_changes_no_gradient() -> None:
    source, batch = random_tokens(3, 6), {"labels": targets(5, 1, 4), "reveal_draws": torch.rand(3, 5)}
    results = []
    for checkpoints in (False, True):
        model = tiny_iterative_vae(**STILL, decoder_layers=3).train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(input_ids=source, **batch).loss.backward()
        results.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(*results, **FLOAT32)


def test_model_of_one_layer_has_no_latent() -> None:
    model, source, labels = tiny_iterative_vae(decoder_layers=1), random_tokens(3, 6), targets(5, 1, 4)
    outputs = model(input_ids=source, labels=labels, has_hint=True)
    assert torch.equal(outputs.bound, model(input_ids=source, labels=labels).token_loss)
    assert outputs.layer_kl.numel() == 0
    model.train()(input_ids=source, labels=labels).loss.backward()


def test_projection_with_an_adapter_has_the_losses_of_the_plain_one() -> None:
    """A wrapped projection is called in place of its matrix."""
    model = tiny_iterative_vae(**STILL, decoder_layers=3, label_smoothing=0.1).train()
    batch: dict[str, Any] = {"input_ids": random_tokens(2, 6), "labels": targets(5, 4)}
    batch["reveal_draws"] = torch.rand(2, 5)
    expected = model(**batch)
    model.lm_head.register_forward_hook(lambda *_: None)
    outputs = model(**batch)
    for name in ("loss", "bound", "layer_losses", "layer_kl"):
        torch.testing.assert_close(outputs[name], expected[name], **FLOAT32)


def test_with_glancing_the_first_layers_mistakes_replace_the_draw_of_rho(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_iterative_vae(**STILL, decoder_layers=3).train()
    source, labels, shares = random_tokens(2, 6), targets(5, 4), []
    monkeypatch.setattr(
        iterative_vae, "nested_positions", lambda *given: shares.append(given[3]) or nested_positions(*given)
    )
    states = model(input_ids=source, labels=labels, output_hidden_states=True).decoder_hidden_states[1]
    labels[0, :2] = model.lm_head(states)[0, :2].argmax(-1)
    model.glancing_ratio = 0.5
    outputs = model(input_ids=source, labels=labels)
    wrong = (model.lm_head(states).argmax(-1) != labels) & labels.ne(-100)
    assert shares[0] is None
    torch.testing.assert_close(shares[1][:, 0], 0.5 * wrong.sum(1) / torch.tensor([5.0, 4.0]))
    assert float(outputs.accuracy) == pytest.approx(1 - float(wrong.sum()) / 9)


# Inference


def test_evaluation_sees_no_reference() -> None:
    model, source, labels = tiny_iterative_vae(decoder_layers=3), random_tokens(3, 6), targets(5, 1, 4)
    outputs = model(input_ids=source, labels=labels)
    torch.testing.assert_close(outputs.loss, outputs.token_loss + outputs.length_loss, **FLOAT32)
    assert outputs.bound is outputs.layer_kl is None
    other_words = labels.masked_fill(labels.ne(-100), 50)
    assert torch.equal(model(input_ids=source, labels=other_words).logits, outputs.logits)


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_history_shows_the_most_probable_words_committed_where_they_stay(layers: int) -> None:
    """After layer i, at most ceil(m i / N) words are committed, fewer only if the others repeat a neighbor."""
    model = random_weights(tiny_iterative_vae(decoder_layers=layers))
    source = random_tokens(5, 6)
    settings: dict[str, Any] = {"return_history": True, "return_dict_in_generate": True, "length_beam_size": 3}
    generated = model.generate(source, **settings)
    words, committed = generated.history[:, :, 1:], generated.committed
    assert committed.shape == words.shape == (layers, 5, generated.sequences.shape[1] - 1)
    assert torch.equal(words[-1], generated.sequences[:, 1:])
    lengths = generated.lengths
    for layer in range(layers):
        counts = [math.ceil(m * (layer + 1) / layers) for m in lengths.tolist()]
        assert all(one <= count for one, count in zip(committed[layer].sum(1).tolist(), counts, strict=True))
        if layer < layers - 1:
            both = committed[layer, :, 1:] & committed[layer, :, :-1]
            assert not bool((both & (words[layer, :, 1:] == words[layer, :, :-1])).any())
        assert torch.equal(words[layer][committed[layer]], words[-1][committed[layer]])
    assert bool((committed[1:] | ~committed[:-1]).all())
    assert torch.equal(committed[-1], canvas(lengths).bool())


def test_committed_words_are_the_most_probable_ones() -> None:
    log_probs = torch.tensor([[-1.0, -0.5, -3.0, -0.1, -9.0]])
    words = torch.tensor([[5, 6, 7, 8, 9]])
    prior = CommittedWords(lambda states, is_read: (words, log_probs), canvas(torch.tensor([4]), 5).bool(), layers=2)
    step = RevealedStep(VaswaniIterativeVaeConfig(d_model=4, num_heads=2), dropout=0.0)
    prior.apply(step, torch.zeros(1, 5, 4), torch.zeros(10, 4))
    assert prior.is_committed.tolist() == [[False, True, False, True, False]]


def committed_by_loop(
    words: list[int], log_probs: list[float], committed: list[bool], length: int, count: int
) -> list[bool]:
    """Return which words are committed after a layer, word by word."""
    ranked = [1.0 if known else value for known, value in zip(committed, log_probs, strict=True)]
    free = []
    for place in range(length):
        left = place > 0 and words[place - 1] == words[place] and ranked[place] <= ranked[place - 1]
        right = place < length - 1 and words[place + 1] == words[place] and ranked[place] < ranked[place + 1]
        if not committed[place] and not left and not right:
            free.append(place)
    best = sorted(free, key=lambda place: -ranked[place])[: count - sum(committed)]
    return [known or place in best for place, known in enumerate(committed)]


@pytest.mark.parametrize("seed", range(30))
def test_of_equal_neighbors_only_the_more_probable_is_committed(seed: int) -> None:
    """Words of a vocabulary of two, so that most have an equal neighbor; some log-probabilities are equal too."""
    layers, lengths = 4, torch.tensor([9, 6, 1])
    torch.manual_seed(seed)
    read: list[tuple[Tensor, Tensor]] = []

    def random_words(states: Tensor, is_read: Tensor) -> tuple[Tensor, Tensor]:
        read.append((torch.randint(5, 7, (3, 9)), -torch.randint(1, 6, (3, 9)).float()))
        return read[-1]

    prior = CommittedWords(random_words, canvas(lengths, 9).bool(), layers)
    step = RevealedStep(VaswaniIterativeVaeConfig(d_model=4, num_heads=2), dropout=0.0)
    expected = [[False] * 9 for _ in lengths]
    for layer in range(1, layers):
        prior.apply(step, torch.zeros(3, 9, 4), torch.zeros(10, 4))
        for row, m in enumerate(lengths.tolist()):
            words, log_probs = prior.words[row].tolist(), prior.log_probs[row].tolist()
            count = math.ceil(m * layer / layers)
            expected[row] = committed_by_loop(words, log_probs, expected[row], m, count)
        assert prior.is_committed.tolist() == expected


@torch.no_grad()
def test_scores_are_the_log_probabilities_of_the_order_in_which_words_were_committed() -> None:
    """Revealing the generated words in this order gives the same numbers by the bound."""
    model = random_weights(tiny_iterative_vae(decoder_layers=3)).double()
    source = random_tokens(4, 6)
    generated = model.generate(source, return_history=True, return_dict_in_generate=True)
    levels = 4 - generated.committed[:2].sum(0)  # committed after layer 1: before layer 2
    labels = generated.sequences[:, 1:].masked_fill(~generated.committed[-1], -100)
    for row in range(4):
        draws = draws_of(levels[row : row + 1], 3)
        outputs = model(input_ids=source[row][None], labels=labels[row][None], has_hint=True, reveal_draws=draws)
        scores = generated.token_scores[row]
        torch.testing.assert_close(outputs.bound * generated.lengths[row], -scores.sum())


@pytest.mark.parametrize("suppresses", [False, True])
def test_generation_is_the_forward_pass(suppresses: bool) -> None:
    """Without suppressed words; a suppressed word, a special one and an early end are never committed."""
    model = random_weights(tiny_iterative_vae(decoder_layers=4))
    source = random_tokens(6, 6)
    suppressed = []
    if suppresses:
        suppressed = sorted(set(model.generate(source).flatten().tolist()) - {0, 1, 2})
    settings: dict[str, Any] = {"return_history": True, "return_dict_in_generate": True}
    generated = model.generate(source, suppress_tokens=suppressed, **settings)
    inner = generated.committed[-1].cumsum(1) < generated.lengths[:, None]
    assert not torch.isin(generated.history[:, :, 1:][:, inner], torch.tensor([0, 1, 2, *suppressed])).any()
    if not suppresses:
        logits = model(input_ids=source, decoder_attention_mask=generated.committed[-1].long()).logits
        words = logits.index_fill(2, torch.tensor([0, 1, 2]), float("-inf")).argmax(-1)
        assert torch.equal(words[inner], generated.sequences[:, 1:][inner])


def test_prepared_model_commits_the_same_words() -> None:
    model, source = random_weights(tiny_iterative_vae(decoder_layers=4)), random_tokens(5, 6)
    settings: dict[str, Any] = {"return_history": True, "return_dict_in_generate": True, "length_beam_size": 2}
    expected, generated = (each.generate(source, **settings) for each in (model, prepare_for_inference(model)))
    for name in ("sequences", "history", "committed"):
        assert torch.equal(generated[name], expected[name])


def test_padding_of_the_target_changes_no_state_of_the_body() -> None:
    """The body and the decoder by themselves commit words by the embeddings."""
    for implementation in ("eager", "sdpa"):
        model = random_weights(tiny_iterative_vae(decoder_layers=3, attn_implementation=implementation).double()).model
        source, inputs = random_tokens(2, 6), torch.randn(2, 5, 32, dtype=torch.float64)
        narrow = model(input_ids=source, decoder_inputs_embeds=inputs).last_hidden_state
        wide_inputs = torch.nn.functional.pad(inputs, (0, 0, 0, 3), value=1.0)
        mask = canvas(torch.tensor([5, 5]), 8)
        wide = model(input_ids=source, decoder_inputs_embeds=wide_inputs, decoder_attention_mask=mask)
        torch.testing.assert_close(wide.last_hidden_state[:, :5], narrow)


# The configuration


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("revealed", None)),
        ({"latent": "discrete"}, ("discrete", "discrete")),
        ({"hint": False}, ("discrete", "discrete")),
        ({"kl_weights": [1.0]}, ("discrete", "discrete")),
        ({"gumbel_temperature": 0.5}, ("discrete", "discrete")),
        ({"latent_sample": "relaxed"}, ("discrete", "relaxed")),
    ],
    ids=str,
)
def test_fields_of_a_discrete_latent_choose_it(fields: dict[str, Any], expected: tuple[str, str | None]) -> None:
    config = VaswaniIterativeVaeConfig(decoder_layers=2, **fields)
    assert (config.latent, config.latent_sample) == expected
    again = VaswaniIterativeVaeConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()


def test_saved_configuration_without_the_field_has_a_discrete_latent() -> None:
    saved = VaswaniIterativeVaeConfig(latent="discrete").to_dict()
    del saved["latent"], saved["latent_sample"]
    config = VaswaniIterativeVaeConfig.from_dict(saved)
    assert (config.latent, config.latent_sample) == ("discrete", "discrete")


def test_revealed_latent_with_a_setting_of_a_discrete_one_is_an_error() -> None:
    with pytest.raises(Exception, match=r'hint: not supported by latent="revealed"; got False'):
        VaswaniIterativeVaeConfig(latent="revealed", hint=False)
