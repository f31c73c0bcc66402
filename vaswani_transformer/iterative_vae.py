"""IterativeVAE: a non-autoregressive decoder with layers that refine a discrete latent over the vocabulary.

B batch, S source, T target, k target rows per source row, l lengths of a length beam, N layers, V vocabulary.

Before each layer but the first, the states predict words, and some words go back into the states. There are two kinds
of latents. Revealed ones (`revealed`) are words at some positions: in training those of the reference at random ones.
Discrete ones (`discrete`), those of the report, are samples at every position, for which the reference is a hint.

Length, soft copy and layers are those of NAT.
"""

from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from .config import checked_field, positive_float, unit_rate
from .discrete import LatentPass, LatentStep
from .layers import read_table
from .lengths import MeasuredSource
from .nar import EncodedSource, NarLMOutput, NarSettings, NarTargets, Target, TargetInputs, canvas
from .nat import PositionalDecoder, VaswaniNatConfig, VaswaniNatForConditionalGeneration, VaswaniNatModel
from .revealed import CommittedWords, RevealedStep, RevealedWords, nested_positions

NEW_LATENT = "revealed"
"""The latent of a new configuration that sets no field of a discrete one."""

latent_type = checked_field(
    lambda value: value in (None, "revealed", "discrete"), "is not a latent; choose 'revealed' or 'discrete'."
)
latent_sample_type = checked_field(
    lambda value: value in (None, "discrete", "relaxed"), "is not a sample of a latent; choose 'discrete' or 'relaxed'."
)


@strict
class VaswaniIterativeVaeConfig(VaswaniNatConfig):
    """Hyperparameters of IterativeVAE; `label_smoothing` defaults to 0.

    Args:
        latent: "revealed", the reference's words at random positions in training and the most probable words at
            inference; or "discrete", the report's sample at every position. None for revealed, unless a field that only
            a discrete latent has is set: `latent_sample`, `hint`, `kl_weights` or `gumbel_temperature`.
        latent_sample: of a discrete latent: "discrete", a word with the gradient of a Gumbel-softmax
            (straight-through), or "relaxed", the Gumbel-softmax itself.
        hint: whether a discrete latent sees the reference in training. Without it there is neither noise nor a KL
            divergence.
        kl_weights: w_2 to w_N, the weight of a discrete latent's KL divergence before each layer but the first; None
            for (N + 1 - i)^2 before layer i.
        gumbel_temperature: tau, the temperature of the Gumbel-softmax.
        latent_dropout: dropout rate of the embedded latents.
    """

    model_type = "vaswani_iterative_vae"
    keys_to_ignore_at_inference = [
        *VaswaniNatConfig.keys_to_ignore_at_inference,
        *("bound", "kl_loss", "layer_losses", "layer_kl", "prior_weights", "hint_weights"),
    ]

    latent: str | None = latent_type(default=None)
    latent_sample: str | None = latent_sample_type(default=None)
    hint: bool = True
    kl_weights: list[float | int] | None = None
    gumbel_temperature: float | int = positive_float(default=1.0)
    latent_dropout: float | int = unit_rate(default=0.1)
    label_smoothing: float | int = unit_rate(default=0.0)

    def __post_init__(self, **kwargs: Any) -> None:
        """Choose the latent if it is not given."""
        if self.latent is None:
            self.latent = "discrete" if self.discrete_settings() else NEW_LATENT
        if self.latent == "discrete" and self.latent_sample is None:
            self.latent_sample = "discrete"
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Read a saved configuration; one without `latent` was saved when every latent was discrete."""
        return super().from_dict({"latent": "discrete", **config_dict}, **kwargs)

    @property
    def is_revealed(self) -> bool:
        """Return whether the latents are revealed words."""
        return self.latent == "revealed"

    def discrete_settings(self) -> dict[str, Any]:
        """Return the fields of a discrete latent that are not at their defaults."""
        defaults = {"latent_sample": None, "hint": True, "kl_weights": None, "gumbel_temperature": 1}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

    def validate_latent(self) -> None:
        """Check that no setting of a discrete latent is set for revealed ones."""
        settings = self.discrete_settings()
        if self.is_revealed and settings:
            name, value = next(iter(settings.items()))
            raise ValueError(
                f'{name}: not supported by latent="revealed"; got {value!r}. Leave it out, or set latent="discrete".'
            )

    def validate_kl_weights(self) -> None:
        """Check that each layer but the first has a nonnegative weight."""
        if self.kl_weights is None:
            return
        count = self.decoder_layers - 1
        are_valid = all(0 <= weight < float("inf") for weight in self.kl_weights)
        if len(self.kl_weights) != count or not are_valid:
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


Latent = LatentPass | RevealedWords | CommittedWords
"""The latents of one decoder pass: discrete ones, the posterior and the prior of revealed ones."""


def make_step(config: VaswaniIterativeVaeConfig) -> nn.Module:
    """Return a new latent step of the configuration's latent."""
    if config.is_revealed:
        return RevealedStep(config, config.latent_dropout)
    return LatentStep(
        config,
        config.latent_dropout,
        temperature=config.gumbel_temperature,
        is_relaxed=config.latent_sample == "relaxed",
    )


