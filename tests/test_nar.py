"""Every non-autoregressive family: forward pass, `generate()` against plain Python, the Trainer, prepared copies.

B batch, S source, T target.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from tests.batches import END, FLOAT32, MASK, padded_batch, random_tokens, source_batch, targets
from tests.models import (
    EVERY_FAMILY,
    FAMILY,
    LENGTH_FAMILY,
    PAIRS,
    TINY,
    family_of_pairs,
    tiny_cmlm,
    tiny_ctc,
    tiny_model,
    tiny_nat,
    with_normal_weights,
)
from vaswani_transformer import (
    MaskingCollator,
    VaswaniCmlmConfig,
    VaswaniFlowSeqConfig,
    VaswaniIterativeVaeConfig,
    VaswaniNatConfig,
    prepare_for_inference,
)
from vaswani_transformer.nar_decoder import argmax, canvas
from vaswani_transformer.settings import TOKEN_IDS, NarSettings, default_settings


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (VaswaniNatConfig, {"min_length_difference": 1}, "must enclose 0"),
        (VaswaniNatConfig, {"max_length_difference": -1}, "must enclose 0"),
        (VaswaniCmlmConfig, {}, r"mask_token_id, pad_token_id: .*add_special_tokens"),
        (VaswaniCmlmConfig, {"mask_token_id": 99}, "outside the vocabulary"),
        (VaswaniIterativeVaeConfig, {"kl_weights": [1.0, 2.0]}, r"kl_weights .* must be 1 finite"),
        (VaswaniIterativeVaeConfig, {"kl_weights": [float("nan")]}, "kl_weights"),
        (VaswaniFlowSeqConfig, {"d_model": 36}, r"d_model \(36\) must be divisible by 8: .* and 4 heads"),
        (VaswaniCmlmConfig, {"attention_window": 3}, r"attention_window'(.|\n)*3 is not supported by non-auto"),
    ],
    ids=str,
)
def test_bad_field_is_an_error_that_names_it(config: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        AutoModelForSeq2SeqLM.from_config(config(**{**TINY, **fields}))


@pytest.mark.parametrize("family", ["nat", "iterative_vae", "flowseq"])
def test_decoder_whose_masks_flash_attention_lacks_is_not_given_it(family: str) -> None:
    model = FAMILY[family]()
    for part in (model, model.model, model.model.decoder):
        with pytest.raises(ValueError, match=f"{type(part).__name__} does not support Flash Attention"):
            part.set_attn_implementation("flash_attention_2")


@pytest.mark.parametrize(("side", "implementation"), [("left", "eager"), ("right", "sdpa"), ("left", "sdpa")])
@pytest.mark.parametrize("family", FAMILY)
def test_sentence_is_decoded_by_itself_as_in_a_batch(family: str, side: str, implementation: str) -> None:
    model = FAMILY[family](attn_implementation=implementation).double()
    number = 4 if family in LENGTH_FAMILY else 1
    settings: dict[str, Any] = {"length_beam_size": number, "num_iterations": 3 if family == "cmlm" else 1}
    settings |= {"num_return_sequences": number, "return_dict_in_generate": True}
    tokens, mask = padded_batch([3, 9, 1, 5], side)
    together = model.generate(tokens, attention_mask=mask, **settings)
    for row in range(4):
        single = model.generate(tokens[row, mask[row].bool()][None], **settings)
        rows, width = slice(number * row, number * (row + 1)), single.sequences.shape[1]
        assert torch.equal(together.sequences[rows, :width], single.sequences)
        assert bool((together.sequences[rows, width:] == 1).all())
        torch.testing.assert_close(together.token_scores[rows, : width - 1], single.token_scores, **FLOAT32)
        torch.testing.assert_close(together.sequences_scores[rows], single.sequences_scores, **FLOAT32)


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


@pytest.mark.parametrize("family", LENGTH_FAMILY)
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
def test_two_half_batches_give_the_gradient_of_the_batch(family: str) -> None:
    """Every sum is divided by `num_items_in_batch`; random choices come with the batch, a CMLM's from the collator."""
    model = FAMILY[family](dropout=0.0, **({"latent_dropout": 0.0} if family == "iterative_vae" else {})).train()
    source, labels = random_tokens(4, 6), targets(5, 2, 7, 3)
    batch: dict[str, Any] = {"labels": labels}
    if family == "cmlm":
        batch = MaskingCollator(lambda features: {"labels": labels}, MASK, 1)([])
    if family == "iterative_vae":
        batch |= {"reveal_draws": torch.rand(4, 7)}
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
    torch.testing.assert_close(halves, complete, **FLOAT32)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("family", "fields"), [*((name, {}) for name in EVERY_FAMILY), ("iterative_vae", {"latent": "discrete"})], ids=str
)
def test_count_of_items_of_a_data_parallel_trainer_gives_scalars(
    family: str, fields: dict[str, Any], training: bool
) -> None:
    """Transformers' Trainer passes it in the shape (1, 1) if it uses `torch.nn.DataParallel`."""
    model = EVERY_FAMILY[family](**fields).train(training)
    batch: dict[str, Any] = {"input_ids": random_tokens(2, 6), "labels": targets(5, 2)}
    losses = []
    for items in (torch.tensor(9), torch.tensor([[9]])):
        torch.manual_seed(1)
        losses.append(model(**batch, num_items_in_batch=items).loss)
    assert losses[1].shape == ()
    torch.testing.assert_close(losses[1], losses[0])


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
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"labels": torch.tensor([[5, 6, 2]])},
            "decoder_input_ids: rows do not match the source; got 1 for 2 source rows",
        ),
        ({"labels": torch.zeros(2, 0, dtype=torch.long)}, r"labels: not token ids; got shape \(2, 0\) of torch.int64"),
        ({"labels": torch.tensor([[5, 2], [-100, 2]])}, r"labels: .* row 1 with a token after padding\. Pad"),
        (
            {"decoder_inputs_embeds": torch.ones(1, 3, 32)},
            "decoder_input_ids: rows do not match the source; got 1 for 2 source rows",
        ),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"attention_mask: .* got shape \(2, 1, 6, 6\), expected \(2, 6\)"),
    ],
    ids=str,
)
def test_target_or_mask_that_does_not_fit_the_source_is_an_error(
    family: str, inputs: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as error:
        FAMILY[family]()(input_ids=random_tokens(2, 6), **inputs)
    assert "\n" not in str(error.value)


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Return the norm of the error relative to that of `expected`."""
    return float((logits - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILY)
def test_half_precision_is_finite_and_close(family: str, dtype: torch.dtype) -> None:
    """The batch has m = 1 and padding, in half and mixed precision.

    A rounding is off by up to eps / 2, and tens of them in a row by a few eps. A gradient near 0 is a difference of
    larger ones, so its error is measured by the largest gradient too.
    """
    bound = 32 * torch.finfo(dtype).eps
    model = FAMILY[family](dropout=0.0, activation_function="gelu")  # relu has corners
    tokens, mask = padded_batch([3, 7], "left")
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": targets(1, 6)}
    expected = model(**batch)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)  # the same masks and latents each time
        loss = model.train()(**batch).loss
        assert loss.dtype == torch.float32
        loss.backward()
        return [weight.grad for weight in model.parameters()]

    exact = gradients()
    with torch.autocast("cpu", dtype=dtype):
        mixed = gradients()
        plain = model.eval()(**batch)
    largest = max(float(gradient.norm()) for gradient in exact)
    for gradient, other in zip(mixed, exact, strict=True):
        assert float((gradient - other).norm()) < bound * (float(other.norm()) + 1e-3 * largest)
    half = model.to(dtype)(**batch)
    for outputs in (plain, half):
        torch.testing.assert_close(outputs.loss.float(), expected.loss, rtol=0.05, atol=0.05)
        if family != "iterative_vae":  # its layers may commit other words
            assert relative_error(outputs.logits, expected.logits) < bound
    assert model.generate(tokens, attention_mask=mask).shape[0] == 2


@pytest.mark.parametrize("family", LENGTH_FAMILY)
def test_learned_positions_bound_the_predicted_length(family: str) -> None:
    model, source = FAMILY[family](position_embedding="learned", max_position_embeddings=6), random_tokens(8, 6)
    generated = model.generate(source, length_beam_size=5)
    assert generated.shape[1] <= 7
    assert model(input_ids=source).logits.shape[1] == model.generate(source).shape[1] - 1


@pytest.mark.parametrize("family", LENGTH_FAMILY)
def test_target_has_the_length_of_its_embeddings_or_else_the_most_likely_one(family: str) -> None:
    model, source = FAMILY[family](), random_tokens(2, 6)
    generated: Any = model.generate(source, length_beam_size=1, return_dict_in_generate=True)
    assert model(input_ids=source).logits.shape[1] == generated.lengths.max()
    assert model(input_ids=source, decoder_inputs_embeds=torch.randn(2, 3, 32)).logits.shape[1] == 3


@pytest.mark.parametrize("family", FAMILY)
def test_encoder_outputs_replace_the_source(family: str) -> None:
    model, batch = FAMILY[family](), source_batch([4, 6], labels=targets(4, 2))
    tokens, mask = batch.pop("input_ids"), batch["attention_mask"]
    encoded, expected = model.get_encoder()(tokens, mask), model(input_ids=tokens, **batch).loss
    assert torch.equal(model(encoder_outputs=encoded, **batch).loss, expected)
    assert torch.equal(model(encoder_outputs=encoded.to_tuple(), **batch, return_dict=False)[0], expected)
    torch.testing.assert_close(FAMILY[family](return_dict=False)(input_ids=tokens, **batch)[0], expected)
    assert torch.equal(model.generate(encoder_outputs=encoded, **batch), model.generate(tokens, attention_mask=mask))


@pytest.mark.parametrize("family", FAMILY)
def test_seq2seq_collator_adds_no_shifted_targets(family: str) -> None:
    assert not hasattr(FAMILY[family](), "prepare_decoder_input_ids_from_labels")


@pytest.mark.parametrize("side", ["right", "left"])
def test_source_without_any_token_gives_finite_numbers(side: str) -> None:
    """A source without any token counts in full length, and gives finite numbers."""
    tokens, mask = padded_batch([3, 5], side)
    mask[0] = 0
    outputs = tiny_nat()(input_ids=tokens, attention_mask=mask, labels=random_tokens(2, 4))
    assert bool(outputs.logits.isfinite().all())


BANNED = {0, 1, END, MASK}


def best_words(logits: Tensor, length: int) -> tuple[list[int], list[float]]:
    """Return the most likely words of logits (T, V), with the end last, and their log-probabilities."""
    log_probs = logits.log_softmax(-1).tolist()
    words = [
        END if i == length - 1 else max((v for v in range(len(row)) if v not in BANNED), key=row.__getitem__)
        for i, row in enumerate(log_probs[:length])
    ]
    return words, [log_probs[i][word] for i, word in enumerate(words)]


def mask_predict(model: Any, source: Tensor, length: int, rounds: int) -> tuple[list[list[int]], list[float]]:
    """Return the words after each iteration of Mask-Predict on one sentence, and the last log-probabilities."""
    words, scores, history = [MASK] * length, [0.0] * length, []
    for t in range(rounds):
        count = max(1, length * (rounds - t) // rounds) if t else length
        masked = sorted(range(length), key=lambda i: (scores[i], i))[:count] if t else list(range(length))
        for i in masked:
            words[i] = MASK
        logits = model(input_ids=source, decoder_input_ids=torch.tensor([words])).logits[0]
        new, new_scores = best_words(logits, length)
        for i in masked:
            words[i], scores[i] = new[i], new_scores[i]
        history.append(list(words))
    return history, scores


@torch.no_grad()
@pytest.mark.parametrize("seed", range(15))
def test_mask_predict_equals_plain_python(seed: int) -> None:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 12, "d_model": 8, "num_heads": 2, "d_ff": 8, "max_target_length": 9}
    model: Any = tiny_cmlm(**sizes, encoder_layers=1, decoder_layers=1).double()  # such weights amplify rounding
    for weight in model.parameters():
        weight.data.normal_()  # sharper than at the start of training, so that iterations change words
    tokens, mask = padded_batch([4, 2], "left")
    tokens = tokens.clamp(max=11)
    rounds, lengths = seed % 5 + 1, seed % 3 + 1
    settings: dict[str, Any] = {"num_iterations": rounds, "length_beam_size": lengths, "return_history": True}
    generated = model.generate(tokens, attention_mask=mask, **settings, return_dict_in_generate=True)
    for row in range(2):
        source = tokens[row, mask[row].bool()][None]
        logits = model.read_source(model.encode(source).last_hidden_state, None).length_logits[0]
        candidates = logits.argsort(descending=True)[:lengths].tolist()
        results = [(*mask_predict(model, source, m, rounds), m) for m in candidates]
        log_lengths = logits.log_softmax(0).tolist()
        ranks = [(sum(scores) + log_lengths[m]) / m for _, scores, m in results]
        history, scores, m = results[ranks.index(max(ranks))]
        padding = int(generated.lengths.max()) - m
        assert generated.sequences[row].tolist() == [0, *history[-1], *[1] * padding]
        assert [step[row, 1 : m + 1].tolist() for step in generated.history] == history
        assert generated.lengths[row] == m
        expected = torch.tensor([*scores, *[0.0] * padding], dtype=torch.float64)
        torch.testing.assert_close(generated.token_scores[row], expected, rtol=1e-9, atol=1e-9)
        assert generated.sequences_scores[row].item() == pytest.approx(max(ranks), rel=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"length_weight": 0}, {"length_penalty": 0.4, "length_weight": 2.5}], ids=str)
def test_nat_finds_the_best_length_of_all(settings: dict[str, float]) -> None:
    """The oracle computes each length of every sentence separately, by forward, and ranks them by the rule."""
    model: Any = tiny_nat(min_length_difference=-3, max_length_difference=4).double()
    source = random_tokens(4, 5)
    model.config.mask_token_id = MASK  # NAT has no such token, but the reference bans it
    for weight in model.length_difference.parameters():
        weight.data.mul_(8)  # lengths that matter
    generated: Any = model.generate(source, length_beam_size=8, return_dict_in_generate=True, **settings)
    alpha, weight = (settings.get(name, 1.0) for name in ("length_penalty", "length_weight"))
    log_lengths = model.read_source(model.encode(source)[0], None).length_logits.log_softmax(-1)  # (B, 8)
    for row in range(4):
        results = []
        for m in range(2, 10):
            logits = model(input_ids=source[row][None], decoder_attention_mask=torch.ones(1, m)).logits[0]
            words, scores = best_words(logits, m)
            results.append(((sum(scores) + weight * float(log_lengths[row, m - 2])) / m**alpha, words))
        score, words = max(results)
        assert generated.sequences[row, 1 : len(words) + 1].tolist() == words
        assert generated.sequences_scores[row].item() == pytest.approx(score)


@pytest.mark.parametrize("family", LENGTH_FAMILY)
def test_several_targets_of_a_source_come_best_first(family: str) -> None:
    model, source = FAMILY[family](), random_tokens(3, 5)
    settings: dict[str, Any] = {"length_beam_size": 5, "return_dict_in_generate": True}
    scores = model.generate(source, num_return_sequences=5, **settings).sequences_scores.view(3, 5)
    assert torch.equal(scores, scores.sort(dim=1, descending=True).values)
    assert torch.equal(model.generate(source, **settings).sequences_scores, scores[:, 0])


LONG_PATHS: dict[str, Any] = {"decoding_strategy": "viterbi", "length_penalty": 9.0}


@pytest.mark.parametrize(
    ("family", "fields", "search"),
    [
        *((family, {}, {}) for family in FAMILY if family not in ("cmlm", "dag")),
        ("cmlm", {}, {"num_iterations": 3}),
        ("dag", {}, LONG_PATHS),
        ("iterative_vae", {"latent": "discrete"}, {}),
        ("ctc", {}, {"num_beams": 3}),
    ],
    ids=str,
)
def test_suppressed_tokens_are_never_predicted(family: str, fields: dict[str, Any], search: dict[str, Any]) -> None:
    model, source = FAMILY[family](**fields), random_tokens(4, 9)
    plain = model.generate(source, **search)
    words = sorted(set(plain.flatten().tolist()) - BANNED)
    assert words
    generated = model.generate(source, suppress_tokens=words, **search)
    assert not set(words) & set(generated.flatten().tolist())


def long_target_model(family: str) -> Any:
    """Return a model whose targets have 30 tokens or more without a limit; the autoregressive one never ends."""
    if family == "nat":
        model = tiny_nat(max_length_difference=40)
        model.length_difference.proj.bias.data = 1e4 * torch.arange(61.0)  # the longer, the likelier
    elif family == "cmlm":
        model = tiny_cmlm(max_target_length=40)
        model.length_token.weight.data[1:] = torch.arange(1.0, 41)[:, None] * model.length_token.weight.data[40]
    else:
        model = tiny_model(tie_word_embeddings=False)
        model.lm_head.weight.data[END] = -10 * model.lm_head.weight.data.abs().max()
    return model


RELATIVE = {"max_source_relative_length": 10}
NONE_GIVEN: dict[str, Any] = {}


@pytest.mark.parametrize("family", ["autoregressive", "nat", "cmlm"])
@pytest.mark.parametrize(
    ("saved", "call", "tokens"),
    [
        ({"max_new_tokens": 5}, NONE_GIVEN, 5),
        ({"max_length": 6}, NONE_GIVEN, 5),
        ({"max_new_tokens": 5}, {"max_length": 9}, 5),  # Transformers takes the first of the two
        ({"max_length": 6}, {"max_new_tokens": 8}, 8),
        ({"max_length": 6}, {"max_length": 20}, 19),
        (RELATIVE, NONE_GIVEN, 15),
        (RELATIVE, {"max_new_tokens": 18}, 18),
        (RELATIVE | {"max_new_tokens": 5}, NONE_GIVEN, 5),
        (RELATIVE | {"max_length": 6}, NONE_GIVEN, 15),
        ({"max_length": 6}, {"generation_config": GenerationConfig(max_length=4)}, 3),
    ],
    ids=str,
)
def test_saved_limits_and_those_of_the_call_hold_alike_in_every_family(
    family: str, saved: dict[str, Any], call: dict[str, Any], tokens: int
) -> None:
    model = long_target_model(family)
    model.generation_config = model.config.make_generation_config(**saved)
    assert model.generate(random_tokens(2, 5), **call).shape[1] == tokens + 1


@pytest.mark.parametrize("family", ["nat", "cmlm"])
def test_defaults_that_a_trainer_saves_shorten_no_target(family: str) -> None:
    """Seq2SeqTrainer writes them into the model's generation config after an evaluation: a max_length of 20."""
    model, source = long_target_model(family), random_tokens(2, 5)
    expected = model.generate(source)
    defaults = GenerationConfig._get_default_generation_params()
    assert expected.shape[1] > defaults["max_length"] == 20
    model.generation_config.update(**defaults, defaults_only=True)
    assert torch.equal(model.generate(source), expected)


def model_of_different_words(source: Tensor, mask: Tensor) -> Any:
    """Return a CTC model that predicts a different word at each slot: the states, of equal norms, are their vectors."""
    model = tiny_ctc(tie_word_embeddings=False)
    encoded = model.read_source(model.encode(source, mask).last_hidden_state, mask)
    slots = model.slot_mask(encoded)
    states = model.slot_states(encoded, slots)[slots.bool()]
    model.lm_head.weight.data[4 : 4 + len(states)] = states
    return model


@pytest.mark.parametrize(
    ("family", "search"),
    [
        *((family, {}) for family in FAMILY if family != "dag"),
        ("ctc", {"num_beams": 3}),
        ("dag", LONG_PATHS),
    ],
    ids=str,
)
def test_source_relative_length_bounds_each_target_by_its_own_source(family: str, search: dict[str, Any]) -> None:
    model, (source, mask) = FAMILY[family](), padded_batch([9, 3, 5], "right")
    if family == "ctc":
        model = model_of_different_words(source, mask)
    elif family == "dag":
        model = with_normal_weights(model, 0)
    elif family != "cmlm":  # predicts more tokens than two of the sources have
        model.length_difference.proj.bias.data = 1e4 * torch.arange(41.0)
    call: dict[str, Any] = {"attention_mask": mask, "return_dict_in_generate": True, **search}
    free = model.generate(source, **call).lengths
    expected = torch.minimum(free, mask.sum(1) + 1)
    assert (expected < free).sum() >= 2
    assert torch.equal(model.generate(source, max_source_relative_length=1, **call).lengths, expected)
    model.generation_config.max_source_relative_length = 1
    assert torch.equal(model.generate(source, **call).lengths, expected)
    assert torch.equal(model.generate(source, max_source_relative_length=None, **call).lengths, free)


def test_settings_are_saved_and_overridden(tmp_path: Path) -> None:
    model, source = tiny_cmlm(), random_tokens(3, 5)
    model.use_mask_predict(4, length_beam_size=3)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert (again.generation_config.num_iterations, again.generation_config.length_beam_size) == (4, 3)
    call: dict[str, Any] = {"return_dict_in_generate": True, "return_history": True}
    config = GenerationConfig(num_iterations=3)
    histories = [again.generate(source, *given, **call).history for given in ((), (config,))]
    histories += [again.generate(source, *given, num_iterations=2, **call).history for given in ((), (config,))]
    assert [len(history) for history in histories] == [4, 3, 2, 2]


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_setting_made_on_the_models_generation_config_is_saved(family: str, tmp_path: Path) -> None:
    model = EVERY_FAMILY[family]()
    model.generation_config.update(allow_custom_entries=True, max_source_relative_length=3)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert again.generation_config.max_source_relative_length == 3


@pytest.mark.parametrize(
    ("family", "search"), [("nat", {"length_beam_size": 5}), ("cmlm", {}), ("dag", {"decoding_strategy": "viterbi"})]
)
def test_length_penalty_is_saved_without_beams(family: str, search: dict[str, Any], tmp_path: Path) -> None:
    """Transformers would refuse it, also after a change of a loaded one."""
    model = EVERY_FAMILY[family]()
    for penalty in (1.5, 0.5):
        model.generation_config = model.config.make_generation_config(**search, length_penalty=penalty)
        model.save_pretrained(tmp_path)
        model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        assert model.generation_config.length_penalty == penalty
        model.generation_config.length_penalty = penalty + 1
        model.save_pretrained(tmp_path)
        assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generation_config.length_penalty == penalty + 1
    model.generation_config.temperature = 0.5
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("family", FAMILY)
def test_generate_accepts_a_complete_batch_of_a_trainer(family: str) -> None:
    model, source = FAMILY[family](), random_tokens(3, 5)
    expected = model.generate(source)
    extra: dict[str, Any] = {
        "labels": targets(4, 2, 3),
        "decoder_input_ids": random_tokens(3, 4),
        "target_lengths": torch.ones(3),
    }
    assert torch.equal(model.generate(input_ids=source, synced_gpus=True, **extra), expected)


def test_iterations_encode_once_and_project_the_source_once() -> None:
    model, calls, layer = tiny_cmlm(), Counter(), "decoder.layers.0"
    for name in ("encoder", "decoder", f"{layer}.cross_attn.k_proj", f"{layer}.self_attn.k_proj"):
        model.model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update([name]))
    model.generate(random_tokens(3, 5), num_iterations=4, length_beam_size=3)
    assert calls == {"encoder": 1, "decoder": 4, f"{layer}.cross_attn.k_proj": 1, f"{layer}.self_attn.k_proj": 4}


