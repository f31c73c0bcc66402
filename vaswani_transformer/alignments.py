"""The words of CTC targets, their best alignments to the slots of a source, and the targets of paths.

B batch, k target rows per source row, T target, U slots, A = 2 T + 1 states of an alignment: a blank, then each word
followed by a blank.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .nar import canvas

NO_TARGET = torch.iinfo(torch.long).max  # slots that a row without labels needs, so that it has no loss


class Words(NamedTuple):
    """The words of targets, without `</s>`."""

    tokens: Tensor  # (k B, T), blanks after the words
    counts: Tensor  # (k B,), number of words
    needed_slots: Tensor  # (k B,), number of words and of blanks between equal neighbors


def words_of(labels: Tensor, end_ids: list[int], blank: int) -> Words:
    """Return the words of `labels` (k B, T), -100 at padding."""
    # The words: all tokens but the end token.
    lengths = labels.ne(-100).sum(1, keepdim=True)  # (k B, 1)
    last = labels.gather(1, (lengths - 1).clamp(min=0))
    is_end = torch.stack([last == end for end in end_ids]).any(0)  # (k B, 1)
    counts = (lengths - is_end.long()).squeeze(1)  # (k B,)
    is_word = canvas(counts, labels.shape[1]).bool()  # (k B, T)

    # Each needs a slot, and a blank before it if it repeats the previous word.
    is_repetition = (labels[:, 1:] == labels[:, :-1]) & is_word[:, 1:]
    needed_slots = counts + is_repetition.sum(1)
    needed_slots = needed_slots.masked_fill(lengths.squeeze(1) == 0, NO_TARGET)
    return Words(labels.masked_fill(~is_word, blank), counts, needed_slots)


def state_tokens(words: Words, blank: int) -> Tensor:
    """Return the tokens (k B, A) of the states of an alignment."""
    rows, width = words.tokens.shape
    tokens = words.tokens.new_full((rows, 2 * width + 1), blank)
    tokens[:, 1::2] = words.tokens
    return tokens


def skippable(tokens: Tensor) -> Tensor:
    """Return which states (k B, A) may follow the state before the previous one, for `tokens` of `state_tokens`.

    An alignment may skip the blank between two different words, but no word.
    """
    return pad(tokens[:, 2:] != tokens[:, :-2], (2, 0))


def best_alignment(scores: Tensor, tokens: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    """Return the token (B, U) of each slot in the best alignment.

    Args:
        scores: (B, U, A), log-probabilities of the states' tokens, up to a constant of each slot.
        tokens: (B, A), those of `state_tokens`.
        slots, counts: (B,), numbers of slots and of words.
    """
    return tokens.gather(1, best_states(scores, skippable(tokens), slots, counts))


def best_states(scores: Tensor, may_skip: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    """Return the state (B, U) of each slot in the best alignment, by Viterbi's algorithm.

    The loop over slots takes little time beside the decoder. A parallel scan would avoid it, but multiplies U matrices
    (A, A) instead of vectors.

    Args:
        scores: (B, U, A), log-probabilities of the states' tokens, up to a constant of each slot.
        may_skip: (B, A), True at states that may follow the state before the previous one.
        slots, counts: (B,), numbers of slots and of words.
    """
    # Forward: the score of the best alignment that ends in each state, and how many states its last step moved.
    totals = torch.full_like(scores[:, 0], -torch.inf)  # (B, A)
    totals[:, :2] = scores[:, 0, :2]
    steps = []
    for slot in range(1, scores.shape[1]):
        moved_by_one = pad(totals[:, :-1], (1, 0), value=-torch.inf)
        moved_by_two = pad(totals[:, :-2], (2, 0), value=-torch.inf).masked_fill(~may_skip, -torch.inf)
        best, step = torch.stack([totals, moved_by_one, moved_by_two]).max(0)  # (B, A)
        is_slot = (slot < slots)[:, None]
        totals = torch.where(is_slot, best + scores[:, slot], totals)
        steps.append(step * is_slot)

    # An alignment ends in the last blank or the last word.
    last_blank = 2 * counts[:, None]  # (B, 1)
    last_word = (last_blank - 1).clamp(min=0)
    ends_in_word = (counts[:, None] > 0) & (totals.gather(1, last_word) > totals.gather(1, last_blank))
    state = torch.where(ends_in_word, last_word, last_blank)

    # Backward along the steps.
    states = [state]
    for step in reversed(steps):
        state = (state - step.gather(1, state)).clamp(min=0)  # without an alignment, any state
        states.append(state)
    return torch.cat(states[::-1], dim=1)


def state_posteriors(log_probs: Tensor, may_skip: Tensor, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p (B,) of targets, and the probability (B, U, A) of each state at each slot (Graves et al. 2006).

    The probabilities are 0 beyond the slots. Both are meaningless for targets that do not fit into their slots.

    Args:
        log_probs: (B, U, A), log-probabilities of the states' tokens.
        may_skip: (B, A), those of `skippable`.
        slots, counts: (B,), numbers of slots and of words.
    """
    width = log_probs.shape[1]
    is_slot = canvas(slots, width).bool()  # (B, U)
    is_blocked = ~may_skip

    # Forward: log p of the first slots that end in each state.
    forward = torch.full_like(log_probs[:, 0], -torch.inf)  # (B, A)
    forward[:, :2] = log_probs[:, 0, :2]
    forwards = [forward]
    for slot in range(1, width):
        by_one = pad(forward[:, :-1], (1, 0), value=-torch.inf)
        by_two = pad(forward[:, :-2], (2, 0), value=-torch.inf).masked_fill(is_blocked, -torch.inf)
        moved = forward.logaddexp(by_one).logaddexp(by_two) + log_probs[:, slot]
        forward = torch.where(is_slot[:, slot, None], moved, forward)
        forwards.append(forward)

    # The target ends in the last word or in the blank after it.
    ends = torch.stack([2 * counts, (2 * counts - 1).clamp(min=0)], dim=1)  # (B, 2)
    values = forward.gather(1, ends)
    log_p = torch.where(counts > 0, values.logsumexp(1), values[:, 0])  # (B,)

    # Backward: log p of the later slots after each state.
    backward = torch.full_like(forward, -torch.inf).scatter(1, ends, 0.0)  # (B, A)
    backwards = [backward]
    for slot in range(width - 1, 0, -1):
        later = backward + log_probs[:, slot]
        by_one = pad(later[:, 1:], (0, 1), value=-torch.inf)
        by_two = pad(later.masked_fill(is_blocked, -torch.inf)[:, 2:], (0, 2), value=-torch.inf)
        backward = torch.where(is_slot[:, slot, None], later.logaddexp(by_one).logaddexp(by_two), backward)
        backwards.append(backward)

    together = torch.stack(forwards, dim=1) + torch.stack(backwards[::-1], dim=1)  # (B, U, A)
    return log_p, (together - log_p[:, None, None]).exp() * is_slot[:, :, None]


