"""Every family's forward pass: configurations, padding, losses, gradients, precision, errors.

B batch, S source, T target.
"""

from typing import Any

import pytest
import torch

from tests.helpers import FLOAT32, TINY, padded_batch, random_tokens, source_batch
from tests.nar_models import FAMILY, MASK, targets, tiny_nat
from vaswani_transformer import (
    MaskingCollator,
    VaswaniCmlmConfig,
    VaswaniCmlmForConditionalGeneration,
    VaswaniFlowSeqConfig,
    VaswaniIterativeVaeConfig,
    VaswaniNatConfig,
    latent,
)
from vaswani_transformer.lengths import canvas


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (VaswaniNatConfig, {"min_length_difference": 1}, "must enclose 0"),
        (VaswaniNatConfig, {"max_length_difference": -1}, "must enclose 0"),
        (VaswaniNatConfig, {"relative_attention_clip": 0}, "relative_attention_clip"),
        (VaswaniNatConfig, {"length_loss_weight": -0.1}, "length_loss_weight"),
        (VaswaniNatConfig, {"d_model": 33}, "d_model"),
        (VaswaniCmlmConfig, {"mask_token_id": 99}, "outside the vocabulary"),
        (VaswaniCmlmConfig, {"mask_token_id": 1}, "add_special_tokens"),
        (VaswaniCmlmConfig, {"max_target_length": 0}, "max_target_length"),
        (VaswaniIterativeVaeConfig, {"kl_weights": [1.0, 2.0]}, r"kl_weights .* must be 1 finite"),
        (VaswaniIterativeVaeConfig, {"kl_weights": [-1.0]}, "kl_weights"),
        (VaswaniIterativeVaeConfig, {"kl_weights": [float("nan")]}, "kl_weights"),
        (VaswaniIterativeVaeConfig, {"gumbel_temperature": 0.0}, "gumbel_temperature"),
        (VaswaniIterativeVaeConfig, {"latent_dropout": 1.0}, "latent_dropout"),
        (VaswaniFlowSeqConfig, {"d_model": 36}, r"d_model \(36\) must be divisible by 8: .* and 4 heads"),
        (VaswaniFlowSeqConfig, {"flow_steps": 0}, "flow_steps"),
        (VaswaniFlowSeqConfig, {"word_dropout": 1.0}, "word_dropout"),
        (VaswaniNatConfig, {"attention_window": 3}, "attention_window: vaswani_nat has no restricted .*; got 3"),
        (VaswaniCmlmConfig, {"attention_window": 3}, "attention_window: vaswani_cmlm has no restricted .*; got 3"),
        (VaswaniIterativeVaeConfig, {"attention_window": 3}, "attention_window: .*_vae has no restricted .*; got 3"),
    ],
    ids=str,
)
def test_bad_field_is_an_error_that_names_it(config: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        config(**{**TINY, **fields})


def test_cmlm_without_a_mask_token_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"mask_token_id, pad_token_id: .*add_special_tokens"):
        VaswaniCmlmForConditionalGeneration(VaswaniCmlmConfig(**TINY))


@pytest.mark.parametrize("family", ["nat", "iterative_vae", "flowseq"])
def test_decoder_whose_masks_flash_attention_lacks_is_not_given_it(family: str) -> None:
    model = FAMILY[family]()
    for part in (model, model.model, model.model.decoder):
        with pytest.raises(ValueError, match=f"{type(part).__name__} does not support Flash Attention"):
            part.set_attn_implementation("flash_attention_2")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", FAMILY)
def test_padding_on_either_side_of_the_source_changes_nothing(family: str, side: str, implementation: str) -> None:
    """A sentence gives the same by itself as in any batch, m = 1 included."""
    model = FAMILY[family](attn_implementation=implementation)
    lengths, target_lengths = [3, 7, 1], [4, 1, 6]
    tokens, mask = padded_batch(lengths, side)
    together = model(input_ids=tokens, attention_mask=mask, decoder_attention_mask=canvas(torch.tensor(target_lengths)))
    for row, (n, m) in enumerate(zip(lengths, target_lengths, strict=True)):
        row_tokens = tokens[row, mask[row].bool()][None]
        single = model(input_ids=row_tokens, decoder_attention_mask=torch.ones(1, m)).logits
        assert row_tokens.shape == (1, n)
        torch.testing.assert_close(together.logits[row, :m], single[0], **FLOAT32)


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("side", ["right", "left"])
def test_sentence_is_decoded_by_itself_as_in_a_batch(family: str, side: str) -> None:
    model = FAMILY[family]()
    settings: dict[str, Any] = {"length_beam_size": 4, "num_iterations": 3 if family == "cmlm" else 1}
    tokens, mask = padded_batch([3, 9, 1, 5], side)
    together = model.generate(tokens, attention_mask=mask, **settings)
    for row in range(4):
        single = model.generate(tokens[row, mask[row].bool()][None], **settings)[0].tolist()
        assert together[row].tolist()[: len(single)] == single
        assert set(together[row].tolist()[len(single) :]) <= {1}


