"""Random numbers of a training pair at a step, which masks and glancing are made from.

B batch, S source, T target. They depend on the seed, the step and the pair, not on what else the process has drawn. So
a resumed run has those of an uninterrupted one, and a step has the same on any number of processes and micro-batches.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from vaswani_transformer.masking import draw_masks, mask_targets


def pair_draws(batch: dict[str, Any], seed: int, step: int) -> Tensor:
    """Return numbers uniform on [0, 1) for a batch on the host: (B, 1 + T), none of which depends on other pairs."""
    source, labels = batch["input_ids"], batch["labels"]  # (B, S), (B, T)
    is_source, is_target, generator = batch["attention_mask"].bool(), labels.ne(-100), torch.Generator()
    draws = torch.zeros(len(labels), 1 + labels.shape[1])
    for row in range(len(labels)):
        target = labels[row, is_target[row]].tolist()
        pair = repr((seed, step, source[row, is_source[row]].tolist(), target)).encode()
        generator.manual_seed(int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest()))
        draws[row, : 1 + len(target)] = torch.rand(1 + len(target), generator=generator)
    return draws


def add_masks(batch: dict[str, Any], draws: Tensor, mask_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Return a batch with the masks that `draws` (B, 1 + T) decide, in pinned memory if the batch is."""
    is_masked = draw_masks(batch["labels"].ne(-100), draws=(draws[:, 0], draws[:, 1:]))  # (B, T)
    return like(batch, mask_targets(batch, is_masked, mask_token_id, pad_token_id))


def add_glancing_draws(batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
    """Return a batch with the numbers of `draws` (B, 1 + T) that decide what GLAT shows."""
    return like(batch, {**batch, "glancing_draws": draws[:, 1:]})


def like(batch: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Return the changed batch in pinned memory if the batch is, so that no copy to the device is waited for."""
    if not batch["labels"].is_pinned():
        return changed
    return {name: tensor.pin_memory() for name, tensor in changed.items()}
