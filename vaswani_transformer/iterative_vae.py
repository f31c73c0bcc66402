"""IterativeVAE: a non-autoregressive decoder whose layers refine a discrete latent over the vocabulary.

B batch, S source, T target, k target rows per source row, l lengths of a length beam, N layers or real positions, n
positions in a chunk, V vocabulary.

Before each layer but the first, the states predict words, and some words go back into the states. There are two kinds
of latents. Revealed ones (`revealed`) are words at some positions: in training those of the reference at random ones.

A discrete latent, that of the report, is a sample at every position, embedded and added to the states: a word with the
gradient of a Gumbel-softmax (straight-through), or the Gumbel-softmax itself (Jang et al. 2017). In training the
reference shifts the distribution as a hint. At inference there is no hint, and by default the most likely word replaces
the sample. Training without the hint is layer-wise prediction (DSLP, Huang et al. 2022).

Length, soft copy and layers are those of NAT.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from .config import checked_field, positive_float, unit_rate
from .embeddings import Dropout, read_table
from .lengths import MeasuredSource
from .loss import accumulation_dtype, chunk_size
from .nar import EncodedSource, NarLMOutput, NarSettings, NarTargets, Target, TargetInputs, argmax, canvas
from .nat import PositionalDecoder, VaswaniNatConfig, VaswaniNatForConditionalGeneration, VaswaniNatModel
from .restricted import AttentionMask
from .revealed import CommittedWords, RevealedStep, RevealedWords, nested_positions

RECOMPUTED = 2**25
"""Scores (N V, 128 MiB in float32) of a latent step above which the backward pass computes them again."""

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
    """Hyperparameters of IterativeVAE, in addition to those of `VaswaniNatConfig`; `label_smoothing` defaults to 0.

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
        """Return the fields of a discrete latent that are set."""
        defaults = {"latent_sample": None, "hint": True, "kl_weights": None, "gumbel_temperature": 1}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

    def validate_latent(self) -> None:
        """Check that revealed latents have no setting of a discrete one."""
        if self.is_revealed and (settings := self.discrete_settings()):
            name, value = next(iter(settings.items()))
            raise ValueError(
                f'{name}: not supported by latent="revealed"; got {value!r}. Leave it out, or set latent="discrete".'
            )

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

    def output(self, states: Tensor) -> Tensor:
        """Return the states (k B, T, d_model) that predict the words: those of the last layer."""
        return states

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


Latent = LatentPass | RevealedWords | CommittedWords
"""The latents of one decoder pass: discrete ones, the posterior and the prior of revealed ones."""


