"""The prior of FlowSeq: an invertible map between latents and standard normal numbers, given a source (Ma et al. 2019).

B batch, S source, T target, k target rows of one source row, d latent width, h = d / 2, L layers of the flow. A layer
maps x to y, and back; for densities it adds up log|det dy/dx|. Every layer computes in at least float32.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init
from transformers.utils import logging

from .attention import MultiHeadAttention
from .config import VaswaniTransformerConfig
from .embeddings import sinusoids
from .layers import AddAndNorm
from .loss import accumulation_dtype
from .nar_decoder import NarDecoderLayer
from .nat_decoder import PositionalAttention

logger = logging.get_logger(__name__)

HEAD = 32  # features that one matrix mixes; less where 32 does not divide d


class FlowError(ValueError):
    """A flow without a start, with a singular matrix, or with numbers that are not finite; the message names it."""


@dataclass
class FlowInputs:
    """What every layer gets in addition to the latents.

    Attributes:
        is_real: (k B, T, 1), 1.0 at the places of tokens, else 0.0.
        positions: (1, T, h), PE of the places, half as wide as the latents.
        attention_mask: of self-attention, in the form that the attention implementation takes.
        memory: (B, S, d_model), the encoder's output; row i of the latents belongs to source i // k.
        memory_mask: of cross-attention.
    """

    is_real: Tensor
    positions: Tensor
    attention_mask: Any
    memory: Tensor
    memory_mask: Any


class LatentAttention(PositionalAttention):
    """Attention whose queries are the positions, and whose keys and values are the latents."""

    def keys(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Return what the keys are projected from, (B, T, d_model)."""
        return hidden_states


class LatentReader(nn.Module):
    """Positions that attend to latents: LayerNorm(PE + Dropout(Attention(PE, z, z)))."""

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__()
        self.latent_attn = LatentAttention(config, layer_idx=0)
        self.add_norm = AddAndNorm(config)

    def forward(self, latents: Tensor, positions: Tensor, attention_mask: Any, **kwargs: object) -> Tensor:
        """Return states (k B, T, d_model) from latents of that shape and PE (1, T, d_model)."""
        attended, _ = self.latent_attn(latents, positions, attention_mask, **kwargs)
        return self.add_norm(positions, attended)


class FlowLayer(nn.Module):
    """An invertible map of latents (k B, T, d) at the same places, in both directions by `forward`.

    Accelerate loads offloaded weights for a call of the module, and for no other method.
    """

    def forward(self, latents: Tensor, inputs: FlowInputs, inverts: bool = False) -> tuple[Tensor, Tensor]:
        """Return y, or x for y where it `inverts`, and log|det dy/dx| of each place: a scalar, or (k B, T)."""
        raise NotImplementedError


class ActNorm(FlowLayer):
    """y = x exp(s) + t, with s and t of each feature (Kingma and Dhariwal 2018, 3.1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, latents: Tensor, inputs: FlowInputs, inverts: bool = False) -> tuple[Tensor, Tensor]:
        if inverts:
            return (latents - self.shift) * (-self.log_scale).exp(), self.log_scale.sum()
        return latents * self.log_scale.exp() + self.shift, self.log_scale.sum()

    def start(self, latents: Tensor, inputs: FlowInputs) -> None:
        """Set s and t so that every feature of `latents` has mean 0 and variance 1 over the places of tokens."""
        count = inputs.is_real.sum()
        mean = (latents * inputs.is_real).sum((0, 1)) / count  # (d,)
        variance = ((latents - mean).square() * inputs.is_real).sum((0, 1)) / count
        std = (variance + 1e-6).sqrt()
        self.log_scale.copy_(-std.log())
        self.shift.copy_(-mean / std)


class HeadLinear(FlowLayer):
    """One matrix W for all heads of features, contiguous or interleaved ones: y = W x in each (Ma et al. 2019, 3.2)."""

    def __init__(self, width: int, is_interleaved: bool) -> None:
        super().__init__()
        size = math.gcd(width, HEAD)
        self.num_heads, self.is_interleaved = width // size, is_interleaved
        self.weight = nn.Parameter(torch.eye(size))

    def multiply(self, latents: Tensor, matrix: Tensor) -> Tensor:
        if self.is_interleaved:  # head i has the features i, i + num_heads, ...
            heads = latents.unflatten(-1, (-1, self.num_heads)).transpose(-1, -2)  # (k B, T, heads, size)
            return (heads @ matrix.T).transpose(-1, -2).flatten(-2)
        return (latents.unflatten(-1, (self.num_heads, -1)) @ matrix.T).flatten(-2)

    def forward(self, latents: Tensor, inputs: FlowInputs, inverts: bool = False) -> tuple[Tensor, Tensor]:
        matrix = torch.linalg.inv_ex(self.weight).inverse if inverts else self.weight
        log_det = torch.linalg.slogdet(self.weight)[1]  # -inf where the matrix is singular
        return self.multiply(latents, matrix), self.num_heads * log_det


class SmallLinear(nn.Linear):
    """A linear layer that starts at `gain` times the usual weights; at 0 it starts with none."""

    def __init__(self, inputs: int, outputs: int, gain: float) -> None:
        super().__init__(inputs, outputs)
        self.gain = gain


def coupling_config(config: VaswaniTransformerConfig) -> VaswaniTransformerConfig:
    """Return the configuration of a coupling's network: half as wide, without dropout."""
    narrow = copy.copy(config)
    narrow.d_model = config.d_model // 2
    narrow.dropout = narrow.attention_dropout = narrow.activation_dropout = 0.0
    return narrow