class LatentDecoder(PositionalDecoder):
    """NAT's decoder with a latent step before each layer but the first."""

    _no_split_modules = ["PositionalDecoderLayer", "LatentStep", "RevealedStep"]

    def __init__(self, config: VaswaniIterativeVaeConfig) -> None:
        super().__init__(config)
        self.latent_steps = nn.ModuleList(make_step(config) for _ in range(config.decoder_layers - 1))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as every model does, and the vectors of unknown words with zeros."""
        super()._init_weights(module)
        if isinstance(module, RevealedStep):
            init.zeros_(module.empty)

    def run_layers(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        memory: Tensor | None,
        source_mask: Tensor | None,
        past_key_values: Cache | None,
        latent: Latent | None = None,
        depth: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply all layers and latent steps to `hidden_states` (k B, T, d_model).

        Args:
            latent: the latents of this pass; None for inference with the embeddings as output projection.
            depth: number of layers to apply; None for all.
        """
        vocab_size = self.config.vocab_size
        scale = self.config.embedding_scale
        table = read_table(self.embed_tokens, vocab_size, hidden_states.device, scale)  # E (V, d_model)
        if latent is None:
            latent = self.inference(hidden_states, mask, table)
        positions = self.position_encodings(hidden_states)  # (1, T, d_model)
        self_attention_mask = self.without_diagonal(mask, hidden_states)

        for index, layer in enumerate(self.layers[:depth]):
            if index > 0:
                step: Any = self.latent_steps[index - 1]
                hidden_states = latent.apply(step, hidden_states, table)
            hidden_states = layer(
                hidden_states,
                mask,
                memory,
                encoder_attention_mask=source_mask,
                past_key_values=past_key_values,
                positions=positions,
                self_attention_mask=self_attention_mask,
                **kwargs,
            )  # (k B, T, d_model)
        return latent.output(hidden_states)

    def inference(self, hidden_states: Tensor, mask: Tensor | None, table: Tensor) -> LatentPass | CommittedWords:
        """Return a pass without reference, for a decoder that is used by itself."""
        if not self.config.is_revealed:
            return LatentPass(lambda states: functional.linear(states, table))
        is_real = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
        if mask is not None:  # boolean or additive; its first row tells the keys of the first position
            is_key = mask if mask.dtype == torch.bool else mask == 0
            is_real = is_key[:, 0, 0].expand_as(is_real)

        @torch.no_grad()
        def read(states: Tensor, is_read: Tensor) -> tuple[Tensor, Tensor]:
            log_probs, words = functional.linear(states, table).log_softmax(-1).max(-1)
            return words, log_probs

        return CommittedWords(read, is_real, self.config.decoder_layers)


