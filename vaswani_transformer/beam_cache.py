"""Keys and values of the targets that one source's beams write, where beams that change places leave them.

B sources, k targets of a source, H heads, T target tokens so far, d_k and d_v the widths of a head's keys and values.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 32  # tokens, by which the room for keys and values grows at least


class BeamCache(DynamicCache):
    """A cache of self-attention for one token a target at a time; all k targets of a source lie side by side.

    Beams that change places change whose keys a target looks at, which a mask says, and move no keys.

    Args:
        contents: (layers, B, H, T, k, d_k + d_v), keys and values side by side.
        key_width: d_k.

    Attributes:
        length: T.
        num_sources, num_targets: B and k.
        contents: as above, with room for T to grow.
        looks: (k B, T k), -inf where a target may not look; None where a source has one target.
        own: (k B, k), what a token newly written adds to it: each target looks at its own.
        mask: (B H or 1, k or 1, T k or 1), the same as it is added to the scores.
        places: of each layer (B, H, k, d_k + d_v), where the token that has begun goes.
        keys, values: of each layer, (B H, d_k, T k) and (B H, T k, d_v), that token among them.
        draws: what each layer does with the sources, which a decoder leaves here until one of them leaves.
    """

    def __init__(self, contents: Tensor, key_width: int) -> None:
        super().__init__()
        _, self.num_sources, _, self.length, self.num_targets, _ = contents.shape
        self.contents, self.key_width = contents, key_width
        own = contents.new_zeros(()).where(torch.eye(self.num_targets).bool(), -torch.inf)
        self.own = own.repeat(self.num_sources, 1)
        self.looks = self.own.repeat(1, self.length) if self.num_targets > 1 else None
        self.mask = contents.new_zeros(1, 1, 1)
        self.keys: tuple[Tensor, ...] = ()
        self.values: tuple[Tensor, ...] = ()
        self.places: tuple[Tensor, ...] = ()
        self.draws: list[Callable[[Tensor], Tensor]] | None = None

    @classmethod
    def of_rows(cls, cache: DynamicCache, num_targets: int) -> "BeamCache":
        """The contents of a plain cache of target rows (k B, H, T, d)."""
        layers = [layer for layer in cast(list[DynamicLayer], cache.layers) if layer.keys is not None]
        pairs = [torch.cat([cast(Tensor, layer.keys), cast(Tensor, layer.values)], dim=-1) for layer in layers]
        contents = torch.stack(pairs).unflatten(1, (-1, num_targets)).permute(0, 1, 3, 4, 2, 5)
        return cls(contents.contiguous(), cast(Tensor, layers[0].keys).shape[-1])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Each row (k B,) goes on from another of its source, and looks at what that looked at."""
        if self.looks is not None:
            self.looks = self.looks.index_select(0, beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, all k of each source that stays, in their order.

        Sources close ranks where they are: fresh memory for all of them would take longer than the copying.
        """
        sources = indices[:: self.num_targets] // self.num_targets
        stay = int((sources == torch.arange(len(sources))).long().cumprod(0).sum())  # so many are in their place
        for layer in self.contents:
            written = layer[:, :, : self.length]
            written[stay : len(sources)] = written[sources[stay:]]
        self.looks = None if self.looks is None else self.looks.index_select(0, indices)
        self.contents, self.num_sources, self.draws = self.contents[:, : len(sources)], len(sources), None
        self.own = self.own[: len(indices)]

    def begin(self) -> None:
        """Make room for one more token of each target, which looks at itself and at what it looked at so far."""
        self.length += 1
        if self.length > self.contents.shape[3]:
            layers, sources, heads, room, targets, width = self.contents.shape
            grown = self.contents.new_empty(layers, sources, heads, room + max(ROOM, room // 2), targets, width)
            grown[:, :, :, :room] = self.contents
            self.contents = grown
        layers, sources, heads, _, targets, width = self.contents.shape
        if self.looks is not None:
            self.looks = torch.cat([self.looks, self.own], dim=1)
            of_source = self.looks.view(sources, 1, targets, -1)
            self.mask = of_source[0] if sources == 1 else of_source.expand(-1, heads, -1, -1).flatten(0, 1)
        self.places = self.contents.select(3, self.length - 1).unbind()  # (B, H, k, d_k + d_v) each
        each_layer, _, each_head, *_ = self.contents.stride()  # it begins where its memory does
        rows, tokens, key_width = sources * heads, self.length * targets, self.key_width
        keys, values = (layers, rows, key_width, tokens), (layers, rows, tokens, width - key_width)
        self.keys = self.contents.as_strided(keys, (each_layer, each_head, 1, width)).unbind()
        self.values = self.contents.as_strided(values, (each_layer, each_head, width, 1), key_width).unbind()

    def extend(self, layer: int, keys_and_values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys (B H, d_k, T k) and values (B H, T k, d_v) of a layer.

        Args:
            layer: its index.
            keys_and_values: (B, H, k, d_k + d_v), those of the token that has begun; B may lack where it is 1.
        """
        self.places[layer].copy_(keys_and_values)
        return self.keys[layer], self.values[layer]


__all__ = ["BeamCache"]
