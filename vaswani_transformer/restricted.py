"""Restricted self-attention, in which each position attends only to its neighborhood (section 4).

B batch, H heads, Q queries, K keys, n tokens of a text, N blocks of c queries with w keys. r counts the positions on
one side, so a neighborhood has 2 r + 1 tokens, or r + 1 in the decoder. Padding must not be between tokens.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_sliding_window_mask, create_sliding_window_causal_mask

from .config import VaswaniTransformerConfig

MIN_BLOCK = 32
"""Smallest number of queries in a block, since small products are slow."""


def in_blocks(heads: Tensor, blocks: int, block: int, before: int = 0, after: int = 0) -> Tensor:
    """Split (B, H, n, width) into overlapping blocks (B N, H, before + c + after, width)."""
    remainder = blocks * block - heads.shape[2]
    padded = nn.functional.pad(heads, (0, 0, before, remainder + after))
    return padded.unfold(2, before + block + after, block).permute(0, 2, 1, 4, 3).flatten(0, 1)


@dataclass(frozen=True)
class Band:
    """Mask of neighborhoods that computes attention block by block, with time and memory in O(r n d).

    Attributes:
        allowed: (B or 1, N, 1, c, w), whether each query of a block attends to each key; keys begin r positions before
            the block.
        reach: r.
    """

    allowed: Tensor
    reach: int

    @classmethod
    def over(cls, queries: Tensor, attention_mask: Tensor | None, reach: int, is_causal: bool) -> "Band":
        """Return the neighborhoods of `queries` (B, n, d_model); padding may attend to itself."""
        length = queries.shape[1]
        device = queries.device
        block = max(reach, MIN_BLOCK)
        after = 0 if is_causal else reach

        # The neighborhood of each query of a block.
        keys = torch.arange(reach + block + after, device=device)
        rows = torch.arange(block, device=device)
        distance = keys - reach - rows[:, None]  # (c, w)
        is_near = (distance >= -reach) & (distance <= after)

        # The tokens among the keys of each block.
        is_token = torch.ones(1, length, dtype=torch.bool, device=device)
        if attention_mask is not None:
            is_token = attention_mask.to(device).ne(0)  # (B, n)
        padded = nn.functional.pad(is_token, (reach, -length % block + after))
        is_key = padded.unfold(1, len(keys), block)  # (B, N, w)
        allowed = (is_near & is_key[:, :, None]) | (distance == 0)  # (B, N, c, w)
        return cls(allowed[:, :, None], reach)

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


def check_supports_window(config: VaswaniTransformerConfig, attention_mask: Tensor | BlockMask | None) -> None:
    """Raise ValueError unless the attention implementation and the mask support a window."""
    implementation = config._attn_implementation or "eager"
    is_supported = implementation in ("eager", "sdpa", "flex_attention") or "flash" in implementation
    if isinstance(attention_mask, BlockMask) or not is_supported:
        raise ValueError(
            f"attention_window: cannot be applied; got the attention implementation {implementation!r} and a mask of "
            f"type {type(attention_mask).__name__}, expected eager, sdpa, flex_attention or a flash attention, and a "
            "tensor. Choose one with set_attn_implementation, or set attention_window=None."
        )


def make_window_mask(
    config: VaswaniTransformerConfig,
    queries: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    is_causal: bool,
) -> Tensor | None:
    """Return Transformers' mask of the neighborhoods; arguments as in `window_mask`."""
    windowed: Any = copy.copy(config)
    windowed.sliding_window = (config.attention_window or 0) + is_causal  # a causal window counts the token itself
    is_4d = attention_mask is not None and attention_mask.dim() == 4
    if is_4d:
        windowed._attn_implementation = "sdpa"  # its masks are boolean
    padding = None if is_4d else attention_mask
    may_skip = queries.device.type == "cpu" and not is_4d  # on an accelerator the check would synchronize
    if is_causal:
        mask = create_sliding_window_causal_mask(windowed, queries, padding, cache, allow_is_causal_skip=may_skip)
    else:
        mask = create_bidirectional_sliding_window_mask(
            windowed, queries, padding, allow_is_bidirectional_skip=may_skip
        )
    if attention_mask is None or not is_4d:
        return mask

    # The caller's mask, with the window.
    lowest = False if attention_mask.dtype == torch.bool else torch.finfo(attention_mask.dtype).min
    return attention_mask.masked_fill(~mask.to(attention_mask.device), lowest)


def window_mask(
    config: VaswaniTransformerConfig,
    queries: Tensor,
    attention_mask: Tensor | BlockMask | None,
    cache: Cache | None = None,
    is_causal: bool = False,
) -> Tensor | None:
    """Return the mask of the neighborhoods of `queries` (B, Q, d_model) in the attention implementation's format.

    It may be a `Band`, which only `SelfAttention` knows; None means that no mask is needed. `attention_mask` is (B, K),
    0 at padding, or a mask (B, 1, Q, K) to combine with the window; `cache` contains earlier tokens.

    Raises:
        ValueError: the attention implementation does not support a window, or the mask is a `BlockMask`.
    """
    check_supports_window(config, attention_mask)
    mask = cast(Tensor | None, attention_mask)
    reach = config.attention_window or 0
    length = queries.shape[1]
    is_dynamic = cache is not None and not cache.is_compileable

    # A single new token attends to all tokens while these fit into the window.
    is_newest = is_causal and length == 1 and mask is None
    if is_newest and is_dynamic and cache.get_mask_sizes(1, 0)[0] <= reach + 1:
        return None

    # A band computes whole texts at once, and is worth it only for long ones.
    is_first = cache is None or (is_dynamic and cache.get_seq_length() == 0)
    is_whole = is_first and (mask is None or mask.shape[1] == length)
    is_long = length >= 4 * max(reach, MIN_BLOCK)
    is_fast = config._attn_implementation == "sdpa" and queries.device.type == "cpu"
    if is_fast and is_whole and is_long and not torch.compiler.is_compiling():
        return cast(Tensor, Band.over(queries, mask, reach, is_causal))
    return make_window_mask(config, queries, mask, cache, is_causal)