class VaswaniIterativeVaeModel(VaswaniNatModel):
    """Encoder and latent decoder with a shared embedding matrix, which also projects in the latent steps."""

    config_class = VaswaniIterativeVaeConfig
    decoder_class = LatentDecoder


@dataclass
class IterativeVaeLMOutput(NarLMOutput):
    """Output of IterativeVAE; the fields below are means over target tokens, and None if the model does not have them.

    The mean of `bound` over samples, in evaluation mode with `has_hint`, is an upper bound of -log p(y | x, m). With
    revealed latents `token_loss` is the bound too, and a pass that does not see the labels has none of these fields.
    """

    bound: Tensor | None = None  # cross-entropy after the last layer plus the sum of layer_kl
    kl_loss: Tensor | None = None  # weighted sum of layer_kl, without kl_scale; 0 without a hint
    layer_losses: Tensor | None = None  # (N,), cross-entropy after each layer; revealed: of the words it predicts
    layer_kl: Tensor | None = None  # (N - 1,), KL(q || prior) before each layer but the first
    prior_weights: Tensor | None = None  # (N - 1,), a, the weight of the predicted distribution
    hint_weights: Tensor | None = None  # (N - 1,), b, the weight of the hint


class VaswaniIterativeVaeForConditionalGeneration(VaswaniNatForConditionalGeneration, GenerationMixin):
    """IterativeVAE, with `generate()` in one pass; `return_history` returns the words after every layer.

    In training mode the latents see the `labels`. The `loss` is the sum of `layer_losses` and `length_loss_weight`
    `length_loss`, and with a discrete latent also `kl_scale` `kl_loss`; with revealed latents the sum of `layer_losses`
    is the `bound`. In evaluation mode the latents see no labels and have no noise, and the `loss` is the negative
    log-likelihood of words and length in the pass that `generate()` makes.

    `forward` also takes `has_hint`: whether the latents see the `labels`; None: in training mode only. In evaluation
    mode `has_hint=True` computes the `bound` from one sample of the latents. `reveal_draws` (k B, T), uniform on
    [0, 1), determine revealed latents. Other latents, and these without draws, come from torch's generator.

    Attributes:
        kl_scale: kappa, the weight of a discrete latent's KL divergences in training; not part of the configuration.
        glancing_ratio: with a discrete latent as in NAT; words that are shown have neither hint nor loss. With revealed
            latents, if above 0, the last layer knows as many words as this ratio of the first layer's mistakes.
    """

    config_class = VaswaniIterativeVaeConfig
    body_class = VaswaniIterativeVaeModel
    output_class = IterativeVaeLMOutput
    further_arguments = (*VaswaniNatForConditionalGeneration.further_arguments, "has_hint", "reveal_draws")
    kl_scale: float = 1.0

    def __init__(self, config: VaswaniIterativeVaeConfig) -> None:
        super().__init__(config)
        if config.hint and not config.is_revealed:
            self.family_settings = (*self.family_settings, "do_sample")

    def make_target(self, source: MeasuredSource, inputs: TargetInputs) -> Target:
        target = super().make_target(source, inputs)
        has_hint = inputs.further["has_hint"]
        if has_hint is None:
            has_hint = self.training
        if not self.config.is_revealed:
            target.decoder_inputs["latent"] = LatentPass(
                self.lm_head,
                target.mask,
                target.labels,
                is_sampled=self.config.hint and has_hint,
                smoothing=self.config.label_smoothing if self.training else 0.0,
            )
        elif has_hint and target.labels is not None:
            draws = inputs.further["reveal_draws"]
            target.decoder_inputs["latent"] = self.reveal(source, target, target.labels, draws)
        return target

    def training_input(
        self, source: MeasuredSource, target: Target, labels: Tensor, draws: dict[str, Tensor | None]
    ) -> Tensor:
        """Return the soft copy (k B, T, d_model); with a discrete latent also words that glancing shows."""
        if self.config.is_revealed:
            return self.decoder_input(source, target.mask)
        return super().training_input(source, target, labels, draws)

    def reveal(self, source: MeasuredSource, target: Target, labels: Tensor, draws: Tensor | None) -> RevealedWords:
        """Return the posterior of `labels` (k B, T), and limit `target.labels` to the words that stay hidden."""
        labels = labels.to(source.memory.device)
        is_real = labels.ne(-100)  # (k B, T)
        if draws is None:
            draws = torch.rand(labels.shape, device=labels.device)
        share = None
        if self.training and self.glancing_ratio > 0:
            share = self.share_of_mistakes(source, target, labels)
        revealed = nested_positions(is_real, draws.to(labels.device), self.config.decoder_layers, share)
        if revealed:
            target.labels = labels.masked_fill(revealed[-1], -100)
        return RevealedWords(labels.clamp(min=0), revealed)

    @torch.no_grad()
    def share_of_mistakes(self, source: MeasuredSource, target: Target, labels: Tensor) -> Tensor:
        """Return `glancing_ratio` times the share (k B, 1) of words that the first layer gets wrong."""
        is_real = labels.ne(-100)  # (k B, T)
        states = self.run_decoder(source, target.mask, **target.decoder_inputs, depth=1)[0]  # (k B, T, d_model)
        mistakes = self.count_mistakes(states, labels)[:, None]  # (k B, 1)
        lengths = is_real.sum(1, keepdim=True)  # (k B, 1)
        target.outputs["accuracy"] = 1 - mistakes.sum() / lengths.sum().clamp(min=1)
        return self.glancing_ratio * mistakes / lengths.clamp(min=1)

    def commit(self, mask: Tensor, suppress_tokens: list[int] | None) -> CommittedWords:
        """Return the prior for targets of `mask` (k B, T), which never commits any of `suppress_tokens`."""
        lengths = mask.sum(1)

        @torch.no_grad()
        def read(states: Tensor, is_read: Tensor) -> tuple[Tensor, Tensor]:
            return self.read_words(states, lengths, is_read, suppress_tokens, has_scores=True)

        return CommittedWords(read, mask.bool(), self.config.decoder_layers)

    def run_decoder(
        self, source: EncodedSource, target_mask: Tensor, cache: Cache | None = None, **inputs: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the decoder, by default without reference and noise."""
        if inputs.get("latent") is None and self.config.is_revealed:
            inputs["latent"] = self.commit(target_mask, self.special_tokens())
        elif inputs.get("latent") is None:
            inputs["latent"] = LatentPass(self.lm_head, target_mask)
        return super().run_decoder(source, target_mask, cache, **inputs)

    def losses(self, source: MeasuredSource, target: Target, token_loss: Tensor) -> dict[str, Tensor]:
        """Return the output fields with the losses of layers, latents and length."""
        losses = super().losses(source, target, token_loss)
        latent = target.decoder_inputs.get("latent")
        if isinstance(latent, RevealedWords):
            losses.update(self.revealed_losses(losses, target, latent))
        elif latent is not None:  # a pass without the reference has none
            losses.update(self.discrete_losses(losses, target, latent))
        return losses

    def revealed_losses(self, losses: dict[str, Tensor], target: Target, latent: RevealedWords) -> dict[str, Tensor]:
        """Return the fields of revealed latents."""
        # The words that become known before each layer but the first; the layer before predicts them.
        is_known = torch.zeros_like(latent.words, dtype=torch.bool)  # (k B, T)
        is_new = []
        for is_revealed in latent.revealed:
            is_new.append(is_revealed & ~is_known)
            is_known = is_revealed

        # Their losses are the divergences; `token_loss` is that of the words that stay hidden from the last layer.
        token_loss = losses["token_loss"]
        states = cast(Tensor, latent.predicting).to(token_loss.device)  # (k B, T, d_model)
        summed, token_losses = self.token_losses(states, latent.words.masked_fill(~is_known, -100))  # scalar, (k B, T)
        layer_kl = [target.mean((token_losses * mask).sum()) for mask in is_new]  # K_2 to K_N
        layer_losses = torch.stack([*layer_kl, token_loss.detach()])  # (N,)
        bound = token_loss + target.mean(summed)
        return {
            "loss": bound + self.config.length_loss_weight * losses["length_loss"],
            "token_loss": bound,
            "bound": bound,
            "layer_losses": layer_losses,
            "layer_kl": layer_losses[:-1],
        }

    def discrete_losses(self, losses: dict[str, Tensor], target: Target, latent: LatentPass) -> dict[str, Tensor]:
        """Return the fields of discrete latents."""
        # The means over tokens of each step's results, none with a single layer.
        token_loss = losses["token_loss"]
        means = token_loss.new_zeros(0, 4)
        if latent.tokens:
            sums = [torch.stack([values.sum() for values in tokens]) for tokens in latent.tokens]
            means = target.mean(torch.stack([step_sums.to(token_loss.device) for step_sums in sums]))  # (N - 1, 4)
        step_losses, layer_kl, prior_weights, hint_weights = means.unbind(1)  # (N - 1,) each

        layer_losses = torch.cat([step_losses, token_loss[None]])  # (N,)
        kl_loss = token_loss.new_zeros(())
        for weight, kl in zip(self.config.layer_kl_weights, layer_kl, strict=True):
            kl_loss = kl_loss + weight * kl
        loss = losses["loss"]
        if self.training:
            length_loss = self.config.length_loss_weight * losses["length_loss"]
            loss = layer_losses.sum() + self.kl_scale * kl_loss + length_loss
        return {
            "loss": loss,
            "bound": token_loss + layer_kl.sum(),
            "kl_loss": kl_loss,
            "layer_losses": layer_losses,
            "layer_kl": layer_kl,
            "prior_weights": prior_weights.detach(),
            "hint_weights": hint_weights.detach(),
        }

    def decode_targets(self, source: MeasuredSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,) in one pass, with the words after each layer as history."""
        if self.config.is_revealed:
            return self.decode_revealed(source, canvas(lengths), settings)
        return self.decode_discrete(source, lengths, settings)

    def decode_revealed(self, source: MeasuredSource, mask: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each row of `mask` (l B, T), whose words the layers commit one after the other."""
        latent = self.commit(mask, settings.suppress_tokens)
        states = self.run_decoder(source, mask, inputs_embeds=self.decoder_input(source, mask), latent=latent)[0]
        latent.read_open(states)  # the words that no step has committed
        history = [*latent.history, (latent.words, latent.is_real)]
        return NarTargets(
            latent.words,
            latent.log_probs,
            history=[words for words, _ in history],
            committed=[is_committed for _, is_committed in history],
        )

    def decode_discrete(self, source: MeasuredSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,) from the states of the last layer."""
        mask = canvas(lengths)  # (l B, T)
        outputs = self.run_decoder(
            source,
            mask,
            inputs_embeds=self.decoder_input(source, mask),
            latent=LatentPass(self.lm_head, mask, is_sampled=settings.do_sample),
            output_hidden_states=settings.return_history,
        )

        def read(states: Tensor, has_scores: bool) -> tuple[Tensor, Tensor]:
            return self.read_words(states, lengths, mask.bool(), settings.suppress_tokens, has_scores)

        history = []
        if settings.return_history:
            earlier_layers = (outputs.hidden_states or ())[1:-1]  # after the decoder's input, before the last layer
            history = [read(states, False)[0] for states in earlier_layers]
        tokens, log_probs = read(outputs[0], settings.reads_scores)
        return NarTargets(tokens, log_probs, [*history, tokens])
