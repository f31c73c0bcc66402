"""The directed acyclic Transformer, which predicts a graph of translations in parallel (Huang et al. 2022).

B batch, S source, T target, k target rows per source row, U vertices, V vocabulary, H heads, d_k the width of a head,
N sentences of a chunk.

The decoder is the paper's without the causal mask. It has `upsampling` vertices per source token, each with a
distribution over words and one over the later vertices, its transitions. A target is written along a path: from the
first vertex, which stands for the start and has no word, through one vertex for each word, to the last vertex, which
stands for `</s>`. The probability of a target is the sum over its paths of all transitions times all words. Huang et
al. also predict `<s>` and `</s>` at these two vertices, which are on every path.
"""

from typing import Any, NamedTuple, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers.generation import GenerationConfig, GenerationMixin

from .config import positive_int, unit_rate
from .loss import accumulation_dtype
from .nar import NarGenerateOutput
from .nar_decoder import canvas
from .search import report_nan
from .settings import NarSettings, refuse
from .slots import SlotConfig, SlotGenerateOutput, SlotHead, SlotModel, Words, summed_path_loss

CHUNK_SCORES = 2**23  # scores of transitions, of all heads, at a time


@strict
class VaswaniDagConfig(SlotConfig):
    """Hyperparameters of the directed acyclic Transformer.

    Args:
        upsampling: number of vertices per source token. They must suffice for the words of a target, the start and the
            end; more vertices have room for more translations.
        label_smoothing: eps_ls of the words of each path; 0 as in Huang et al.
    """

    model_type = "vaswani_dag"

    upsampling: int = positive_int(default=4)
    label_smoothing: float | int = unit_rate(default=0.0)


class VaswaniDagModel(SlotModel):
    """Encoder and non-autoregressive decoder with a shared embedding matrix, without predictions."""

    config_class = VaswaniDagConfig


