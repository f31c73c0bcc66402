"""The decoder's step of a prepared model without hooks on its layers, with its cache for beam search.

B sources, k beams per source, H heads, S source tokens, T target tokens so far, V vocabulary; d_k and d_v are the
widths of a head's keys and values.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from ..layers import CrossAttention, VaswaniTransformerDecoderLayer, additive_mask
from ..stacks import VaswaniTransformerDecoder
from .encoder import GROWTH, Function, UnwrappedLayer, attend, embed_fn, raw_forward
from .linear import PreparedLinear

KeyValues = tuple[Tensor, Tensor]  # (B, H, d_k, S) and (B, H, S, d_v)


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


class CachedCrossAttention:
    """Cross-attention of one layer, with its residual connection and precomputed source products.

    Scores are (h W_Q) K^T, and the output is (A V) W_O. For short sources the products W_Q K^T and V W_O of each head
    are precomputed (weight absorption), which saves two products per step. This also needs W_Q and W_O unpacked.
    """

    def __init__(self, attention: CrossAttention) -> None:
        self.heads = attention.config.num_heads
        self.scaling = attention.scaling
        self.head_widths = (attention.head_dim, attention.value_head_dim)
        self.k_proj = raw_forward(attention.k_proj)
        self.v_proj = raw_forward(attention.v_proj)
        self.q_proj = raw_forward(attention.q_proj)
        self.o_proj = raw_forward(attention.o_proj)
        self.weights = self.unpack(attention)

    def unpack(self, attention: CrossAttention) -> tuple[Tensor, ...]:
        """Return W_Q and its bias, scaled, and W_O and its bias, by head; () if they are not available."""
        parameters = []
        for linear in (attention.q_proj, attention.o_proj):
            unpacked = linear.unpacked() if isinstance(linear, PreparedLinear) else None
            if unpacked is None:
                return ()
            weight, bias = unpacked
            parameters += [weight, weight.new_zeros(len(weight)) if bias is None else bias]
        w_q, q_bias, w_o, o_bias = parameters
        return (
            w_q.unflatten(0, (self.heads, -1)) * self.scaling,  # (H, d_k, d_model)
            q_bias.view(self.heads, -1, 1) * self.scaling,  # (H, d_k, 1)
            w_o.unflatten(1, (self.heads, -1)).permute(1, 2, 0).contiguous(),  # (H, d_v, d_model)
            o_bias,
        )

    def source_key_values(self, memory: Tensor) -> KeyValues:
        """Return contiguous keys and values of the encoder's output (B, S, d_model)."""
        sources, tokens, _ = memory.shape
        rows = memory.flatten(0, 1)
        key_width, value_width = self.head_widths
        keys = self.k_proj(rows).view(sources, tokens, self.heads, key_width)
        values = self.v_proj(rows).view(sources, tokens, self.heads, value_width)
        return keys.permute(0, 2, 3, 1).contiguous(), values.transpose(1, 2).contiguous()

    def over(self, key_values: KeyValues, mask: Tensor | None, num_beams: int) -> Function:
        """Return a function of hidden states (k B, d_model) that attends to the sources; `mask` is (B, 1, 1, S)."""
        keys, values = key_values
        sources, heads, _, tokens = keys.shape
        if self.weights:
            d_model = self.weights[0].shape[2]
            if sources * heads * tokens <= d_model:
                return self.absorbed(keys, values, mask, num_beams)
        flat_keys = keys.flatten(0, 1)
        flat_values = values.flatten(0, 1)
        flat_mask = keys.new_zeros(1, 1, 1) if mask is None else mask.expand(-1, heads, -1, -1).flatten(0, 1)

        def cross_attend(hidden_states: Tensor) -> Tensor:
            query = self.q_proj(hidden_states).view(sources, num_beams, heads, -1).transpose(1, 2).flatten(0, 1)
            attended = attend(query, flat_keys, flat_values, flat_mask, self.scaling)  # (B H, k, d_v)
            by_beam = attended.view(sources, heads, num_beams, -1).transpose(1, 2)  # (B, k, H, d_v)
            output = self.o_proj(by_beam.reshape(hidden_states.shape[0], -1))
            return output.add_(hidden_states)

        return cross_attend

    def absorbed(self, keys: Tensor, values: Tensor, mask: Tensor | None, num_beams: int) -> Function:
        """Return the same function with precomputed products (weight absorption)."""
        w_q, q_bias, w_o, o_bias = self.weights
        sources, heads, _, tokens = keys.shape
        d_model = w_q.shape[2]

        # Scores (B, k, H S) are states @ to_scores + score_bias.
        keys = keys.transpose(2, 3)
        to_scores = (keys @ w_q).flatten(1, 2).transpose(1, 2)  # (B, d_model, H S)
        score_bias = (keys @ q_bias).transpose(2, 3)  # (B, H, 1, S)
        if mask is not None:
            score_bias = score_bias + mask
        score_bias = score_bias.reshape(sources, 1, -1)

        # The output is weights @ to_output.
        to_output = (values @ w_o).flatten(1, 2)  # (B, H S, d_model)
        to_output += o_bias / heads  # attention weights sum to 1 in each head

        if sources == 1:  # products of matrices are faster than batches of one product
            return self.absorbed_source(to_scores[0], to_output[0], score_bias[0], num_beams)

        def cross_attend(hidden_states: Tensor) -> Tensor:
            states = hidden_states.view(sources, num_beams, d_model)
            weights = torch.baddbmm(score_bias, states, to_scores)
            weights = weights.view(sources, num_beams, heads, tokens).softmax(-1)
            return torch.baddbmm(states, weights.flatten(-2), to_output).view(hidden_states.shape)

        return cross_attend

    def absorbed_source(self, to_scores: Tensor, to_output: Tensor, score_bias: Tensor, num_beams: int) -> Function:
        """Return the function of `absorbed` for a single source, of matrices without the dimension B."""
        tokens = to_scores.shape[1] // self.heads

        def cross_attend(hidden_states: Tensor) -> Tensor:
            weights = torch.addmm(score_bias, hidden_states, to_scores)  # (k, H S)
            weights = weights.view(num_beams, self.heads, tokens).softmax(-1)
            return torch.addmm(hidden_states, weights.flatten(-2), to_output)

        return cross_attend