def make_step(config: VaswaniIterativeVaeConfig) -> nn.Module:
    """Return a new latent step of the configuration's latent."""
    if not config.is_revealed:
        return LatentStep(config)
    return RevealedStep(config, config.latent_dropout)


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
        mask: AttentionMask | None,
        memory: Tensor | None,
        source_mask: AttentionMask | None,
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
        rows = self.config.vocab_size
        table = read_table(self.embed_tokens, rows, hidden_states.device, self.config.embedding_scale)  # E (V, d_model)
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

    def inference(
        self, hidden_states: Tensor, mask: AttentionMask | None, table: Tensor
    ) -> LatentPass | CommittedWords:
        """Return a pass without reference, for a decoder that is used by itself."""
        if not self.config.is_revealed:
            return LatentPass(lambda states: functional.linear(states, table))
        is_real = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
        if isinstance(mask, Tensor):  # boolean or additive; its first row tells the keys of the first position
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
    revealed latents `token_loss` is the bound too, the other fields have no gradient, and a pass that does not see the
    labels has none of them.
    """

    bound: Tensor | None = None  # cross-entropy after the last layer plus the sum of layer_kl
    kl_loss: Tensor | None = None  # weighted sum of layer_kl, without kl_scale; 0 without a hint
    layer_losses: Tensor | None = None  # (N,), cross-entropy after each layer; revealed: of the words that it lacks
    layer_kl: Tensor | None = None  # (N - 1,), KL(q || prior) before each layer but the first
    prior_weights: Tensor | None = None  # (N - 1,), a, the weight of the predicted distribution
    hint_weights: Tensor | None = None  # (N - 1,), b, the weight of the hint


class VaswaniIterativeVaeForConditionalGeneration(VaswaniNatForConditionalGeneration):
    """IterativeVAE, with `generate()` in one pass; `return_history` returns the words after every layer.

    In training mode the latents see the `labels`. The `loss` is the sum of `layer_losses` and `length_loss_weight`
    `length_loss`, and with a discrete latent also `kl_scale` `kl_loss`. In evaluation mode the latents see no labels
    and have no noise, and the `loss` is the negative log-likelihood of words and length in the pass that `generate()`
    makes.

    `forward` also takes `has_hint`: whether the latents see the `labels`; None for in training mode only. In evaluation
    mode `has_hint=True` computes the `bound` from one sample of the latents. `reveal_draws` (k B, 1 + T), uniform on
    [0, 1), determine revealed latents: first rho of each target, then u of each position. Other latents, and these
    without draws, come from torch's generator.

    Attributes:
        kl_scale: kappa, the weight of a discrete latent's KL divergences in training; not part of the configuration.
        glancing_ratio: with a discrete latent as in NAT; words that are shown have neither hint nor loss. With revealed
            latents, if above 0, rho is this ratio of the first layer's share of mistakes.
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

    def make_target(self, source: MeasuredSource, given: TargetInputs) -> Target:
        target, has_hint = super().make_target(source, given), given.further["has_hint"]
        has_hint = self.training if has_hint is None else has_hint
        if not self.config.is_revealed:
            target.decoder_inputs["latent"] = LatentPass(
                self.lm_head,
                target.mask,
                target.labels,
                is_sampled=self.config.hint and has_hint,
                smoothing=self.config.label_smoothing if self.training else 0.0,
            )
        elif has_hint and target.labels is not None:
            target.decoder_inputs["latent"] = self.reveal(source, target, target.labels, given.further["reveal_draws"])
        return target

    def training_input(self, source: MeasuredSource, target: Target, labels: Tensor, draws: dict[str, Any]) -> Tensor:
        """Return the soft copy (k B, T, d_model); with a discrete latent also words that glancing shows."""
        if self.config.is_revealed:
            return self.decoder_input(source, target.mask)
        return super().training_input(source, target, labels, draws)

    def reveal(self, source: MeasuredSource, target: Target, labels: Tensor, draws: Tensor | None) -> RevealedWords:
        """Return the posterior of `labels` (k B, T); in training the last layer learns only the words that stay hidden.

        In evaluation mode `token_loss` is the bound, since the output has the states that predict each word.
        """
        labels = labels.to(source.memory.device)
        is_real, share = labels.ne(-100), None  # (k B, T)
        if draws is None:
            draws = torch.rand(labels.shape[0], 1 + labels.shape[1], device=labels.device)
        if self.training and self.glancing_ratio > 0:
            share = self.share_of_mistakes(source, target, labels)
        revealed = nested_positions(is_real, draws.to(labels.device), self.config.decoder_layers, share)
        if self.training and revealed:
            target.labels = labels.masked_fill(revealed[-1], -100)
        return RevealedWords(labels.clamp(min=0), revealed)

    @torch.no_grad()
    def share_of_mistakes(self, source: MeasuredSource, target: Target, labels: Tensor) -> Tensor:
        """Return `glancing_ratio` times the share (k B, 1) of words that the first layer gets wrong."""
        is_real = labels.ne(-100)  # (k B, T)
        states = self.run_decoder(source, target.mask, **target.decoder_inputs, depth=1)[0]
        wrong = [argmax(logits) != words for logits, words in self.logits_of(states, is_real, labels)]
        mistakes = torch.zeros_like(is_real).masked_scatter(is_real, torch.cat(wrong)).sum(1, keepdim=True)
        target.outputs["accuracy"] = 1 - mistakes.sum() / is_real.sum().clamp(min=1)
        return self.glancing_ratio * mistakes / is_real.sum(1, keepdim=True).clamp(min=1)

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

    def losses(self, source: MeasuredSource, target: Target, token_loss: Tensor) -> dict[str, Any]:
        """Return the output fields with the losses of layers, latents and length."""
        losses, latent = super().losses(source, target, token_loss), target.decoder_inputs.get("latent")
        if latent is None:  # without the reference
            return losses
        if isinstance(latent, RevealedWords):
            return losses | self.revealed_losses(losses, target, latent)
        return losses | self.discrete_losses(losses, target, latent)

    def revealed_losses(self, losses: dict[str, Tensor], target: Target, latent: RevealedWords) -> dict[str, Tensor]:
        """Return the fields of revealed latents."""
        is_hidden, labels, is_new = target.mask.bool(), [], []  # for the layers 1 to N - 1
        for is_revealed in latent.revealed:
            labels.append(latent.words.masked_fill(~is_hidden, -100))
            is_new.append(is_hidden & is_revealed)
            is_hidden = is_hidden & ~is_revealed
        token_loss = losses["token_loss"]
        earlier, earlier_losses, layer_kl = (token_loss.new_zeros(shape) for shape in ((), (0,), (0,)))
        if labels:
            states = torch.stack([each.to(token_loss.device) for each in latent.states])  # (N - 1, k B, T, d_model)
            summed, token_losses = self.token_losses(states, torch.stack(labels))  # scalar, (N - 1, k B, T)
            earlier = target.mean(summed)
            earlier_losses = target.mean(token_losses.sum((1, 2)))  # (N - 1,)
            layer_kl = target.mean((token_losses * torch.stack(is_new)).sum((1, 2)))  # (N - 1,), K_2 to K_N
        if self.training:
            last, bound = token_loss.detach(), token_loss.detach() + layer_kl.sum()
            loss = token_loss + earlier + self.config.length_loss_weight * losses["length_loss"]
        else:
            last, bound, loss = token_loss.detach() - layer_kl.sum(), token_loss, losses["loss"]
        layer_losses = torch.cat([earlier_losses, last[None]])
        return {
            "loss": loss,
            "token_loss": bound,
            "bound": bound,
            "layer_losses": layer_losses,
            "layer_kl": layer_kl,
        }

    def discrete_losses(self, losses: dict[str, Tensor], target: Target, latent: LatentPass) -> dict[str, Tensor]:
        """Return the fields of discrete latents."""
        token_loss = losses["token_loss"]
        sums = [torch.stack([values.sum() for values in tokens]).to(token_loss.device) for tokens in latent.tokens]
        means = target.mean(torch.stack(sums)) if sums else token_loss.new_zeros(0, 4)
        step_losses, layer_kl, prior_weights, hint_weights = means.unbind(1)  # (N - 1,) each
        layer_losses = torch.cat([step_losses, token_loss[None]])
        weighted = [weight * kl for weight, kl in zip(self.config.layer_kl_weights, layer_kl, strict=True)]
        kl_loss = sum(weighted, token_loss.new_zeros(()))
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
        mask = canvas(lengths)  # (l B, T)
        if self.config.is_revealed:
            latent = self.commit(mask, settings.suppress_tokens)
            states = self.run_decoder(source, mask, inputs_embeds=self.decoder_input(source, mask), latent=latent)[0]
            latent.read_open(states)
            history = [*latent.history, (latent.words, latent.is_real)]
            return NarTargets(
                latent.words,
                latent.log_probs,
                history=[words for words, _ in history],
                committed=[is_committed for _, is_committed in history],
            )
        outputs = self.run_decoder(
            source,
            mask,
            inputs_embeds=self.decoder_input(source, mask),
            latent=LatentPass(self.lm_head, mask, is_sampled=settings.do_sample),
            output_hidden_states=settings.return_history,
        )
        layers = (outputs.hidden_states or ())[1:-1] if settings.return_history else ()
        read = [(states, False) for states in layers] + [(outputs[0], settings.reads_scores)]
        is_real, suppressed = mask.bool(), settings.suppress_tokens
        words = [self.read_words(states, lengths, is_real, suppressed, has_scores) for states, has_scores in read]
        return NarTargets(*words[-1], [tokens for tokens, _ in words])
