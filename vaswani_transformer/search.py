"""The paper's beam search (6.1; Wu et al. 2016, section 7) and greedy search, by any model.

B sources, A sources still in the batch, k beams and C candidates per source, T tokens so far, V vocabulary.
Rows of a source are consecutive: row i belongs to source i // k.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.utils import logging

logger = logging.get_logger(__name__)

NOT_FINISHED = -1e9  # score of an empty slot
TOPK_GROUP = 16  # tokens in a group of `top_continuations`


def warn_of_nan(sources: list[int]) -> None:
    """Warn that the targets of these sources of a batch are meaningless."""
    logger.warning(
        "The scores of %d sources are NaN (the first is number %d of its batch), so their targets are meaningless. Use "
        "float32, and check that the weights are finite.",
        len(sources),
        sources[0] + 1,
    )


def report_nan(is_nan: Tensor, nan_handler: Callable[[list[int]], None] | None) -> None:
    """Call `nan_handler`, or else warn, if the scores of any source are NaN, `is_nan` (B,)."""
    if not torch.compiler.is_compiling() and bool(is_nan.any()):
        handler = nan_handler or warn_of_nan
        handler(is_nan.nonzero()[:, 0].tolist())


class Stepper(Protocol):
    """Interface between a search and a model.

    If `logits_are_scratch` is True, the search may overwrite the logits.
    """

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits (k A, V) of the token after `tokens` (k A, T); T grows by one with each call."""

    def reorder(self, beams: Tensor) -> None:
        """Replace the state of row i by that of row `beams[i]` of the same source; `beams` (k A,)."""

    def keep(self, sources: Tensor) -> None:
        """Drop all other sources; `sources` are indices into the current ones, in ascending order."""


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search.

    Attributes:
        limits: (B,), largest number of new tokens of each target.
        end_tokens: (E,), ids of the end tokens; may be empty.
        pad_token: id of the padding after the end.
        num_beams, num_returned: k, and n, the number of hypotheses to return per source.
        alpha: exponent of the length penalty.
        length_penalty_type: "gnmt" or "power", see `length_penalty`.
        early_stopping: True to stop a source at its k-th hypothesis; False or "never" to stop by `score_bound`.
        do_sample: whether to sample candidates instead of taking the most likely.
        process: maps tokens (k B, T) and next-token scores (k B, V) to new scores; or None.
        keep: restricts `process` to these sources, as `Stepper.keep`; None if it always gets all of them.
        ends: returns whether rows of tokens (R, T) end for a reason other than limits and end tokens; or None.
        nan_handler: gets the indices of sources whose scores are NaN at the end of the search; None to warn.
        compacts: whether to drop finished sources from the batch.
    """

    limits: Tensor
    end_tokens: Tensor
    pad_token: int
    num_beams: int = 1
    num_returned: int = 1
    alpha: float = 1.0
    length_penalty_type: str = "power"
    early_stopping: bool | str | None = False
    do_sample: bool = False
    process: Callable[[Tensor, Tensor], Tensor] | None = None
    keep: Callable[[Tensor], None] | None = None
    ends: Callable[[Tensor], Tensor] | None = None
    nan_handler: Callable[[list[int]], None] | None = None
    compacts: bool = True

    @functools.cached_property
    def shortest(self) -> int:
        """Smallest of the limits."""
        return int(self.limits.min())

    @property
    def candidates(self) -> int:
        """C, the number of continuations per source considered in a step.

        More than k, so that k open beams remain if each end token continues each of them.
        """
        return max(2, 1 + self.end_tokens.numel()) * self.num_beams

    @property
    def is_plain(self) -> bool:
        """True for the most likely tokens by unmodified scores."""
        return self.process is None and not self.do_sample

    @property
    def reads_all_rows(self) -> bool:
        """True if processors, criteria or sampling need the rows of all sources."""
        return not self.is_plain and self.keep is None

    def is_last(self, tokens: Tensor, limits: Tensor, new_tokens: int) -> Tensor:
        """Return whether each of the new `tokens` is an end token or reaches its limit."""
        is_end = tokens == self.end_tokens if self.end_tokens.numel() == 1 else torch.isin(tokens, self.end_tokens)
        if new_tokens < self.shortest:
            return is_end
        return is_end | (limits <= new_tokens)


@dataclass
class SearchState:
    """State of a beam search between steps.

    Attributes:
        tokens: (k A, T), tokens of the open beams.
        parents: (k A, T), for each new token the row (of k A) that it continued.
        scores: (A, k), log P of the open beams, in descending order.
        active: (A,), indices of the sources in the batch.
        is_active: (A,), whether the result of a source can still change.
        limits: (A, 1), largest number of new tokens of each source's targets.
        finished_tokens, finished_parents: (B, k, up to T), tokens and parents of the hypotheses, which are the finished
            targets, best first; -1 after the end.
        hypothesis_scores: (B, k), their log P / lp, or `NOT_FINISHED`.
        has_hypotheses: whether any target is finished.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    active: Tensor
    is_active: Tensor
    limits: Tensor
    finished_tokens: Tensor
    finished_parents: Tensor
    hypothesis_scores: Tensor
    has_hypotheses: bool = False

    @classmethod
    def start(cls, prompt: Tensor, settings: SearchSettings) -> "SearchState":
        """Return the initial state for k equal rows per source (k B, T); only the first of them is continued."""
        k = settings.num_beams
        num_sources = len(prompt) // k
        device = prompt.device
        scores = torch.zeros(num_sources, k, dtype=torch.float32, device=device)
        scores[:, 1:] = NOT_FINISHED
        parents = torch.full_like(prompt, -1)
        return cls(
            tokens=prompt,
            parents=parents,
            scores=scores,
            active=torch.arange(num_sources, device=device),
            is_active=torch.ones(num_sources, dtype=torch.bool, device=device),
            limits=settings.limits[:, None],
            finished_tokens=prompt.unflatten(0, (num_sources, k)),
            finished_parents=parents.unflatten(0, (num_sources, k)),
            hypothesis_scores=torch.full_like(scores, NOT_FINISHED),
        )

    def extended(self, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and parents (R, T + 1) of the beams `rows` (R,), extended by `tokens` (R,)."""
        all_tokens = torch.cat((self.tokens.index_select(0, rows), tokens.unsqueeze(1)), dim=1)
        all_parents = torch.cat((self.parents.index_select(0, rows), rows.unsqueeze(1)), dim=1)
        return all_tokens, all_parents

    def drop_finished(self) -> Tensor:
        """Remove finished sources from the state, and return the indices (A,) of those that stay."""
        kept = self.is_active.nonzero()[:, 0]
        beams = (-1, self.scores.shape[1])
        self.tokens = self.tokens.unflatten(0, beams)[kept].flatten(0, 1)
        self.parents = self.parents.unflatten(0, beams)[kept].flatten(0, 1)
        self.scores = self.scores[kept]
        self.active = self.active[kept]
        self.is_active = self.is_active[kept]
        self.limits = self.limits[kept]
        return kept


def length_penalty(length: Tensor | int, alpha: float, length_penalty_type: str = "gnmt") -> Tensor | float:
    """Return the divisor of log P(Y | X): lp(Y) = ((5 + |Y|) / 6)^alpha for "gnmt" (6.1), |Y|^alpha for "power"."""
    if length_penalty_type == "gnmt":
        return ((5 + length) / 6) ** alpha
    return length**alpha


def score_bound(state: SearchState, new_tokens: int, settings: SearchSettings) -> Tensor:
    """Return an upper bound (A, 1) of the scores that the open beams of each source can reach.

    log P can only decrease. Under "gnmt" the bound uses the length limit, or the next length if alpha is not positive.
    Under "power" it uses the current length, as Transformers does, unless `early_stopping` is "never".
    """
    alpha = settings.alpha
    is_gnmt = settings.length_penalty_type == "gnmt"
    length: Tensor | int = new_tokens + 1 if is_gnmt else new_tokens
    if alpha > 0 and (is_gnmt or settings.early_stopping == "never"):
        length = state.limits
    return state.scores[:, :1] / length_penalty(length, alpha, settings.length_penalty_type)


def can_improve(state: SearchState, new_tokens: int, settings: SearchSettings) -> Tensor:
    """Return whether an open beam of each source can still enter its n best (A,), or its k best under "power"."""
    scores = state.hypothesis_scores[state.active]  # (A, k)
    count = settings.num_returned if settings.length_penalty_type == "gnmt" else settings.num_beams
    worst = scores[:, count - 1]  # (A,), of the hypotheses that count
    bound = score_bound(state, new_tokens, settings)[:, 0]  # (A,)
    improves = ~(bound <= worst)  # True for NaN, reported later
    if settings.early_stopping is True:
        return improves & (scores[:, -1] == NOT_FINISHED)
    return improves


def next_log_probs(stepper: Stepper, tokens: Tensor) -> Tensor:
    """Return log P (k A, V) of each token that may follow `tokens` (k A, T)."""
    logits = stepper.step(tokens)
    memory = logits if getattr(stepper, "logits_are_scratch", False) else None  # avoids an allocation
    return torch.log_softmax(logits, 1, dtype=torch.float32, out=memory)


def top_continuations(log_probs: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` most likely continuations of each source's beams by one token.

    The result lies in the `count` groups of `TOPK_GROUP` tokens with the largest maxima. Searching only these is faster
    than `topk` over the vocabulary.

    Args:
        log_probs: (k A, V), log-probabilities of the next token of each beam.
        scores: (A, k), log P of the beams so far.

    Returns:
        log P (A, `count`) including the next token, in descending order, and indices into each source's k V.
    """
    sources, k = scores.shape
    vocabulary = log_probs.shape[1]
    groups = vocabulary // TOPK_GROUP
    if k * groups < count:  # a small vocabulary
        continued = log_probs.reshape(sources, k, -1) + scores[:, :, None]  # (A, k, V)
        return continued.flatten(1).topk(count, dim=1)

    # The groups with the largest maxima contain the best continuations.
    grouped = log_probs[:, : groups * TOPK_GROUP].view(-1, TOPK_GROUP, groups)
    maxima = grouped.amax(1).add_(scores.reshape(-1, 1)).view(sources, -1)  # (A, k G)
    best = maxima.topk(count, dim=1).indices  # (A, C)

    # So only their members, and the ungrouped tokens, need to be compared.
    indices, beams = members_of_groups(best, k, vocabulary)
    values = log_probs.reshape(sources, -1).gather(1, indices).add_(scores.gather(1, beams))
    values, order = values.topk(count, dim=1)
    return values, indices.gather(1, order)


def members_of_groups(best: Tensor, k: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the indices, into a source's k V, of the members of groups `best` (A, C) and of the ungrouped tokens.

    Also return the beam of each index. A beam has G = V // 16 groups; its group g consists of the tokens g, g + G,
    g + 2 G and so on. Groups of all beams are numbered consecutively. Example with groups of two tokens, k = 2 and
    V = 7: G = 3, and group 4 is group 1 of beam 1, with the members 7 + 1 = 8 and 8 + 3 = 11. The last token of each
    beam, 6 and 13, is ungrouped.
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
    """Return the offsets of a group's members (16,), the indices of the ungrouped tokens, and their beams."""
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
    """Return the candidates of each source (A, C), best first: log P, rows (of k A) that they continue, and tokens."""
    k = settings.num_beams
    vocabulary = log_probs.shape[1]
    if settings.process is not None:
        log_probs = settings.process(state.tokens, log_probs)
    if settings.do_sample:
        continued = (log_probs.view(-1, k, vocabulary) + state.scores[:, :, None]).flatten(1)  # (A, k V)
        drawn = torch.multinomial(continued.softmax(-1), settings.candidates)  # in random order
        values, order = continued.gather(1, drawn).sort(1, descending=True)
        indices = drawn.gather(1, order)
    else:
        values, indices = top_continuations(log_probs, state.scores, settings.candidates)
    rows = torch.floor_divide(indices, vocabulary)
    tokens = indices.sub(rows, alpha=vocabulary)
    if rows.shape[0] > 1:
        rows += first_rows(rows.shape[0], k, rows.device)
    return values, rows, tokens


def ended(state: SearchState, rows: Tensor, tokens: Tensor, new_tokens: int, settings: SearchSettings) -> Tensor:
    """Return whether each candidate (A, C) ends its target."""
    is_end = settings.is_last(tokens, state.limits, new_tokens)
    if settings.ends is None:
        return is_end

    # Criteria get the candidates of all B sources, zeros for the dropped ones.
    candidates, _ = state.extended(rows.flatten(), tokens.flatten())
    candidates = candidates.unflatten(0, rows.shape)  # (A, C, T + 1)
    of_all_sources = candidates.new_zeros(len(state.hypothesis_scores), *candidates.shape[1:])  # (B, C, T + 1)
    of_all_sources[state.active] = candidates
    meets_criteria = settings.ends(of_all_sources.flatten(0, 1)).view(of_all_sources.shape[:2])  # (B, C)
    return is_end | meets_criteria[state.active]


def add_hypotheses(state: SearchState, scores: Tensor, rows: Tensor, tokens: Tensor, is_end: Tensor) -> None:
    """Merge the ended candidates among the k best (A, k) of each active source into its hypotheses."""
    is_end = is_end & state.is_active[:, None]
    with_ends = is_end.any(1).nonzero()[:, 0]  # (S,), sources with an ended candidate
    if not len(with_ends):
        return
    state.has_hypotheses = True

    # The ended candidates as new hypotheses; those that did not end lose every comparison.
    k = is_end.shape[1]
    scores = scores[with_ends].masked_fill(~is_end[with_ends], -torch.inf)  # (S, k)
    ended_rows = rows[with_ends].flatten()  # (S k,)
    ended_tokens = tokens[with_ends].flatten()
    new_tokens, new_parents = state.extended(ended_rows, ended_tokens)  # (S k, T + 1)

    # The k best of the earlier and the new ones.
    sources = state.active[with_ends]
    merged_scores = torch.cat((state.hypothesis_scores[sources], scores), dim=1)  # (S, 2 k)
    best, order = merged_scores.topk(k, dim=1)
    state.hypothesis_scores[sources] = best
    state.finished_tokens = merge(state.finished_tokens, new_tokens.unflatten(0, (-1, k)), sources, order)
    state.finished_parents = merge(state.finished_parents, new_parents.unflatten(0, (-1, k)), sources, order)


def merge(finished: Tensor, new: Tensor, sources: Tensor, order: Tensor) -> Tensor:
    """Return `finished` (B, k, up to T), where `sources` (S,) have the k in `order` (S, k) of theirs and `new` ones.

    `new` are (S, k, T + 1); earlier ones are padded to their length.
    """
    finished = pad(finished, (0, new.shape[2] - finished.shape[2]), value=-1)
    merged = torch.cat((finished[sources], new), dim=1)  # (S, 2 k, T + 1)
    finished[sources] = merged[torch.arange(len(order), device=order.device)[:, None], order]
    return finished


@dataclass(frozen=True)
class Hypotheses:
    """Result of a beam search: n hypotheses per source.

    Attributes:
        tokens: (n B, T), including the prompts, padded after the end.
        scores: (n B,), log P / lp.
        beam_indices: (n B, new tokens), the row that each token continued; -1 after the end. They are rows of k B if
            no source was dropped.
    """

    tokens: Tensor
    scores: Tensor
    beam_indices: Tensor


def beam_search(stepper: Stepper, prompt: Tensor, settings: SearchSettings) -> Hypotheses:
    """Search the n best targets of each source that begin with `prompt` (k B, T), k equal rows per source."""
    state = SearchState.start(prompt, settings)
    k = settings.num_beams
    new_tokens = 0
    while True:
        # Candidates: more than k, so that k open beams remain if some of them end.
        new_tokens += 1
        log_probs = next_log_probs(stepper, state.tokens)
        log_probs, rows, tokens = select_continuations(log_probs, state, settings)

        # Those among the k best that end become hypotheses.
        is_end = ended(state, rows, tokens, new_tokens, settings)
        has_ends = bool(is_end.any())
        if has_ends:
            scores = log_probs[:, :k] / length_penalty(new_tokens, settings.alpha, settings.length_penalty_type)
            add_hypotheses(state, scores, rows[:, :k], tokens[:, :k], is_end[:, :k])
            state.is_active &= ~is_end.all(1)

        # The k best of the others are the new beams.
        if has_ends:  # else the first k candidates are the best
            log_probs, order = (log_probs + is_end * NOT_FINISHED).topk(k, dim=1)
            rows = rows.gather(1, order)
            tokens = tokens.gather(1, order)
        rows = rows[:, :k].flatten()
        state.tokens, state.parents = state.extended(rows, tokens[:, :k].flatten())
        state.scores = log_probs[:, :k]

        # Counting active sources synchronizes with an accelerator, so only once one may be finished.
        if state.has_hypotheses:
            state.is_active &= can_improve(state, new_tokens, settings)
        num_active = state.active.shape[0]
        if has_ends or state.has_hypotheses:
            num_active = int(state.is_active.sum())
        if num_active == 0:
            return best_hypotheses(state, prompt.shape[1], settings)

        stepper.reorder(rows)
        if num_active < state.active.shape[0] and settings.compacts and not settings.reads_all_rows:
            kept = state.drop_finished()
            stepper.keep(kept)
            if settings.keep is not None:
                settings.keep(kept)


def best_hypotheses(state: SearchState, prompt_length: int, settings: SearchSettings) -> Hypotheses:
    """Return the n best hypotheses of every source."""
    report_nan(state.hypothesis_scores.isnan().any(1), settings.nan_handler)
    tokens = state.finished_tokens[:, : settings.num_returned].flatten(0, 1)  # (n B, T)
    parents = state.finished_parents[:, : settings.num_returned].flatten(0, 1)  # (n B, T)
    longest = int((tokens >= 0).sum(1).max())
    tokens = tokens[:, :longest]
    return Hypotheses(
        tokens=tokens.masked_fill(tokens < 0, settings.pad_token),
        scores=state.hypothesis_scores[:, : settings.num_returned].flatten(),
        beam_indices=parents[:, prompt_length:longest].int(),
    )


def next_tokens(logits: Tensor, rows: Tensor, tokens: Tensor, settings: SearchSettings) -> Tensor:
    """Return the next token (R,) of every row of `tokens` (R, T), given the logits of the decoded `rows`."""
    values = logits if settings.is_plain else logits.float()
    if not settings.reads_all_rows:
        if settings.process is not None:
            values = settings.process(tokens[rows], values)
        values = values.max(-1).indices  # the token of `argmax`, in less time on a CPU

    # Finished rows get zeros.
    if rows.shape[0] < tokens.shape[0]:
        values = values.new_zeros(len(tokens), *values.shape[1:]).index_copy_(0, rows, values)
    if not settings.reads_all_rows:
        return values

    # Sampling, and processors that cannot drop rows, get all of them.
    scores = values if settings.process is None else settings.process(tokens, values)
    if settings.do_sample:
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]
    return scores.argmax(-1)


def greedy_search(stepper: Stepper, prompt: Tensor, settings: SearchSettings) -> Tensor:
    """Return the greedy or sampled targets (n B, T) that begin with `prompt` (n B, T), padded after the end.

    Without end tokens, rows continue after their limits, as in Transformers.
    """
    tokens = prompt
    new_tokens = 0
    active = torch.arange(len(prompt), device=prompt.device).view(len(settings.limits), -1)  # (B, n), rows to decode
    limits = settings.limits.repeat_interleave(active.shape[1], output_size=len(prompt))  # (n B,)
    is_over = torch.zeros_like(limits, dtype=torch.bool)
    rows = active.flatten()
    summed = torch.zeros(len(prompt), dtype=torch.float32, device=prompt.device)  # logits of the chosen tokens
    while True:
        # One token for every row; `<pad>` after the end.
        new_tokens += 1
        decoded = tokens[rows] if rows.shape[0] < tokens.shape[0] else tokens
        logits = stepper.step(decoded)
        chosen = next_tokens(logits, rows, tokens, settings)
        chosen_logits = logits.gather(1, chosen.index_select(0, rows).unsqueeze(1)).squeeze(1)
        summed.index_add_(0, rows, chosen_logits.float())
        if settings.end_tokens.numel():
            chosen = chosen.masked_fill(is_over, settings.pad_token)
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)

        # Which rows are finished.
        is_end = settings.is_last(chosen, limits, new_tokens)
        if settings.ends is not None:
            is_end = is_end | settings.ends(tokens)
        if not bool(is_end.any()):
            continue
        is_over = is_over | is_end
        if bool(is_over.all()):
            report_nan(summed.isnan().view(len(settings.limits), -1).any(1), settings.nan_handler)
            return tokens

        # Sources of which all rows are finished leave the batch.
        kept = (~is_over[active].all(1)).nonzero()[:, 0]
        if len(kept) < len(active) and settings.compacts and len(settings.end_tokens):
            stepper.keep(kept)
            if settings.keep is not None:
                settings.keep(kept)
            active = active[kept]
            rows = active.flatten()
