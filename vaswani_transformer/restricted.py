"""Restricted self-attention: each position attends to its neighborhood only (section 4).

B batch, H heads, Q queries, K keys, n tokens of a text, r positions to either side, N blocks of c queries with w keys.
The paper's "neighborhood of size r" is centered around a position; here r counts to one side, so that a neighborhood
has 2 r + 1 tokens, and r + 1 in the decoder, where no position attends to a later one. Distances are those of tokens in
the text, counted over unmasked tokens: padding and given `position_ids` change none.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from .attention import BlockwiseMask, additive_mask
from .config import VaswaniTransformerConfig
from .embeddings import count_positions

MIN_BLOCK = 32
"""The fewest queries of a block: smaller products are slow."""


def side_by_side(attention_mask: Tensor) -> bool:
    """Return whether the tokens of each text are neighbors, so that (B, n) has padding at the ends only."""
    starts = nn.functional.pad(attention_mask.ne(0).to(torch.int8), (1, 0)).diff() == 1  # (B, n)
    return bool((starts.sum(-1) <= 1).all())


def in_blocks(heads: Tensor, blocks: int, block: int, before: int = 0, after: int = 0) -> Tensor:
    """Cut (B, H, n, width) into blocks (B N, H, before + c + after, width) with tokens of their neighbors."""
    remainder = blocks * block - heads.shape[2]
    padded = nn.functional.pad(heads, (0, 0, before, remainder + after))
    return padded.unfold(2, before + block + after, block).permute(0, 2, 1, 4, 3).flatten(0, 1)


@dataclass(frozen=True)
class Band(BlockwiseMask):
    """Neighborhoods block by block: O(r n d), and no n x n numbers.

    Attributes:
        allowed: (B or 1, N, 1, c, w), whether each query of a block attends to each of its keys, which begin r places
            before the block.
        reach: r.
    """

    allowed: Tensor
    reach: int

    def attend(
        self, attend: Callable, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> tuple[Tensor, None]:
        """Return the output (B, n, H, d_v) for queries and keys (B, H, n, d_k) and values (B, H, n, d_v)."""
        batch, _, length, _ = query.shape
        blocks, _, block, width = self.allowed.shape[1:]
        neighbors = (self.reach, width - block - self.reach)
        attended, _ = attend(
            in_blocks(query, blocks, block),
            in_blocks(key, blocks, block, *neighbors),
            in_blocks(value, blocks, block, *neighbors),
            self.allowed.expand(batch, -1, -1, -1, -1).flatten(0, 1),
            **kwargs,
        )  # (B N, c, H, d_v)
        return attended.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :length], None


class Window:
    """The neighborhoods of one call, as a mask.

    Args:
        config: with an `attention_window`, r.
        queries: (B, Q, d_model), the embeddings that attend.
        cache: of earlier tokens.
        is_causal: whether no position attends to a later one.

    Attributes:
        past: the number of earlier tokens, a tensor in a static cache.
        offset: the number of tokens before the first key.
        num_keys: K.
    """

    def __init__(
        self, config: VaswaniTransformerConfig, queries: Tensor, cache: Cache | None = None, is_causal: bool = False
    ) -> None:
        self.config, self.queries, self.cache, self.is_causal = config, queries, cache, is_causal
        self.reach: int = config.attention_window or 0
        self.past = 0 if cache is None else cache.get_seq_length()
        length = queries.shape[1]
        self.num_keys, self.offset = (length, 0) if cache is None else cache.get_mask_sizes(length, 0)

    def mask(self, attention_mask: Tensor | BlockMask | None) -> Tensor | BlockMask | Band | None:
        """Return the mask in the form that the attention implementation takes; None: each query attends to all keys."""
        implementation = self.config._attn_implementation or "eager"
        if isinstance(attention_mask, BlockMask) or not (
            implementation in ("eager", "sdpa", "flex_attention") or "flash" in implementation
        ):
            raise ValueError(
                f"attention_window: no window can be applied; got the attention implementation {implementation!r} and "
                f"a mask of type {type(attention_mask).__name__}, expected eager, sdpa, flex_attention or a flash "
                "attention, and a tensor. Choose with set_attn_implementation, or set attention_window=None."
            )
        if attention_mask is not None and attention_mask.dim() == 4:
            return self.within(attention_mask)
        if "flash" in implementation:
            return self.library_mask(attention_mask)
        if implementation == "flex_attention":
            return self.library_mask(attention_mask, self.is_near(attention_mask))
        if self.sees_all(attention_mask):
            return None
        if implementation == "sdpa" and self.is_banded(attention_mask):
            return self.band(attention_mask)
        allowed = self.allowed(attention_mask)
        return allowed if implementation == "sdpa" else additive_mask(allowed, self.queries.dtype)

    def library_mask(self, attention_mask: Tensor | None, near: Callable | None = None) -> Tensor | BlockMask | None:
        """Return the mask of Transformers, restricted by a function of indices."""
        if self.is_causal:
            return create_causal_mask(self.config, self.queries, attention_mask, self.cache, and_mask_function=near)
        return create_bidirectional_mask(self.config, self.queries, attention_mask, and_mask_function=near)

    def is_near(self, attention_mask: Tensor | None) -> Callable:
        """Return Transformers' function that decides, by index, whether a query is near a key."""
        reach = self.reach
        if attention_mask is None:
            return lambda batch, head, query, key: (query - key).abs() <= reach
        positions = count_positions(attention_mask).to(self.queries.device)  # (B, K)
        return lambda batch, head, query, key: (positions[batch, query] - positions[batch, key]).abs() <= reach

    def columns(self) -> tuple[Tensor, Tensor]:
        """Return the indices of queries (Q,) and keys (K,) in the text."""
        device = self.queries.device
        keys = torch.arange(self.num_keys, device=device) + self.offset
        return torch.arange(self.queries.shape[1], device=device) + self.past, keys

    def within(self, attention_mask: Tensor) -> Tensor:
        """Return a caller's mask (B, 1, Q, K) with the window by index in addition: it names no padding."""
        queries, keys = self.columns()
        keys = torch.arange(attention_mask.shape[-1], device=keys.device) + self.offset
        is_far = (queries[:, None] - keys).abs() > self.reach  # (Q, K)
        lowest = False if attention_mask.dtype == torch.bool else torch.finfo(attention_mask.dtype).min
        return attention_mask.masked_fill(is_far.to(attention_mask.device), lowest)

    def sees_all(self, attention_mask: Tensor | None) -> bool:
        has_every_key = isinstance(self.past, int) and self.offset + self.num_keys == self.past + self.queries.shape[1]
        is_last = not self.is_causal or self.queries.shape[1] == 1
        return attention_mask is None and has_every_key and is_last and self.num_keys - 1 <= self.reach

    def allowed(self, attention_mask: Tensor | None) -> Tensor:
        """Return whether each query may attend to each key (B or 1, 1, Q, K)."""
        queries, keys = self.columns()
        query_positions, key_positions = queries[None], keys[None]
        if attention_mask is not None:
            self.check_kept_keys(attention_mask)
            missing = max(0, self.offset + self.num_keys - attention_mask.shape[1])  # of a static cache
            is_token = nn.functional.pad(attention_mask.to(queries.device).ne(0), (0, missing))  # (B, n)
            positions = count_positions(is_token)
            query_positions, key_positions = positions.index_select(1, queries), positions.index_select(1, keys)
        allowed = (query_positions[:, :, None] - key_positions[:, None]).abs() <= self.reach  # (B or 1, Q, K)
        if self.is_causal:
            allowed = allowed & (keys <= queries[:, None])
        if attention_mask is not None:
            allowed = allowed & is_token.index_select(1, keys)[:, None]
        return allowed[:, None]

    def check_kept_keys(self, attention_mask: Tensor) -> None:
        """Raise ValueError where a cache of r keys has dropped one for padding between tokens."""
        if isinstance(self.offset, int) and self.offset > 0 and not side_by_side(attention_mask):
            raise ValueError(
                "decoder_attention_mask: padding between tokens, whose neighbors a cache of attention_window "
                f"({self.reach}) keys no longer has; got such a mask and cache, expected EncoderDecoderCache("
                "DynamicCache(), DynamicCache()). Give that as past_key_values from the first call on."
            )

    def is_banded(self, attention_mask: Tensor | None) -> bool:
        """Return whether to compute attention block by block, on a CPU where a text has at least four blocks."""
        length, block = self.queries.shape[1], max(self.reach, MIN_BLOCK)
        return (
            self.queries.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and isinstance(self.past, int)
            and self.past == 0
            and self.num_keys == length
            and length >= 4 * block
            and (attention_mask is None or (attention_mask.shape[1] == length and side_by_side(attention_mask)))
        )

    def band(self, attention_mask: Tensor | None) -> Band:
        """Return the neighborhoods by blocks of queries.

        Keys begin r places before a block and end with it, or r places after it where attention is not causal. A query
        that is padding may attend to itself, or it had no key.
        """
        length, reach = self.queries.shape[1], self.reach
        block = max(reach, MIN_BLOCK)
        after = 0 if self.is_causal else reach
        device = self.queries.device
        distance = (
            torch.arange(reach + block + after, device=device) - reach - torch.arange(block, device=device)[:, None]
        )
        is_near = (distance >= -reach) & (distance <= after)  # (c, w)
        is_token = torch.ones(1, length, dtype=torch.bool, device=device)
        if attention_mask is not None:
            is_token = attention_mask.to(device).ne(0)  # (B, n)
        remainder = -length % block
        keys = nn.functional.pad(is_token, (reach, remainder + after)).unfold(
            1, reach + block + after, block
        )  # (B, N, w)
        return Band(((is_near & keys[:, :, None]) | (distance == 0))[:, :, None], reach)
