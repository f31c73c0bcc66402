"""Revealed latents of IterativeVAE: before each layer but the first, some words of the target are known.

B batch, T target, k target rows per source row, N layers, m target tokens, V vocabulary.

In training a random part of the reference is known, which grows evenly from layer to layer: S_1 is empty, and S_2 to
S_N are nested sets of positions. The last layer that does not know a word predicts it. At inference each layer commits
the most probable words in place of the reference's, as many as are known in training.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .config import VaswaniTransformerConfig
from .layers import Dropout


class RevealedStep(nn.Module):
    """Latent step of revealed words: LN(gate h + Dropout((1 - gate) e)).

    At known positions e is the scaled embedding of the word, and elsewhere `empty`, a learned vector. The gate is the
    sigmoid of a linear function of h.
    """

    def __init__(self, config: VaswaniTransformerConfig, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, 1)
        self.empty = nn.Parameter(torch.zeros(config.d_model))
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.config = config

    def forward(self, states: Tensor, words: Tensor, is_known: Tensor, table: Tensor) -> Tensor:
        """Return the new states (k B, T, d_model).

        Args:
            states: h (k B, T, d_model).
            words: (k B, T), token ids; they count only at known positions.
            is_known: (k B, T), True at known positions.
            table: E (V, d_model), the embeddings.
        """
        embedded = self.config.embedding_scale * nn.functional.embedding(words, table)  # (k B, T, d_model)
        latent = torch.where(is_known[..., None], embedded, self.empty.to(embedded.dtype))
        latent = latent.to(states.dtype)
        gate = self.gate(states).sigmoid()  # (k B, T, 1)
        return self.norm(gate * states + self.dropout((1 - gate) * latent)).to(states.dtype)


def nested_positions(is_real: Tensor, draws: Tensor, layers: int, share: Tensor | None = None) -> list[Tensor]:
    """Return S_2 to S_N, (k B, T) each: the real positions t with u_t < (i - 1) / N.

    Args:
        is_real: (k B, T), True at tokens.
        draws: (k B, T), u_t of each position, uniform on [0, 1).
        layers: N.
        share: (k B, 1), the share of positions in S_N instead of (N - 1) / N; in [0, 1].
    """
    known = (layers - 1) / layers if share is None else share
    steps = layers - 1
    return [is_real & (draws < known * step / steps) for step in range(1, layers)]


def repeats_neighbor(words: Tensor, ranked: Tensor) -> Tensor:
    """Return which of `words` (k B, T) equal a neighbor that is ranked higher; of equally ranked ones, the second."""
    is_equal = words[:, 1:] == words[:, :-1]  # (k B, T - 1), of a word and the next one
    is_lower = ranked[:, 1:] <= ranked[:, :-1]
    repeats_left = pad(is_equal & is_lower, (1, 0))
    repeats_right = pad(is_equal & ~is_lower, (0, 1))
    return repeats_left | repeats_right


@dataclass
class RevealedWords:
    """Posterior of one decoder pass: before layer i it knows the reference's words at S_i."""

    words: Tensor  # (k B, T), y, any id at padding
    revealed: list[Tensor]  # S_2 to S_N, (k B, T) each
    states: list[Tensor] = field(default_factory=list)  # after layers 1 to N - 1, (k B, T, d_model) each
    predicting: Tensor | None = None  # (k B, T, d_model), the states that predict each word

    def apply(self, step: RevealedStep, states: Tensor, table: Tensor) -> Tensor:
        """Apply the step before the next layer to the states (k B, T, d_model)."""
        is_known = self.revealed[len(self.states)]
        self.states.append(states)
        return step(states, self.words, is_known, table)

    def output(self, states: Tensor) -> Tensor:
        """Return the states that predict each word: those of the last layer that does not know it."""
        # Backwards, since a known word stays known.
        for is_known, earlier in reversed(list(zip(self.revealed, self.states, strict=True))):
            states = torch.where(is_known[..., None].to(states.device), earlier.to(states.device), states)
        self.predicting = states
        return states


@dataclass
class CommittedWords:
    """Prior of one decoder pass: before layer i it knows at most the ceil(m (i - 1) / N) most probable words.

    Of equal neighbors only the more probable word is committed, and no word equal to a committed neighbor; later layers
    predict the others again. A committed word and its log-probability stay as they are. So the sum of all
    log-probabilities is that of a target of which the words are predicted in this order.
    """

    read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Function that reads words and log-probabilities (k B, T) from states (k B, T, d_model) at a mask's positions."""
    is_real: Tensor  # (k B, T), True at tokens
    layers: int  # N
    words: Tensor = field(init=False)  # (k B, T), of the last layer at positions that are not committed
    log_probs: Tensor = field(init=False)  # (k B, T)
    is_committed: Tensor = field(init=False)  # (k B, T)
    states: Tensor | None = field(default=None, init=False)  # (k B, T, d_model), those that predicted the words
    history: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # words and `is_committed` after each layer

    def __post_init__(self) -> None:
        self.is_committed = torch.zeros_like(self.is_real)

    def apply(self, step: RevealedStep, states: Tensor, table: Tensor) -> Tensor:
        """Commit words of the states (k B, T, d_model), and apply the step before the next layer."""
        self.read_open(states)
        layer = len(self.history) + 1
        lengths = self.is_real.sum(1, keepdim=True)  # (k B, 1), m
        counts = (lengths * layer + self.layers - 1) // self.layers  # (k B, 1), ceil(m layer / N)

        # Committed words stay first, then the most probable ones; repetitions and padding are last.
        ranked = self.log_probs.masked_fill(self.is_committed, 1.0)  # above every log-probability
        ranked = ranked.masked_fill(~self.is_real, float("-inf"))
        can_commit = self.is_real & (self.is_committed | ~repeats_neighbor(self.words, ranked))
        ranked = ranked.masked_fill(~can_commit, float("-inf"))
        ranks = ranked.argsort(dim=1, descending=True, stable=True).argsort(1)
        self.is_committed = can_commit & (ranks < counts)
        self.history.append((self.words, self.is_committed))
        return step(states, self.words, self.is_committed, table)

    def read_open(self, states: Tensor) -> None:
        """Read the words that are not committed from the states (k B, T, d_model) after a layer."""
        states = states.to(self.is_real.device)
        is_open = self.is_real & ~self.is_committed
        words, log_probs = self.read(states, is_open)
        if self.states is not None:  # not the first layer
            words = torch.where(is_open, words, self.words)
            log_probs = torch.where(is_open, log_probs, self.log_probs)
        self.words = words
        self.log_probs = log_probs
        self.states = self.output(states)

    def output(self, states: Tensor) -> Tensor:
        """Return the states that predict each word: those from which it was committed, or those of the last layer."""
        if self.states is None:
            return states
        return torch.where(self.is_committed[..., None], self.states, states.to(self.states.device))
