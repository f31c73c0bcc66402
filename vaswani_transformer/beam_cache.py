"""Keys and values of the targets that one source's beams write, where beams that change places leave them.

B sources, k targets of a source, H heads, T target tokens so far, d the width of a head's keys or values.
"""

from typing import cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 32  # tokens, by which the room for keys and values grows


class BeamCache(DynamicCache):
    """A cache of self-attention for one token a target at a time; all k targets of a source lie side by side.

    Beams that change places change whose keys a target looks at, which a mask says, and move no keys.

    Args:
        cache: the plain cache (k B, H, T, d) whose contents it takes over.
        num_targets: k.

    Attributes:
        length: T.
        num_targets: k.
        contents: for each layer its keys and its values (B, H, T and room to grow, k, d).
        mask: (B, 1, k, T k), -inf where a target may not look; None where a source has one target.
        own: (B, 1, k, k), what a token newly written adds to the mask: each target looks at its own.
        is_token, source_mask: what `mask_of_source` was last given, and gave.
    """

    def __init__(self, cache: DynamicCache, num_targets: int) -> None:
        super().__init__()
        self.length, self.num_targets = cache.get_seq_length(), num_targets
        self.contents: list[tuple[Tensor, Tensor]] = []
        for layer in cast(list[DynamicLayer], cache.layers):
            if layer.keys is not None and layer.values is not None:  # there may be more layers than in the decoder
                self.contents.append((self.side_by_side(layer.keys), self.side_by_side(layer.values)))
        sources = self.contents[0][0].shape[0]
        self.own = torch.zeros(()).where(torch.eye(num_targets).bool(), -torch.inf).expand(sources, 1, -1, -1)
        self.mask = self.own.repeat(1, 1, 1, self.length) if num_targets > 1 else None
        self.is_token: Tensor | None = None
        self.source_mask: Tensor | None = None

    def side_by_side(self, rows: Tensor) -> Tensor:
        """Keys or values of target rows (k B, H, T, d) as (B, H, T, k, d)."""
        return rows.unflatten(0, (-1, self.num_targets)).permute(0, 2, 3, 1, 4)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Each row (k B,) goes on from another of its source, and looks at what that looked at."""
        if self.mask is not None:
            beams = (beam_idx % self.num_targets).view(-1, 1, self.num_targets, 1)  # (B, 1, k, 1)
            self.mask = self.mask.gather(2, beams.expand_as(self.mask))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, all k of each source that stays."""
        sources = indices[:: self.num_targets] // self.num_targets
        self.own, self.mask = self.own[sources], None if self.mask is None else self.mask[sources]
        self.contents = [(keys[sources], values[sources]) for keys, values in self.contents]

    def begin(self) -> None:
        """Make room for one more token of each target, which looks at itself and at what it looked at so far."""
        self.length += 1
        if self.length > self.contents[0][0].shape[2]:
            grow = (0, 0, 0, 0, 0, ROOM)
            self.contents = [
                (nn.functional.pad(keys, grow), nn.functional.pad(values, grow)) for keys, values in self.contents
            ]
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.own], dim=-1)

    def mask_of_source(self, is_token: Tensor | None) -> Tensor | None:
        """(B, K), 0 where a source token is padding, as what is added to scores: (B, 1, 1, K); None where none is."""
        if is_token is not self.is_token:  # the same for many steps
            lowest = torch.finfo(torch.float32).min
            all_count = is_token is None or bool(is_token.all())
            mask = None if all_count else torch.zeros(()).where(is_token.bool(), lowest)[:, None, None]
            self.is_token, self.source_mask = is_token, mask
        return self.source_mask

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values (B, H, T k, d) of a layer, with those (B, H, k, d) of the token that has begun."""
        keys, values = self.contents[layer]
        keys[:, :, self.length - 1] = key
        values[:, :, self.length - 1] = value
        return keys[:, :, : self.length].flatten(2, 3), values[:, :, : self.length].flatten(2, 3)


__all__ = ["BeamCache"]
