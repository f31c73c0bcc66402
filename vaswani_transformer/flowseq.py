"""FlowSeq: non-autoregressive decoding of latents with a normalizing flow as their prior (Ma et al. 2019).

B batch, S source, T target, k target rows per source row, l lengths of a length beam, d = d_model the latent width,
h = d / 2, V vocabulary.

The posterior maps a target to latents z (T, d), and the decoder predicts all words from them. The flow F maps latents
to standard normal noise eps given the source, and its inverse gives z = F^-1(temperature eps). A layer of the flow maps
x to y (k B, T, d), or y to x if it `inverts`, and returns log|det dy/dx| at each position, a scalar or (k B, T), in at
least float32. The length is predicted as in NAT. The flow has one level, instead of the paper's three, and supports any
target length.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.utils import logging

from .config import VaswaniTransformerConfig, layer_count, unit_rate
from .layers import AddAndNorm, InputEmbedding, MultiHeadAttention, sinusoids, text_positions
from .loss import accumulation_dtype, without_padding
from .model import EncoderDecoder
from .nar import NarLMOutput, NarTargets
from .nar_decoder import (
    LengthTarget,
    MeasuredSource,
    NarDecoder,
    NarDecoderLayer,
    PositionalAttention,
    TargetInputs,
    canvas,
    given_mask,
)
from .nat import LengthDifferenceConfig, LengthDifferenceHead
from .settings import NarSettings

logger = logging.get_logger(__name__)

HEAD = 32  # largest number of features in a head of `HeadLinear`


class FlowError(ValueError):
    """Raised for a flow that is not initialized from data or produces non-finite numbers."""


class FlowInputs(NamedTuple):
    """Inputs of every flow layer besides the latents."""

    is_real: Tensor  # (k B, T, 1), 1.0 at tokens, else 0.0
    positions: Tensor  # (1, T, h), position encodings
    attention_mask: Tensor | None  # mask of self-attention
    memory: Tensor  # (B, S, d_model), encoder output; row i of the latents belongs to source i // k
    memory_mask: Tensor | None  # mask of cross-attention


class LatentReader(nn.Module):
    """Attention from positions to latents: LayerNorm(PE + Dropout(Attention(PE, z, z)))."""

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__()
        self.latent_attn = PositionalAttention(config, layer_idx=0)
        self.add_norm = AddAndNorm(config)

    def forward(self, latents: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return states (k B, T, d_model) for latents of that shape and `positions` (1, T, d_model)."""
        attended, _ = self.latent_attn(latents, positions, attention_mask, keys=latents)
        return self.add_norm(positions, attended)


