"""Random numbers of a training pair at a step, which masks, glancing and latents are made from.

B batch, S source, T target. They depend on the seed, the step and the pair, not on what else the process has drawn. So
a resumed run has those of an uninterrupted one, and a step has the same on any number of processes and micro-batches.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vaswani_transformer.cmlm_masks import mask_targets, sample_masks


def pair_generators(batch: dict[str, Any], seed: int, step: int) -> Iterator[tuple[int, int, torch.Generator]]:
    """Yield each pair of a batch on the host: its row, the number of its target's tokens, a generator seeded for it."""
    source, labels = batch["input_ids"], batch["labels"]  # (B, S), (B, T)
    is_source, is_target, generator = batch["attention_mask"].bool(), labels.ne(-100), torch.Generator()
    for row in range(len(labels)):
        target = labels[row, is_target[row]].tolist()
        pair = repr((seed, step, source[row, is_source[row]].tolist(), target)).encode()
        generator.manual_seed(int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest()))
        yield row, len(target), generator


def pair_draws(batch: dict[str, Any], seed: int, step: int) -> Tensor:
    """Return numbers uniform on [0, 1) for a batch on the host: (B, 1 + T), none of which depends on other pairs."""
    rows, width = batch["labels"].shape
    draws = torch.zeros(rows, 1 + width)
    for row, length, generator in pair_generators(batch, seed, step):
        draws[row, : 1 + length] = torch.rand(1 + length, generator=generator)
    return draws


def add_latent_draws(batch: dict[str, Any], seed: int, step: int, d_model: int) -> dict[str, Any]:
    """Return a batch with the numbers of its pairs by which FlowSeq drops words and draws latents."""
    rows, width = batch["labels"].shape
    words, noise = torch.zeros(rows, width), torch.zeros(rows, width, d_model)
    for row, length, generator in pair_generators(batch, seed, step):
        words[row, :length] = torch.rand(length, generator=generator)
        noise[row, :length] = torch.randn(length, d_model, generator=generator)
    return pin_like(batch, {**batch, "word_draws": words, "latent_noise": noise})


def add_masks(batch: dict[str, Any], draws: Tensor, mask_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Return a batch with the masks that `draws` (B, 1 + T) decide, in pinned memory if the batch is."""
    is_masked = sample_masks(batch["labels"].ne(-100), draws=(draws[:, 0], draws[:, 1:]))  # (B, T)
    return pin_like(batch, mask_targets(batch, is_masked, mask_token_id, pad_token_id))


def add_glancing_draws(batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
    """Return a batch with the numbers of `draws` (B, 1 + T) that decide what GLAT shows."""
    return pin_like(batch, {**batch, "glancing_draws": draws[:, 1:]})


def pin_like(batch: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Return the changed batch in pinned memory if the batch is, so that no copy to the device is waited for."""
    if not batch["labels"].is_pinned():
        return changed
    return {name: tensor.pin_memory() for name, tensor in changed.items()}
