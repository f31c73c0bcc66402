"""IterativeVAE: a non-autoregressive decoder whose layers refine a discrete latent over the vocabulary.

B batch, S source, T target, k target rows per source row, l lengths of a length beam, N layers or real positions, n
positions in a chunk, V vocabulary.

Before each layer but the first, the states predict words. A sample of this distribution is embedded and added to the
states: a word with the gradient of a Gumbel-softmax (straight-through), or the Gumbel-softmax itself (Jang et al.
2017). Positions are independent. In training the reference shifts the distribution as a hint. At inference there is no
hint, and by default the most likely word replaces the sample. Training without the hint is layer-wise prediction (DSLP,
Huang et al. 2022). Length, soft copy, layers and glancing are those of NAT.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from .config import checked_field, positive_float, unit_rate
from .embeddings import Dropout, read_table
from .lengths import MeasuredSource
from .loss import accumulation_dtype, chunk_size
from .nar import EncodedSource, NarLMOutput, NarSettings, NarTargets, Target, TargetInputs, argmax, canvas
from .nat import PositionalDecoder, VaswaniNatConfig, VaswaniNatForConditionalGeneration, VaswaniNatModel

RECOMPUTED = 2**25
"""Scores (N V, 128 MiB in float32) of a latent step above which the backward pass computes them again."""

latent_sample_type = checked_field(
    lambda value: value in ("discrete", "relaxed"), "is not a sample of a latent; choose 'discrete' or 'relaxed'."
)


@strict
class VaswaniIterativeVaeConfig(VaswaniNatConfig):
    """Hyperparameters of IterativeVAE, in addition to those of `VaswaniNatConfig`; `label_smoothing` defaults to 0.

    Args:
        latent_sample: "discrete", a word with the gradient of a Gumbel-softmax (straight-through), or "relaxed", the
            Gumbel-softmax itself.
        hint: whether the latents see the reference in training. Without it there is neither noise nor a KL divergence.
        kl_weights: w_2 to w_N, the weight of the KL divergence before each layer but the first; None for (N + 1 - i)^2
            before layer i.
        gumbel_temperature: tau, the temperature of the Gumbel-softmax.
        latent_dropout: dropout rate of the embedded latents.
    """

    model_type = "vaswani_iterative_vae"
    keys_to_ignore_at_inference = [
        *VaswaniNatConfig.keys_to_ignore_at_inference,
        *("bound", "kl_loss", "layer_losses", "layer_kl", "prior_weights", "hint_weights"),
    ]

    latent_sample: str = latent_sample_type(default="discrete")
    hint: bool = True
    kl_weights: list[float | int] | None = None
    gumbel_temperature: float | int = positive_float(default=1.0)
    latent_dropout: float | int = unit_rate(default=0.1)
    label_smoothing: float | int = unit_rate(default=0.0)

    def validate_kl_weights(self) -> None:
        """Check that each layer but the first has a nonnegative weight."""
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


def gumbel_noise(scores: Tensor) -> Tensor:
    """Return standard Gumbel noise of the shape of `scores`."""
    dtype = accumulation_dtype(scores.dtype)  # half precision is too coarse near 1
    tiny = torch.finfo(dtype).tiny
    uniform = torch.empty_like(scores, dtype=dtype).uniform_(tiny, 1)  # faster on a CPU than exponential_
    return uniform.log_().neg_().log_().neg_()


def divergence(prior: Tensor, words: Tensor, hint_weight: Tensor) -> Tensor:
    """Return KL(softmax(s) || softmax(prior)) (n, 1), where s adds `hint_weight` (n, 1) at `words` (n, 1).

    The hint does not change the ratios of the other words, so two outcomes suffice: y, and any other word.
    """
    word = -functional.cross_entropy(prior, words.squeeze(1), reduction="none")[:, None]  # (n, 1), log p(y)
    others = (-word.expm1()).clamp(min=torch.finfo(prior.dtype).tiny).log()  # (n, 1), of all other words
    log_prior = torch.cat([word, others], dim=1).log_softmax(1)  # (n, 2)
    log_q = torch.cat([word + hint_weight, others], dim=1).log_softmax(1)  # (n, 2)
    return (log_q.exp() * (log_q - log_prior)).sum(1, keepdim=True)


def relaxed_divergence(hint_weight: Tensor) -> Tensor:
    """Return b - 1 + exp(-b) (n, 1), the limit of the Gumbel-softmaxes' KL divergence as V grows, for any tau."""
    return hint_weight + torch.expm1(-hint_weight)


