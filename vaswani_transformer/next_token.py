"""One more token of each target by the shortest way through a prepared decoder.

B sources, k target rows of a source, T tokens of a source or those k rows, H heads, K keys, d_k and d_v the widths of a
head's keys and values.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from .attention import CrossAttention
from .beam_cache import ROOM, BeamCache
from .decoder import VaswaniTransformerDecoder
from .embeddings import ScaledEmbedding
from .layers import VaswaniTransformerDecoderLayer, VaswaniTransformerEncoderLayer

Step = Callable[[Tensor], Tensor]
Parameters = tuple[Tensor, Tensor | None]  # a linear layer's weight (out, in) and bias


def without_detours(module: nn.Module) -> Step:
    """What a module does, without the detours of calling one."""
    if type(module) is nn.LayerNorm:
        shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
        return lambda hidden_states: torch.layer_norm(hidden_states, shape, weight, bias, eps)
    return getattr(module, "without_detours", lambda: module.forward)()


def embedding_of(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The embeddings of token ids with their positions added, by the module that embeds tokens."""
    if type(module) is ScaledEmbedding:
        scale = module.embed_scale
        return lambda ids, positions: torch.add(positions, torch.embedding(module.weight, ids), alpha=scale)
    return lambda ids, positions: module.forward(ids) + positions


def in_turn(*modules: nn.Module) -> Step:
    """Modules one after the other."""
    steps = [without_detours(module) for module in modules if type(module) is not nn.Identity]

    def run(hidden_states: Tensor) -> Tensor:
        for step in steps:
            hidden_states = step(hidden_states)
        return hidden_states

    return run