@pytest.mark.parametrize("family", FAMILY)
def test_eager_and_sdpa_agree(family: str) -> None:
    batch = source_batch([3, 7]) | {"labels": targets(5, 1)}
    first, second = (FAMILY[family](attn_implementation=name)(**batch) for name in ("eager", "sdpa"))
    torch.testing.assert_close(first.logits, second.logits, **FLOAT32)
    torch.testing.assert_close(first.loss, second.loss, **FLOAT32)


@pytest.mark.parametrize("family", FAMILY)
def test_every_output_depends_on_every_real_input(family: str) -> None:
    """No output depends on padding, and each on all source words and all positions of the target."""
    model = FAMILY[family]().double()
    source = torch.randn(1, 4, 32, dtype=torch.float64, requires_grad=True)
    target = torch.randn(1, 5, 32, dtype=torch.float64, requires_grad=True)
    masks = {"attention_mask": torch.tensor([[1, 1, 1, 0]]), "decoder_attention_mask": canvas(torch.tensor([4]), 5)}
    logits = model(inputs_embeds=source, decoder_inputs_embeds=target, **masks).logits
    for position in range(4):
        gradients = torch.autograd.grad(logits[0, position].pow(2).sum(), (source, target), retain_graph=True)
        assert [bool(row.abs().sum() > 0) for row in gradients[0][0]] == [True, True, True, False]
        assert [bool(row.abs().sum() > 0) for row in gradients[1][0]] == [True] * 4 + [False]


@pytest.mark.parametrize("family", FAMILY)
def test_evaluation_loss_is_the_plain_negative_log_likelihood(family: str) -> None:
    """Tokens and lengths by loops over the logits, both over the number of target tokens."""
    model = FAMILY[family](length_loss_weight=0.5)
    tokens, mask = padded_batch([3, 7, 2], "right")
    labels = targets(5, 1, 4)
    outputs = model(input_ids=tokens, attention_mask=mask, labels=labels)
    log_probs = outputs.logits.log_softmax(-1)
    summed = sum(-log_probs[row, i, labels[row, i]] for row, m in enumerate((5, 1, 4)) for i in range(m))
    source = model.read_source(outputs.encoder_last_hidden_state, mask)
    lengths = torch.tensor([5, 1, 4])
    classes = lengths if family == "cmlm" else lengths - mask.sum(1) + 20
    length = sum(-source.length_logits.log_softmax(-1)[row, classes[row]] for row in range(3))
    torch.testing.assert_close(outputs.token_loss, summed / 10, **FLOAT32)
    torch.testing.assert_close(outputs.length_loss, length / 10, **FLOAT32)
    torch.testing.assert_close(outputs.loss, (summed + 0.5 * length) / 10, **FLOAT32)


