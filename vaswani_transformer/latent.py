"""The latent of IterativeVAE: words that the states predict, sampled, and mixed back into the states.

B batch, T target, k target rows of one source row, N real positions, n of them in a chunk, V vocabulary. A sample is a
word with the gradient of a Gumbel-softmax (straight-through), or the Gumbel-softmax itself (Jang et al. 2017). It is
independent at every position.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .config import VaswaniTransformerConfig
from .dropout import Dropout
from .loss import accumulation_dtype, chunk_size


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
    """The results of a latent step for each of n tokens; losses and divergence are 0 where a position has no word.

    Attributes:
        losses: (n,), the cross-entropy of the words under the distribution that the step began with.
        kl: (n,), KL(q || prior) of the sample, 0 without a hint.
        prior_weights, hint_weights: (n,), a and b.
    """

    losses: Tensor
    kl: Tensor
    prior_weights: Tensor
    hint_weights: Tensor


class LatentStep(nn.Module):
    """A step from states to a latent over the vocabulary and back, with a highway around it.

    Let p = log softmax(logits). Then s = a p + b onehot(y) under a hint, a p otherwise. The latent z is the word
    argmax(s + g), with the gradient of softmax((s + g) / tau), or if it is relaxed softmax((s + g) / tau) itself. The
    result is LN(gate h + Dropout((1 - gate) sqrt(d_model) z E)). a and b are softplus, the gate a sigmoid, of linear
    functions of h.

    Args:
        config: the model's.
        temperature: tau.
        dropout: of what the latent adds.
        is_relaxed: whether z is the Gumbel-softmax in place of a word.
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
        scores = prior_weight * logits  # (n, V), the prior's logits
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
            return table[noisy.argmax(-1)]
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
    """One pass of the decoder: what its latent steps are given, and their results, step by step.

    Attributes:
        project: the output projection, states (n, d_model) to logits (n, V).
        is_real: (k B, T), the positions of tokens; None: all.
        labels: (k B, T), the target's words, -100 where a position has neither hint nor loss; None: unknown.
        has_hint, has_noise: whether the latents see `labels`, and whether they are samples.
        smoothing: of the cross-entropy.
        tokens: the results of each step for the words; empty without `labels`.
    """

    project: Callable[[Tensor], Tensor]
    is_real: Tensor | None = None
    labels: Tensor | None = None
    has_hint: bool = False
    has_noise: bool = False
    smoothing: float = 0.0
    tokens: list[LatentTokens] = field(default_factory=list)

    @functools.cached_property
    def real_rows(self) -> Tensor:
        """The indices (N,) of the real positions, for whose number an accelerator's host waits once a pass."""
        return torch.empty(0) if self.is_real is None else self.is_real.flatten().nonzero()[:, 0]

    def apply(self, step: LatentStep, hidden_states: Tensor, table: Tensor) -> Tensor:
        """Return the states (k B, T, d_model) after a latent step, in chunks that the backward pass recomputes.

        So no (k B, T, V) tensor is held. Padding keeps its states.
        """
        states = hidden_states.flatten(0, 1)  # (k B T, d_model)
        words = None if self.labels is None else self.labels.flatten().to(states.device)
        rows = None
        if self.is_real is not None and not torch.compiler.is_compiling():  # shapes would depend on the mask
            rows = self.real_rows.to(states.device)
        chosen = states if rows is None else states[rows]
        chosen_words = words if words is None or rows is None else words[rows]
        size = chunk_size(states.device)
        chunks = [None] * len(chosen.split(size)) if chosen_words is None else chosen_words.split(size)
        results = [self.chunk(step, *pair, table) for pair in zip(chosen.split(size), chunks, strict=True)]
        mixed = torch.cat([result[0] for result in results])
        if chosen_words is not None:
            is_word = chosen_words.ne(-100)
            values = zip(*(tokens for _, tokens in results if tokens is not None), strict=True)
            self.tokens.append(LatentTokens(*(torch.cat(chunks) * is_word for chunks in values)))
        return (mixed if rows is None else states.index_copy(0, rows, mixed)).view_as(hidden_states)

    def chunk(
        self, step: LatentStep, states: Tensor, words: Tensor | None, table: Tensor
    ) -> tuple[Tensor, LatentTokens | None]:
        """Return what `step` returns for a chunk (n, d_model)."""

        def run(states: Tensor, table: Tensor) -> tuple[Tensor, LatentTokens | None]:
            logits = self.project(states).to(states.device)  # (n, V)
            noise = gumbel_noise if self.has_noise else None
            return step(states, logits, table, words, self.has_hint, noise, self.smoothing)

        if not (step.training and torch.is_grad_enabled()):
            return run(states, table)
        return checkpoint(run, states, table, use_reentrant=False)
