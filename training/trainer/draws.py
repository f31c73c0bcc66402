"""Random numbers of a training pair at a step, which masks, glancing and latents are made from.

B batch, S source, T target. They depend on the seed, the step and the pair, not on what else the process has drawn. So
a resumed run has those of an uninterrupted one, and a step has the same on any number of processes and micro-batches.
A pair's numbers are those of a SplitMix64 generator (Steele, Lea and Flood 2014) whose state is a hash of the three.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from training.recipe.fields import Recipe
from vaswani_transformer.cmlm_masks import mask_targets, sample_masks

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # between the states of a SplitMix64 generator
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # its shifts and factors
STATES = "latent_states"
Bits = NDArray[np.uint64]


def mix(bits: Bits) -> Bits:
    """Return SplitMix64's output for each state, in place: fresh memory takes longer than the arithmetic."""
    scratch = np.empty_like(bits)
    for shift, factor in MIXING:
        bits ^= np.right_shift(bits, np.uint64(shift), out=scratch)
        bits *= np.uint64(factor)
    return bits


def hash_rows(tokens: Tensor, is_token: Tensor) -> Bits:
    """Return a hash of each row's tokens (B, L) in their order, without padding: (B,)."""
    kept = is_token.numpy().astype(bool)
    bits = kept.cumsum(1, dtype=np.uint64)  # places, from 1
    bits <<= np.uint64(32)
    bits |= tokens.numpy().view(np.uint64)
    bits *= GOLDEN_GAMMA
    return np.multiply(mix(bits), kept, out=bits).sum(1)


def pair_states(batch: dict[str, Any], seed: int, step: int) -> Bits:
    """Return the state of the generator of each pair of a batch on the host: (B,)."""
    sources = hash_rows(batch["input_ids"], batch["attention_mask"])
    targets = hash_rows(batch["labels"], batch["labels"].ne(-100))
    state = mix(np.array([seed % 2**64], dtype=np.uint64) + GOLDEN_GAMMA)
    for more in (np.uint64(step), sources, targets):
        state = mix((state ^ more) + GOLDEN_GAMMA)
    return state


def pair_draws(batch: dict[str, Any], seed: int, step: int) -> Tensor:
    """Return numbers uniform on [0, 1) for a batch on the host: (B, 1 + T), none of which depends on other pairs.

    They are 0 where a target has ended.
    """
    steps = np.arange(1, batch["labels"].shape[1] + 2, dtype=np.uint64) * GOLDEN_GAMMA
    bits = mix(pair_states(batch, seed, step)[:, None] + steps)
    bits >>= np.uint64(40)  # float32 has 24 bits
    draws = torch.from_numpy(bits.astype(np.float32)).mul_(2**-24)
    draws[:, 1:] *= batch["labels"].ne(-100)
    return draws


def pin_like(batch: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Return the changed batch in pinned memory if the batch is, so that no copy to the device is waited for."""
    if not batch["labels"].is_pinned():
        return changed
    return {name: tensor.pin_memory() for name, tensor in changed.items()}


def add_latent_draws(batch: dict[str, Any], seed: int, step: int) -> dict[str, Any]:
    """Return a batch with the numbers by which FlowSeq drops words, and the states (B,) of its latents' generators."""
    states = torch.from_numpy(pair_states(batch, seed, step).view(np.int64))
    return pin_like(batch, {**batch, "word_draws": pair_draws(batch, seed, step)[:, 1:], STATES: states})


def draw_latents(batch: dict[str, Any], d_model: int) -> dict[str, Any]:
    """Return a batch whose generators' states have become `latent_noise` (B, T, d_model), on the batch's device.

    One output of SplitMix64 has the two uniform numbers from which Box and Muller's formula makes two normal ones.
    """
    batch = dict(batch)
    states, length, pairs = batch.pop(STATES), batch["labels"].shape[1], -(-d_model // 2)
    first = 2**32  # later than all numbers of `pair_draws`
    numbers = torch.arange(first, first + length * pairs, device=states.device).view(length, pairs)
    bits = states[:, None, None] + numbers * signed(GOLDEN_GAMMA)  # (B, T, d_model / 2)
    for shift, factor in MIXING[:-1]:
        bits ^= bits >> shift & 2 ** (64 - shift) - 1  # a shift that fills with zeros
        bits *= signed(factor)
    bits ^= bits >> 31 & 2**33 - 1
    radius = ((bits >> 40 & 2**24 - 1).float() + 1).mul_(2**-24).log_().mul_(-2).sqrt_()
    angle = (bits >> 16 & 2**24 - 1).float().mul_(2 * math.pi * 2**-24)
    noise = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)[..., :d_model]
    return batch | {"latent_noise": noise}


def signed(bits: int | np.uint64) -> int:
    """Return 64 bits as the int64 that torch calculates with."""
    return int(np.uint64(bits).astype(np.int64))


def add_masks(batch: dict[str, Any], draws: Tensor, mask_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Return a batch with the masks that `draws` (B, 1 + T) decide, in pinned memory if the batch is."""
    is_masked = sample_masks(batch["labels"].ne(-100), draws=(draws[:, 0], draws[:, 1:]))  # (B, T)
    return pin_like(batch, mask_targets(batch, is_masked, mask_token_id, pad_token_id))


def add_random_choices(
    batch: dict[str, Any], recipe: Recipe, tokenizer: PreTrainedTokenizerBase, step: int
) -> dict[str, Any]:
    """Return a batch on the host with CMLM's masks, or with what GLAT shows words and FlowSeq draws latents by.

    ENGINE masks every word. Other models learn from the batch as it is.
    """
    if recipe.kind == "flowseq":
        return add_latent_draws(batch, recipe.seed, step)
    if recipe.training.energy_from is not None:
        is_real = batch["labels"].ne(-100)
        return pin_like(batch, mask_targets(batch, is_real, tokenizer.mask_token_id, tokenizer.pad_token_id))
    if not recipe.family.needs_mask and recipe.training.glancing is None:
        return batch
    draws = pair_draws(batch, recipe.seed, step)
    if not recipe.family.needs_mask:
        return pin_like(batch, {**batch, "glancing_draws": draws[:, 1:]})
    return add_masks(batch, draws, tokenizer.mask_token_id, tokenizer.pad_token_id)
