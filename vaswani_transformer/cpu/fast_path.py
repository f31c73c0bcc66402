"""Fast paths of a prepared model's encoder and of its decoder's step, without hooks on their layers.

B sources, k beams per source, H heads, S source tokens, T target tokens so far, Q queries (S, or the k beams), K keys,
V vocabulary; d_k and d_v are the widths of a head's keys and values.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from ..layers import (
    AddAndNorm,
    CausalSelfAttention,
    CrossAttention,
    FeedForward,
    InputEmbedding,
    LearnedPositions,
    ScaledEmbedding,
    SelfAttention,
    SinusoidalPositions,
    VaswaniTransformerDecoderLayer,
    VaswaniTransformerEncoderLayer,
    additive_mask,
    count_positions,
)
from ..stacks import VaswaniTransformerDecoder, VaswaniTransformerEncoder
from .beam_cache import GROWTH, BeamCache
from .linear import PreparedLinear

Function = Callable[[Tensor], Tensor]
KeyValues = tuple[Tensor, Tensor]  # (B, H, d_k, S) and (B, H, S, d_v)

RECORDED = ("output_attentions", "output_hidden_states")
PLAIN_INPUTS = {"input_ids", "attention_mask", "return_dict", *RECORDED}


class FusedQKVAttention(CausalSelfAttention):
    """Self-attention with one product for queries, keys and values, and a copy of the weights of `attention`."""

    def __init__(self, attention: SelfAttention) -> None:
        nn.Module.__init__(self)  # the constructor of MultiHeadAttention would make three projections
        self.config = attention.config
        self.layer_idx = attention.layer_idx
        self.is_causal = attention.is_causal
        self.head_dim = attention.head_dim
        self.value_head_dim = attention.value_head_dim
        self.scaling = attention.scaling
        self.dropout = attention.dropout
        self._forward_hooks = attention._forward_hooks  # Transformers records weights with them
        self.qkv_proj = fused_linear([attention.q_proj, attention.k_proj, attention.v_proj], self.config.num_heads)
        self.o_proj = attention.o_proj

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        widths = (self.head_dim, self.head_dim, self.value_head_dim)
        by_head = self.split_heads(self.qkv_proj(hidden_states), sum(widths))
        return by_head.split(widths, dim=-1)


def fused_linear(linears: list[nn.Linear], heads: int) -> nn.Linear:
    """Return one layer with the outputs of all `linears`: those of the first head, then of the second, and so on.

    In this order a view of the product contains, for each head, all that its attention needs.
    """
    inputs = linears[0].in_features
    outputs = sum(linear.out_features for linear in linears)
    has_bias = linears[0].bias is not None
    fused = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=has_bias)
    for name, parameter in fused.named_parameters():
        parameters = [getattr(linear, name).detach() for linear in linears]
        by_head = [parameter.unflatten(0, (heads, -1)) for parameter in parameters]
        parameter.data = torch.cat(by_head, dim=1).flatten(0, 1)
    return fused


def fuse_qkv(attention: SelfAttention) -> SelfAttention:
    """Return a fused copy of a self-attention with plain projections; return any other, as of an adapter, unchanged."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    if all(type(projection) is nn.Linear for projection in projections):
        return FusedQKVAttention(attention)
    return attention


PLAIN = {
    VaswaniTransformerEncoder,
    VaswaniTransformerDecoder,
    InputEmbedding,
    SinusoidalPositions,
    LearnedPositions,
    VaswaniTransformerEncoderLayer,
    VaswaniTransformerDecoderLayer,
    FusedQKVAttention,
    CrossAttention,
    FeedForward,
    AddAndNorm,
}
"""Modules whose `forward` the fast paths replace; the one of a subclass may compute something different."""


def is_plain(stack: Any) -> bool:
    """Return whether a stack consists of unmodified modules of this package, with fused projections."""
    positions = getattr(stack.input_embedding, "positions", None)
    modules = [stack, stack.input_embedding, positions]
    for layer in stack.layers:
        modules += [layer, *layer.children()]
    return all(type(module) in PLAIN for module in modules)


def raw_forward(module: nn.Module) -> Function:
    """Return a module's `forward` as a function without hooks; a ReLU works in place."""
    if isinstance(module, PreparedLinear):
        return module.product
    if type(module) is nn.ReLU:
        return torch.relu_
    if type(module) is nn.LayerNorm:
        # Looking up an attribute of a module takes time in each call.
        shape = module.normalized_shape
        weight = module.weight
        bias = module.bias
        eps = module.eps
        return lambda hidden_states: torch.layer_norm(hidden_states, shape, weight, bias, eps)
    return module.forward


