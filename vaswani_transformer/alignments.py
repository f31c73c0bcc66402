"""The words of CTC targets, and their best alignments to the slots of a source.

B batch, k target rows per source row, T target, U slots, A = 2 T + 1 states of an alignment: a blank, then each word
followed by a blank.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

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
        moved_by_one = functional.pad(totals[:, :-1], (1, 0), value=-torch.inf)
        moved_by_two = functional.pad(totals[:, :-2], (2, 0), value=-torch.inf).masked_fill(~may_skip, -torch.inf)
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