def test_every_setting_of_a_search_from_left_to_right_must_have_its_default() -> None:
    model: Any = tiny_nat()
    known = {*vars(NarSettings()), *TOKEN_IDS, "transformers_version"} - {"do_sample", "num_beams"}
    refused = {name: value for name, value in default_settings().items() if name not in known and name[0] != "_"}
    assert {"num_beams", "length_penalty_type", "early_stopping", "do_sample", "top_k", "max_time"} <= refused.keys()
    for name, default in refused.items():
        rule = f"{name}: not supported by {type(model).__name__}; got 'x', expected {default!r}. Leave it out, or set"
        with pytest.raises(ValueError, match=f"^{re.escape(rule)}"):
            model.generate(random_tokens(2, 5), **{name: "x"})


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("nat", {"max_source_relative_length": -1}, "got -1, expected a whole number of at least 0"),
        ("nat", {"length_beam_size": 42}, "got 42, expected at most 41, the model's length classes"),
        ("cmlm", {"num_return_sequences": 2}, "got 2, expected at most 1, length_beam_size times num_latent_samples"),
        ("nat", {"length_penalty": float("inf")}, r"got inf, expected a finite number\. Leave"),
        ("flowseq", {"latent_temperature": -1}, "got -1, expected a finite number of at least 0.0"),
        ("flowseq", {"num_latent_samples": 3}, "got 3, expected at most 1, since at latent_temperature 0"),
        ("iterative_vae", {"return_history": "no"}, "got 'no', expected True or False"),
        ("ctc", {"return_dict_in_generate": 1.5}, r"got 1\.5, expected True or False"),
        ("nat", {"suppress_tokens": [99]}, r"got \[99\], expected ids from 0 to 98"),
        ("iterative_vae", {"latent_temperature": 0.5}, r"not supported by .*; got 0\.5, expected 0\.0"),
        ("nat", {"num_iterations": 2}, "not supported by .*; got 2, expected 1"),
        ("nat", {"generation_config": GenerationConfig(num_iteration=4)}, "not supported by .*; got 4, expected None"),
        ("nat", {"logits_processor": [print]}, "not supported by .*, expected None"),
        ("nat", {"input_ids": torch.zeros(2, 5)}, "the same argument as inputs, .*, expected None"),
        ("cmlm", {"pad_token_id": 5}, r"not supported by .*; got \[5\], expected \[1\]"),
    ],
    ids=str,
)
def test_argument_out_of_its_range_or_of_another_family_is_an_error(
    family: str, settings: dict[str, Any], message: str
) -> None:
    [name] = settings
    name = "num_iteration" if name == "generation_config" else name
    with pytest.raises(ValueError, match=f"^{name}: .*{message}.* set it to None in the generation config"):
        FAMILY[family]().generate(random_tokens(2, 5), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1, "do_sample": False, "logits_processor": [], "top_k": 50, "length_penalty_type": "power"},
        {"max_source_relative_length": 300},
        {"length_beam_size": np.int64(1), "num_return_sequences": np.int64(1), "max_new_tokens": np.int64(99)},
        {"output_scores": True, "repetition_penalty": 1, "num_beams": None},
        {"decoder_start_token_id": 0, "eos_token_id": [END]},  # the same tokens as those of the configuration
    ],
    ids=str,
)
def test_setting_without_an_effect_is_accepted(settings: dict[str, Any]) -> None:
    model: Any = tiny_nat()
    source = random_tokens(2, 5)
    assert torch.equal(model.generate(source, **settings), model.generate(source))