class Collapsed(NamedTuple):
    """The targets of paths."""

    tokens: Tensor  # (B, T), the words and `</s>`, then blanks
    lengths: Tensor  # (B,), number of words and `</s>`
    token_of_slot: Tensor  # (B, U), index of the target's token that a slot belongs to


def collapse(path: Tensor, blank: int, end: int, limits: Tensor) -> Collapsed:
    """Return the targets of paths.

    A slot belongs to its word, a blank to the word after it, and what follows the last word to the end token.

    Args:
        path: (B, U), token of each slot; blanks after the last one.
        blank, end: the blank, and the token that ends a target.
        limits: (B,), largest lengths of the targets; words beyond them are dropped.
    """
    # The first slot of each word.
    is_word = path != blank
    is_new = pad(path[:, 1:] != path[:, :-1], (1, 0), value=True)
    begins = is_word & is_new
    lengths = torch.minimum(1 + begins.sum(1), limits)[:, None]  # (B, 1)

    # The words in order, followed by the end token and blanks.
    order = begins.long().argsort(dim=1, descending=True, stable=True)
    words = pad(path.gather(1, order), (0, 1))[:, : int(lengths.max())]  # (B, T)
    position = torch.arange(words.shape[1], device=words.device)
    tokens = words.masked_fill(position == lengths - 1, end).masked_fill(position >= lengths, blank)

    token_of_slot = torch.minimum(begins.cumsum(1) - is_word.long(), lengths - 1)  # (B, U)
    return Collapsed(tokens, lengths.squeeze(1), token_of_slot)
