"""The paper's beam search (6.1; Wu et al. 2016, section 7), and greedy search, over any decoder.

B sources, A of them active (their results can still change), k beams of a source, C candidates of a source, T tokens of
a beam so far, V vocabulary. Rows of one source are side by side: row i belongs to source i // k.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

LENGTH_PENALTY_TYPES = ("power", "gnmt")
NOT_FINISHED = -1e9  # the score of a place that no hypothesis has taken yet
TOPK_GROUP = 16  # tokens; a power of two that keeps both steps of the choice of candidates short


class Decoder(Protocol):
    """The three calls that a search makes to a model.

    A decoder with a true attribute `gives_logits_away` keeps no logits, and a search writes over them.
    """

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits (k A, V) of the token after `tokens` (k A, T), which grow by one from call to call."""

    def reorder(self, beams: Tensor) -> None:
        """Continue row i from what row `beams[i]` of the same source has been so far; `beams` (k A,)."""

    def keep(self, sources: Tensor) -> None:
        """Decode only these sources from now on, by their index among those decoded so far, in rising order."""


@dataclass(frozen=True)
class SearchSettings:
    """The settings of a search.

    Attributes:
        limits: (B,) the number of new tokens that each target may have.
        end_tokens: (E,) token ids that end a target; none: empty.
        pad_token: fills a target after its end.
        num_beams, num_returned: k and n, the number of hypotheses of a source that the caller requests.
        candidates: C, the continuations of a source that are examined in a step.
        alpha: the exponent of the length penalty.
        length_penalty_type: "gnmt" or "power", see `length_penalty`.
        early_stopping: True: a source ends with its k-th hypothesis; False or "never": by `score_bound`.
        do_sample: draw candidates instead of taking the likeliest.
        process: changes next-token scores (k B, V), given the tokens (k B, T); None: nothing does.
        keep: makes `process` take only these sources from now on, as `Decoder.keep`; None: it takes all of them.
        ends: whether rows of tokens (R, T) have ended for another reason than limits and end tokens; None: none has.
        compacts: whether finished sources are dropped from the decoder's batch.
    """

    limits: Tensor
    end_tokens: Tensor
    pad_token: int
    num_beams: int = 1
    num_returned: int = 1
    candidates: int = 2
    alpha: float = 1.0
    length_penalty_type: str = "power"
    early_stopping: bool | str | None = False
    do_sample: bool = False
    process: Callable[[Tensor, Tensor], Tensor] | None = None
    keep: Callable[[Tensor], None] | None = None
    ends: Callable[[Tensor], Tensor] | None = None
    compacts: bool = True

    @functools.cached_property
    def shortest(self) -> int:
        """The number of new tokens below which no limit is met."""
        return int(self.limits.min())

    @property
    def is_plain(self) -> bool:
        """True if nothing changes the scores, and the likeliest tokens are taken."""
        return self.process is None and not self.do_sample

    @property
    def reads_all_rows(self) -> bool:
        """True if something reads the rows of all sources by number or draws a random number for each."""
        return not self.is_plain and self.keep is None

    def is_last(self, tokens: Tensor, limits: Tensor, new_tokens: int) -> Tensor:
        """Return whether each of `tokens`, the newest ones, is an end token or the last within its limit."""
        is_end = tokens == self.end_tokens if self.end_tokens.numel() == 1 else torch.isin(tokens, self.end_tokens)
        return is_end | (limits <= new_tokens) if new_tokens >= self.shortest else is_end