@pytest.mark.parametrize("size", [1, 127, 128, 129])
def test_argmax_is_the_first_of_equal_numbers_in_any_vocabulary(size: int) -> None:
    for logits in (torch.randn(50, size), torch.randint(0, 3, (50, size)).float(), torch.full((2, size), -torch.inf)):
        assert torch.equal(argmax(logits), logits.argmax(1))
        logits[:, size // 2] = torch.nan
        assert torch.equal(argmax(logits), logits.argmax(1))


def trainer_for(family: str, folder: Path, **settings: Any) -> Seq2SeqTrainer:
    model, tokenizer = family_of_pairs(family, d_model=64, d_ff=128, dropout=0.0)
    data: Any = [dict(tokenizer(source, text_target=target)) for source, target in PAIRS.items()]
    collator: Any = DataCollatorForSeq2Seq(tokenizer, model)
    if family == "cmlm":
        collator = MaskingCollator(collator, tokenizer.mask_token_id, tokenizer.pad_token_id)
    settings |= {"report_to": "none", "use_cpu": True, "save_strategy": "no", "learning_rate": 3e-3}
    arguments = Seq2SeqTrainingArguments(str(folder), per_device_train_batch_size=6, **settings)
    return Seq2SeqTrainer(model, arguments, collator, train_dataset=data, eval_dataset=data, processing_class=tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["nat", "cmlm"])
def test_stock_trainer_trains_and_generates(family: str, tmp_path: Path) -> None:
    """The model memorizes six pairs; the loss is over real tokens, or over those that the collator masks."""
    schedule = {"max_steps": 300, "lr_scheduler_type": "constant"}
    trainer: Any = trainer_for(family, tmp_path, predict_with_generate=True, **schedule)
    settings: dict[str, Any] = {"max_length": 40} | ({"num_iterations": 4} if family == "cmlm" else {})
    before = trainer.evaluate(**settings)["eval_loss"]
    trainer.train()
    tokens, _, metrics = trainer.predict(trainer.eval_dataset, **settings)
    assert metrics["test_loss"] < before / 4
    assert metrics["test_loss"] == trainer.evaluate(**settings)["eval_loss"]
    assert trainer.processing_class.batch_decode(tokens.clip(0), skip_special_tokens=True) == [*PAIRS.values()]


@pytest.mark.parametrize("family", FAMILY)
def test_trainer_that_computes_the_loss_itself_is_an_error(family: str, tmp_path: Path) -> None:
    for smoothing, compute_loss in ((0.1, None), (0.0, lambda *_, **__: 0)):
        trainer = trainer_for(family, tmp_path, max_steps=1, label_smoothing_factor=smoothing)
        trainer.compute_loss_func = compute_loss
        with pytest.raises(ValueError, match=r"^labels: .* config\.label_smoothing"):
            trainer.train()


@pytest.mark.parametrize("family", FAMILY)
def test_prepared_copy_gives_the_same_tokens(family: str) -> None:
    """In float32; the other two have 8 bits a number, and their logits, losses and scores stay near."""
    model, source = FAMILY[family]().requires_grad_(False), random_tokens(3, 6)
    for name, weight in model.named_parameters():
        if ".cross_attn." in name:
            weight *= 2  # so that without its scores the logits would be off by two fifths
    settings: dict[str, Any] = {
        "length_beam_size": 3 if family in LENGTH_FAMILY else 1,
        "num_iterations": 3 if family == "cmlm" else 1,
        "return_history": True,
    }
    batch: dict[str, Any] = {"input_ids": source, "labels": targets(5, 3, 4)}
    if family == "iterative_vae":  # the words of the labels, since its layers may commit other words
        batch |= {"has_hint": True, "reveal_draws": torch.rand(3, 5)}
    outputs = model(**batch)
    expected = model.generate(source, **settings, return_dict_in_generate=True)
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.05), ("int8", 0.05)):
        prepared = prepare_for_inference(model, dtype)
        own = prepared(**batch)
        torch.testing.assert_close(own.loss, outputs.loss, rtol=tolerance, atol=tolerance)
        assert relative_error(own.logits, outputs.logits) < (1e-4 if dtype == "float32" else 0.12)
        found: Any = prepared.generate(source, **settings, return_dict_in_generate=True)
        if dtype == "float32" or family != "iterative_vae":  # its layers may commit other words
            torch.testing.assert_close(
                found.sequences_scores, expected.sequences_scores, rtol=tolerance, atol=tolerance
            )
        assert dtype != "float32" or torch.equal(found.history, expected.history)


