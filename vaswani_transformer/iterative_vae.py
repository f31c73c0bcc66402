"""IterativeVAE: one pass whose layers refine a latent in the vocabulary's space.

B batch, S source, T target, k target rows of one source row, l lengths of a length beam, N layers or real positions, n
of them in a chunk, V vocabulary. Before each layer but the first the states predict words. A sample of their
distribution, in training with the reference as a hint, goes back through the embedding into the states: a word with the
gradient of a Gumbel-softmax (straight-through), or the Gumbel-softmax itself (Jang et al. 2017). It is independent at
every position. At inference there is no hint, and the most likely word is taken, except on request. Without the hint in
training this is layer-wise prediction (DSLP, Huang et al. 2022). Length, soft copy, layers and glancing are NAT's.
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

from .config import VaswaniTransformerConfig, checked_field, positive_float, unit_rate
from .embeddings import Dropout, read_table
from .loss import accumulation_dtype, chunk_size
from .nar import EncodedSource, NarLMOutput, NarSettings, NarTargets, Target, argmax, canvas
from .nat import PositionalDecoder, VaswaniNatConfig, VaswaniNatForConditionalGeneration, VaswaniNatModel


def gumbel_noise(scores: Tensor) -> Tensor:
    """Return independent standard Gumbel numbers, one for each entry of `scores`."""
    dtype = accumulation_dtype(scores.dtype)  # half precision has too few numbers below 1
    tiny = torch.finfo(dtype).tiny
    uniform = torch.empty_like(scores, dtype=dtype).uniform_().clamp_(min=tiny)  # faster on a CPU than exponential_
    return uniform.log_().neg_().clamp_(min=tiny).log_().neg_()


def straight_through(scores: Tensor, soft: Tensor) -> Tensor:
    """Return the one-hot of the largest of `scores` (N, V), whose gradient is that of `soft` (N, V)."""
    one_hot = functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    return one_hot + (soft - soft.detach())


class LatentTokens(NamedTuple):
    """The results of a latent step for each of n tokens; losses and divergence are 0 where a position has no word."""

    losses: Tensor  # (n,), the cross-entropy of the words under the distribution that the step began with
    kl: Tensor  # (n,), KL(q || prior) of the sample, 0 without a hint
    prior_weights: Tensor  # (n,), a
    hint_weights: Tensor  # (n,), b


class LatentStep(nn.Module):
    """A step from states to a latent over the vocabulary and back, with a highway around it.

    Let p = log softmax(logits). Then s = a p + b onehot(y) under a hint, a p otherwise. The latent z is the word
    argmax(s + g), with the gradient of softmax((s + g) / tau), or if it is relaxed softmax((s + g) / tau) itself. The
    result is LN(gate h + Dropout((1 - gate) sqrt(d_model) z E)). a and b are softplus, the gate a sigmoid, of linear
    functions of h. `temperature` is tau.
    """

    def __init__(
        self, config: VaswaniTransformerConfig, temperature: float, dropout: float, is_relaxed: bool = False
    ) -> None:
        super().__init__()
        self.mixing = nn.Linear(config.d_model, 3)
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.temperature, self.is_relaxed = temperature, is_relaxed
        self.scale = config.embedding_scale

    def forward(
        self,
        states: Tensor,
        logits: Tensor,
        table: Tensor,
        words: Tensor | None = None,
        has_hint: bool = False,
        noise: Callable[[Tensor], Tensor] | None = None,
        smoothing: float = 0.0,
    ) -> tuple[Tensor, LatentTokens | None]:
        """Return the mixed states (n, d_model), and where `words` are given the results for them.

        Args:
            states: h (n, d_model).
            logits: (n, V), the output projection of `states`.
            table: E (V, d_model), the embeddings.
            words: y (n,), -100 where a position has neither hint nor loss.
            has_hint: whether the latent sees `words`.
            noise: makes g from s (n, V); None: g = 0.
            smoothing: of the cross-entropy.
        """
        logits = logits.to(accumulation_dtype(logits.dtype))  # p but for a constant, which changes no latent
        prior_weight, hint_weight, gate = self.mixing(states).to(logits.dtype).split(1, dim=-1)  # (n, 1) each
        prior_weight, hint_weight = functional.softplus(prior_weight), functional.softplus(hint_weight)
        is_argmax = noise is None and not has_hint and not self.is_relaxed
        scores = logits if is_argmax else prior_weight * logits  # (n, V), the prior's, whose weight changes no order
        kl = torch.zeros_like(prior_weight)
        if has_hint and words is not None:
            seen = words.clamp(min=0)[:, None]  # (n, 1)
            hint = hint_weight * words.ne(-100)[:, None]
            kl = self.relaxed_divergence(hint) if self.is_relaxed else self.divergence(scores, seen, hint)
            scores = scores.scatter_add(1, seen, hint)  # (n, V), s
        gate = gate.sigmoid().to(states.dtype)
        embedded = self.scale * self.embed(scores, table, noise).to(states.dtype)  # (n, d_model)
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
        soft = (noisy / self.temperature).softmax(-1)
        latents = soft if self.is_relaxed else straight_through(noisy, soft)  # (n, V), z
        return latents.to(table.dtype) @ table

    def divergence(self, prior: Tensor, words: Tensor, hint_weight: Tensor) -> Tensor:
        """Return KL(softmax(s) || softmax(prior)) (n, 1), which needs no sum over the vocabulary.

        The hint keeps the proportions of all words but y, so it is the divergence of two numbers: y, and any other.
        """
        word = prior.gather(1, words) - prior.logsumexp(1, keepdim=True)  # (n, 1), the log-probability of y
        others = (-word.expm1()).clamp(min=torch.finfo(prior.dtype).tiny).log()  # (n, 1), of all other words
        log_prior = torch.cat([word, others], dim=1).log_softmax(1)  # (n, 2)
        log_q = torch.cat([word + hint_weight, others], dim=1).log_softmax(1)  # (n, 2)
        return (log_q.exp() * (log_q - log_prior)).sum(1, keepdim=True)

    def relaxed_divergence(self, hint_weight: Tensor) -> Tensor:
        """Return b - 1 + exp(-b) (n, 1), to which the KL divergence of the two Gumbel-softmaxes rises as V grows.

        It depends neither on the prior nor on tau: the V numbers reveal b, however unlikely the word is.
        """
        return hint_weight + torch.expm1(-hint_weight)


@dataclass
class LatentPass:
    """One pass of the decoder: what its latent steps are given, and their results, step by step."""

    project: Callable[[Tensor], Tensor]  # the output projection, states (n, d_model) to logits (n, V)
    is_real: Tensor | None = None  # (k B, T), the positions of tokens; None: all
    labels: Tensor | None = None  # (k B, T), -100 where a position has neither hint nor loss; None: unknown
    has_hint: bool = False  # whether the latents see the labels
    has_noise: bool = False  # whether the latents are samples
    smoothing: float = 0.0  # of the cross-entropy
    tokens: list[LatentTokens] = field(default_factory=list)  # of each step; empty without labels
    real_rows: Tensor | None = field(default=None, init=False)

    def apply(self, step: LatentStep, hidden_states: Tensor, table: Tensor) -> Tensor:
        """Return the states (k B, T, d_model) after a latent step; padding keeps its states."""
        states = hidden_states.flatten(0, 1)  # (k B T, d_model)
        words = None if self.labels is None else self.labels.flatten().to(states.device)
        if self.is_real is None or torch.compiler.is_compiling():  # shapes would depend on the mask
            return self.in_chunks(step, states, words, table).view_as(hidden_states)
        if self.real_rows is None:  # for whose number an accelerator's host waits, once a pass
            self.real_rows = self.is_real.flatten().nonzero()[:, 0]
        rows = self.real_rows.to(states.device)
        mixed = self.in_chunks(step, states[rows], None if words is None else words[rows], table)
        return states.index_copy(0, rows, mixed).view_as(hidden_states)

    def in_chunks(self, step: LatentStep, states: Tensor, words: Tensor | None, table: Tensor) -> Tensor:
        """Return the states (N, d_model) after a step, in chunks that the backward pass recomputes.

        So no (N, V) tensor is held.
        """

        def run(states: Tensor, words: Tensor | None, table: Tensor) -> tuple[Tensor, LatentTokens | None]:
            logits = self.project(states).to(states.device)  # (n, V)
            noise = gumbel_noise if self.has_noise else None
            return step(states, logits, table, words, self.has_hint, noise, self.smoothing)

        size, results = chunk_size(states.device), []
        for start in range(0, max(1, len(states)), size):
            rows = slice(start, start + size)
            inputs = states[rows], None if words is None else words[rows], table
            is_learning = step.training and torch.is_grad_enabled()
            results.append(checkpoint(run, *inputs, use_reentrant=False) if is_learning else run(*inputs))
        if words is not None:
            values = zip(*(tokens for _, tokens in results), strict=True)
            self.tokens.append(LatentTokens(*(torch.cat(chunks) * words.ne(-100) for chunks in values)))
        return torch.cat([mixed for mixed, _ in results])


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

    def run_layers(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Pass `hidden_states` (k B, T, d_model) through every layer and the latent steps between.

        Args:
            latent: a `LatentPass`; None: neither hint nor noise, and the embeddings are the output projection.
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
    """Encoder and latent decoder over one embedding matrix, which is also the projection of its latent steps."""

    config_class = VaswaniIterativeVaeConfig
    decoder_class = LatentDecoder


@dataclass
class IterativeVaeLMOutput(NarLMOutput):
    """The output of IterativeVAE; with labels also the losses of its layers and latent steps, means a target token.

    The mean of `bound` over samples, in evaluation mode with `has_hint`, is an upper bound of -log p(y | x, m).
    """

    bound: Tensor | None = None  # the cross-entropy after the last layer plus the sum of layer_kl
    kl_loss: Tensor | None = None  # the weighted sum of layer_kl, without kl_scale; 0 without a hint
    layer_losses: Tensor | None = None  # (N,), the cross-entropy after each layer; the last is token_loss
    layer_kl: Tensor | None = None  # (N - 1,), KL(q || prior) before each layer but the first
    prior_weights: Tensor | None = None  # (N - 1,), a, by which a latent weighs its own distribution
    hint_weights: Tensor | None = None  # (N - 1,), b, by which it weighs the hint


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
    kl_scale: float = 1.0

    @property
    def samples(self) -> bool:
        return self.config.hint

    def make_target(self, source: EncodedSource, **given: Any) -> Target:
        """Return the target of `forward`, with what its latent steps get."""
        has_hint = given["draws"].pop("has_hint")
        has_hint = self.config.hint and bool(self.training if has_hint is None else has_hint)
        target = super().make_target(source, **given)
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
        is_real = target.mask.bool()
        outputs = self.run_decoder(
            source,
            target.mask,
            inputs_embeds=self.embed_target(source, target),
            latent=LatentPass(self.lm_head, is_real, has_noise=settings.do_sample),
            output_hidden_states=settings.return_history,
        )
        earlier = (outputs.hidden_states or ())[1:-1] if settings.return_history else ()
        history = [self.read_words(states, lengths, is_real, settings, False)[0] for states in earlier]
        tokens, log_probs = self.read_words(outputs[0], lengths, is_real, settings, settings.reads_scores)
        return NarTargets(tokens, log_probs, [*history, tokens])
