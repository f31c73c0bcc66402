"""IterativeVAE: one pass whose layers refine a latent in the vocabulary's space.

B batch, S source, T target, k target rows of one source row, l lengths of a length beam, N layers, V vocabulary.
Before each layer but the first the states predict words. A sample of their distribution, in training with the reference
as a hint, goes back through the embedding into the states. At inference there is no hint, and the most likely word is
taken, except on request. Without the hint in training this is layer-wise prediction (DSLP, Huang et al. 2022). Length,
soft copy, layers and glancing are NAT's.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from .config import checked_field, positive_float, unit_rate
from .embeddings import read_table
from .latent import LatentPass, LatentStep
from .lengths import canvas
from .nar_generation import NarSettings, NarTargets
from .nar_head import EncodedSource, NarLMOutput, Target, TargetInputs, TrainingRate
from .nat import VaswaniNatConfig, VaswaniNatForConditionalGeneration, VaswaniNatModel
from .nat_decoder import PositionalDecoder

latent_sample_type = checked_field(
    lambda value: value in ("discrete", "relaxed"), "is not a sample of a latent; choose 'discrete' or 'relaxed'."
)


@strict
class VaswaniIterativeVaeConfig(VaswaniNatConfig):
    """The hyperparameters of IterativeVAE, in addition to those of `VaswaniNatConfig`; label smoothing is 0 by default.

    Args:
        latent_sample: "discrete", a word with the gradient of a Gumbel-softmax (straight-through), or "relaxed", the
            Gumbel-softmax itself, whose divergence is that of the V real numbers that it passes on.
        hint: whether the latents see the reference in training; otherwise there is neither noise nor divergence, and
            training feeds what inference feeds.
        kl_weights: w_2 to w_N, the weight of the KL divergence before each layer but the first; None for (N + 1 - i)^2
            before layer i.
        gumbel_temperature: tau of the Gumbel-softmax.
        latent_dropout: the dropout of what a latent adds to the states.

    Raises:
        huggingface_hub.errors.StrictDataclassError: as for `VaswaniNatConfig`.
    """

    model_type = "vaswani_iterative_vae"
    keys_to_ignore_at_inference = [
        *VaswaniNatConfig.keys_to_ignore_at_inference,
        "bound",
        "kl_loss",
        "layer_losses",
        "layer_kl",
        "prior_weights",
        "hint_weights",
    ]

    latent_sample: str = latent_sample_type(default="discrete")
    hint: bool = True
    kl_weights: list[float | int] | None = None
    gumbel_temperature: float | int = positive_float(default=1.0)
    latent_dropout: float | int = unit_rate(default=0.1)
    label_smoothing: float | int = unit_rate(default=0.0)

    def validate_kl_weights(self) -> None:
        """Check that each layer but the first has a weight of at least 0."""
        if self.kl_weights is None:
            return
        count = self.decoder_layers - 1
        if len(self.kl_weights) != count or not all(0 <= weight < float("inf") for weight in self.kl_weights):
            raise ValueError(
                f"kl_weights ({self.kl_weights}) must be {count} finite numbers of at least 0, one for each decoder "
                "layer but the first; leave it None for the squares that fall to 1."
            )

    @property
    def layer_kl_weights(self) -> list[float | int]:
        """Return w_2 to w_N."""
        if self.kl_weights is not None:
            return self.kl_weights
        return [(self.decoder_layers + 1 - layer) ** 2 for layer in range(2, self.decoder_layers + 1)]


class LatentDecoder(PositionalDecoder):
    """NAT's decoder with a latent step before each layer but the first."""

    _no_split_modules = ["PositionalDecoderLayer", "LatentStep"]

    def __init__(self, config: VaswaniIterativeVaeConfig) -> None:
        super().__init__(config)
        settings = (config, config.gumbel_temperature, config.latent_dropout, config.latent_sample == "relaxed")
        self.latent_steps = nn.ModuleList(LatentStep(*settings) for _ in range(config.decoder_layers - 1))
        self.post_init()

    def run_layers(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Pass `hidden_states` (k B, T, d_model) through every layer and the latent steps between.

        Args:
            latent: a `LatentPass`; None: neither hint nor noise, and the embeddings are the output projection.
        """
        rows, scale = self.config.vocab_size, self.config.embedding_scale
        table = read_table(self.embed_tokens, rows, hidden_states.device, scale)  # E (V, d_model)
        latent = kwargs.pop("latent", None)
        if not isinstance(latent, LatentPass):
            latent = LatentPass(lambda states: functional.linear(states, table))
        kwargs |= self.positional_inputs(hidden_states, cast(Tensor | None, args[0]))
        for index, layer in enumerate(self.layers):
            if index:
                hidden_states = latent.apply(cast(LatentStep, self.latent_steps[index - 1]), hidden_states, table)
            hidden_states = layer(hidden_states, *args, **kwargs)  # (k B, T, d_model)
        return hidden_states


class VaswaniIterativeVaeModel(VaswaniNatModel):
    """Encoder and latent decoder over one embedding matrix, which is also the projection of its latent steps."""

    config_class = VaswaniIterativeVaeConfig
    decoder_class = LatentDecoder


@dataclass
class IterativeVaeLMOutput(NarLMOutput):
    """The output of IterativeVAE; with labels also the losses of its layers and latent steps, means a target token.

    Attributes:
        bound: the cross-entropy after the last layer plus the sum of `layer_kl`. Its mean over samples, in evaluation
            mode with `has_hint`, is an upper bound of -log p(y | x, m) a target token.
        kl_loss: the weighted sum of `layer_kl`, without `kl_scale`; 0 without a hint.
        layer_losses: (N,), the cross-entropy after each layer; the last is `token_loss`.
        layer_kl: (N - 1,), KL(q || prior) before each layer but the first.
        prior_weights, hint_weights: (N - 1,), a and b, by which a latent weighs its own distribution and the hint.
    """

    bound: Tensor | None = None
    kl_loss: Tensor | None = None
    layer_losses: Tensor | None = None
    layer_kl: Tensor | None = None
    prior_weights: Tensor | None = None
    hint_weights: Tensor | None = None


class VaswaniIterativeVaeForConditionalGeneration(VaswaniNatForConditionalGeneration):
    """IterativeVAE, with `generate()` in one pass, whose `return_history` gives the words after every layer.

    In training mode the latents are samples that see the `labels`, and the `loss` is the sum of `layer_losses`,
    `kl_scale` `kl_loss` and `length_loss_weight` `length_loss`. In evaluation mode there is neither hint nor noise, and
    the `loss` is the plain negative log-likelihood after the last layer and the length's. Words that glancing shows
    have neither hint nor loss in any layer.

    `forward` also takes `has_hint`: whether the latents are samples that see the `labels`; None: in training mode. In
    evaluation mode it gives the `bound`, with samples of torch's generator.

    Attributes:
        kl_scale: kappa, the weight of the KL divergences in training. It is no part of the configuration.
        glancing_ratio: as of NAT.
    """

    config_class = VaswaniIterativeVaeConfig
    body_class = VaswaniIterativeVaeModel
    output_class = IterativeVaeLMOutput
    draws = (*VaswaniNatForConditionalGeneration.draws, "has_hint")
    kl_scale = TrainingRate(1.0, None, "weighs a loss")

    @property
    def samples(self) -> bool:
        return self.config.hint

    def make_target(self, source: EncodedSource, given: TargetInputs) -> Target:
        """Return the target of `forward`, with what its latent steps get."""
        has_hint = given.draws.pop("has_hint")
        has_hint = self.config.hint and bool(self.training if has_hint is None else has_hint)
        target = super().make_target(source, given)
        target.decoder_inputs["latent"] = LatentPass(
            self.lm_head,
            is_real=target.mask.bool(),
            labels=target.labels,
            has_hint=has_hint,
            has_noise=has_hint,
            smoothing=self.config.label_smoothing if self.training else 0.0,
        )
        return target

    def run_decoder(
        self, source: EncodedSource, target_mask: Tensor, cache: Cache | None = None, **inputs: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the decoder's output; by default its latents have neither hint nor noise."""
        inputs.setdefault("latent", LatentPass(self.lm_head, target_mask.bool()))
        return super().run_decoder(source, target_mask, cache, **inputs)

    def losses(self, source: EncodedSource, target: Target, token_loss: Tensor) -> dict[str, Any]:
        """Return the loss of every layer, of the KL divergences and of the length, with the fields of the output."""
        losses, steps = super().losses(source, target, token_loss), target.decoder_inputs["latent"].tokens

        def by_step(name: str) -> Tensor:
            means = [target.mean(getattr(tokens, name).sum()) for tokens in steps]
            return torch.stack(means) if means else token_loss.new_zeros(0)

        losses["layer_kl"] = by_step("kl")
        weighted = [weight * kl for weight, kl in zip(self.config.layer_kl_weights, losses["layer_kl"], strict=True)]
        losses["kl_loss"] = torch.stack(weighted).sum() if weighted else token_loss.new_zeros(())
        losses["layer_losses"] = torch.cat([by_step("losses"), token_loss[None]])
        losses["bound"] = token_loss + losses["layer_kl"].sum()
        losses |= {name: by_step(name).detach() for name in ("prior_weights", "hint_weights")}
        if self.training:
            divergences = self.kl_scale * losses["kl_loss"]
            length_loss = self.config.length_loss_weight * losses["length_loss"]
            losses["loss"] = losses["layer_losses"].sum() + divergences + length_loss
        return losses

    def decode_targets(self, source: EncodedSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,) in one pass; the history has the words after each layer."""
        target = Target(lengths, canvas(lengths))
        outputs = self.run_decoder(
            source,
            target.mask,
            inputs_embeds=self.embed_target(source, target),
            latent=LatentPass(self.lm_head, target.mask.bool(), has_noise=settings.do_sample),
            output_hidden_states=settings.return_history,
        )
        is_real = target.mask.bool()
        tokens, log_probs = self.read_words(outputs[0], lengths, is_real, settings)
        earlier = (outputs.hidden_states or ())[1:-1] if settings.return_history else ()
        history = [self.read_words(states, lengths, is_real, settings)[0] for states in earlier]
        return NarTargets(tokens, log_probs, [*history, tokens])