@pytest.mark.parametrize("family", LENGTH_FAMILY)
def test_targets_returned_have_the_most_likely_different_lengths_within_the_limit(family: str) -> None:
    """Sources of two tokens have lengths from 1 up, whatever their length differences."""
    model, source = FAMILY[family](), random_tokens(3, 2)
    logits = model.read_source(model.encode(source)[0], None).length_logits
    first = 0 if family == "cmlm" else 2 - 20
    settings: dict[str, Any] = {"length_beam_size": 5, "return_dict_in_generate": True}
    for count, limit in ((3, 6), (4, 4), (5, 9)):
        generated = model.generate(
            source, num_return_sequences=count, max_new_tokens=limit, **settings | {"length_beam_size": count}
        )
        for lengths, row in zip(generated.lengths.view(3, count).tolist(), logits.tolist(), strict=True):
            best = sorted(range(1, limit + 1), key=lambda m, row=row: -row[m - first])[:count]
            assert sorted(lengths) == sorted(best)
    few = model.generate(source, max_new_tokens=3, num_return_sequences=3, **settings)
    assert sorted(few.lengths[:3].tolist()) == [1, 2, 3]
    assert bool(few.sequences_scores.isfinite().all())
    with pytest.raises(ValueError, match=r"^num_return_sequences: .* got 4, expected at most 3, the candidates of the"):
        model.generate(source, max_new_tokens=3, num_return_sequences=4, **settings)


@pytest.mark.parametrize("family", [name for name in LENGTH_FAMILY if name != "cmlm"])
def test_limit_below_every_length_class_is_the_length(family: str) -> None:
    """The classes of sources of nine and eight tokens begin at lengths of seven and six."""
    model = FAMILY[family](min_length_difference=-2)
    batch = source_batch([9, 8])
    generated = model.generate(**batch, max_new_tokens=4, length_beam_size=3, return_dict_in_generate=True)
    assert generated.lengths.tolist() == [4, 4]
    assert generated.sequences[:, -1].tolist() == [END, END]


def test_samples_of_flowseq_share_the_different_lengths_within_the_limit() -> None:
    model, source = FAMILY["flowseq"](), random_tokens(3, 2)
    settings: dict[str, Any] = {"length_beam_size": 5, "latent_temperature": 0.5, "num_latent_samples": 2}
    generated = model.generate(
        source, max_new_tokens=3, num_return_sequences=6, return_dict_in_generate=True, **settings
    )
    assert [sorted(row) for row in generated.lengths.view(3, 6).tolist()] == [[1, 1, 2, 2, 3, 3]] * 3
