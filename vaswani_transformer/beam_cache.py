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
        contents: for each layer its keys and its values (B, H, T and room to grow, k, d).
        writers: (B, k, T), which of its source's targets has written what a target looks at, for each place.
        mask: (B, 1, k, T k), -inf where a target may not look; None where a source has one target.
    """

    def __init__(self, cache: DynamicCache, num_targets: int) -> None:
        super().__init__()
        self.length, self.targets = cache.get_seq_length(), torch.arange(num_targets)
        self.contents: list[tuple[Tensor, Tensor]] = []
        self.mask: Tensor | None = None
        for layer in cast(list[DynamicLayer], cache.layers):
            if layer.keys is not None and layer.values is not None:  # there may be more layers than in the decoder
                self.contents.append((self.side_by_side(layer.keys), self.side_by_side(layer.values)))
        self.writers = self.targets[:, None].expand(self.contents[0][0].shape[0], -1, self.length)

    def side_by_side(self, rows: Tensor) -> Tensor:
        """Keys or values of target rows (k B, H, T, d) as (B, H, T, k, d)."""
        return rows.unflatten(0, (-1, len(self.targets))).permute(0, 2, 3, 1, 4)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Each row (k B,) goes on from another of its source."""
        beams = (beam_idx % len(self.targets)).view(-1, len(self.targets), 1)  # (B, k, 1)
        self.writers = self.writers.gather(1, beams.expand_as(self.writers))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, all k of each source that stays."""
        sources = indices[:: len(self.targets)] // len(self.targets)
        self.writers = self.writers[sources]
        self.contents = [(keys[sources], values[sources]) for keys, values in self.contents]

    def begin(self) -> None:
        """Make room for one more token of each target, which looks at itself and at what it looked at so far."""
        own = self.targets[:, None].expand(self.writers.shape[0], -1, 1)
        self.writers = torch.cat([self.writers, own], dim=-1)
        self.length += 1
        if self.length > self.contents[0][0].shape[2]:
            grow = (0, 0, 0, 0, 0, ROOM)
            self.contents = [
                (nn.functional.pad(keys, grow), nn.functional.pad(values, grow)) for keys, values in self.contents
            ]
        if len(self.targets) > 1:
            is_own = self.writers[..., None] == self.targets  # (B, k, T, k)
            self.mask = torch.zeros(()).where(is_own, -torch.inf).flatten(2)[:, None]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values (B, H, T k, d) of a layer, with those (k B, H, 1, d) of the token that has begun."""
        for kept, new in zip(self.contents[layer], (key, value), strict=True):
            kept[:, :, self.length - 1 : self.length] = self.side_by_side(new)
        keys, values = (kept[:, :, : self.length].flatten(2, 3) for kept in self.contents[layer])
        return keys, values


__all__ = ["BeamCache"]
