"""Fast path of a prepared model's decoder step.

B sources, k beams per source, H heads, S source tokens, T target tokens so far, V vocabulary; d_k and d_v are the
widths of a head's keys and values.
"""

from typing import cast

import torch
from torch import Tensor, nn

from ..attention import CrossAttention, additive_mask
from ..layers import VaswaniTransformerDecoderLayer
from ..stacks import VaswaniTransformerDecoder
from .layers import GROWTH, Function, UnwrappedLayer, attend, embed_fn, raw_forward
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
        self.num_sources, self.num_beams, self.key_width, self.length = num_sources, num_beams, key_width, 0
        shape = (layers, num_sources, heads, GROWTH, num_beams, key_width + value_width)
        self.key_values = torch.empty(shape, dtype=torch.float32, device="cpu")
        own_column = torch.full((num_beams, num_beams), -torch.inf, dtype=torch.float32, device="cpu").fill_diagonal_(0)
        self.self_mask = own_column.repeat(num_sources, 1)
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
        unmoved = torch.arange(len(sources), device=sources.device)
        stay = int((sources == unmoved).long().cumprod(0).sum())  # leading sources that do not move
        for layer in self.key_values:
            written = layer[:, :, : self.length]
            written[stay : len(sources)] = written[sources[stay:]]
        if self.ancestry_mask is not None:
            rows = self.ancestry_mask.view(self.num_sources, self.num_beams, -1)
            self.ancestry_mask = rows[sources].flatten(0, 1)
        self.key_values, self.num_sources = self.key_values[:, : len(sources)], len(sources)
        self.self_mask = self.self_mask[: len(sources) * self.num_beams]

    def append_slot(self) -> None:
        """Append a slot for a new token of each beam."""
        self.length += 1
        layers, sources, heads, slots, beams, width = self.key_values.shape
        if self.length > slots:
            grown = self.key_values.new_empty(layers, sources, heads, slots + max(GROWTH, slots // 2), beams, width)
            grown[:, :, :, :slots] = self.key_values
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
        self.heads, self.scaling = attention.config.num_heads, attention.scaling
        self.project_key_values = attention.project_key_values
        self.q_proj, self.o_proj = map(raw_forward, (attention.q_proj, attention.o_proj))
        self.weights: tuple[Tensor, ...] = ()
        linears = (attention.q_proj, attention.o_proj)
        unpacked = [linear.unpacked() for linear in linears if isinstance(linear, PreparedLinear)]
        parameters = [pair for pair in unpacked if pair is not None]
        if len(parameters) == 2:
            (w_q, _), (w_o, _) = parameters
            q_bias, o_bias = (weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parameters)
            self.weights = (
                w_q.unflatten(0, (self.heads, -1)) * self.scaling,  # (H, d_k, d_model)
                q_bias.view(self.heads, -1, 1) * self.scaling,  # (H, d_k, 1)
                w_o.unflatten(1, (self.heads, -1)).permute(1, 2, 0).contiguous(),  # (H, d_v, d_model)
                o_bias,
            )

    def source_key_values(self, memory: Tensor) -> KeyValues:
        """Return contiguous keys and values of the encoder's output (B, S, d_model)."""
        keys, values = self.project_key_values(memory)
        return keys.transpose(2, 3).contiguous(), values.contiguous()

    def over(self, key_values: KeyValues, mask: Tensor | None, num_beams: int) -> Function:
        """Return a function of hidden states (k B, d_model) that attends to the sources; `mask` is (B, 1, 1, S)."""
        keys, values = key_values
        sources, heads, _, tokens = keys.shape
        if self.weights and sources * heads * tokens <= self.weights[0].shape[2]:
            return self.absorbed(keys, values, mask, num_beams)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        mask = keys.new_zeros(1, 1, 1) if mask is None else mask.expand(-1, heads, -1, -1).flatten(0, 1)

        def cross_attend(hidden_states: Tensor) -> Tensor:
            query = self.q_proj(hidden_states).view(sources, num_beams, heads, -1).transpose(1, 2).flatten(0, 1)
            attended = attend(query, keys, values, mask, self.scaling).view(sources, heads, num_beams, -1)
            return self.o_proj(attended.transpose(1, 2).reshape(hidden_states.shape[0], -1)).add_(hidden_states)

        return cross_attend

    def absorbed(self, keys: Tensor, values: Tensor, mask: Tensor | None, num_beams: int) -> Function:
        """Return the same function with precomputed products (weight absorption)."""
        w_q, q_bias, w_o, o_bias = self.weights
        sources, heads, _, tokens = keys.shape
        keys = keys.transpose(2, 3)
        to_scores = (keys @ w_q).flatten(1, 2).transpose(1, 2)  # (B, d_model, H S)
        to_output = (values @ w_o).flatten(1, 2)
        to_output += o_bias / heads  # attention weights sum to 1 in each head
        added = (keys @ q_bias).transpose(2, 3)  # (B, H, 1, S)
        added = (added if mask is None else added + mask).reshape(sources, 1, -1)
        batch, product = (sources,), torch.baddbmm
        if sources == 1:  # omit the dimension for speed
            to_scores, to_output, added, batch, product = to_scores[0], to_output[0], added[0], (), torch.addmm
        to_states, head_shape = (*batch, num_beams, w_q.shape[2]), (*batch, num_beams, heads, tokens)

        def cross_attend(hidden_states: Tensor) -> Tensor:
            states = hidden_states.view(to_states)  # (B, k, d_model)
            weights = product(added, states, to_scores).view(head_shape).softmax(-1)
            return product(states, weights.flatten(-2), to_output).view(hidden_states.shape)

        return cross_attend


class DecoderLayerStep(UnwrappedLayer):
    """Decoder layer for one new token of each beam."""

    def __init__(self, layer: VaswaniTransformerDecoderLayer) -> None:
        super().__init__(layer)
        self.index = layer.self_attn.layer_idx
        self.cross_attention = CachedCrossAttention(layer.cross_attn)
        self.cross_attn_norm = raw_forward(layer.cross_attn_add_norm.norm)

    def __call__(self, hidden_states: Tensor, cache: BeamCache, cross_attend: Function) -> Tensor:
        """Return the next `hidden_states` (k B, d_model)."""
        query, key_values = self.split_heads(self.project(hidden_states), cache.num_sources)
        keys, values = cache.write(self.index, key_values)
        attended = attend(query, keys, values, cache.mask, self.scaling)  # (B H, k, d_v)
        hidden_states = self.norm(self.o_proj(self.merge_heads(attended, cache.num_sources)).add_(hidden_states))
        hidden_states = self.cross_attn_norm(cross_attend(hidden_states))
        inner = self.activation(self.fc1(hidden_states))
        return self.ffn_norm(self.fc2(inner).add_(hidden_states))


class DecoderStep:
    """All decoder layers and the output projection, for one new token of each beam.

    Attributes:
        positions: encodings (d_model,) of the first positions, extended on demand.
    """

    def __init__(self, decoder: VaswaniTransformerDecoder, lm_head: nn.Module) -> None:
        self.layers = [DecoderLayerStep(cast(VaswaniTransformerDecoderLayer, layer)) for layer in decoder.layers]
        self.embed = embed_fn(decoder.embed_tokens)
        self.encode = decoder.input_embedding.positions
        self.project = raw_forward(lm_head)
        self.positions: tuple[Tensor, ...] = ()

    def __call__(self, input_ids: Tensor, cache: BeamCache, cross_attention: list[Function]) -> Tensor:
        """Return the decoder's output (k B, d_model) for one new token of each beam (k B,), and extend the cache."""
        cache.append_slot()
        if cache.length > len(positions := self.positions):
            self.positions = positions = self.encode.first_positions(cache.length + GROWTH).unbind()
        hidden_states = self.embed(input_ids, positions[cache.length - 1])  # (k B, d_model)
        for layer, cross_attend in zip(self.layers, cross_attention, strict=True):
            hidden_states = layer(hidden_states, cache, cross_attend)
        return hidden_states


class PreparedDecoder:
    """`Decoder` of a search by the fast path.

    Args:
        decoder_step: the decoder step of the prepared model.
        memory: (B, S, d_model), the encoder's output.
        attention_mask: (B, S), 0 at padding; None for no padding.
        num_beams: k.
    """

    gives_logits_away = True

    def __init__(
        self, decoder_step: DecoderStep, memory: Tensor, attention_mask: Tensor | None, num_beams: int
    ) -> None:
        self.decoder_step, self.num_beams, layers = decoder_step, num_beams, decoder_step.layers
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
        hidden_states = tokens
        for position in range(self.cache.length, tokens.shape[1]):
            hidden_states = self.decoder_step(tokens[:, position], self.cache, self.cross_attention)
        return self.decoder_step.project(hidden_states)

    def reorder(self, beams: Tensor) -> None:
        self.cache.reorder(beams)

    def keep(self, sources: Tensor) -> None:
        self.cache.keep(sources)
        self.key_values = [(keys[sources], values[sources]) for keys, values in self.key_values]
        self.mask = None if self.mask is None else self.mask[sources]
        self.cross_attention = self.attend_to_sources()
