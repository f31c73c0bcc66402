"""The words of a target that a conditional masked language model predicts in training (Ghazvininejad et al. 2019, 3.1).

B batch, T target. With m real tokens, `</s>` among them, k is uniform on 1..m and k of the m positions are masked. The
authors' code draws 1..m-1, and so never trains the all-masked start of decoding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from .lengths import check_right_padded, choose_positions


def sample_masks(
    is_real: Tensor, generator: torch.Generator | None = None, draws: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return the positions (B, T) to mask among the real ones (B, T): k of each row's m, k uniform on 1..m.

    `draws`, (B,) and (B, T), uniform on [0, 1), decide k and the positions; None: they are drawn from `generator`.
    """
    lengths = is_real.sum(1)  # (B,), m
    if draws is None:
        count_draws, position_draws = torch.rand(lengths.shape, generator=generator, device=is_real.device), None
    else:
        count_draws, position_draws = draws
    counts = torch.minimum((count_draws * lengths).long() + 1, lengths)  # (B,), k
    return choose_positions(is_real, counts, generator, position_draws)


def mask_targets(batch: dict[str, Any], is_masked: Tensor, mask_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Return a batch with `labels` (B, T) whose targets are masked where `is_masked` (B, T).

    It also has `decoder_input_ids` (B, T), the targets with `<mask>`, and `target_lengths` (B,); its `labels` are the
    masked tokens only.
    """
    labels: Tensor = batch["labels"]
    is_real = labels.ne(-100)
    check_right_padded(is_real, "labels")
    tokens = labels.masked_fill(~is_real, pad_token_id).masked_fill(is_masked, mask_token_id)
    masked = {"decoder_input_ids": tokens, "labels": labels.masked_fill(~is_masked, -100)}
    return {**batch, **masked, "target_lengths": is_real.sum(1)}


class MaskingCollator:
    """Adds masks to the batches of another collator, for a stock Trainer that trains a CMLM.

    The model itself draws masks for plain labels, but then a Trainer has counted all labels before the model masks
    some. With this collator it counts the masked ones, and the loss is exact under gradient accumulation and over
    several processes. In evaluation mode the model masks every token of any batch; the `labels` of a batch
    are the masked ones only, so metrics over labels need a Trainer with the plain collator.

    A batch has `decoder_input_ids` (B, T), the targets with `<mask>` at the masked positions; `labels` (B, T), -100
    elsewhere; and `target_lengths` (B,). The masks come from a separate generator, which a worker process seeds again
    from its own seed. A stock Trainer does not save it: a resumed run draws from the seed again, so its masks are not
    those of an uninterrupted run. Recipes resume bit for bit.

    Args:
        collator: makes batches with `labels` padded on the right by -100 or `<pad>`, such as `DataCollatorForSeq2Seq`.
        mask_token_id: the id of `<mask>`.
        pad_token_id: the id of `<pad>`.
        seed: of the masks.

    Raises:
        ValueError: an id is None; when called, as `mask_targets`.
    """

    def __init__(
        self, collator: Callable[[Sequence[Any]], dict[str, Any]], mask_token_id: int, pad_token_id: int, seed: int = 0
    ) -> None:
        if mask_token_id is None or pad_token_id is None:
            raise ValueError(
                f"mask_token_id, pad_token_id: got {mask_token_id} and {pad_token_id}, expected two ids. Add the first "
                'by tokenizer.add_special_tokens({"mask_token": "<mask>"}).'
            )
        self.collator = collator
        self.mask_token_id, self.pad_token_id, self.seed = mask_token_id, pad_token_id, seed
        self.generator: torch.Generator | None = None

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Return the batch of `features` with masks."""
        batch = {**self.collator(features)}
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] == self.pad_token_id, -100)
        is_masked = sample_masks(batch["labels"].ne(-100), self.mask_generator())  # (B, T)
        return mask_targets(batch, is_masked, self.mask_token_id, self.pad_token_id)

    def mask_generator(self) -> torch.Generator:
        """Return the generator of the masks, made at the first batch of a process."""
        worker = get_worker_info()
        seed = (self.seed + (0 if worker is None else worker.seed)) % 2**64
        if self.generator is None or self.generator.initial_seed() != seed:  # a worker's may be a copy of its parent's
            self.generator = torch.Generator().manual_seed(seed)
        return self.generator