class DecoderLayerStep(UnwrappedLayer):
    """Decoder layer for one new token of each beam."""

    def __init__(self, layer: VaswaniTransformerDecoderLayer, index: int) -> None:
        super().__init__(layer)
        self.index = index  # of its slot in the cache
        self.cross_attention = CachedCrossAttention(layer.cross_attn)
        self.cross_attn_norm = raw_forward(layer.cross_attn_add_norm.norm)

    def __call__(self, hidden_states: Tensor, cache: BeamCache, cross_attend: Function) -> Tensor:
        """Return the next `hidden_states` (k B, d_model)."""
        query, key_values = self.split_heads(self.project(hidden_states), cache.num_sources)
        keys, values = cache.write(self.index, key_values)
        attended = attend(query, keys, values, cache.mask, self.scaling)  # (B H, k, d_v)
        output = self.o_proj(self.merge_heads(attended, cache.num_sources))
        hidden_states = self.norm(output.add_(hidden_states))
        hidden_states = self.cross_attn_norm(cross_attend(hidden_states))
        inner = self.activation(self.fc1(hidden_states))
        return self.ffn_norm(self.fc2(inner).add_(hidden_states))


class DecoderStep:
    """All decoder layers and the output projection, for one new token of each beam.

    Attributes:
        positions: encodings (d_model,) of the first positions, extended on demand.
    """

    def __init__(self, decoder: VaswaniTransformerDecoder, lm_head: nn.Module) -> None:
        layers = cast(Iterable[VaswaniTransformerDecoderLayer], decoder.layers)
        self.layers = [DecoderLayerStep(layer, index) for index, layer in enumerate(layers)]
        self.embed = embed_fn(decoder.embed_tokens)
        self.encode = decoder.input_embedding.positions
        self.project = raw_forward(lm_head)
        self.positions: tuple[Tensor, ...] = ()

    def __call__(self, input_ids: Tensor, cache: BeamCache, cross_attention: list[Function]) -> Tensor:
        """Return the decoder's output (k B, d_model) for one new token of each beam (k B,), and extend the cache."""
        cache.append_slot()
        positions = self.positions  # read once, since a different thread may replace it
        if cache.length > len(positions):
            positions = self.encode.first_positions(cache.length + GROWTH).unbind()
            self.positions = positions
        hidden_states = self.embed(input_ids, positions[cache.length - 1])  # (k B, d_model)
        for layer, cross_attend in zip(self.layers, cross_attention, strict=True):
            hidden_states = layer(hidden_states, cache, cross_attend)
        return hidden_states


class PreparedStepper:
    """`Stepper` by the fast path.

    Args:
        decoder_step: the decoder step of the prepared model.
        memory: (B, S, d_model), the encoder's output.
        attention_mask: (B, S), 0 at padding; None for no padding.
        num_beams: k.
    """

    logits_are_scratch = True

    def __init__(
        self, decoder_step: DecoderStep, memory: Tensor, attention_mask: Tensor | None, num_beams: int
    ) -> None:
        layers = decoder_step.layers
        self.decoder_step = decoder_step
        self.num_beams = num_beams
        self.key_values = [layer.cross_attention.source_key_values(memory) for layer in layers]
        self.mask: Tensor | None = None  # (B, 1, 1, S)
        if attention_mask is not None and not bool(attention_mask.all()):
            self.mask = additive_mask(attention_mask.bool(), torch.float32)[:, None, None]
        self.cache = BeamCache(len(layers), len(memory), layers[0].heads, num_beams, *layers[0].head_widths)
        self.cross_attention = self.attend_to_sources()

    def attend_to_sources(self) -> list[Function]:
        pairs = zip(self.decoder_step.layers, self.key_values, strict=True)
        return [layer.cross_attention.over(pair, self.mask, self.num_beams) for layer, pair in pairs]

    def step(self, tokens: Tensor) -> Tensor:
        hidden_states = tokens  # each step has at least one new token, whose states these become
        for position in range(self.cache.length, tokens.shape[1]):
            hidden_states = self.decoder_step(tokens[:, position], self.cache, self.cross_attention)
        return self.decoder_step.project(hidden_states)

    def reorder(self, beams: Tensor) -> None:
        self.cache.reorder(beams)

    def keep(self, sources: Tensor) -> None:
        self.cache.keep(sources)
        self.key_values = [(keys[sources], values[sources]) for keys, values in self.key_values]
        if self.mask is not None:
            self.mask = self.mask[sources]
        self.cross_attention = self.attend_to_sources()
