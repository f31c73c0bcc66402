"""FlowSeq: one pass over latents that an invertible flow draws for a source (Ma et al. 2019).

B batch, S source, T target, k target rows of one source row, l lengths of a length beam, d = d_model, V vocabulary. A
posterior turns a target into latents z (T, d), the decoder turns them into all words at once, and the flow learns the
posterior's latents as a prior. Decoding reads z = F^-1(temperature eps). The length is predicted as NAT's. The flow has
one level, of the three in the paper, so a target may have any length.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional

from .body import EncoderDecoder
from .config import VaswaniTransformerConfig, layer_count, unit_rate
from .embeddings import InputEmbedding, text_positions
from .flow import Flow, FlowInputs, LatentReader, SmallLinear, half_positions, init_flow, normal_log_prob
from .lengths import canvas
from .loss import accumulation_dtype, without_padding
from .nar_decoder import NarDecoder, NarDecoderLayer
from .nar_generation import NarSettings, NarTargets
from .nar_head import EncodedSource, NarLMOutput, Target, TrainingRate
from .nat import LengthDifferenceConfig, LengthDifferenceHead


@strict
class VaswaniFlowSeqConfig(LengthDifferenceConfig):
    """The hyperparameters of FlowSeq, in addition to those of `LengthDifferenceConfig`.

    Args:
        flow_steps: K, the steps of the flow after its positional one; each has eight couplings.
        word_dropout: the share of the target's words that the posterior does not see in training.

    Raises:
        huggingface_hub.errors.StrictDataclassError: as for `VaswaniTransformerConfig`; half of d_model does not fit
            the heads.
    """

    model_type = "vaswani_flowseq"
    keys_to_ignore_at_inference = [*LengthDifferenceConfig.keys_to_ignore_at_inference, "kl_loss", "log_determinant"]

    flow_steps: int = layer_count(default=4)
    word_dropout: float | int = unit_rate(default=0.2)

    def validate_couplings(self) -> None:
        """Check that half of the features fit the heads."""
        heads = 1 if self.d_k is not None and self.d_v is not None else self.num_heads
        if self.d_model % (2 * heads):
            raise ValueError(
                f"d_model ({self.d_model}) must be divisible by {2 * heads}: a coupling's network has half the width "
                f"and {self.num_heads} heads; change one of them or give both d_k and d_v."
            )


class LatentEmbedding(InputEmbedding):
    """Latents as the decoder's input; the decoder reads them at positions and adds none here."""

    def forward(self, inputs_embeds: Tensor, positions: Tensor, max_position: int | None = None) -> Tensor:
        """Apply dropout to latents (k B, T, d)."""
        return self.dropout(inputs_embeds)


