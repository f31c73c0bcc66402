"""Discrete latents of IterativeVAE: before each layer but the first, a word at every position, embedded and added.

B batch, T target, k target rows per source row, N real positions, n positions in a chunk, V vocabulary.

The word is a sample with the gradient of a Gumbel-softmax (straight-through), or the Gumbel-softmax itself (Jang et al.
2017). In training the reference shifts the distribution as a hint. At inference there is no hint, and by default the
most likely word replaces the sample. Training without the hint is layer-wise prediction (DSLP, Huang et al. 2022).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .config import VaswaniTransformerConfig
from .layers import Dropout
from .loss import accumulation_dtype, chunk_size
from .nar import NarTargets
from .nar_decoder import LengthTarget, MeasuredSource, argmax
from .settings import NarSettings

RECOMPUTED = 2**25
"""Scores (N V, 128 MiB in float32) of a latent step above which the backward pass computes them again."""


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
    log_word = -functional.cross_entropy(prior, words.squeeze(1), reduction="none")[:, None]  # (n, 1), log p(y)
    tiny = torch.finfo(prior.dtype).tiny
    log_rest = (-log_word.expm1()).clamp(min=tiny).log()  # (n, 1), log(1 - p(y))
    log_prior = torch.cat([log_word, log_rest], dim=1).log_softmax(1)  # (n, 2)
    log_q = torch.cat([log_word + hint_weight, log_rest], dim=1).log_softmax(1)  # (n, 2)
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

    def __init__(
        self,
        config: VaswaniTransformerConfig,
        dropout: float,
        temperature: float = 1.0,
        is_relaxed: bool = False,
    ) -> None:
        super().__init__()
        self.mixing = nn.Linear(config.d_model, 3)
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.temperature = temperature
        self.is_relaxed = is_relaxed
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
        # a, b and the gate.
        logits = logits.to(accumulation_dtype(logits.dtype))  # p up to a constant, which does not change the latent
        mixing = self.mixing(states).to(logits.dtype)  # (n, 3)
        prior_weight, hint_weight, gate = mixing.split(1, dim=-1)  # (n, 1) each
        prior_weight = functional.softplus(prior_weight)
        hint_weight = functional.softplus(hint_weight)
        gate = gate.sigmoid().to(states.dtype)

        # s, and what the hint adds to the prior.
        is_argmax = noise is None and not self.is_relaxed
        scores = logits if is_argmax else prior_weight * logits  # (n, V); argmax ignores the weight
        kl = torch.zeros_like(prior_weight)
        if noise is not None and words is not None:
            hinted = words.clamp(min=0)[:, None]  # (n, 1)
            hint = hint_weight * words.ne(-100)[:, None]
            kl = relaxed_divergence(hint) if self.is_relaxed else divergence(scores, hinted, hint)
            scores = scores.scatter_add(1, hinted, hint)

        # The latent goes back into the states.
        embedded = self.embed(scores, table, noise).to(states.dtype)  # (n, d_model)
        embedded = self.config.embedding_scale * embedded
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
        scaled = noisy if self.temperature == 1 else noisy / self.temperature
        soft = scaled.softmax(-1).to(table.dtype)  # (n, V)
        if self.is_relaxed:
            return soft @ table

        # A word's row, with the gradient in s of the mean row.
        mean = soft @ table.detach()
        return table[argmax(noisy)] + (mean - mean.detach())


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
    shows_words: ClassVar[bool] = True  # glancing shows words in the decoder's input

    @staticmethod
    def make_step(config: Any) -> LatentStep:
        """Return a new latent step."""
        is_relaxed = config.latent_sample == "relaxed"
        return LatentStep(config, config.latent_dropout, config.gumbel_temperature, is_relaxed)

    @classmethod
    def of_target(
        cls, head: Any, source: MeasuredSource, target: LengthTarget, has_hint: bool, draws: Tensor | None
    ) -> "LatentPass":
        """Return the latents of a target, which see its labels if `has_hint`."""
        return cls(
            head.lm_head,
            target.mask,
            target.labels,
            is_sampled=head.config.hint and has_hint,
            smoothing=head.config.label_smoothing if head.training else 0.0,
        )

    @classmethod
    def without_target(
        cls, head: Any, mask: Tensor, suppress_tokens: list[int] | None, is_sampled: bool = False
    ) -> "LatentPass":
        """Return the latents of targets of `mask` (k B, T), by default without noise."""
        return cls(head.lm_head, mask, is_sampled=is_sampled)

    @classmethod
    def without_head(cls, hidden_states: Tensor, mask: Tensor | None, table: Tensor, layers: int) -> "LatentPass":
        """Return the latents of a decoder that is used by itself; the embeddings are its output projection."""
        return cls(lambda states: functional.linear(states, table))

    def apply(self, step: LatentStep, hidden_states: Tensor, table: Tensor) -> Tensor:
        """Apply a latent step to the states (k B, T, d_model) of all tokens except padding."""
        states = hidden_states.flatten(0, 1)  # (k B T, d_model)
        words = None if self.labels is None else self.labels.flatten().to(states.device)
        if self.mask is None or torch.compiler.is_compiling():  # a graph needs fixed shapes
            return self.in_chunks(step, states, words, table).view_as(hidden_states)
        if self.rows is None:  # one synchronization per pass
            self.rows = self.mask.flatten().nonzero()[:, 0]
        rows = self.rows.to(states.device)
        if words is not None:
            words = words[rows]
        mixed = self.in_chunks(step, states[rows], words, table)
        return states.index_copy(0, rows, mixed).view_as(hidden_states)

    def output(self, states: Tensor) -> Tensor:
        """Return the states (k B, T, d_model) that predict the words: those of the last layer."""
        return states

    def in_chunks(self, step: LatentStep, states: Tensor, words: Tensor | None, table: Tensor) -> Tensor:
        """Apply a step to states (N, d_model) in chunks; to save memory, the backward pass recomputes large ones."""

        def run(states: Tensor, words: Tensor | None, table: Tensor) -> tuple[Tensor, LatentTokens | None]:
            logits = self.project(states).to(states.device)  # (n, V)
            noise = gumbel_noise if self.is_sampled else None
            return step(states, logits, table, words, noise, self.smoothing)

        recomputes = step.training and torch.is_grad_enabled() and len(states) * len(table) > RECOMPUTED
        size = chunk_size(states.device)
        results = []
        for start in range(0, max(1, len(states)), size):
            rows = slice(start, start + size)
            words_of_chunk = None if words is None else words[rows]
            if recomputes:
                results.append(checkpoint(run, states[rows], words_of_chunk, table, use_reentrant=False))
            else:
                results.append(run(states[rows], words_of_chunk, table))

        # Each field of the chunks' results, joined.
        if words is not None:
            fields = zip(*(tokens for _, tokens in results), strict=True)
            self.tokens.append(LatentTokens(*(torch.cat(chunks) * words.ne(-100) for chunks in fields)))
        return torch.cat([mixed for mixed, _ in results])

    def loss(self, head: Any, target: LengthTarget, predictions: dict[str, Any]) -> dict[str, Tensor]:
        """Return the losses and divergences of the layers, and in training the `loss` with them."""
        # The means over tokens of each step's results, none with a single layer.
        token_loss = predictions["token_loss"]
        means = token_loss.new_zeros(0, 4)
        if self.tokens:
            sums = [torch.stack([values.sum() for values in tokens]) for tokens in self.tokens]
            means = target.mean(torch.stack([step_sums.to(token_loss.device) for step_sums in sums]))  # (N - 1, 4)
        step_losses, layer_kl, prior_weights, hint_weights = means.unbind(1)  # (N - 1,) each

        layer_losses = torch.cat([step_losses, token_loss[None]])  # (N,)
        kl_loss = token_loss.new_zeros(())
        for weight, kl in zip(head.config.layer_kl_weights, layer_kl, strict=True):
            kl_loss = kl_loss + weight * kl
        loss = predictions["loss"]
        if head.training:
            length_loss = head.config.length_loss_weight * predictions["length_loss"]
            loss = layer_losses.sum() + head.kl_scale * kl_loss + length_loss
        return {
            "loss": loss,
            "bound": token_loss + layer_kl.sum(),
            "kl_loss": kl_loss,
            "layer_losses": layer_losses,
            "layer_kl": layer_kl,
            "prior_weights": prior_weights.detach(),
            "hint_weights": hint_weights.detach(),
        }

    def decode(self, head: Any, source: MeasuredSource, mask: Tensor, settings: NarSettings) -> NarTargets:
        """Return a target for each row of `mask` (l B, T), from the states of the last layer."""
        outputs = head.model.decoder.run(
            source,
            mask,
            inputs_embeds=head.decoder_input(source, mask),
            latent=self,
            output_hidden_states=settings.return_history,
        )

        def read(states: Tensor, has_scores: bool) -> tuple[Tensor, Tensor]:
            return head.read_words(states, mask.sum(1), mask.bool(), settings.suppress_tokens, has_scores)

        history = []
        if settings.return_history:
            earlier_layers = (outputs.hidden_states or ())[1:-1]  # after the decoder's input, before the last layer
            history = [read(states, False)[0] for states in earlier_layers]
        tokens, log_probs = read(outputs[0], settings.reads_scores)
        return NarTargets(tokens, log_probs, [*history, tokens])