class ActNorm(nn.Module):
    """Per-feature affine map y = x exp(s) + t (Kingma and Dhariwal 2018, 3.1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, latents: Tensor, inputs: FlowInputs, inverts: bool = False) -> tuple[Tensor, Tensor]:
        if inverts:
            return (latents - self.shift) * (-self.log_scale).exp(), self.log_scale.sum()
        return latents * self.log_scale.exp() + self.shift, self.log_scale.sum()

    def start(self, latents: Tensor, inputs: FlowInputs) -> None:
        """Set s and t so that every output feature has mean 0 and variance 1 over the tokens of `latents`."""
        count = inputs.is_real.sum()
        mean = (latents * inputs.is_real).sum((0, 1)) / count  # (d,)
        variance = ((latents - mean).square() * inputs.is_real).sum((0, 1)) / count  # (d,)
        std = (variance + 1e-6).sqrt()
        self.log_scale.copy_(-std.log())
        self.shift.copy_(-mean / std)


class HeadLinear(nn.Module):
    """Map y = W x of each head of features, contiguous or interleaved, with one shared W (Ma et al. 2019, 3.2)."""

    def __init__(self, width: int, is_interleaved: bool) -> None:
        super().__init__()
        size = math.gcd(width, HEAD)
        self.num_heads = width // size
        self.is_interleaved = is_interleaved
        self.weight = nn.Parameter(torch.eye(size))

    def forward(self, latents: Tensor, inputs: FlowInputs, inverts: bool = False) -> tuple[Tensor, Tensor]:
        matrix = torch.linalg.inv_ex(self.weight).inverse if inverts else self.weight
        log_det = self.num_heads * torch.linalg.slogdet(self.weight)[1]  # -inf if singular
        if self.is_interleaved:  # head i has the features i, i + num_heads, ...
            heads = latents.unflatten(-1, (-1, self.num_heads)).transpose(-1, -2)  # (k B, T, heads, size)
            return (heads @ matrix.T).transpose(-1, -2).flatten(-2), log_det
        heads = latents.unflatten(-1, (self.num_heads, -1))  # (k B, T, heads, size)
        return (heads @ matrix.T).flatten(-2), log_det


class SmallLinear(nn.Linear):
    """Linear layer with initial weights scaled by `gain`."""

    def __init__(self, inputs: int, outputs: int, gain: float) -> None:
        super().__init__(inputs, outputs)
        self.gain = gain


class Coupling(nn.Module):
    """Affine coupling v' = sigmoid(r + 2) v + mu, with mu and r computed from the unchanged half c.

    The network is a decoder layer of half the model's width, without dropout.

    Args:
        config: the model's configuration.
        is_interleaved: whether the halves are the even and odd features instead of the first and second half.
        is_reversed: whether c is the second half.
        attends: whether positions attend to c, as in the positional step, instead of being added to it.
    """

    def __init__(
        self, config: VaswaniTransformerConfig, is_interleaved: bool, is_reversed: bool, attends: bool = False
    ) -> None:
        super().__init__()
        narrow = copy.copy(config)
        narrow.d_model = config.d_model // 2
        narrow.dropout = narrow.attention_dropout = narrow.activation_dropout = 0.0
        self.is_interleaved = is_interleaved
        self.is_reversed = is_reversed
        self.memory_proj = nn.Linear(config.d_model, narrow.d_model, bias=False)
        self.reader = LatentReader(narrow) if attends else None
        self.layer = NarDecoderLayer(narrow, layer_idx=0)
        self.affine = SmallLinear(narrow.d_model, config.d_model, gain=0.0)
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):
                module.config = config  # so that `set_attn_implementation` reaches it

    def forward(self, latents: Tensor, inputs: FlowInputs, inverts: bool = False) -> tuple[Tensor, Tensor]:
        # The halves c and v: even and odd features, or first and second half.
        dim = -1 if self.is_interleaved else -2
        shape = (-1, 2) if self.is_interleaved else (2, -1)
        first, second = latents.unflatten(-1, shape).unbind(dim)  # (k B, T, h) each
        unchanged, values = (second, first) if self.is_reversed else (first, second)

        # mu and r, from c and the source.
        if self.reader is None:
            states = unchanged + inputs.positions  # (k B, T, h)
        else:
            states = self.reader(unchanged, inputs.positions, inputs.attention_mask)  # (k B, T, h)
        memory = self.memory_proj(inputs.memory)  # (B, S, h)
        states = self.layer(states, inputs.attention_mask, memory, inputs.memory_mask)
        shift, gate = self.affine(states).chunk(2, dim=-1)  # (k B, T, h) each
        log_scale = functional.logsigmoid(gate + 2)

        # v' from v, or if the layer inverts, v from v'.
        values = (values - shift) * (-log_scale).exp() if inverts else log_scale.exp() * values + shift
        halves = (values, unchanged) if self.is_reversed else (unchanged, values)
        return torch.stack(halves, dim).flatten(-2), log_scale.sum(-1)


class Flow(nn.Module):
    """Normalizing flow eps = F(z) of a positional step and K = `steps` further steps.

    Each further step is, twice in a row, an actnorm, a linear map over heads and four couplings.

    Attributes:
        started: 1.0 once `start` has initialized the actnorms from data, else 0.0; saved with the weights.
    """

    keeps_float32: ClassVar[bool] = True  # read by `prepare_for_inference`
    started: Tensor

    def __init__(self, config: VaswaniTransformerConfig, steps: int) -> None:
        super().__init__()
        # The positional step.
        layers: list[nn.Module] = [
            ActNorm(config.d_model),
            Coupling(config, is_interleaved=False, is_reversed=False, attends=True),
            Coupling(config, is_interleaved=False, is_reversed=True),
        ]
        # The further steps, each with contiguous and then with interleaved heads.
        for has_interleaved_heads in (False, True) * steps:
            layers += [
                ActNorm(config.d_model),
                HeadLinear(config.d_model, has_interleaved_heads),
                Coupling(config, is_interleaved=False, is_reversed=False),
                Coupling(config, is_interleaved=False, is_reversed=True),
                ActNorm(config.d_model),
                Coupling(config, is_interleaved=True, is_reversed=False),
                Coupling(config, is_interleaved=True, is_reversed=True),
            ]
        self.layers = nn.ModuleList(layers)
        self.register_buffer("started", torch.zeros(()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn` to all tensors, but keep at least float32."""

        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if not moved.is_floating_point() or moved.dtype == accumulation_dtype(moved.dtype):
                return moved
            return tensor.to(moved.device)

        return super()._apply(keep_wide, recurse)

    def forward(self, latents: Tensor, inputs: FlowInputs, inverts: bool = False) -> tuple[Tensor, Tensor]:
        """Return eps (k B, T, d), or z if `inverts`, and log|det F| (k B,) over the tokens."""
        log_det_by_position = torch.zeros_like(latents[..., 0])  # (k B, T)
        for layer in reversed(self.layers) if inverts else self.layers:
            latents, log_det = layer(latents, inputs, inverts)
            log_det_by_position = log_det_by_position + log_det
        log_det = (log_det_by_position * inputs.is_real.squeeze(-1)).sum(1)  # (k B,)
        if not torch.compiler.is_compiling():
            self.check_result(torch.cat([latents.flatten(), log_det]) if inverts else log_det, inverts)
        return latents, log_det

    def log_prob(self, latents: Tensor, inputs: FlowInputs) -> tuple[Tensor, Tensor]:
        """Return log p(z | x) (k B,) of latents (k B, T, d), and its log-determinant term (k B,)."""
        noise, log_det = self(latents, inputs)
        return normal_log_prob(noise, inputs.is_real) + log_det, log_det

    @torch.no_grad()
    def start(self, latents: Tensor, inputs: FlowInputs) -> None:
        """Initialize the actnorms, in order, from a batch of latents (k B, T, d).

        Raises:
            ValueError: the weights are offloaded, so that they would not be changed.
        """
        if any(weight.is_meta for weight in self.parameters()):
            raise ValueError(
                "flow: its weights are offloaded, and start_flow would not change them; got weights on meta, expected "
                "weights in memory. Load the model without a device_map first."
            )
        for layer in self.layers:
            if isinstance(layer, ActNorm):
                layer.start(latents, inputs)
            latents, _ = layer(latents, inputs)
        self.started.fill_(1.0)

    def check_result(self, values: Tensor, inverts: bool) -> None:
        """Raise FlowError for `values` that are not finite, or for the density of a flow that is not initialized."""
        is_finite = values.isfinite()
        checks = torch.stack([is_finite.all(), self.started == 1])
        are_finite, is_started = checks.tolist()  # one synchronization
        if not is_started and inverts:
            logger.warning_once("The flow is not initialized; decoding from an untrained prior.")
        elif not is_started:
            raise FlowError(
                "flow: its ActNorm layers are not initialized, so it has no density; got started "
                f"{float(self.started):g}, expected 1. Call start_flow() with a batch, or set kl_scale to 0."
            )
        if not are_finite:
            name = "inverse" if inverts else "log-determinant"
            count = int((~is_finite).sum())
            raise FlowError(
                f"flow: its {name} is not finite; got {count} NaN or infinite numbers, expected none. "
                "Use an earlier checkpoint, and train with a smaller learning rate."
            )


