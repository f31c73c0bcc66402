"""Masks of a CMLM: how they are drawn, and the collator that adds them.

B batch, T target.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.nar_models import MASK, targets
from vaswani_transformer import MaskingCollator
from vaswani_transformer.cmlm_masks import sample_masks
from vaswani_transformer.lengths import canvas


def test_masks_are_uniform_in_number_and_in_position() -> None:
    """Chi-square of k on 1..6 and of the masked position where k = 1; 20.5 is the 99.9th percentile of 5 degrees."""
    masks = sample_masks(canvas(torch.full((12000,), 6), 8).bool(), torch.Generator().manual_seed(1))
    assert not bool(masks[:, 6:].any())
    sizes = masks.sum(1)
    counts = torch.bincount(sizes, minlength=7)[1:].double()
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 20.5
    singles = masks[sizes == 1][:, :6].sum(0).double()
    assert float(((singles - singles.mean()) ** 2 / singles.mean()).sum()) < 20.5


def test_collator_masks_and_counts_exactly() -> None:
    labels = targets(5, 3, 1)
    collator = MaskingCollator(lambda _: {"labels": labels.clone()}, MASK, 1, seed=3)
    batches = [collator([]) for _ in range(20)]
    for batch in batches:
        is_masked = batch["decoder_input_ids"].eq(MASK)
        assert torch.equal(is_masked, batch["labels"].ne(-100))
        assert torch.equal(batch["labels"][is_masked], labels[is_masked])
        shown = ~is_masked & labels.ne(-100)
        assert torch.equal(batch["decoder_input_ids"][shown], labels[shown])
        assert batch["target_lengths"].tolist() == [5, 3, 1]
        assert bool((is_masked.sum(1) > 0).all())
    again = MaskingCollator(lambda _: {"labels": labels.clone()}, MASK, 1, seed=3)
    assert all(torch.equal(again([])["labels"], batch["labels"]) for batch in batches)


def test_collator_draws_no_random_number_of_the_caller() -> None:
    state = torch.get_rng_state()
    collator = MaskingCollator(lambda _: {"labels": torch.full((2, 3), 7)}, MASK, 1)
    collator([])
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


def test_collator_masks_no_padding_token() -> None:
    labels = targets(5, 3, 1)
    for ignored in (-100, 1):
        collator = MaskingCollator(
            lambda _, padding=ignored: {"labels": labels.where(labels != -100, padding)}, MASK, 1
        )
        batch = collator([])
        assert batch["target_lengths"].tolist() == [5, 3, 1]
        assert torch.equal(batch["labels"].ne(-100), batch["decoder_input_ids"].eq(MASK))
        assert not bool(batch["labels"].eq(1).any())