class Drawing:
    """The attention of one layer over the sources, with its residual; it keeps what it can compute of it beforehand.

    Scores are (h W_Q) K^T and what is drawn is (A V) W_O. For sources of few tokens the products W_Q K^T and V W_O of
    each head have fewer entries than the weights themselves, and every token to come takes two products less. For that
    the layer's W_Q and W_O are kept as they are, beside the packed ones.
    """

    def __init__(self, attention: CrossAttention) -> None:
        self.heads, self.scaling = attention.config.num_heads, attention.scaling
        self.remember = attention.source_key_values
        self.ask, self.combine = map(without_detours, (attention.q_proj, attention.o_proj))
        found = [getattr(layer, "unpacked", lambda: None)() for layer in (attention.q_proj, attention.o_proj)]
        self.weights = None if None in found else self.weights_by_head(*cast(Any, found))

    def weights_by_head(self, asking: Parameters, combining: Parameters) -> tuple[Tensor, ...]:
        """W_Q / sqrt(d_k) (H, d_k, d_model), its bias (H, d_k, 1), W_O (H, d_v, d_model) and its bias (d_model,)."""
        biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in (asking, combining)]
        return (
            asking[0].unflatten(0, (self.heads, -1)) * self.scaling,
            biases[0].view(self.heads, -1, 1) * self.scaling,
            combining[0].unflatten(1, (self.heads, -1)).permute(1, 2, 0).contiguous(),
            biases[1],
        )

    def of(self, keys: Tensor, values: Tensor, mask: Tensor | None, num_targets: int) -> Step:
        """What it makes of hidden states (k B, d_model), for sources with keys and values (B, H, K, d_k and d_v).

        Args:
            mask: (B, 1, 1, K), added to the scores.
            num_targets: k.
        """
        sources, heads, tokens, _ = keys.shape
        if self.weights is not None and sources * heads * tokens <= self.weights[0].shape[2]:
            return self.with_weights(keys, values, mask)
        keys, values = keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)
        mask = keys.new_zeros(1, 1, 1) if mask is None else mask.expand(-1, heads, -1, -1).flatten(0, 1)

        def draw(hidden_states: Tensor) -> Tensor:
            query = self.ask(hidden_states).view(sources, num_targets, heads, -1).transpose(1, 2).flatten(0, 1)
            attended = attend(query, keys, values, mask, self.scaling).view(sources, heads, num_targets, -1)
            return hidden_states + self.combine(attended.transpose(1, 2).reshape(len(hidden_states), -1))

        return draw

    def with_weights(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> Step:
        """The same, by the products of the weights with keys and values, (B, H K, d_model) each."""
        asking, asking_bias, combining, combining_bias = cast(tuple[Tensor, ...], self.weights)
        sources, heads, tokens, _ = keys.shape
        scores = (keys @ asking).flatten(1, 2).transpose(1, 2)  # (B, d_model, H K)
        results = (values @ combining).flatten(1, 2)
        results += combining_bias / heads  # each head's weights add up to 1
        added = (keys @ asking_bias).transpose(2, 3)  # (B, H, 1, K)
        added = (added if mask is None else added + mask).reshape(sources, 1, -1)

        if sources == 1:
            return self.from_one(scores[0], results[0], added[0])

        def draw(hidden_states: Tensor) -> Tensor:
            states = hidden_states.view(sources, -1, hidden_states.shape[-1])  # (B, k, d_model)
            weights = torch.baddbmm(added, states, scores).view(sources, -1, heads, tokens).softmax(-1)  # (B, k, H, K)
            return torch.baddbmm(states, weights.flatten(2), results).view_as(hidden_states)

        return draw

    def from_one(self, scores: Tensor, results: Tensor, added: Tensor) -> Step:
        """The same for one source: `scores` (d_model, H K), `results` (H K, d_model) and `added` (1, H K)."""
        heads, tokens = self.heads, len(results) // self.heads

        def draw(hidden_states: Tensor) -> Tensor:
            weights = torch.addmm(added, hidden_states, scores).view(-1, heads, tokens).softmax(-1)  # (k, H, K)
            return torch.addmm(hidden_states, weights.flatten(1), results)

        return draw


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Equation (1): (B H, k, d_v) of queries (B H, k, d_k), keys (B H, d_k, K) and values (B H, K, d_v)."""
    return torch.softmax(torch.baddbmm(mask, query, keys, alpha=scaling), dim=-1).bmm(values)


class FlatLayer:
    """What the layers of a prepared encoder and decoder have in common, their modules without detours."""

    def __init__(self, layer: VaswaniTransformerEncoderLayer | VaswaniTransformerDecoderLayer) -> None:
        attention, inner = cast(Any, layer.self_attn), layer.feed_forward
        self.heads, self.scaling = attention.config.num_heads, attention.scaling
        self.head_widths = attention.head_dim, attention.value_head_dim
        self.project, self.combine = map(without_detours, (attention.qkv_proj, attention.o_proj))
        self.feed_forward = in_turn(inner.fc1, inner.activation, inner.dropout, inner.fc2)
        self.norm = without_detours(layer.self_attn_add_norm.norm)
        self.norm_fed = without_detours(layer.feed_forward_add_norm.norm)

    def by_head(self, projected: Tensor, num_sources: int) -> tuple[Tensor, Tensor]:
        """Queries (B H, T, d_k), and keys beside values (B, H, T, d_k + d_v), in the rows (B T, ...) of a product.

        The product is a tensor of its own, no view. What it returns has no dimension B where that is 1.
        """
        tokens, row = len(projected) // num_sources, projected.shape[1]
        sizes, strides = ((), ()) if num_sources == 1 else ((num_sources,), (tokens * row,))

        def part(width: int, start: int) -> Tensor:
            return projected.as_strided((*sizes, self.heads, tokens, width), (*strides, width, row, 1), start)

        key_width, value_width = self.head_widths
        query = part(key_width, 0)
        query = query if num_sources == 1 else query.flatten(0, 1)
        return query, part(key_width + value_width, self.heads * key_width)

    def by_token(self, attended: Tensor, num_sources: int) -> Tensor:
        """What the heads (B H, T, d_v) have attended to, side by side for each token (B T, H d_v)."""
        if num_sources == 1:
            return attended.transpose(0, 1).reshape(attended.shape[1], -1)
        return attended.unflatten(0, (num_sources, -1)).transpose(1, 2).flatten(2).flatten(0, 1)


class NextStates(FlatLayer):
    """What a layer of a prepared decoder makes of one more token of each target row."""

    def __init__(self, layer: VaswaniTransformerDecoderLayer) -> None:
        super().__init__(layer)
        self.index = layer.self_attn.layer_idx
        self.drawing = Drawing(layer.cross_attn)
        self.norm_drawn = without_detours(layer.cross_attn_add_norm.norm)

    def __call__(self, hidden_states: Tensor, targets: BeamCache, draw: Step) -> Tensor:
        """`hidden_states` (k B, d_model), also what is returned."""
        query, keys_and_values = self.by_head(self.project(hidden_states), targets.num_sources)
        keys, values = targets.extend(self.index, keys_and_values)
        attended = attend(query, keys, values, targets.mask, self.scaling)  # (B H, k, d_v)
        hidden_states = self.norm(hidden_states + self.combine(self.by_token(attended, targets.num_sources)))
        hidden_states = self.norm_drawn(draw(hidden_states))
        return self.norm_fed(hidden_states + self.feed_forward(hidden_states))


class NextOutput:
    """What a prepared decoder makes of one more token of each target row, by the shortest way.

    Attributes:
        positions: (d_model,) each, the encodings of the first positions, as many as were needed so far.
    """

    def __init__(self, decoder: VaswaniTransformerDecoder) -> None:
        self.layers = [NextStates(cast(Any, layer)) for layer in decoder.layers]
        self.embed = embedding_of(decoder.embed_tokens)
        self.encode = decoder.input_embedding.positions
        self.positions: tuple[Tensor, ...] = ()

    def __call__(
        self, input_ids: Tensor, memory: Tensor, source_mask: Tensor | None, cache: EncoderDecoderCache
    ) -> Tensor:
        """The decoder's output (k B, 1, d_model) for one more token of each target row (k B, 1).

        Args:
            memory: (B, K, d_model), the encoder's output, of which a first call computes keys and values.
            source_mask: (B, K), 0 where a source token is padding; None: every token counts.
            cache: keys and values of the earlier tokens and of the source, which the call extends.
        """
        targets = cast(DynamicCache, cache.self_attention_cache)
        if not isinstance(targets, BeamCache):
            cache.self_attention_cache = targets = self.begun(targets, memory, len(input_ids) // len(memory))
        if targets.draws is None:
            targets.draws = self.draws(memory, source_mask, cache, targets.num_targets)
        targets.begin()
        if targets.length > len(positions := self.positions):
            self.positions = positions = self.encode.first_positions(targets.length + ROOM).unbind()
        hidden_states = self.embed(input_ids[:, 0], positions[targets.length - 1])  # (k B, d_model)
        for layer, draw in zip(self.layers, targets.draws, strict=True):
            hidden_states = layer(hidden_states, targets, draw)
        return hidden_states[:, None]

    def begun(self, cache: DynamicCache, memory: Tensor, num_targets: int) -> BeamCache:
        """The same keys and values side by side, or none where the search begins."""
        if cache.get_seq_length():
            return BeamCache.of_rows(cache, num_targets)
        layer = self.layers[0]
        shape = (len(self.layers), len(memory), layer.heads, 0, num_targets, sum(layer.head_widths))
        return BeamCache(memory.new_empty(shape), layer.head_widths[0])

    def draws(
        self, memory: Tensor, source_mask: Tensor | None, cache: EncoderDecoderCache, num_targets: int
    ) -> list[Step]:
        """What each layer does with these sources, until one of them leaves."""
        all_count = source_mask is None or bool(source_mask.all())
        lowest = torch.finfo(torch.float32).min
        mask = None if all_count else memory.new_zeros(()).where(source_mask.bool(), lowest)[:, None, None]
        return [layer.drawing.of(*layer.drawing.remember(memory, cache), mask, num_targets) for layer in self.layers]


__all__ = ["NextOutput"]