def embed_fn(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that adds position encodings to the embeddings of token ids."""
    if type(module) is ScaledEmbedding:
        scale = module.embed_scale
        return lambda ids, positions: torch.add(positions, torch.embedding(module.weight, ids), alpha=scale)
    return lambda ids, positions: module.forward(ids) + positions


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Return equation (1) (B H, Q, d_v) of queries (B H, Q, d_k), keys (B H, d_k, K) and values (B H, K, d_v)."""
    scores = torch.baddbmm(mask, query, keys, alpha=scaling)
    return torch.softmax(scores, dim=-1).bmm(values)


class UnwrappedLayer:
    """Common modules of encoder and decoder layers, as functions."""

    def __init__(self, layer: VaswaniTransformerEncoderLayer | VaswaniTransformerDecoderLayer) -> None:
        attention = layer.self_attn
        self.heads = attention.config.num_heads
        self.head_widths = (attention.head_dim, attention.value_head_dim)
        self.scaling = attention.scaling
        self.project = raw_forward(attention.get_submodule("qkv_proj"))
        self.o_proj = raw_forward(attention.o_proj)
        self.fc1 = raw_forward(layer.feed_forward.fc1)
        self.activation = raw_forward(layer.feed_forward.activation)
        self.fc2 = raw_forward(layer.feed_forward.fc2)
        self.norm = raw_forward(layer.self_attn_add_norm.norm)
        self.ffn_norm = raw_forward(layer.feed_forward_add_norm.norm)

    def split_heads(self, projected: Tensor, num_sources: int) -> tuple[Tensor, Tensor]:
        """Return queries (B H, Q, d_k), and concatenated keys and values (B, H, Q, d_k + d_v), of rows (B Q, ...).

        A row contains for each head its query, key and value, next to each other. The results are views of it, since
        a step is too short for copies; `projected` itself must not be a view. With one source they lack B.
        """
        row_width = projected.shape[1]
        head_width = row_width // self.heads
        key_width, value_width = self.head_widths
        tokens = projected.shape[0] // num_sources

        if num_sources == 1:
            strides = (head_width, row_width, 1)
            query = projected.as_strided((self.heads, tokens, key_width), strides)
            key_values = projected.as_strided((self.heads, tokens, key_width + value_width), strides, key_width)
            return query, key_values
        heads = (num_sources, self.heads, tokens)
        strides = (tokens * row_width, head_width, row_width, 1)
        query = projected.as_strided((*heads, key_width), strides).flatten(0, 1)
        key_values = projected.as_strided((*heads, key_width + value_width), strides, key_width)
        return query, key_values

    def merge_heads(self, attended: Tensor, num_sources: int) -> Tensor:
        """Concatenate the outputs of the heads (B H, Q, d_v) for each token: (B Q, H d_v)."""
        if num_sources == 1:
            return attended.transpose(0, 1).reshape(attended.shape[1], -1)
        by_source = attended.view(num_sources, self.heads, -1, attended.shape[2])  # (B, H, Q, d_v)
        return by_source.transpose(1, 2).reshape(num_sources * attended.shape[1], -1)


class EncoderLayerPass(UnwrappedLayer):
    """Encoder layer over all tokens of each source."""

    def __call__(self, hidden_states: Tensor, mask: Tensor, num_sources: int) -> Tensor:
        """Return the next `hidden_states` (B S, d_model); `mask` (B H or 1, 1, S or 1) is added to the scores."""
        query, key_values = self.split_heads(self.project(hidden_states), num_sources)
        keys, values = key_values.flatten(0, -3).split_with_sizes(self.head_widths, -1)  # (B H, S, d_k), (B H, S, d_v)
        attended = attend(query, keys.transpose(1, 2), values, mask, self.scaling)  # (B H, S, d_v)
        output = self.o_proj(self.merge_heads(attended, num_sources))
        hidden_states = self.norm(output.add_(hidden_states))
        inner = self.activation(self.fc1(hidden_states))
        return self.ffn_norm(self.fc2(inner).add_(hidden_states))


class PreparedEncoder:
    """Wrapper of the encoder with a fast path for sources of valid length, without intermediate outputs.

    The fast path calls no hooks on the layers. Other attributes are those of the encoder.

    Attributes:
        encodings: (P, d_model), encodings of the first positions, extended on demand.
    """

    def __init__(self, encoder: VaswaniTransformerEncoder) -> None:
        layers = cast(Iterable[VaswaniTransformerEncoderLayer], encoder.layers)
        self.encoder = encoder
        self.positions = encoder.input_embedding.positions
        self.fast_layers = [EncoderLayerPass(layer) for layer in layers]
        self.embed = embed_fn(encoder.embed_tokens)
        self.encodings = torch.empty(0, encoder.config.d_model)

    def fast_pass(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the encoder's output (B, S, d_model) for `input_ids` (B, S); `attention_mask` is 0 at padding."""
        sources, length = input_ids.shape
        encodings = self.encodings  # read once, since a different thread may replace it
        if length > len(encodings):
            encodings = self.positions.first_positions(length + GROWTH)
            self.encodings = encodings
        positions = encodings[:length]
        mask = positions.new_zeros(1, 1, 1)
        if attention_mask is not None and not bool(attention_mask.all()):
            positions = nn.functional.embedding(count_positions(attention_mask), positions)
            mask = additive_mask(attention_mask.bool(), torch.float32)  # (B, S)
            mask = mask.repeat_interleave(self.encoder.config.num_heads, dim=0)[:, None]
        hidden_states = self.embed(input_ids, positions).flatten(0, 1)
        for layer in self.fast_layers:
            hidden_states = layer(hidden_states, mask, sources)
        return hidden_states.view(sources, length, -1)

    @functools.wraps(VaswaniTransformerEncoder.forward)
    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Return the encoder's output."""
        config = self.encoder.config
        ids = inputs.get("input_ids")
        mask = inputs.get("attention_mask")
        longest = self.positions.table.num_embeddings if isinstance(self.positions, LearnedPositions) else None
        is_fast = (
            not args
            and PLAIN_INPUTS.issuperset(inputs)
            and ids is not None
            and ids.numel() > 0
            and (longest is None or ids.shape[1] <= longest)
            and (mask is None or mask.shape == ids.shape)
            and inputs.get("return_dict") is not False
            and not any(inputs.get(flag) or getattr(config, flag) for flag in RECORDED)
            and config._attn_implementation == "eager"
            and config.attention_window is None
            and not torch.is_autocast_enabled("cpu")
        )
        if not is_fast:
            return self.encoder(*args, **inputs)
        return BaseModelOutput(last_hidden_state=self.fast_pass(ids, mask))

    __call__ = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)


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