@dataclass
class SearchState:
    """The state of a beam search between its steps.

    Attributes:
        beams: (2, k A, T) the open beams' tokens, and for each new token the row among k B whose beam it continued.
        scores: (A, k) log P of the open beams, in falling order.
        active: (A,) the sources still in the batch, by number.
        is_active: (A,) whether a source's result can still change; all are once finished ones are dropped.
        limits: (A, 1) the new tokens that a target of each source may have.
        hypotheses: (2, B, k, up to T) finished targets like `beams`, the best first; -1 after their end.
        hypothesis_scores: (B, k) their log P / lp, or `NOT_FINISHED`.
        has_hypotheses: whether there is one at all.
    """

    beams: Tensor
    scores: Tensor
    active: Tensor
    is_active: Tensor
    limits: Tensor
    hypotheses: Tensor
    hypothesis_scores: Tensor
    has_hypotheses: bool = False

    @classmethod
    def start(cls, prompt: Tensor, settings: SearchSettings) -> "SearchState":
        """Begin with k equal beams (k B, T), of which all but the first of a source score too low to be continued."""
        k, device = settings.num_beams, prompt.device
        num_sources = len(prompt) // k
        scores = torch.zeros(num_sources, k, dtype=torch.float32, device=device)
        scores[:, 1:] = NOT_FINISHED
        beams = torch.stack((prompt, torch.full_like(prompt, -1)))
        return cls(
            beams=beams,
            scores=scores,
            active=torch.arange(num_sources, device=device),
            is_active=torch.ones(num_sources, dtype=torch.bool, device=device),
            limits=settings.limits[:, None],
            hypotheses=beams.unflatten(1, (num_sources, k)),
            hypothesis_scores=torch.full_like(scores, NOT_FINISHED),
        )


def length_penalty(length: Tensor | int, alpha: float, length_penalty_type: str = "gnmt") -> Tensor | float:
    """Return what log P(Y | X) is divided by: lp(Y) = ((5 + |Y|) / 6)^alpha (6.1), or |Y|^alpha under "power"."""
    return ((5 + length) / 6) ** alpha if length_penalty_type == "gnmt" else length**alpha


def score_bound(state: SearchState, new_tokens: int, settings: SearchSettings) -> Tensor:
    """Return the best score (A, 1) that an open beam of each source can still reach.

    log P only falls. Under "gnmt" the length that divides it best is the source's limit, or the next one where alpha is
    not positive. Under "power" it is the present one as Transformers estimates it, unless `early_stopping` is "never".
    """
    alpha, is_gnmt = settings.alpha, settings.length_penalty_type == "gnmt"
    length: Tensor | int = new_tokens + 1 if is_gnmt else new_tokens
    if alpha > 0 and (is_gnmt or settings.early_stopping == "never"):
        length = state.limits
    return state.scores[:, :1] / length_penalty(length, alpha, settings.length_penalty_type)


def can_improve(state: SearchState, new_tokens: int, settings: SearchSettings) -> Tensor:
    """Return whether an open beam of each source can still enter its n best (A,); under "power": its k best."""
    scores = state.hypothesis_scores[state.active]  # (A, k)
    last = settings.num_returned if settings.length_penalty_type == "gnmt" else settings.num_beams
    improves = score_bound(state, new_tokens, settings)[:, 0] > scores[:, last - 1]
    return improves & (scores[:, -1] == NOT_FINISHED) if settings.early_stopping is True else improves


