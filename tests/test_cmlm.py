"""CMLM: how masks are drawn and added, training and evaluation with them, the length token.

B batch, S source, T target.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.batches import FLOAT32, MASK, Batch, padded_batch, random_tokens, targets
from tests.models import tiny_cmlm, tiny_model
from vaswani_transformer import MaskingCollator
from vaswani_transformer.cmlm import mask_targets, sample_masks
from vaswani_transformer.nar_decoder import canvas


def test_masks_are_uniform_in_number_and_in_position() -> None:
    """Chi-square of k on 1..6 and of the masked position where k = 1; 20.5 is the 99.9th percentile of 5 degrees."""
    masks = sample_masks(canvas(torch.full((12000,), 6), 8).bool(), torch.Generator().manual_seed(1))
    assert not bool(masks[:, 6:].any())
    sizes = masks.sum(1)
    counts = torch.bincount(sizes, minlength=7)[1:].double()
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 20.5
    singles = masks[sizes == 1][:, :6].sum(0).double()
    assert float(((singles - singles.mean()) ** 2 / singles.mean()).sum()) < 20.5


@pytest.mark.parametrize("padding", [-100, 1])
def test_collator_masks_and_counts_exactly_and_draws_no_random_number_of_the_caller(padding: int) -> None:
    labels, state = targets(5, 3, 1), torch.get_rng_state()
    given = labels.where(labels != -100, padding)
    collator, again = (MaskingCollator(lambda _: {"labels": given.clone()}, MASK, 1, seed=3) for _ in range(2))
    for _ in range(20):
        batch = collator([])
        is_masked = batch["decoder_input_ids"].eq(MASK)
        assert torch.equal(is_masked, batch["labels"].ne(-100))
        assert torch.equal(batch["labels"][is_masked], labels[is_masked])
        shown = ~is_masked & labels.ne(-100)
        assert torch.equal(batch["decoder_input_ids"][shown], labels[shown])
        assert batch["target_lengths"].tolist() == [5, 3, 1]
        assert bool((is_masked.sum(1) > 0).all())
        assert torch.equal(again([])["labels"], batch["labels"])
    assert torch.equal(torch.get_rng_state(), state)


def mask_two_targets(_: Any) -> dict[str, torch.Tensor]:
    return {"labels": torch.full((2, 20), 7)}


def test_collator_seeds_its_masks_again_in_every_worker_whatever_its_own_process_has_drawn() -> None:
    collator = MaskingCollator(mask_two_targets, MASK, 1, seed=-3)
    drawn = [collator([])["labels"] for _ in range(2)]
    assert not torch.equal(*drawn)
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=2, collate_fn=collator)
    batches = [batch["labels"] for _ in range(2) for batch in loader]
    assert len({tuple(labels.flatten().tolist()) for labels in [*batches, *drawn]}) == 6


def masked_by_the_collator(labels: Tensor) -> Batch:
    return MaskingCollator(lambda _: {"labels": labels.clone()}, MASK, 1)([])


def test_cmlm_in_evaluation_masks_every_token_and_divides_by_it_whatever_a_trainer_masked_and_counted() -> None:
    model, source, labels = tiny_cmlm(), random_tokens(3, 6), targets(5, 3, 1)
    batch = masked_by_the_collator(labels)
    counted = batch["labels"].ne(-100).sum()
    assert int(counted) < 9
    plain = model(input_ids=source, labels=labels)
    assert torch.equal(plain.loss, model(input_ids=source, **batch).loss)
    canvas_only = model(input_ids=source, decoder_attention_mask=labels.ne(-100).long())
    assert torch.equal(plain.logits, canvas_only.logits)
    for processes in (1, 2):  # the count of a Trainer is that of all its processes
        masked = model(input_ids=source, **batch, num_items_in_batch=counted * processes)
        torch.testing.assert_close(masked.loss, plain.loss / processes, **FLOAT32)
    embeds, mask = model.model.decoder.embed_tokens(labels.clamp(min=0)), labels.ne(-100).long()
    embedded = model(source, labels=labels, decoder_inputs_embeds=embeds, decoder_attention_mask=mask)
    assert torch.equal(embedded.loss, plain.loss)


@pytest.mark.parametrize("is_training", [False, True])
def test_cmlm_without_mask_and_lengths_counts_no_padding(is_training: bool) -> None:
    model, labels = tiny_cmlm(dropout=0.0).train(is_training), targets(5, 3, 1)
    batch = masked_by_the_collator(labels) | {"input_ids": random_tokens(3, 6)}
    expected = model(**batch, skip_logits=False)
    del batch["target_lengths"]
    actual = model(**batch, skip_logits=False)
    assert torch.equal(actual.loss, expected.loss)
    assert torch.equal(actual.logits, expected.logits)


def test_word_that_a_cmlm_sees_and_learns_is_an_error() -> None:
    """Decoder inputs are shifted right, as for BART; evaluation masks every word."""
    model, labels = tiny_cmlm().train(), targets(5, 3)
    shifted = torch.nn.functional.pad(labels[:, :-1], (1, 0)).clamp(min=1)
    batch = {"input_ids": random_tokens(2, 6), "decoder_input_ids": shifted, "labels": labels}
    with pytest.raises(
        ValueError, match=r"^decoder_input_ids: a word with a label must be <mask>, .* MaskingCollator\.$"
    ):
        model(**batch)
    assert bool(model.eval()(**batch).loss.isfinite())


def test_cmlm_in_training_masks_plain_labels_and_divides_by_the_masked_tokens() -> None:
    model = tiny_cmlm(dropout=0.0, label_smoothing=0.0).train()
    source, labels = random_tokens(2, 6), targets(7, 5)
    torch.manual_seed(3)
    outputs = model(input_ids=source, labels=labels)
    torch.manual_seed(3)
    masked = mask_targets({"labels": labels}, sample_masks(labels.ne(-100)), MASK, 1)
    expected = model(input_ids=source, **masked, skip_logits=False)
    torch.testing.assert_close(outputs.loss, expected.loss, **FLOAT32)
    nll = torch.nn.functional.cross_entropy(expected.logits.flatten(0, 1), masked["labels"].flatten())
    torch.testing.assert_close(outputs.token_loss, nll, **FLOAT32)


def test_length_token_leaves_the_words_their_positions() -> None:
    """If no word attends to the token, the states are those of an autoregressive encoder."""
    model, reference = tiny_cmlm(), tiny_model()
    reference.model.encoder.load_state_dict(model.model.encoder.state_dict())
    tokens, mask = padded_batch([4, 6], "left")
    hidden: dict[str, torch.Tensor] = {}
    model.model.encoder.layers[0].register_forward_pre_hook(lambda _, inputs: hidden.__setitem__("cmlm", inputs[0]))
    reference.model.encoder.layers[0].register_forward_pre_hook(lambda _, inputs: hidden.__setitem__("ar", inputs[0]))
    states = model.encode(tokens, mask).last_hidden_state
    reference.model.encoder(input_ids=tokens, attention_mask=mask)
    assert states is not None
    assert states.shape[1] == 7
    assert torch.equal(hidden["cmlm"][:, 1:], hidden["ar"])


def test_encoder_outputs_without_the_length_token_are_an_error() -> None:
    """Those of the body's encoder, which adds none: the first word would be taken for it."""
    model, (tokens, mask) = tiny_cmlm(), padded_batch([3, 7])
    outputs = model.model.get_encoder()(input_ids=tokens, attention_mask=mask)
    with pytest.raises(
        ValueError, match=r"^encoder_outputs: .* got shape \(2, 7\), expected \(2, 8\)\. Encode by get_"
    ):
        model(encoder_outputs=outputs, attention_mask=mask)


def test_length_token_predicts_no_empty_target() -> None:
    model = tiny_cmlm(max_target_length=5)
    source = model.read_source(model.encode(random_tokens(4, 4))[0], None)
    assert source.length_logits.shape == (4, 6)
    assert source.length_logits[:, 0].tolist() == [-math.inf] * 4
    assert source.length_classes(torch.tensor([0, 1, 5, 9])).tolist() == [1, 1, 5, 5]
