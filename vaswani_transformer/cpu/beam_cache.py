"""Keys and values of a source's beams, which stay where they are when beams change places.

B sources, k beams of a source, H heads, T target tokens so far; d_k and d_v the widths of a head's keys and values.
"""

import torch
from torch import Tensor

GROWTH = 32  # tokens, by which the room for keys and values grows at least


class BeamCache:
    """Keys and values of self-attention, written for one token a beam at a time; a source's k beams lie side by side.

    Beams that change places change whose keys a beam attends to, which a mask says, and move no keys.

    Args:
        layers, num_sources, heads, num_beams, key_width, value_width: the sizes; the last two are d_k and d_v.

    Attributes:
        length: T.
        key_values: (layers, B, H, room for T, k, d_k + d_v), keys and values side by side.
        ancestry_mask: (k B, T k), -inf where a beam does not attend; None where a source has one beam.
        self_mask: (k B, k), what a token newly written adds to it: each beam attends to its own.
        mask: (B H or 1, k or 1, T k or 1), the same as it is added to the scores.
        write_slots: of each layer (B, H, k, d_k + d_v), where the newest token goes.
        keys, values: of each layer, (B H, d_k, T k) and (B H, T k, d_v), that token included.
    """

    def __init__(
        self, layers: int, num_sources: int, heads: int, num_beams: int, key_width: int, value_width: int
    ) -> None:
        self.num_sources, self.num_beams, self.key_width, self.length = num_sources, num_beams, key_width, 0
        shape = (layers, num_sources, heads, GROWTH, num_beams, key_width + value_width)
        self.key_values = torch.empty(shape, dtype=torch.float32)
        own = torch.zeros((), dtype=torch.float32).where(torch.eye(num_beams).bool(), -torch.inf)
        self.self_mask = own.repeat(num_sources, 1)
        self.ancestry_mask = self.self_mask[:, :0] if num_beams > 1 else None
        self.mask = torch.zeros(1, 1, 1, dtype=torch.float32)
        self.keys: tuple[Tensor, ...] = ()
        self.values: tuple[Tensor, ...] = ()
        self.write_slots: tuple[Tensor, ...] = ()

    def reorder(self, beams: Tensor) -> None:
        """Let each beam (k B,) continue another of its source, and attend to what that attended to."""
        if self.ancestry_mask is not None:
            self.ancestry_mask = self.ancestry_mask.index_select(0, beams)

    def keep(self, sources: Tensor) -> None:
        """Keep these sources, by index in rising order.

        They are moved within the memory at hand: fresh memory for all of them would take longer than the copying.
        """
        stay = int((sources == torch.arange(len(sources))).long().cumprod(0).sum())  # so many are in their place
        for layer in self.key_values:
            written = layer[:, :, : self.length]
            written[stay : len(sources)] = written[sources[stay:]]
        if self.ancestry_mask is not None:
            rows = self.ancestry_mask.view(self.num_sources, self.num_beams, -1)
            self.ancestry_mask = rows[sources].flatten(0, 1)
        self.key_values, self.num_sources = self.key_values[:, : len(sources)], len(sources)
        self.self_mask = self.self_mask[: len(sources) * self.num_beams]

    def append_slot(self) -> None:
        """Make room for one more token of each beam, which attends to itself and to what the beam attended to."""
        self.length += 1
        layers, sources, heads, room, beams, width = self.key_values.shape
        if self.length > room:
            grown = self.key_values.new_empty(layers, sources, heads, room + max(GROWTH, room // 2), beams, width)
            grown[:, :, :, :room] = self.key_values
            self.key_values = grown
        if self.ancestry_mask is not None:
            self.ancestry_mask = torch.cat([self.ancestry_mask, self.self_mask], dim=1)
            of_source = self.ancestry_mask.view(sources, 1, beams, -1)
            self.mask = of_source[0] if sources == 1 else of_source.expand(-1, heads, -1, -1).flatten(0, 1)
        self.write_slots = self.key_values.select(3, self.length - 1).unbind()  # (B, H, k, d_k + d_v) each
        each_layer, _, each_head, *_ = self.key_values.stride()  # it begins where its memory does
        rows, tokens = sources * heads, self.length * beams
        keys, values = (layers, rows, self.key_width, tokens), (layers, rows, tokens, width - self.key_width)
        self.keys = self.key_values.as_strided(keys, (each_layer, each_head, 1, width)).unbind()
        self.values = self.key_values.as_strided(values, (each_layer, each_head, width, 1), self.key_width).unbind()

    def write(self, layer: int, key_values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the newest token's keys and values, and return all of a layer: (B H, d_k, T k) and (B H, T k, d_v).

        Args:
            layer: its index.
            key_values: (B, H, k, d_k + d_v); B may lack where it is 1.
        """
        self.write_slots[layer].copy_(key_values)
        return self.keys[layer], self.values[layer]


__all__ = ["GROWTH", "BeamCache"]
