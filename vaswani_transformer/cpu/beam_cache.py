"""Cache of self-attention for beam search on a CPU.

B sources, k beams per source, H heads, T target tokens so far; d_k and d_v are the widths of a head's keys and values.
"""

import torch
from torch import Tensor

GROWTH = 32  # smallest growth of a cache or of position encodings, in tokens


class BeamCache:
    """Self-attention cache of the beams; reordering beams changes only a mask, and moves no keys and values.

    Args:
        layers, num_sources, heads, num_beams, key_width, value_width: sizes; the last two are d_k and d_v.

    Attributes:
        length: T.
        key_values: (layers, B, H, slots for T, k, d_k + d_v), concatenated keys and values.
        ancestry_mask: (k B, T k), -inf at keys of other beams' ancestors; None for a single beam.
        self_mask: (k B, k), the mask's columns for a new token, at which each beam attends to its own key.
        mask: (B H or 1, k or 1, T k or 1), the mask to add to the scores.
        write_slots: views (B, H, k, d_k + d_v) of each layer's slots for the newest token.
        keys, values: views (B H, d_k, T k) and (B H, T k, d_v) of each layer, including the newest token.
    """

    def __init__(
        self, layers: int, num_sources: int, heads: int, num_beams: int, key_width: int, value_width: int
    ) -> None:
        self.num_sources = num_sources
        self.num_beams = num_beams
        self.key_width = key_width
        self.length = 0
        shape = (layers, num_sources, heads, GROWTH, num_beams, key_width + value_width)
        self.key_values = torch.empty(shape, dtype=torch.float32, device="cpu")
        no_beam = torch.full((num_beams, num_beams), -torch.inf, dtype=torch.float32, device="cpu")
        self.self_mask = no_beam.fill_diagonal_(0).repeat(num_sources, 1)
        self.ancestry_mask = self.self_mask[:, :0] if num_beams > 1 else None
        self.mask = torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu")
        self.keys: tuple[Tensor, ...] = ()
        self.values: tuple[Tensor, ...] = ()
        self.write_slots: tuple[Tensor, ...] = ()

    def reorder(self, beams: Tensor) -> None:
        """Let row i continue row `beams[i]` of the same source; `beams` (k B,)."""
        if self.ancestry_mask is not None:
            self.ancestry_mask = self.ancestry_mask.index_select(0, beams)

    def keep(self, sources: Tensor) -> None:
        """Keep these sources, by index in ascending order, moving them within the allocated memory."""
        remaining = len(sources)
        unmoved = torch.arange(remaining, device=sources.device)
        stay = int((sources == unmoved).long().cumprod(0).sum())  # leading sources that do not move
        for layer in self.key_values:
            written = layer[:, :, : self.length]
            written[stay:remaining] = written[sources[stay:]]
        self.key_values = self.key_values[:, :remaining]
        self.self_mask = self.self_mask[: remaining * self.num_beams]
        if self.ancestry_mask is not None:
            rows = self.ancestry_mask.view(self.num_sources, self.num_beams, -1)
            self.ancestry_mask = rows[sources].flatten(0, 1)
        self.num_sources = remaining

    def append_slot(self) -> None:
        """Append a slot for a new token of each beam."""
        self.length += 1
        if self.length > self.key_values.shape[3]:
            self.grow()
        if self.ancestry_mask is not None:
            self.ancestry_mask = torch.cat([self.ancestry_mask, self.self_mask], dim=1)
            self.mask = self.mask_by_head(self.ancestry_mask)
        self.write_slots = self.key_values.select(3, self.length - 1).unbind()  # (B, H, k, d_k + d_v) each
        self.keys, self.values = self.views()

    def grow(self) -> None:
        """Allocate more slots; by half, so that a long target copies its cache only a few times."""
        layers, sources, heads, slots, beams, width = self.key_values.shape
        more_slots = slots + max(GROWTH, slots // 2)
        grown = self.key_values.new_empty(layers, sources, heads, more_slots, beams, width)
        grown[:, :, :, :slots] = self.key_values
        self.key_values = grown

    def mask_by_head(self, ancestry_mask: Tensor) -> Tensor:
        """Return the mask of the scores (B H, k, T k); with one source (1, k, T k), which broadcasts without a copy."""
        by_source = ancestry_mask.view(self.num_sources, 1, self.num_beams, -1)
        if self.num_sources == 1:
            return by_source[0]
        heads = self.key_values.shape[2]
        return by_source.expand(-1, heads, -1, -1).flatten(0, 1)

    def views(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the keys and the values of each layer.

        `as_strided` makes the views of all layers in two calls, where slicing and transposing would take several for
        each layer in each step. It counts from the start of the memory, where `key_values` begins, also after `keep`.
        """
        layers, sources, heads, _, beams, width = self.key_values.shape
        layer_stride, _, head_stride, *_ = self.key_values.stride()
        rows = sources * heads
        tokens = self.length * beams
        value_width = width - self.key_width
        keys = self.key_values.as_strided((layers, rows, self.key_width, tokens), (layer_stride, head_stride, 1, width))
        values = self.key_values.as_strided(
            (layers, rows, tokens, value_width), (layer_stride, head_stride, width, 1), self.key_width
        )
        return keys.unbind(), values.unbind()

    def write(self, layer: int, key_values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the newest token's `key_values`, (B, H, k, d_k + d_v) or without B if it is 1.

        Returns:
            All keys (B H, d_k, T k) and values (B H, T k, d_v) of the layer.
        """
        self.write_slots[layer].copy_(key_values)
        return self.keys[layer], self.values[layer]