def next_log_probs(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return log P (k A, V) of each token that may follow `tokens` (k A, T)."""
    logits = decoder.step(tokens)
    memory = logits if getattr(decoder, "gives_logits_away", False) else None  # new memory is slow to get
    return torch.log_softmax(logits, 1, dtype=torch.float32, out=memory)


def top_continuations(log_probs: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` likeliest continuations of each source's beams by one token.

    A likely token is in a group whose maximum is large. So only the `count` best groups, of sixteen tokens of one beam
    each, are searched. That is several times as fast as `topk` over a vocabulary.

    Args:
        log_probs: (k A, V) of the next token of each beam.
        scores: (A, k) log P of the beams so far.

    Returns:
        log P (A, `count`) with the next token, in falling order, and the index of each among a source's k V.
    """
    (sources, k), vocabulary = scores.shape, log_probs.shape[1]
    groups = vocabulary // TOPK_GROUP
    if k * groups < count:
        return (log_probs.reshape(sources, k, -1) + scores[:, :, None]).flatten(1).topk(count, dim=1)
    grouped = log_probs[:, : groups * TOPK_GROUP].view(-1, TOPK_GROUP, groups)
    best = grouped.amax(1).add_(scores.reshape(-1, 1)).view(sources, -1).topk(count, dim=1).indices  # (A, C)
    indices, beams = members_of_groups(best, k, vocabulary)
    values = log_probs.reshape(sources, -1).gather(1, indices).add_(scores.gather(1, beams))
    values, order = values.topk(count, dim=1)
    return values, indices.gather(1, order)


def members_of_groups(best: Tensor, k: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the members of the groups `best` (A, C), and all in no group, by index among a source's k V; their beams.

    A beam has G = V // 16 groups, and its group g the tokens g, g + G, g + 2 G and so on. The groups of all beams are
    numbered in a row. With groups of two tokens, k = 2 and V = 7, for example, G = 3, and beam 1 begins at index 7. So
    group 4 is group 1 of beam 1: its first member has index 1 * 7 + 1 = 8, which is 4 + 1 * (7 - 3), and its second
    8 + 3 = 11. In no group are token 6 of either beam, 6 and 13.
    """
    groups = vocabulary // TOPK_GROUP
    offsets, rest, beams_of_rest = group_offsets(k, groups, vocabulary, best.device)
    beams = torch.floor_divide(best, groups)  # (A, C)
    indices = best.add(beams, alpha=vocabulary - groups).unsqueeze(2).add(offsets).flatten(1)  # (A, 16 C)
    beams = beams.unsqueeze(2).expand(-1, -1, TOPK_GROUP).flatten(1)
    if rest.numel():
        indices = torch.cat([indices, rest.expand(len(best), -1)], dim=1)
        beams = torch.cat([beams, beams_of_rest.expand(len(best), -1)], dim=1)
    return indices, beams


@functools.lru_cache(maxsize=8)
def group_offsets(k: int, groups: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distances of a group's members from its first (16,), the indices in no group, and their beams."""
    with torch.inference_mode(False):
        offsets = torch.arange(0, groups * TOPK_GROUP, groups, device=device)
        remainder = torch.arange(k * vocabulary, device=device).view(k, -1)[:, groups * TOPK_GROUP :].flatten()
        return offsets, remainder, torch.floor_divide(remainder, vocabulary)


@functools.lru_cache(maxsize=64)
def first_rows(sources: int, k: int, device: torch.device) -> Tensor:
    """Return the first row of each source (A, 1)."""
    with torch.inference_mode(False):
        return torch.arange(0, sources * k, k, device=device)[:, None]


def select_continuations(
    log_probs: Tensor, state: SearchState, settings: SearchSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the candidates of each source (A, C): log P, the rows (of k A) that they continue, and their tokens."""
    k, vocabulary = settings.num_beams, log_probs.shape[1]
    if settings.process is not None:
        log_probs = settings.process(state.beams[0], log_probs)
    if settings.do_sample:
        every = (log_probs.view(-1, k, vocabulary) + state.scores[:, :, None]).flatten(1)  # (A, k V)
        indices = torch.multinomial(every.softmax(-1), settings.candidates)
        values = every.gather(1, indices)
    else:
        values, indices = top_continuations(log_probs, state.scores, settings.candidates)
    rows = torch.floor_divide(indices, vocabulary)
    tokens = indices.sub(rows, alpha=vocabulary)
    if rows.shape[0] > 1:
        rows += first_rows(rows.shape[0], k, rows.device)
    return values, rows, tokens


def extend(state: SearchState, rows: Tensor, tokens: Tensor) -> Tensor:
    """Return the open beams (2, R, T + 1) of `rows` (R,) of k A with their next `tokens` (R,)."""
    parents = rows
    if state.active.shape[0] != state.hypotheses.shape[1]:
        k = state.scores.shape[1]
        parents = state.active[rows // k] * k + rows % k
    return torch.cat((state.beams.index_select(1, rows), torch.stack((tokens, parents)).unsqueeze(2)), dim=2)


def ended(state: SearchState, rows: Tensor, tokens: Tensor, new_tokens: int, settings: SearchSettings) -> Tensor:
    """Return whether each candidate (A, C) ends its target."""
    is_end = settings.is_last(tokens, state.limits, new_tokens)
    if settings.ends is not None:  # it sees candidates of all B sources, dropped ones as zeros
        sequences = extend(state, rows.flatten(), tokens.flatten())[0].unflatten(0, rows.shape)  # (A, C, T + 1)
        everyone = sequences.new_zeros(state.hypotheses.shape[1], *sequences.shape[1:])
        everyone[state.active] = sequences
        is_end = is_end | settings.ends(everyone.flatten(0, 1)).view(everyone.shape[:2])[state.active]
    return is_end


def add_hypotheses(state: SearchState, scores: Tensor, rows: Tensor, tokens: Tensor, is_end: Tensor) -> None:
    """Merge those of the k best candidates of each active source that end (A, k) into its k best hypotheses."""
    is_end = is_end & state.is_active[:, None]
    having = is_end.any(1).nonzero()[:, 0]  # (S,) the sources that have one
    if not len(having):
        return
    state.has_hypotheses = True
    sources, k = state.active[having], is_end.shape[1]
    scores = scores[having].masked_fill(~is_end[having], -torch.inf)  # (S, k)
    targets = extend(state, rows[having].flatten(), tokens[having].flatten()).unflatten(1, (-1, k))  # (2, S, k, T + 1)
    hypotheses = pad(state.hypotheses, (0, targets.shape[3] - state.hypotheses.shape[3]), value=-1)
    merged = torch.cat((hypotheses[:, sources], targets), dim=2)  # (2, S, 2 k, T + 1)
    best, order = torch.cat((state.hypothesis_scores[sources], scores), dim=1).topk(k, dim=1)
    hypotheses[:, sources] = merged[:, torch.arange(len(order), device=order.device)[:, None], order]
    state.hypothesis_scores[sources], state.hypotheses = best, hypotheses


def drop_finished(state: SearchState, decoder: Decoder, settings: SearchSettings) -> None:
    """Take sources that are no longer active out of the batch (compaction)."""
    kept = state.is_active.nonzero()[:, 0]
    decoder.keep(kept)
    if settings.keep is not None:
        settings.keep(kept)
    state.beams = state.beams.unflatten(1, (-1, state.scores.shape[1]))[:, kept].flatten(1, 2)
    for name in ("scores", "active", "is_active", "limits"):
        setattr(state, name, getattr(state, name)[kept])


@dataclass(frozen=True)
class Hypotheses:
    """The n hypotheses of each source that a beam search found.

    Attributes:
        tokens: (n B, T), prompts included, padded after their end.
        scores: (n B,) log P / lp.
        beam_indices: (n B, new tokens) the row among k B that each token continued; -1 after the end.
    """

    tokens: Tensor
    scores: Tensor
    beam_indices: Tensor


def beam_search(decoder: Decoder, prompt: Tensor, settings: SearchSettings) -> Hypotheses:
    """Search the n best targets of each source, which begin with `prompt` (k B, T), k equal rows a source."""
    state, k, new_tokens = SearchState.start(prompt, settings), settings.num_beams, 0
    while True:
        new_tokens += 1
        log_probs, rows, tokens = select_continuations(next_log_probs(decoder, state.beams[0]), state, settings)
        is_end = ended(state, rows, tokens, new_tokens, settings)
        has_ends = bool(is_end.any())
        if has_ends:
            scores = log_probs[:, :k] / length_penalty(new_tokens, settings.alpha, settings.length_penalty_type)
            add_hypotheses(state, scores, rows[:, :k], tokens[:, :k], is_end[:, :k])
            state.is_active &= ~is_end.all(1)
        if has_ends or settings.do_sample:  # else the k best of the C candidates are simply the first
            log_probs, order = (log_probs + is_end * NOT_FINISHED).topk(k, dim=1)
            rows, tokens = rows.gather(1, order), tokens.gather(1, order)
        rows = rows[:, :k].flatten()
        state.beams, state.scores = extend(state, rows, tokens[:, :k].flatten()), log_probs[:, :k]
        if state.has_hypotheses:
            state.is_active &= can_improve(state, new_tokens, settings)
        num_active = int(state.is_active.sum()) if has_ends or state.has_hypotheses else state.active.shape[0]
        if num_active == 0:
            return best_hypotheses(state, prompt.shape[1], settings)
        decoder.reorder(rows)
        if num_active < state.active.shape[0] and settings.compacts and not settings.reads_all_rows:
            drop_finished(state, decoder, settings)


def best_hypotheses(state: SearchState, prompt_length: int, settings: SearchSettings) -> Hypotheses:
    """Return the n best hypotheses of every source."""
    best = state.hypotheses[:, :, : settings.num_returned].flatten(1, 2)  # (2, n B, T)
    longest = int((best[0] >= 0).sum(1).max())
    tokens, beam_indices = best[:, :, :longest]
    return Hypotheses(
        tokens=tokens.masked_fill(tokens < 0, settings.pad_token),
        scores=state.hypothesis_scores[:, : settings.num_returned].flatten(),
        beam_indices=beam_indices[:, prompt_length:].int(),
    )


def next_tokens(logits: Tensor, rows: Tensor, tokens: Tensor, settings: SearchSettings) -> Tensor:
    """Return the next token (R,) of every row of `tokens` (R, T), given the logits of those `rows` that are decoded."""
    values = logits if settings.is_plain else logits.float()
    if not settings.reads_all_rows:
        if settings.process is not None:
            values = settings.process(tokens[rows], values)
        values = values.argmax(-1)
    if rows.shape[0] < tokens.shape[0]:  # others have zeros
        values = values.new_zeros(len(tokens), *values.shape[1:]).index_copy_(0, rows, values)
    if not settings.reads_all_rows:
        return values
    scores = values if settings.process is None else settings.process(tokens, values)
    return torch.multinomial(scores.softmax(-1), 1)[:, 0] if settings.do_sample else scores.argmax(-1)


def greedy_search(decoder: Decoder, prompt: Tensor, settings: SearchSettings) -> Tensor:
    """Return the targets (n B, T) that begin with `prompt` (n B, T), padded after their end.

    The next token is the likeliest, or drawn. Without end tokens rows continue after their limits, as in Transformers.
    """
    tokens, new_tokens = prompt, 0
    active = torch.arange(len(prompt), device=prompt.device).view(len(settings.limits), -1)  # (B, n) rows to decode
    limits = settings.limits.repeat_interleave(active.shape[1], output_size=len(prompt))  # (n B,)
    is_over, rows = torch.zeros_like(limits, dtype=torch.bool), active.flatten()
    while True:
        new_tokens += 1
        decoded = tokens[rows] if rows.shape[0] < tokens.shape[0] else tokens
        chosen = next_tokens(decoder.step(decoded), rows, tokens, settings)
        if settings.end_tokens.numel():
            chosen = chosen.masked_fill(is_over, settings.pad_token)
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
        is_end = settings.is_last(chosen, limits, new_tokens)
        if settings.ends is not None:
            is_end = is_end | settings.ends(tokens)
        if not bool(is_end.any()):
            continue
        is_over = is_over | is_end
        if bool(is_over.all()):
            return tokens
        kept = (~is_over[active].all(1)).nonzero()[:, 0]  # of the sources that are decoded
        if len(kept) < len(active) and settings.compacts and len(settings.end_tokens):
            decoder.keep(kept)
            if settings.keep is not None:
                settings.keep(kept)
            active = active[kept]
            rows = active.flatten()