def normal_log_prob(noise: Tensor, is_real: Tensor) -> Tensor:
    """Return log N(eps; 0, I) (k B,) of eps (k B, T, d) over the tokens, `is_real` (k B, T, 1)."""
    log_probs = -0.5 * (noise.square() + math.log(2 * math.pi))
    return (log_probs * is_real).sum((1, 2))


@strict
class VaswaniFlowSeqConfig(LengthDifferenceConfig):
    """Hyperparameters of FlowSeq.

    Args:
        flow_steps: K, the steps of the flow after its positional step; each has eight couplings.
        word_dropout: share of the target words that are hidden from the posterior in training.
    """

    model_type = "vaswani_flowseq"
    keys_to_ignore_at_inference = [*LengthDifferenceConfig.keys_to_ignore_at_inference, "kl_loss", "log_determinant"]

    flow_steps: int = layer_count(default=4)
    word_dropout: float | int = unit_rate(default=0.2)

    def validate_couplings(self) -> None:
        """Check that the width of a coupling, half of d_model, fits the heads."""
        heads = 1 if self.d_k is not None and self.d_v is not None else self.num_heads
        if self.d_model % (2 * heads):
            raise ValueError(
                f"d_model ({self.d_model}) must be divisible by {2 * heads}: a coupling's network has half the width "
                f"and {self.num_heads} heads; change one of them, or set both d_k and d_v."
            )