class LatentTokens(NamedTuple):
    """Results of a latent step for n tokens; losses and divergence are 0 at positions without a word."""

    losses: Tensor  # (n,), cross-entropy of the words under the step's input distribution
    kl: Tensor  # (n,), KL(q || prior), 0 without a hint
    prior_weights: Tensor  # (n,), a
    hint_weights: Tensor  # (n,), b


class LatentStep(nn.Module):
    """Latent step: map states h to a latent over the vocabulary and back, with a highway connection.

    With p = log softmax(logits), s = a p + b onehot(y) with a hint, and a p without. The latent z is the word
    argmax(s + g) with the gradient of softmax((s + g) / tau), or if relaxed that softmax itself. The result is
    LN(gate h + Dropout((1 - gate) sqrt(d_model) z E)). a and b are softplus and the gate is the sigmoid of linear
    functions of h; tau is `temperature`.
    """

    def __init__(self, config: VaswaniIterativeVaeConfig) -> None:
        super().__init__()
        self.mixing = nn.Linear(config.d_model, 3)
        self.dropout = Dropout(config.latent_dropout)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.temperature, self.is_relaxed = config.gumbel_temperature, config.latent_sample == "relaxed"
        self.config = config

    def forward(
        self,
        states: Tensor,
        logits: Tensor,
        table: Tensor,
        words: Tensor | None = None,
        noise: Callable[[Tensor], Tensor] | None = None,
        smoothing: float = 0.0,
    ) -> tuple[Tensor, LatentTokens | None]:
        """Return the new states (n, d_model), and the results for `words` if given.

        Args:
            states, logits: h (n, d_model), and its output projection (n, V).
            table: E (V, d_model), the embeddings.
            words: y (n,), -100 at positions without hint and loss; they are the hint of a sample.
            noise: computes g from s (n, V) for a sample; None for g = 0 and no hint.
            smoothing: label smoothing of the cross-entropy.
        """
        logits = logits.to(accumulation_dtype(logits.dtype))  # p up to a constant, which does not change the latent
        prior_weight, hint_weight, gate = self.mixing(states).to(logits.dtype).split(1, dim=-1)  # (n, 1) each
        prior_weight, hint_weight = functional.softplus(prior_weight), functional.softplus(hint_weight)
        is_argmax = noise is None and not self.is_relaxed
        scores = logits if is_argmax else prior_weight * logits  # (n, V); argmax ignores the weight
        kl = torch.zeros_like(prior_weight)
        if noise is not None and words is not None:
            seen = words.clamp(min=0)[:, None]  # (n, 1)
            hint = hint_weight * words.ne(-100)[:, None]
            kl = relaxed_divergence(hint) if self.is_relaxed else divergence(scores, seen, hint)
            scores = scores.scatter_add(1, seen, hint)  # (n, V), s
        gate = gate.sigmoid().to(states.dtype)
        embedded = self.config.embedding_scale * self.embed(scores, table, noise).to(states.dtype)  # (n, d_model)
        mixed = self.norm(gate * states + self.dropout((1 - gate) * embedded)).to(states.dtype)
        if words is None:
            return mixed, None
        losses = functional.cross_entropy(logits, words, reduction="none", label_smoothing=smoothing)  # (n,)
        return mixed, LatentTokens(losses, kl.squeeze(1), prior_weight.squeeze(1), hint_weight.squeeze(1))

    def embed(self, scores: Tensor, table: Tensor, noise: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Return z E (n, d_model) for s (n, V)."""
        noisy = scores if noise is None else scores + noise(scores)
        if not self.is_relaxed and (noise is None or not torch.is_grad_enabled()):
            return table[argmax(noisy)]
        cooled = noisy if self.temperature == 1 else noisy / self.temperature
        soft = cooled.softmax(-1).to(table.dtype)  # (n, V)
        if self.is_relaxed:
            return soft @ table
        mean = soft @ table.detach()
        return table[argmax(noisy)] + (mean - mean.detach())  # a word's row, with the gradient of `mean` in s


@dataclass
class LatentPass:
    """Inputs and results of the latent steps of one decoder pass."""

    project: Callable[[Tensor], Tensor]  # output projection, states (n, d_model) to logits (n, V)
    mask: Tensor | None = None  # (k B, T), nonzero at tokens; None: all
    labels: Tensor | None = None  # (k B, T), -100 at positions without hint and loss; None: unknown
    is_sampled: bool = False  # the latents are samples, and the labels are hints
    smoothing: float = 0.0  # label smoothing of the cross-entropy
    tokens: list[LatentTokens] = field(default_factory=list)  # results of each step; empty without labels
    rows: Tensor | None = field(default=None, init=False)  # of the tokens among k B T

    def apply(self, step: LatentStep, hidden_states: Tensor, table: Tensor) -> Tensor:
        """Apply a latent step to the states (k B, T, d_model) of all tokens except padding."""
        states = hidden_states.flatten(0, 1)  # (k B T, d_model)
        words = None if self.labels is None else self.labels.flatten().to(states.device)
        if self.mask is None or torch.compiler.is_compiling():  # a graph needs fixed shapes
            return self.in_chunks(step, states, words, table).view_as(hidden_states)
        if self.rows is None:  # one synchronization per pass
            self.rows = self.mask.flatten().nonzero()[:, 0]
        rows = self.rows.to(states.device)
        mixed = self.in_chunks(step, states[rows], None if words is None else words[rows], table)
        return states.index_copy(0, rows, mixed).view_as(hidden_states)

    def in_chunks(self, step: LatentStep, states: Tensor, words: Tensor | None, table: Tensor) -> Tensor:
        """Apply a step to states (N, d_model) in chunks; to save memory, the backward pass recomputes large ones."""

        def run(states: Tensor, words: Tensor | None, table: Tensor) -> tuple[Tensor, LatentTokens | None]:
            logits = self.project(states).to(states.device)  # (n, V)
            return step(states, logits, table, words, gumbel_noise if self.is_sampled else None, self.smoothing)

        size, results = chunk_size(states.device), []
        recomputes = step.training and torch.is_grad_enabled() and len(states) * len(table) > RECOMPUTED
        for start in range(0, max(1, len(states)), size):
            rows = slice(start, start + size)
            inputs = states[rows], None if words is None else words[rows], table
            results.append(checkpoint(run, *inputs, use_reentrant=False) if recomputes else run(*inputs))
        if words is not None:
            values = zip(*(tokens for _, tokens in results), strict=True)
            self.tokens.append(LatentTokens(*(torch.cat(chunks) * words.ne(-100) for chunks in values)))
        return torch.cat([mixed for mixed, _ in results])


class LatentDecoder(PositionalDecoder):
    """NAT's decoder with a latent step before each layer but the first."""

    _no_split_modules = ["PositionalDecoderLayer", "LatentStep"]

    def __init__(self, config: VaswaniIterativeVaeConfig) -> None:
        super().__init__(config)
        self.latent_steps = nn.ModuleList(LatentStep(config) for _ in range(config.decoder_layers - 1))
        self.post_init()

    def run_layers(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Apply all layers and latent steps to `hidden_states` (k B, T, d_model).

        Args:
            latent: a `LatentPass`; None for no hint, no noise, and the embeddings as output projection.
        """
        rows, scale = self.config.vocab_size, self.config.embedding_scale
        table = read_table(self.embed_tokens, rows, hidden_states.device, scale)  # E (V, d_model)
        latent = kwargs.pop("latent", None) or LatentPass(lambda states: functional.linear(states, table))
        kwargs |= self.positional_inputs(hidden_states, args[0])
        for index, layer in enumerate(self.layers):
            if index:
                hidden_states = latent.apply(cast(LatentStep, self.latent_steps[index - 1]), hidden_states, table)
            hidden_states = layer(hidden_states, *args, **kwargs)  # (k B, T, d_model)
        return hidden_states


class VaswaniIterativeVaeModel(VaswaniNatModel):
    """Encoder and latent decoder with a shared embedding matrix, which also projects in the latent steps."""

    config_class = VaswaniIterativeVaeConfig
    decoder_class = LatentDecoder


@dataclass
class IterativeVaeLMOutput(NarLMOutput):
    """Output of IterativeVAE; the fields below need labels and are means over target tokens.

    The mean of `bound` over samples, in evaluation mode with `has_hint`, is an upper bound of -log p(y | x, m).
    """

    bound: Tensor | None = None  # cross-entropy after the last layer plus the sum of layer_kl
    kl_loss: Tensor | None = None  # weighted sum of layer_kl, without kl_scale; 0 without a hint
    layer_losses: Tensor | None = None  # (N,), cross-entropy after each layer; the last is token_loss
    layer_kl: Tensor | None = None  # (N - 1,), KL(q || prior) before each layer but the first
    prior_weights: Tensor | None = None  # (N - 1,), a, the weight of the predicted distribution
    hint_weights: Tensor | None = None  # (N - 1,), b, the weight of the hint


class VaswaniIterativeVaeForConditionalGeneration(VaswaniNatForConditionalGeneration):
    """IterativeVAE, with `generate()` in one pass; `return_history` returns the words after every layer.

    In training mode the latents are samples with the `labels` as hints. The `loss` is the sum of `layer_losses`,
    `kl_scale` `kl_loss` and `length_loss_weight` `length_loss`. In evaluation mode there is neither hint nor noise, and
    the `loss` is the negative log-likelihood of words (after the last layer) and length. Words shown by glancing have
    neither hint nor loss.

    `forward` also takes `has_hint`: whether the latents are samples with the `labels` as hints; None for in training
    mode only. In evaluation mode `has_hint=True` computes the `bound`, with samples from torch's generator.

    Attributes:
        kl_scale: kappa, the weight of the KL divergences in training; not part of the configuration.
        glancing_ratio: as in NAT.
    """

    config_class = VaswaniIterativeVaeConfig
    body_class = VaswaniIterativeVaeModel
    output_class = IterativeVaeLMOutput
    further_arguments = (*VaswaniNatForConditionalGeneration.further_arguments, "has_hint")
    kl_scale: float = 1.0

    def __init__(self, config: VaswaniIterativeVaeConfig) -> None:
        super().__init__(config)
        self.family_settings = ("do_sample",) if config.hint else ()

    def make_target(self, source: MeasuredSource, given: TargetInputs) -> Target:
        target, has_hint = super().make_target(source, given), given.further["has_hint"]
        target.decoder_inputs["latent"] = LatentPass(
            self.lm_head,
            target.mask,
            target.labels,
            is_sampled=self.config.hint and (self.training if has_hint is None else has_hint),
            smoothing=self.config.label_smoothing if self.training else 0.0,
        )
        return target

    def run_decoder(
        self, source: EncodedSource, target_mask: Tensor, cache: Cache | None = None, **inputs: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the decoder, by default without hint and noise."""
        inputs.setdefault("latent", LatentPass(self.lm_head, target_mask))
        return super().run_decoder(source, target_mask, cache, **inputs)

    def losses(self, source: MeasuredSource, target: Target, token_loss: Tensor) -> dict[str, Any]:
        """Return the output fields with the losses of layers, KL divergences and length."""
        losses, steps = super().losses(source, target, token_loss), target.decoder_inputs["latent"].tokens
        sums = [torch.stack([values.sum() for values in tokens]).to(token_loss.device) for tokens in steps]
        means = target.mean(torch.stack(sums)) if sums else token_loss.new_zeros(0, 4)
        step_losses, layer_kl, prior_weights, hint_weights = means.unbind(1)  # (N - 1,) each
        layer_losses = torch.cat([step_losses, token_loss[None]])
        weighted = [weight * kl for weight, kl in zip(self.config.layer_kl_weights, layer_kl, strict=True)]
        kl_loss = sum(weighted, token_loss.new_zeros(()))
        if self.training:
            length_loss = self.config.length_loss_weight * losses["length_loss"]
            losses["loss"] = layer_losses.sum() + self.kl_scale * kl_loss + length_loss
        return losses | {
            "bound": token_loss + layer_kl.sum(),
            "kl_loss": kl_loss,
            "layer_losses": layer_losses,
            "layer_kl": layer_kl,
            "prior_weights": prior_weights.detach(),
            "hint_weights": hint_weights.detach(),
        }

    def decode_targets(self, source: MeasuredSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,) in one pass, with the words after each layer as history."""
        mask = canvas(lengths)  # (l B, T)
        outputs = self.run_decoder(
            source,
            mask,
            inputs_embeds=self.decoder_input(source, mask),
            latent=LatentPass(self.lm_head, mask, is_sampled=settings.do_sample),
            output_hidden_states=settings.return_history,
        )
        layers = (outputs.hidden_states or ())[1:-1] if settings.return_history else ()
        read = [(states, False) for states in layers] + [(outputs[0], settings.reads_scores)]
        words = [self.read_words(states, lengths, mask.bool(), settings, has_scores) for states, has_scores in read]
        return NarTargets(*words[-1], [tokens for tokens, _ in words])