def test_label_smoothing_applies_in_training_only() -> None:
    model, labels, source = tiny_nat(dropout=0.0), targets(5, 4), random_tokens(2, 6)
    plain = model(input_ids=source, labels=labels).token_loss
    smoothed = model.train()(input_ids=source, labels=labels, skip_logits=False)
    expected = torch.nn.functional.cross_entropy(smoothed.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(smoothed.token_loss, expected, **FLOAT32)
    assert float((plain - smoothed.token_loss).detach().abs()) > 1e-3


@pytest.mark.parametrize("family", FAMILY)
def test_two_half_batches_give_the_gradient_of_the_batch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sum is divided by `num_items_in_batch`; random choices come with the batch, a CMLM's from the collator."""
    monkeypatch.setattr(latent, "gumbel_noise", torch.zeros_like)
    model = FAMILY[family](dropout=0.0, **({"latent_dropout": 0.0} if family == "iterative_vae" else {})).train()
    source, labels = random_tokens(4, 6), targets(5, 2, 7, 3)
    batch: dict[str, Any] = {"labels": labels}
    if family == "cmlm":
        batch = MaskingCollator(lambda features: {"labels": labels}, MASK, 1)([])
    if family == "flowseq":
        batch |= {"word_draws": torch.rand(4, 7), "latent_noise": torch.randn(4, 7, 32)}
    items = int(batch["labels"].ne(-100).sum())

    def gradient(parts: list[slice]) -> list[torch.Tensor]:
        model.zero_grad()
        for part in parts:
            inputs = {name: value[part] for name, value in batch.items()}
            model(input_ids=source[part], **inputs, num_items_in_batch=items).loss.backward()
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    complete, halves = gradient([slice(0, 4)]), gradient([slice(0, 2), slice(2, 4)])
    for expected, half in zip(complete, halves, strict=True):
        torch.testing.assert_close(half, expected, **FLOAT32)


@pytest.mark.parametrize("family", FAMILY)
def test_every_parameter_learns(family: str) -> None:
    model = FAMILY[family]().train()
    model(input_ids=random_tokens(3, 6), labels=targets(5, 2, 7)).loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("family", FAMILY)
def test_labels_without_a_token_have_no_loss(family: str) -> None:
    outputs = FAMILY[family]().train()(input_ids=random_tokens(2, 6), labels=torch.full((2, 3), -100))
    assert float(outputs.loss.detach()) == 0
    outputs.loss.backward()


@pytest.mark.parametrize("family", FAMILY)
def test_left_padded_labels_are_an_error(family: str) -> None:
    labels = targets(5, 2).flip(1)
    with pytest.raises(ValueError, match=r"^labels: .* row 1 .* Pad targets on the right\.$"):
        FAMILY[family]()(input_ids=random_tokens(2, 6), labels=labels)


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"labels": torch.zeros(2, 0, dtype=torch.long)}, r"labels: no token ids; got shape \(2, 0\) of torch.int64"),
        (
            {"attention_mask": torch.ones(2, 1, 6, 6)},
            r"attention_mask: .* got shape \(2, 1, 6, 6\), expected \(2, 6\), ",
        ),
        ({"labels": torch.tensor([[5, 2], [6, 2], [7, 2]])}, "The target has 3 rows and the source 2; "),
        ({"decoder_attention_mask": torch.ones(1, 3)}, "The target has 1 rows and the source 2; "),
        ({"attention_mask": torch.ones(1, 6)}, r"attention_mask: .* got shape \(1, 6\), expected \(2, 6\), "),
    ],
    ids=str,
)
def test_target_or_mask_that_does_not_fit_the_source_is_an_error(
    family: str, inputs: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as error:
        FAMILY[family]()(input_ids=random_tokens(2, 6), **inputs)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_half_precision_is_finite_and_close(family: str, dtype: torch.dtype, implementation: str) -> None:
    """The batch has m = 1 and padding, in half and mixed precision; bfloat16 has 8 bits, and logits are below 4."""
    model = FAMILY[family](attn_implementation=implementation, dropout=0.0)
    tokens, mask = padded_batch([3, 7], "left")
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": targets(1, 6)}
    expected = model(**batch)
    with torch.autocast("cpu", dtype=dtype):
        outputs = model.train()(**batch, skip_logits=False)
        assert outputs.loss.dtype == torch.float32
        outputs.loss.backward()
        plain = model.eval()(**batch)
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
    torch.testing.assert_close(plain.loss.float(), expected.loss, rtol=0.05, atol=0.05)
    half = model.to(dtype)(**batch)
    assert bool(half.logits.isfinite().all())
    torch.testing.assert_close(half.loss.float(), expected.loss, rtol=0.05, atol=0.05)
    assert model.generate(tokens, attention_mask=mask, length_beam_size=2).shape[0] == 2


@pytest.mark.parametrize("family", FAMILY)
def test_learned_positions_bound_the_predicted_length(family: str) -> None:
    model = FAMILY[family](position_embedding="learned", max_position_embeddings=6)
    generated = model.generate(random_tokens(8, 6), length_beam_size=5)
    assert generated.shape[1] <= 7


def test_encoder_outputs_replace_the_source() -> None:
    for make in FAMILY.values():
        model, (tokens, mask) = make(), padded_batch([4, 6], "right")
        encoded = model.get_encoder()(tokens, mask)
        assert torch.equal(encoded.last_hidden_state, model.encode(tokens, mask).last_hidden_state)
        labels = targets(4, 2)
        expected = model(input_ids=tokens, attention_mask=mask, labels=labels)
        assert torch.equal(model(encoder_outputs=encoded, attention_mask=mask, labels=labels).loss, expected.loss)
        as_tuple = model(encoder_outputs=encoded.to_tuple(), attention_mask=mask, labels=labels, return_dict=False)
        assert torch.equal(as_tuple[0], expected.loss)
        by_config = make(return_dict=False)
        assert torch.equal(by_config(input_ids=tokens, attention_mask=mask, labels=labels)[0], expected.loss)
        assert torch.equal(
            model.generate(encoder_outputs=encoded, attention_mask=mask), model.generate(tokens, attention_mask=mask)
        )


def test_seq2seq_collator_adds_no_shifted_targets() -> None:
    for make in FAMILY.values():
        assert not hasattr(make(), "prepare_decoder_input_ids_from_labels")


@pytest.mark.parametrize("side", ["right", "left"])
def test_source_without_any_token_gives_finite_numbers(side: str) -> None:
    """A source without any token counts in full length, and gives finite numbers."""
    tokens, mask = padded_batch([3, 5], side)
    mask[0] = 0
    outputs = tiny_nat()(input_ids=tokens, attention_mask=mask, labels=random_tokens(2, 4))
    assert bool(outputs.logits.isfinite().all())


@pytest.mark.parametrize("family", FAMILY)
def test_attentions_of_the_decoder_are_the_weights_of_every_layer(family: str) -> None:
    model, source = FAMILY[family](attn_implementation="eager"), random_tokens(2, 6)
    outputs = model(input_ids=source, labels=targets(5, 3), output_attentions=True)
    for layers, keys in ((outputs.decoder_attentions, 5), (outputs.cross_attentions, 6)):
        assert [weights.shape for weights in layers] == [(2, 4, 5, keys)] * 2