class LatentEmbedding(InputEmbedding):
    """Decoder input of latents, without position encodings."""

    def forward(self, inputs_embeds: Tensor, positions: Tensor, max_position: int | None = None) -> Tensor:
        """Apply dropout to latents (k B, T, d)."""
        return self.dropout(inputs_embeds)


class FlowSeqDecoder(NarDecoder):
    """Non-autoregressive decoder that starts from positions, which attend to latents."""

    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config)
        self.input_embedding = LatentEmbedding(config)
        self.reader = LatentReader(config)
        self.post_init()

    def run_layers(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        memory: Tensor | None,
        source_mask: Tensor | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the reader and all layers on latents (k B, T, d)."""
        states = self.reader(hidden_states, self.position_encodings(hidden_states), mask)  # (k B, T, d_model)
        return super().run_layers(states, mask, memory, source_mask, past_key_values, **kwargs)


class VaswaniFlowSeqModel(EncoderDecoder):
    """Encoder and latent decoder with a shared embedding matrix, without posterior, prior and predictions."""

    config_class = VaswaniFlowSeqConfig
    decoder_class = FlowSeqDecoder
    _supports_flash_attn = False
    _supports_flex_attn = False


class Posterior(nn.Module):
    """Posterior q(z | x, y): a diagonal normal distribution given the source and the complete target."""

    def __init__(self, config: VaswaniFlowSeqConfig) -> None:
        super().__init__()
        self.input_embedding = InputEmbedding(config)
        self.layers = nn.ModuleList(NarDecoderLayer(config, index) for index in range(config.decoder_layers))
        self.mean = SmallLinear(config.d_model, config.d_model, gain=0.1)
        self.log_variance = SmallLinear(config.d_model, config.d_model, gain=0.1)

    def forward(self, inputs_embeds: Tensor, inputs: FlowInputs) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance (k B, T, d), in at least float32, given embedded words (k B, T, d)."""
        positions = text_positions(inputs_embeds, None)  # (1, T)
        states = self.input_embedding(inputs_embeds, positions, inputs_embeds.shape[1])
        for layer in self.layers:
            states = layer(states, inputs.attention_mask, inputs.memory, inputs.memory_mask)
        wide = accumulation_dtype(states.dtype)
        return self.mean(states).to(wide), self.log_variance(states).to(wide)


@dataclass
class FlowSeqLMOutput(NarLMOutput):
    """Output of FlowSeq; the fields below are None unless the loss includes the KL divergence."""

    kl_loss: Tensor | None = None  # KL(posterior || prior) estimated with one sample, in nats per target token
    log_determinant: Tensor | None = None  # log|det dF/dz| per target token


class SampledLatents(NamedTuple):
    """Terms of the loss that a sample of the posterior adds, in nats per target token."""

    kl_loss: Tensor
    log_determinant: Tensor

    def loss(self, head: Any, target: LengthTarget, predictions: dict[str, Any]) -> dict[str, Tensor]:
        """Return the terms, and the `loss` with the KL divergence."""
        loss = predictions["loss"] + head.kl_scale * self.kl_loss
        return {"loss": loss, "kl_loss": self.kl_loss, "log_determinant": self.log_determinant}


class VaswaniFlowSeqForConditionalGeneration(LengthDifferenceHead, GenerationMixin):
    """FlowSeq, with `generate()` in one pass of the inverse flow and of the decoder.

    Training has three phases. With `kl_scale` 0 the latents are the posterior's means and the loss has no KL term. Then
    `start_flow` initializes the flow's actnorms from a batch. Then `kl_scale` rises to 1, and the `loss` includes
    `kl_scale` `kl_loss`. In evaluation mode the latents are F^-1(0). The flow always computes in float32.

    `forward` also takes `word_draws` (k B, T), uniform on [0, 1), for the word dropout, and `latent_noise` (k B, T, d),
    standard normal, for the posterior's sample. If None, they are drawn from torch's generator.

    Attributes:
        kl_scale: kappa, the weight of the KL divergence in training; not part of the configuration.
    """

    config_class = VaswaniFlowSeqConfig
    body_class = VaswaniFlowSeqModel
    output_class = FlowSeqLMOutput
    further_arguments = ("word_draws", "latent_noise")
    family_settings = (*LengthDifferenceHead.family_settings, "latent_temperature", "num_latent_samples")
    kl_scale: float = 1.0
    _no_split_modules = ["Posterior", "Flow"]
    _keep_in_fp32_modules_strict = ["flow"]

    def __init__(self, config: VaswaniFlowSeqConfig) -> None:
        super().__init__(config)
        self.posterior = Posterior(config)
        self.flow = Flow(config, config.flow_steps).float()  # half precision is too coarse to invert it
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as every model does, and the flow with zero shift, unit scale and random rotations."""
        super()._init_weights(module)
        if isinstance(module, ActNorm):
            init.zeros_(module.log_scale)
            init.zeros_(module.shift)
        elif isinstance(module, HeadLinear):
            init.orthogonal_(module.weight)
        elif isinstance(module, SmallLinear):
            init.xavier_uniform_(module.weight, gain=module.gain)
        elif isinstance(module, Flow):
            init.zeros_(module.started)

    def training_input(
        self, source: MeasuredSource, target: LengthTarget, labels: Tensor, draws: dict[str, Tensor | None]
    ) -> Tensor:
        """Return latents (k B, T, d) of the posterior; its means while `kl_scale` is 0."""
        posterior = self.encode_target(source, target.mask, labels.clamp(min=0), draws["word_draws"])
        latents, _ = posterior
        if self.kl_scale > 0:
            latents, divergence, log_det = self.sample(source, target.mask, posterior, draws["latent_noise"])
            target.latent = SampledLatents(target.mean(divergence.sum()), target.mean(log_det.sum()))
        return latents.to(source.memory.dtype)

    def flow_inputs(self, source: MeasuredSource, mask: Tensor, dtype: torch.dtype | None = None) -> FlowInputs:
        """Return the inputs of posterior and flow for targets of `mask` (k B, T); `dtype` defaults to the flow's."""
        memory = source.memory.to(self.flow.started.dtype if dtype is None else dtype)
        d_model = memory.shape[-1]
        states = memory.new_zeros(*mask.shape, d_model)  # their shape and dtype determine the masks
        positions = torch.arange(mask.shape[1], device=memory.device)
        half = d_model // 2
        encodings = sinusoids(positions, half)[None, :, :half]  # (1, T, h); an odd h drops the last cosine
        return FlowInputs(
            is_real=mask.unsqueeze(-1).to(memory.dtype),
            positions=encodings.to(memory.dtype),
            attention_mask=self.model.decoder.self_attention_mask(states, mask, None),
            memory=memory,
            memory_mask=self.model.decoder.source_mask(states, memory, source.attention_mask),
        )

    def encode_target(
        self, source: MeasuredSource, mask: Tensor, words: Tensor, word_draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the posterior's mean and log-variance (k B, T, d) for `words` (k B, T) with `mask` (k B, T)."""
        embedded = self.model.decoder.embed_tokens(words).to(source.memory.dtype)  # (k B, T, d)
        if self.training and self.config.word_dropout > 0:
            draws = torch.rand(words.shape, device=words.device) if word_draws is None else word_draws
            embedded = embedded * draws.ge(self.config.word_dropout).unsqueeze(-1)
        return self.posterior(embedded, self.flow_inputs(source, mask, source.memory.dtype))

    def sample(
        self, source: MeasuredSource, mask: Tensor, posterior: tuple[Tensor, Tensor], noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a sample z (k B, T, d) of a posterior, log q(z | x, y) - log p(z | x) (k B,), and log|det F| (k B,).

        `posterior` has its mean and log-variance (k B, T, d).
        """
        with torch.autocast(mask.device.type, enabled=False):
            inputs = self.flow_inputs(source, mask)
            latents, noise, log_variance = self.reparametrize(posterior, noise)
            log_std = 0.5 * (log_variance * inputs.is_real).sum((1, 2))  # (k B,), of the posterior
            log_q = normal_log_prob(noise, inputs.is_real) - log_std
            log_p, log_det = self.flow.log_prob(latents, inputs)
        return latents, log_q - log_p, log_det

    def reparametrize(self, posterior: tuple[Tensor, Tensor], noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return mu + exp(log var / 2) eps, eps and log var, each (k B, T, d) in the flow's dtype."""
        mean, log_variance = (values.to(self.flow.started.dtype) for values in posterior)
        noise = torch.randn_like(mean) if noise is None else noise.to(mean.dtype)
        latents = mean + (log_variance / 2).exp() * noise
        return latents, noise, log_variance

    def decoder_input(self, source: MeasuredSource, mask: Tensor, temperature: float = 0.0) -> Tensor:
        """Return F^-1(temperature eps) (k B, T, d) in the encoder output's dtype; torch's generator draws eps."""
        with torch.autocast(mask.device.type, enabled=False):
            inputs = self.flow_inputs(source, mask)
            noise = inputs.is_real.new_zeros(*mask.shape, source.memory.shape[-1])  # (k B, T, d)
            if temperature > 0:
                noise = temperature * torch.randn_like(noise)
            latents, _ = self.flow(noise, inputs, inverts=True)
        return latents.to(source.memory.dtype)

    @torch.no_grad()
    def start_flow(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        word_draws: Tensor | None = None,
        latent_noise: Tensor | None = None,
    ) -> None:
        """Initialize the flow's actnorms from the posterior's latents of a batch.

        Afterwards the features of each actnorm have mean 0 and variance 1. Call it in evaluation mode after the first
        phase of training, with the arguments of `forward`. The result is saved with the weights.

        Raises:
            ValueError: the labels have no token.
        """
        labels, _ = without_padding(labels, None, self.config)
        if not bool(labels.ne(-100).any()):
            raise ValueError("labels: the flow is initialized from targets; got only padding. Pass a batch of targets.")
        encoder_outputs = self.encode(input_ids, attention_mask)
        source = self.read_source(encoder_outputs[0], attention_mask)
        mask = cast(Tensor, given_mask(source, TargetInputs(labels)))
        posterior = self.encode_target(source, mask, labels.clamp(min=0), word_draws)
        with torch.autocast(mask.device.type, enabled=False):
            latents, _, _ = self.reparametrize(posterior, latent_noise)
            self.flow.start(latents, self.flow_inputs(source, mask))

    def decode_targets(self, source: MeasuredSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,) from the prior's latents, and rank samples."""
        targets = super().decode_targets(source, lengths, settings)
        if settings.latent_temperature == 0 or not settings.reads_scores:
            return targets
        estimates = self.estimate_log_probs(source, targets.tokens, lengths, settings.num_latent_samples)
        return NarTargets(targets.tokens, targets.log_probs, targets.history, estimates)

    def estimate_log_probs(self, source: MeasuredSource, tokens: Tensor, lengths: Tensor, samples: int) -> Tensor:
        """Estimate log p(y | x, m) (k B,) by importance sampling: log mean_i p(y | z_i, x) p(z_i | x) / q(z_i | x, y).

        y is `tokens` (k B, T), with any token at padding. The `samples` latents z_i come from the posterior.
        """
        mask = canvas(lengths, tokens.shape[1])
        posterior = self.encode_target(source, mask, tokens)
        log_weights = []
        for _ in range(samples):
            latents, divergence, _ = self.sample(source, mask, posterior)
            states = self.first_pass(source, mask, latents.to(source.memory.dtype))
            log_weights.append(self.log_likelihoods(states, tokens, mask) - divergence)
        return torch.stack(log_weights).logsumexp(0) - math.log(samples)

    def log_likelihoods(self, states: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return log p(y | z, x) (k B,), in at least float32, of `tokens` (k B, T) with `mask` (k B, T)."""
        chunks = self.logits_of(states, mask, tokens)
        losses = torch.cat([functional.cross_entropy(logits, words, reduction="none") for logits, words in chunks])
        return losses.new_zeros(mask.shape).masked_scatter(mask.bool(), -losses).sum(1)