class FlowSeqDecoder(NarDecoder):
    """A non-autoregressive decoder whose first states are positions that attend to the latents."""

    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config)
        self.input_embedding = LatentEmbedding(config)
        self.reader = LatentReader(config)
        self.post_init()

    def run_layers(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Pass latents (k B, T, d) through the reader and every layer."""
        hidden_states = self.reader(hidden_states, self.position_encodings(hidden_states), args[0])
        return super().run_layers(hidden_states, *args, **kwargs)


class VaswaniFlowSeqModel(EncoderDecoder):
    """Encoder and decoder of latents over one embedding matrix, without posterior, prior and predictions."""

    config_class = VaswaniFlowSeqConfig
    decoder_class = FlowSeqDecoder
    _supports_flash_attn = False
    _supports_flex_attn = False


class Posterior(nn.Module):
    """q(z | x, y), independent normal numbers given the complete target and the source."""

    def __init__(self, config: VaswaniFlowSeqConfig) -> None:
        super().__init__()
        self.input_embedding = InputEmbedding(config)
        self.layers = nn.ModuleList(NarDecoderLayer(config, index) for index in range(config.decoder_layers))
        self.mean = SmallLinear(config.d_model, config.d_model, gain=0.1)
        self.log_variance = SmallLinear(config.d_model, config.d_model, gain=0.1)

    def forward(self, inputs_embeds: Tensor, inputs: FlowInputs) -> tuple[Tensor, Tensor]:
        """Return the mean and the log-variance (k B, T, d), in at least float32, of embedded words (k B, T, d)."""
        positions = text_positions(inputs_embeds, None)  # (1, T)
        states = self.input_embedding(inputs_embeds, positions, inputs_embeds.shape[1])
        for layer in self.layers:
            states = layer(states, inputs.attention_mask, inputs.memory, inputs.memory_mask)
        wide = accumulation_dtype(states.dtype)
        return self.mean(states).to(wide), self.log_variance(states).to(wide)


@dataclass
class FlowSeqLMOutput(NarLMOutput):
    """The output of FlowSeq; the fields below are None unless the loss has a divergence.

    Attributes:
        kl_loss: the divergence of posterior and prior, one sample, in nats a target token.
        log_determinant: log|det dF/dz| a target token.
    """

    kl_loss: Tensor | None = None
    log_determinant: Tensor | None = None


class VaswaniFlowSeqForConditionalGeneration(LengthDifferenceHead):
    """FlowSeq, with `generate()` in one pass of the inverse flow and of the decoder.

    Train in three phases: with `kl_scale` 0 the loss has no prior and the latents are the posterior's means; then
    `start_flow` sets the flow's actnorms from a batch; then `kl_scale` rises to 1, and the `loss` has `kl_scale`
    `kl_loss`. In evaluation mode the latents are F^-1(0), which see no word. The flow computes in float32 whatever the
    model's precision.

    `forward` also takes `word_draws` (k B, T), uniform on [0, 1), by which the posterior's words are dropped, and
    `latent_noise` (k B, T, d), standard normal, of its sample; None: drawn from torch's generator.

    Attributes:
        kl_scale: kappa, the weight of the divergence in training. It is no part of the configuration.
    """

    config_class = VaswaniFlowSeqConfig
    body_class = VaswaniFlowSeqModel
    output_class = FlowSeqLMOutput
    draws = ("word_draws", "latent_noise")
    has_latents = True
    kl_scale = TrainingRate(1.0, None, "weighs a loss")
    _no_split_modules = ["Posterior", "Flow"]
    _keep_in_fp32_modules_strict = ["flow"]

    def __init__(self, config: VaswaniFlowSeqConfig) -> None:
        super().__init__(config)
        self.posterior = Posterior(config)
        self.flow = Flow(config, config.flow_steps).float()  # a reduced precision would not invert it
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as every model does, and the flow and the posterior as they start."""
        super()._init_weights(module)
        init_flow(module)

    def embed_target(self, source: EncodedSource, target: Target, **draws: Any) -> Tensor:
        """Return latents (k B, T, d): in training mode the posterior's for the words, otherwise F^-1(0).

        Raises:
            FlowError: the flow has no start and `kl_scale` is above 0; it has numbers that are not finite.
        """
        mask, dtype = target.mask, source.memory.dtype
        if target.labels is None or not self.training:
            return self.prior_latents(source, mask)
        posterior = self.encode_target(source, mask, target.labels.clamp(min=0), draws.get("word_draws"))
        if self.kl_scale == 0:
            return posterior[0].to(dtype)
        latents, divergence, log_det = self.sample(source, mask, posterior, draws.get("latent_noise"))
        target.outputs["kl_loss"] = target.mean(divergence.sum())
        target.outputs["log_determinant"] = target.mean(log_det.sum())
        return latents.to(dtype)

    def losses(self, source: EncodedSource, target: Target, token_loss: Tensor) -> dict[str, Any]:
        """Return the losses of every model, and with a sample the divergence in `loss`."""
        losses = super().losses(source, target, token_loss)
        if "kl_loss" in losses:
            losses["loss"] = losses["loss"] + self.kl_scale * losses["kl_loss"]
        return losses

    def flow_inputs(self, source: EncodedSource, mask: Tensor, dtype: torch.dtype | None = None) -> FlowInputs:
        """Return what posterior and flow get for targets of `mask` (k B, T), in a dtype; None: the flow's."""
        memory = source.memory.to(self.flow.dtype if dtype is None else dtype)
        states = memory.new_zeros(*mask.shape, memory.shape[-1])  # the masks have the form for such states
        return FlowInputs(
            is_real=mask.unsqueeze(-1).to(memory.dtype),
            positions=half_positions(mask.shape[1], memory.shape[-1], memory),
            attention_mask=self.model.decoder.self_attention_mask(states, mask, None),
            memory=memory,
            memory_mask=self.model.decoder.source_mask(states, memory, source.attention_mask),
        )

    def encode_target(
        self, source: EncodedSource, mask: Tensor, words: Tensor, word_draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the posterior's mean and log-variance (k B, T, d) for `words` (k B, T) where `mask` (k B, T) is 1."""
        embedded = self.model.decoder.embed_tokens(words).to(source.memory.dtype)  # (k B, T, d)
        if self.training and self.config.word_dropout > 0:
            draws = torch.rand(words.shape, device=words.device) if word_draws is None else word_draws
            embedded = embedded * draws.ge(self.config.word_dropout).unsqueeze(-1)
        return self.posterior(embedded, self.flow_inputs(source, mask, source.memory.dtype))

    def sample(
        self, source: EncodedSource, mask: Tensor, posterior: tuple[Tensor, Tensor], noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a sample of the posterior, given by mean and log-variance (k B, T, d), and its probabilities.

        These are z (k B, T, d), log q(z | x, y) - log p(z | x) (k B,), whose mean over samples is the KL divergence,
        and the log-determinant (k B,) in log p(z | x).
        """
        with torch.autocast(mask.device.type, enabled=False):
            inputs = self.flow_inputs(source, mask)
            latents, noise, log_variance = self.reparametrize(posterior, noise)
            log_q = normal_log_prob(noise, inputs.is_real) - 0.5 * (log_variance * inputs.is_real).sum((1, 2))
            log_p, log_det = self.flow.log_prob(latents, inputs)
        return latents, log_q - log_p, log_det

    def reparametrize(self, posterior: tuple[Tensor, Tensor], noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return mu + exp(log var / 2) eps, eps and log var, all (k B, T, d) in the flow's dtype."""
        mean, log_variance = (part.to(self.flow.dtype) for part in posterior)
        noise = torch.randn_like(mean) if noise is None else noise.to(mean.dtype)
        return mean + (log_variance / 2).exp() * noise, noise, log_variance

    def prior_latents(self, source: EncodedSource, mask: Tensor, temperature: float = 0.0) -> Tensor:
        """Return F^-1(temperature eps) (k B, T, d), eps from torch's generator, in the dtype of the states."""
        with torch.autocast(mask.device.type, enabled=False):
            inputs = self.flow_inputs(source, mask)
            noise = inputs.is_real.new_zeros(*mask.shape, source.memory.shape[-1])
            noise = temperature * torch.randn_like(noise) if temperature else noise
            return self.flow(noise, inputs, inverts=True)[0].to(source.memory.dtype)

    @torch.no_grad()
    def start_flow(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        word_draws: Tensor | None = None,
        latent_noise: Tensor | None = None,
    ) -> None:
        """Set the flow's actnorms so that the posterior's latents of a batch have mean 0 and variance 1 after each.

        It is saved with the weights. Call it in evaluation mode, once the posterior has learned something.

        Args: as of `forward`.

        Raises:
            ValueError: the labels have no token.
        """
        labels, _ = without_padding(labels, None, self.config)
        if not bool(labels.ne(-100).any()):
            raise ValueError("labels: the flow starts from latents of tokens; got none. Give a batch with targets.")
        source = self.read_source(self.encode(input_ids, attention_mask)[0], attention_mask)
        mask = canvas(*self.target_shape(source, labels, None))
        posterior = self.encode_target(source, mask, labels.clamp(min=0), word_draws)
        with torch.autocast(mask.device.type, enabled=False):
            self.flow.start(self.reparametrize(posterior, latent_noise)[0], self.flow_inputs(source, mask))

    def decode_targets(self, source: EncodedSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,) in one pass, from latents of the prior."""
        mask, temperature = canvas(lengths), settings.latent_temperature  # (l B, T)
        states = self.run_decoder(source, mask, inputs_embeds=self.prior_latents(source, mask, temperature))[0]
        tokens, log_probs = self.read_words(states, lengths, mask.bool(), settings)
        samples = settings.num_latent_samples
        estimates = self.estimate_log_probs(source, tokens, lengths, samples) if temperature else None
        return NarTargets(tokens, log_probs, [tokens], estimates)

    def estimate_log_probs(self, source: EncodedSource, tokens: Tensor, lengths: Tensor, samples: int) -> Tensor:
        """Return log mean_i p(y | z_i, x) p(z_i | x) / q(z_i | x, y) (k B,), an estimate of log p(y | x, m).

        Args:
            source: the encoded source.
            tokens: (k B, T), y; padding has any token.
            lengths: (k B,), m.
            samples: the number of z_i, which are drawn from the posterior by torch's generator.
        """
        mask = canvas(lengths, tokens.shape[1])
        posterior, weights = self.encode_target(source, mask, tokens), []
        for _ in range(samples):
            latents, divergence, _ = self.sample(source, mask, posterior)
            states = self.run_decoder(source, mask, inputs_embeds=latents.to(source.memory.dtype))[0]
            weights.append(self.log_likelihoods(states, tokens, mask) - divergence)
        return torch.stack(weights).logsumexp(0) - math.log(samples)

    def log_likelihoods(self, states: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return log p(y | z, x) (k B,) of `tokens` (k B, T) where `mask` (k B, T) is 1, in at least float32."""
        chunks = self.logits_of(states, mask, tokens)
        losses = torch.cat([functional.cross_entropy(logits, words, reduction="none") for logits, words in chunks])
        return losses.new_zeros(mask.shape).masked_scatter(mask.bool(), -losses).sum(1)