class Transitions(nn.Module):
    """Log-probabilities of the transitions: a mixture of heads, weighted by a gate (Huang et al. 2022, released code).

    From vertex i to each later vertex j, head h has the probability softmax_j(q_i . k_j / sqrt(d_k)), and vertex i
    chooses heads by its own softmax. Unlike in the released code, queries and keys have no further position
    encodings.
    """

    def __init__(self, config: VaswaniDagConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.scaling = config.head_dim**-0.5
        self.q_proj = nn.Linear(config.d_model, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.d_model, config.num_heads * config.head_dim, bias=False)
        self.gate = nn.Linear(config.d_model, config.num_heads)

    def by_head(self, rows: Tensor) -> Tensor:
        """Return `rows` (B, U, H n) as (B, H, U, n)."""
        return rows.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the log-probabilities (B, U, U), -inf except for later vertices, in at least float32.

        The heads' scores exist for one chunk of sentences at a time; the backward pass recomputes those of several.

        Args:
            states: (B, U, d_model), the decoder's output.
            mask: (B, U), nonzero at vertices.
        """
        size = max(1, CHUNK_SCORES // (self.num_heads * mask.shape[1] ** 2))  # sentences
        if len(mask) <= size:
            return self.of_chunk(states, mask)
        chunks = zip(states.split(size), mask.split(size), strict=True)
        return torch.cat([checkpoint(self.of_chunk, *chunk, use_reentrant=False) for chunk in chunks])

    def of_chunk(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the result of `forward` for a chunk of sentences."""
        wide = accumulation_dtype(states.dtype)
        query = self.by_head(self.q_proj(states).to(wide))  # (B, H, U, d_k)
        key = self.by_head(self.k_proj(states).to(wide))  # (B, H, U, d_k)
        gate = self.by_head(self.gate(states).to(wide).log_softmax(-1))  # (B, H, U, 1)

        # All values are finite until the sum over heads, so that a vertex without later ones has a gradient of 0.
        width = mask.shape[1]
        is_later = torch.ones(width, width, dtype=torch.bool, device=mask.device).triu(1) & mask.bool()[:, None]
        with torch.autocast(states.device.type, enabled=False):
            scores = query @ key.transpose(2, 3) * self.scaling  # (B, H, U, U)
            scores = scores.masked_fill(~is_later[:, None], torch.finfo(wide).min)
            mixture = (scores.log_softmax(-1) + gate).logsumexp(1)  # (B, U, U)
        return mixture.masked_fill(~is_later, -torch.inf)


def last_vertices(mask: Tensor) -> Tensor:
    """Return the index (B,) of the last vertex of `mask` (B, U)."""
    return (mask.sum(1) - 1).clamp(min=0)


def into_last(transitions: Tensor, last: Tensor) -> Tensor:
    """Return the transitions (B, U) of `transitions` (B, U, U) to the last vertices (B,)."""
    return transitions.gather(2, last[:, None, None].expand(-1, transitions.shape[1], 1)).squeeze(2)


def at_start(transitions: Tensor) -> Tensor:
    """Return log-probabilities (B, U) by which a path is at each vertex before its first word."""
    start = torch.full_like(transitions[:, 0], -torch.inf)
    start[:, 0] = 0
    return start


def path_posteriors(transitions: Tensor, scores: Tensor, counts: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p (B,) of targets, and the probabilities that their paths use each word and each transition.

    They are meaningless for targets that have no path.

    Args:
        transitions: (B, U, U), log-probabilities.
        scores: (B, U, T), log-probabilities of the words of the targets.
        counts: (B,), number of words.
        last: (B,), index of the last vertex.

    Returns:
        log p (B,), the probability (B, U, T) of each word at each vertex, and that (B, U, U) of each transition.
    """
    # Forward: log p of the first words if the last of them is at each vertex.
    forward = at_start(transitions)  # (B, U)
    forwards = [forward]
    for word in range(scores.shape[2]):
        moved = (forward[:, :, None] + transitions).logsumexp(1) + scores[:, :, word]
        forward = torch.where((word < counts)[:, None], moved, forward)
        forwards.append(forward)
    end = into_last(transitions, last)  # (B, U)
    ended = forward + end
    log_p = ended.logsumexp(1)  # (B,)

    # The transitions to the last vertex.
    log_p_of_row = log_p[:, None]
    used = torch.zeros_like(transitions)
    column = last[:, None, None].expand(-1, used.shape[1], 1)
    used.scatter_(2, column, (ended - log_p_of_row).exp()[..., None])

    # Backward: log p of the later words after each vertex.
    backward = end
    words = []
    for word in range(scores.shape[2] - 1, -1, -1):
        is_word = (word < counts)[:, None]
        with_word = scores[:, :, word] + backward  # (B, U)
        moves = transitions + with_word[:, None]  # (B, U, U)
        words.append((forwards[word + 1] + backward - log_p_of_row).exp() * is_word)
        used += (moves + (forwards[word] - log_p_of_row)[:, :, None]).exp() * is_word[..., None]
        backward = torch.where(is_word, moves.logsumexp(2), backward)
    return log_p, torch.stack(words[::-1], dim=2), used


def best_moves(transitions: Tensor, scores: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the scores (B, U) of the best paths to each vertex after 0..T words, and for each word where from (B, U).

    Args:
        transitions: (B, U, U), log-probabilities.
        scores: (B, U, T), log-probabilities of each word.
    """
    total = at_start(transitions)  # (B, U)
    totals = [total]
    origins = []
    for word in range(scores.shape[2]):
        best, origin = (total[:, :, None] + transitions).max(1)  # (B, U)
        total = best + scores[:, :, word]
        totals.append(total)
        origins.append(origin)
    return totals, origins


def trace_back(origins: list[Tensor], vertex: Tensor, counts: Tensor) -> Tensor:
    """Return the vertex (B, T) of each word of a path, 0 after its words, from the `vertex` (B,) of its last word.

    Args:
        origins: T tensors (B, U), those of `best_moves`.
        vertex: (B,), 0 for a path without words.
        counts: (B,), number of words.
    """
    vertices = []
    for word in range(len(origins) - 1, -1, -1):
        is_word = word < counts
        vertices.append(torch.where(is_word, vertex, 0))
        origin = origins[word].gather(1, vertex[:, None]).squeeze(1)
        vertex = torch.where(is_word, origin, vertex)
    return torch.stack(vertices[::-1], dim=1)


def best_vertices(transitions: Tensor, scores: Tensor, counts: Tensor, last: Tensor) -> Tensor:
    """Return the vertex (B, T) of each word on the best path of a target, by Viterbi's algorithm; 0 after the words.

    The arguments are those of `path_posteriors`.
    """
    totals, origins = best_moves(transitions, scores)
    rows = torch.arange(len(counts), device=counts.device)
    total = torch.stack(totals)[counts, rows]  # (B, U)
    return trace_back(origins, (total + into_last(transitions, last)).argmax(1), counts)


def best_path(transitions: Tensor, scores: Tensor, last: Tensor, limits: Tensor, length_penalty: float) -> Tensor:
    """Return the vertices (B, U) of the path with the best log-probability / length^alpha (Shao et al. 2022).

    Args:
        transitions: (B, U, U), log-probabilities.
        scores: (B, U), log-probability of the best word of each vertex.
        last: (B,), index of the last vertex.
        limits: (B,), largest lengths, counting `</s>`.
        length_penalty: alpha.
    """
    # The best path with each number of words.
    num_words = max(0, min(int(limits.max()) - 1, scores.shape[1] - 2))
    totals, origins = best_moves(transitions, scores[:, :, None].expand(-1, -1, max(1, num_words)))
    ended, vertex = (torch.stack(totals, dim=1) + into_last(transitions, last)[:, None]).max(2)  # (B, T + 1)

    # The best of them.
    lengths = torch.arange(1, ended.shape[1] + 1, device=ended.device)  # (T + 1,)
    ranked = (ended / lengths**length_penalty).masked_fill(lengths > limits[:, None], -torch.inf)
    counts = ranked.argmax(1)  # (B,), its number of words
    vertices = trace_back(origins, vertex.gather(1, counts[:, None]).squeeze(1), counts)  # (B, T)
    is_visited = torch.zeros_like(scores, dtype=torch.bool).scatter(1, vertices, True)
    return is_visited.scatter(1, last[:, None], True).scatter(1, torch.zeros_like(last)[:, None], True)


def follow(following: Tensor, last: Tensor) -> Tensor:
    """Return the vertices (B, U), True on the path from the first vertex to the `last` (B,).

    `following` (B, U) is the next vertex after each.
    """
    vertices = torch.arange(following.shape[1], device=following.device)
    following = torch.where(vertices >= last[:, None], last[:, None], following)
    vertex = torch.zeros_like(last)[:, None]  # (B, 1)
    is_visited = vertices.expand_as(following) == 0
    for _ in range(following.shape[1] - 1):
        vertex = following.gather(1, vertex)
        is_visited = is_visited.scatter(1, vertex, True)
    return is_visited


class Paths(NamedTuple):
    """The paths of a batch of targets, as a `Lattice`."""

    counts: Tensor  # (k B,), number of words
    last: Tensor  # (k B,), index of the last vertex

    def posteriors(
        self, rows: slice, chosen: Tensor, uniform: Tensor, transitions: Tensor | None, smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the loss (N,), the probability (N, U, T) of each word, and that (N, U, U) of each transition.

        On each path the words have the smoothed loss of an autoregressive model.
        """
        scores = (1 - smoothing) * chosen + smoothing * uniform[..., None]
        log_p, words, used = path_posteriors(cast(Tensor, transitions), scores, self.counts[rows], self.last[rows])
        return -log_p, words, used


class Graph(NamedTuple):
    """The graphs of a batch, with the most likely word of each vertex."""

    words: Tensor  # (B, U)
    log_probs: Tensor  # (B, U), those of the words; 0 at vertices without one
    transitions: Tensor  # (B, U, U), log-probabilities
    last: Tensor  # (B,), index of the last vertex

    def path(self, settings: NarSettings, limits: Tensor) -> Tensor:
        """Return the vertices (B, U) that the decoding strategy visits; Viterbi's targets are within `limits` (B,)."""
        if settings.decoding_strategy == "viterbi":
            return best_path(self.transitions, self.log_probs, self.last, limits, settings.length_penalty)
        if settings.decoding_strategy == "lookahead":
            return follow((self.transitions + self.log_probs[:, None]).argmax(2), self.last)
        return follow(self.transitions.argmax(2), self.last)

    def vertex_scores(self, is_visited: Tensor) -> Tensor:
        """Return the log-probabilities (B, U) of the words of visited vertices and of the transitions to them."""
        vertices = torch.arange(is_visited.shape[1], device=is_visited.device)
        visits = torch.where(is_visited, vertices, 0).cummax(1).values  # (B, U), the latest visited vertex
        previous = pad(visits[:, :-1], (1, 0))
        moves = self.transitions.gather(1, previous[:, None]).squeeze(1)  # (B, U)
        return torch.where(is_visited & (vertices > 0), moves + self.log_probs, 0)


class VaswaniDagForConditionalGeneration(SlotHead, GenerationMixin):
    """Directed acyclic Transformer, whose `generate()` follows a path through the graph by `decoding_strategy`.

    "greedy" follows the most likely transition from each vertex, and "lookahead" the most likely transition times best
    word (Huang et al. 2022). "viterbi" finds the path that is best as a whole (Shao et al. 2022), divided by its length
    to the power `length_penalty`. Each vertex has its most likely word.

    Glancing shows the words of the best path at their vertices.
    """

    config_class = VaswaniDagConfig
    body_class = VaswaniDagModel
    unmixed = "lm_head|table|transitions"
    family_settings = ("decoding_strategy", "length_penalty")

    def __init__(self, config: VaswaniDagConfig) -> None:
        super().__init__(config)
        self.transitions = Transitions(config)
        self.post_init()

    def needed_slots(self, words: Words) -> Tensor:
        """Return the number (k B,) of words, and of the first and the last vertex."""
        return words.counts + 2

    def summed_losses(
        self, states: Tensor, logits: Tensor | None, mask: Tensor, words: Words, fits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the targets that fit, and the loss (k B,) of each target.

        Without `logits` (k B, U, V), those of `states` (k B, U, d_model) exist for one chunk at a time, to save memory.
        """
        words = self.known_words(words)
        transitions = self.transitions(states, mask)  # (k B, U, U)
        paths = Paths(words.counts, last_vertices(mask))
        if logits is None and self.has_plain_projection:
            weight = self.lm_head.weight
            return summed_path_loss(states, weight, transitions, fits, words.tokens, paths, self.smoothing)

        # From the logits, by the derivatives of the loss.
        logits = self.lm_head(states) if logits is None else logits
        log_probs = logits.to(accumulation_dtype(logits.dtype)).log_softmax(-1)  # (k B, U, V)
        chosen = log_probs.gather(2, words.tokens[:, None].expand(-1, log_probs.shape[1], -1))  # (k B, U, T)
        scores = (1 - self.smoothing) * chosen + self.smoothing * log_probs.mean(-1, keepdim=True)
        with torch.no_grad():
            log_p, used_words, used = path_posteriors(transitions, scores, *paths)
            used_words = used_words.masked_fill(~fits[:, None, None], 0)
            used = used.masked_fill(~fits[:, None, None], 0)
            summed = -log_p.masked_fill(~fits, 0).sum()
        linear = -(used_words * scores).sum() - (used * transitions.masked_fill(used == 0, 0)).sum()
        return summed + (linear - linear.detach()), -log_p

    def best_paths(self, states: Tensor, mask: Tensor, words: Words) -> tuple[Tensor, Tensor, Tensor]:
        """Return the most likely word of each vertex, that of the best path, and the vertices (k B, U) with one."""
        predicted_chunks = []
        score_chunks = []
        for logits, predicted, chosen in self.slot_logits(states, mask, words.tokens):
            predicted_chunks.append(predicted)
            score_chunks.append(chosen - logits.logsumexp(2, keepdim=True))  # (N, U, T)
        scores = torch.cat(score_chunks)  # (k B, U, T)
        transitions = self.transitions(states, mask)
        vertices = best_vertices(transitions, scores, words.counts, last_vertices(mask))  # (k B, T)

        # The words at their vertices; the places after the words are at the first vertex, which has none.
        tokens = torch.full_like(mask, self.blank).scatter(1, vertices, words.tokens)
        has_word = torch.zeros_like(mask, dtype=torch.bool).scatter(1, vertices, True)
        has_word[:, 0] = False
        return torch.cat(predicted_chunks), tokens, has_word

    def read_settings(self, generation_config: GenerationConfig | None, call: dict[str, Any]) -> NarSettings:
        """Return the settings of `generate()`, of which only Viterbi decoding has a length penalty."""
        settings = super().read_settings(generation_config, call)
        if settings.decoding_strategy != "viterbi" and "decoding_strategy" in call and "length_penalty" not in call:
            settings.length_penalty = 1.0  # a saved one is for the saved strategy
        if settings.decoding_strategy != "viterbi" and settings.length_penalty != 1.0:
            expected = '1.0, or decoding_strategy="viterbi"'
            refuse("length_penalty", "only Viterbi decoding has one", settings.length_penalty, expected)
        return settings

    def graph(self, states: Tensor, mask: Tensor, settings: NarSettings) -> Graph:
        """Return the graphs of `states` (B, U, d_model), with vertices where `mask` (B, U)."""
        last = last_vertices(mask)  # (B,)
        vertices = torch.arange(mask.shape[1], device=mask.device)
        has_word = (vertices > 0) & (vertices < last[:, None])  # (B, U)
        is_end = torch.zeros_like(has_word)
        has_scores = settings.reads_scores or settings.decoding_strategy != "greedy"
        words, log_probs = self.most_likely_words(states, has_word, is_end, settings.suppress_tokens, has_scores)
        transitions = self.transitions(states, mask)  # (B, U, U)
        is_nan = log_probs.isnan().any(1) | transitions.isnan().flatten(1).any(1)
        report_nan(is_nan, settings.nan_handler)
        return Graph(words, log_probs, transitions, last)

    def decode(
        self, states: Tensor, attention_mask: Tensor | None, settings: NarSettings
    ) -> Tensor | NarGenerateOutput:
        """Return the targets of the paths, without their words beyond a length limit; Viterbi's are within it."""
        source = self.read_source(states, attention_mask)
        limits = self.length_limits(source, settings)  # (B,)
        mask = self.slot_mask(source)  # (B, U)
        graph = self.graph(self.slot_states(source, mask), mask, settings)
        is_visited = graph.path(settings, limits)  # (B, U)

        # The path's words, and the end token.
        start = self.config.token_id("target_start_token_id")
        last = graph.last[:, None]  # (B, 1)
        path = graph.words.scatter(1, last, self.end_ids[0]).masked_fill(~is_visited, self.blank)  # (B, U)
        lengths = torch.minimum((is_visited.sum(1) - 1).clamp(min=1), limits)  # (B,)
        is_token = canvas(lengths).bool()  # (B, T)
        width = is_token.shape[1]
        order = is_visited.long().argsort(dim=1, descending=True, stable=True)  # visited vertices first
        visited = path.gather(1, order)[:, 1 : width + 1]
        tokens = pad(visited, (0, width - visited.shape[1]), value=self.blank)  # (B, T)
        tokens = tokens.masked_fill(~is_token, self.blank).scatter(1, lengths[:, None] - 1, self.end_ids[0])
        sequences = pad(tokens, (1, 0), value=start)
        if not settings.return_dict_in_generate:
            return sequences

        # The score of a token is that of its vertex; `</s>` has those beyond the limit.
        scores = graph.vertex_scores(is_visited)  # (B, U)
        token_of_vertex = torch.minimum(is_visited.cumsum(1) - 2, lengths[:, None] - 1).clamp(min=0)
        token_scores = torch.zeros_like(tokens, dtype=scores.dtype).scatter_add(1, token_of_vertex, scores)
        return SlotGenerateOutput(
            sequences=sequences,
            sequences_scores=scores.sum(1),
            token_scores=token_scores,
            lengths=lengths,
            history=sequences[None] if settings.return_history else None,
            path=path.scatter(1, torch.zeros_like(last), start),
        )