class Coupling(FlowLayer):
    """v' = sigmoid(r + 2) v + mu, where a decoder layer computes mu and r from the other half c, which stays.

    The network sees positions: it adds them to c, or attends from them to c (`attends`), as in the positional step.

    Args:
        config: the model's.
        is_interleaved: whether the halves are the even and the odd features, or the first and the second ones.
        is_reversed: whether the second half is c.
        attends: whether positions are queries to c.
    """

    def __init__(
        self, config: VaswaniTransformerConfig, is_interleaved: bool, is_reversed: bool, attends: bool = False
    ) -> None:
        super().__init__()
        narrow = coupling_config(config)
        self.is_interleaved, self.is_reversed = is_interleaved, is_reversed
        self.memory_proj = nn.Linear(config.d_model, narrow.d_model, bias=False)
        self.reader = LatentReader(narrow) if attends else None
        self.layer = NarDecoderLayer(narrow, layer_idx=0)
        self.affine = SmallLinear(narrow.d_model, config.d_model, gain=0.0)
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):
                module.config = config  # the model's own, which `set_attn_implementation` changes

    def split(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return c and v (k B, T, h)."""
        shape, dim = ((-1, 2), -1) if self.is_interleaved else ((2, -1), -2)
        first, second = latents.unflatten(-1, shape).unbind(dim)
        return (second, first) if self.is_reversed else (first, second)

    def join(self, conditions: Tensor, values: Tensor) -> Tensor:
        """Return latents (k B, T, d) from c and v."""
        halves = (values, conditions) if self.is_reversed else (conditions, values)
        return torch.stack(halves, dim=-1 if self.is_interleaved else -2).flatten(-2)

    def network(self, conditions: Tensor, inputs: FlowInputs) -> tuple[Tensor, Tensor]:
        """Return mu, and log sigmoid(r + 2), both (k B, T, h)."""
        if self.reader is None:
            states = conditions + inputs.positions
        else:
            states = self.reader(conditions, inputs.positions, inputs.attention_mask)
        memory = self.memory_proj(inputs.memory)  # (B, S, h)
        states = self.layer(states, inputs.attention_mask, memory, inputs.memory_mask)
        shift, gate = self.affine(states).chunk(2, dim=-1)
        return shift, functional.logsigmoid(gate + 2)

    def forward(self, latents: Tensor, inputs: FlowInputs, inverts: bool = False) -> tuple[Tensor, Tensor]:
        conditions, values = self.split(latents)
        shift, log_scale = self.network(conditions, inputs)
        values = (values - shift) * (-log_scale).exp() if inverts else log_scale.exp() * values + shift
        return self.join(conditions, values), log_scale.sum(-1)


def flow_step(config: VaswaniTransformerConfig) -> list[FlowLayer]:
    """Return the layers of a step: twice an actnorm, a linear map over heads, and a unit of four couplings."""
    layers: list[FlowLayer] = []
    for is_interleaved in (False, True):
        layers += [ActNorm(config.d_model), HeadLinear(config.d_model, is_interleaved)]
        layers += [Coupling(config, False, is_reversed) for is_reversed in (False, True)]
        layers += [ActNorm(config.d_model)]
        layers += [Coupling(config, True, is_reversed) for is_reversed in (False, True)]
    return layers


class Flow(nn.Module):
    """eps = F(z) and z = F^-1(eps): a positional step and `steps` further ones, on one level.

    Args:
        config: the model's; d_model is the latents' width d.
        steps: K.

    Attributes:
        started: 1.0 once `start` has set the actnorms from data, else 0.0; saved with the weights.
    """

    keeps_float32: ClassVar[bool] = True  # also in a copy prepared for inference
    started: Tensor

    def __init__(self, config: VaswaniTransformerConfig, steps: int) -> None:
        super().__init__()
        attending = Coupling(config, False, False, attends=True)
        layers: list[FlowLayer] = [ActNorm(config.d_model), attending, Coupling(config, False, True)]
        for _ in range(steps):
            layers += flow_step(config)
        self.layers = nn.ModuleList(layers)
        self.register_buffer("started", torch.zeros(()))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the latents, in which every layer computes."""
        return self.started.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the flow as `fn` does, but keep at least float32."""

        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if not moved.is_floating_point() or moved.dtype == accumulation_dtype(moved.dtype):
                return moved
            return tensor.to(moved.device)

        return super()._apply(keep_wide, recurse)

    def forward(self, latents: Tensor, inputs: FlowInputs, inverts: bool = False) -> tuple[Tensor, Tensor]:
        """Return eps (k B, T, d), or z for eps where it `inverts`, and log|det F| (k B,) over the places of tokens.

        A flow without a start is inverted too, with a warning.
        """
        log_dets: dict[str, Tensor] = {}  # of each layer, a scalar or (k B, T)
        layers = list(self.layers.named_children())
        for name, layer in reversed(layers) if inverts else layers:
            latents, log_dets[name] = layer(latents, inputs, inverts)
        by_place = sum(log_dets.values(), torch.zeros_like(latents[..., 0]))  # (k B, T)
        log_det = (by_place * inputs.is_real.squeeze(-1)).sum(1)  # (k B,)
        self.check(torch.cat([latents.flatten(), log_det]) if inverts else log_det, log_dets, inverts)
        return latents, log_det

    def log_prob(self, latents: Tensor, inputs: FlowInputs) -> tuple[Tensor, Tensor]:
        """Return log p(z | x) (k B,) of latents (k B, T, d), and the part of it that is the log-determinant."""
        noise, log_det = self(latents, inputs)
        return normal_log_prob(noise, inputs.is_real) + log_det, log_det

    @torch.no_grad()
    def start(self, latents: Tensor, inputs: FlowInputs) -> None:
        """Set every actnorm from a batch of latents (k B, T, d), one after the other."""
        for layer in self.layers:
            if isinstance(layer, ActNorm):
                layer.start(latents, inputs)
            latents, _ = layer(latents, inputs)
        self.started.fill_(1.0)

    def check(self, values: Tensor, log_dets: dict[str, Tensor], inverts: bool) -> None:
        """Check that `values` are finite, and for a density that the flow has a start.

        An accelerator's host waits here; a compiled graph cannot check.
        """
        if torch.compiler.is_compiling():
            return
        is_finite, has_start = torch.stack([values.isfinite().all(), self.started == 1]).tolist()
        if not inverts and not has_start:
            raise FlowError(
                f"flow: its actnorms have no start, so it has no density; got started {float(self.started):g}, "
                "expected 1. Call start_flow() with a batch, or set kl_scale to 0."
            )
        if not has_start:
            logger.warning_once("The flow has no start yet: this decodes from latents that nothing has learned.")
        if is_finite:
            return
        part, problem = "flow", f"its {'inverse' if inverts else 'log-determinant'} is not finite"
        for name, log_det in log_dets.items():
            if isinstance(self.layers.get_submodule(name), HeadLinear) and not log_det.isfinite():
                part = f"flow.layers.{name}"
                problem = f"its matrix is singular; got log|det| {log_det.item():g}, expected a finite number"
                break
        got = f"{int(values.isfinite().logical_not().sum())} such numbers, expected none"
        raise FlowError(f"{part}: {problem}; got {got}. Take an earlier checkpoint and a smaller learning rate.")


@torch.no_grad()
def init_flow(module: nn.Module) -> None:
    """Initialize a module of a flow or a posterior: no shift, equal scales, random rotations, and no start."""
    if isinstance(module, ActNorm):
        init.zeros_(module.log_scale)
        init.zeros_(module.shift)
    elif isinstance(module, HeadLinear):
        init.orthogonal_(module.weight)
    elif isinstance(module, SmallLinear):
        init.xavier_uniform_(module.weight, gain=module.gain)
    elif isinstance(module, Flow):
        init.zeros_(module.started)


def half_positions(length: int, width: int, like: Tensor) -> Tensor:
    """Return PE (1, T, h) of the first `length` places, for latents of this width, on the device of `like`."""
    half = width // 2
    encodings = sinusoids(torch.arange(length, device=like.device), half)[:, :half]  # an odd h cuts the last cosine
    return encodings.unsqueeze(0).to(like.dtype)


def normal_log_prob(noise: Tensor, is_real: Tensor) -> Tensor:
    """Return log N(eps; 0, I) (k B,) of eps (k B, T, d) over the places of tokens, `is_real` (k B, T, 1)."""
    log_probs = -0.5 * (noise.square() + math.log(2 * math.pi))
    return (log_probs * is_real).sum((1, 2))
