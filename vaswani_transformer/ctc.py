"""CTC, which predicts all words in one pass without predicting a length (Libovický and Helcl 2018, Gu and Kong 2021).

B batch, S source, T target, k target rows per source row, U slots, V vocabulary, N sentences of a chunk, A = 2 T + 1
states of an alignment (a blank, then each word followed by a blank).

The decoder is the paper's without the causal mask. It has `upsampling` slots per source token and predicts a word or
the blank, `<pad>`, at each. Such a path collapses to a target: equal neighbors become one token, then the blanks are
removed, so a blank must separate a word from its repetition. The probability of a target is the sum over the paths that
collapse to it (Graves et al. 2006). `</s>` is in no path, because the end of the path is the end of the target.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad
from transformers.generation import GenerationConfig, GenerationMixin

from .config import positive_int
from .loss import accumulation_dtype
from .nar import NarGenerateOutput
from .nar_decoder import canvas
from .prefix_search import BEST_TOKENS, prefix_beam_search
from .search import report_nan
from .settings import NarSettings, refuse
from .slots import SlotConfig, SlotGenerateOutput, SlotHead, SlotModel, Words, summed_path_loss


@strict
class VaswaniCtcConfig(SlotConfig):
    """Hyperparameters of CTC; `label_smoothing` applies to each slot.

    Args:
        upsampling: number of slots per source token. They must suffice for the words of a target and a blank between
            equal neighbors.
    """

    model_type = "vaswani_ctc"

    upsampling: int = positive_int(default=2)


class VaswaniCtcModel(SlotModel):
    """Encoder and non-autoregressive decoder with a shared embedding matrix, without predictions."""

    config_class = VaswaniCtcConfig


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

    The loop over slots takes little of the decoder's time. A parallel scan would avoid it, but multiplies U matrices
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


def target_log_probs(log_probs: Tensor, slots: Tensor, words: Words, blank: int) -> Tensor:
    """Return log p (k B,) of k targets of each source, the sum over all alignments.

    Args:
        log_probs: (B, U, V), of all tokens at each slot.
        slots: (B,), number of slots.
        words: the words of k B targets, those of a source in adjacent rows.
        blank: the blank.
    """
    tokens = state_tokens(words, blank)  # (k B, A)
    k = len(tokens) // len(log_probs)
    width = log_probs.shape[1]
    tokens_of_source = tokens.unflatten(0, (-1, k)).flatten(1)  # (B, k A)
    chosen = log_probs.gather(2, tokens_of_source[:, None].expand(-1, width, -1))  # (B, U, k A)
    by_target = chosen.unflatten(2, (k, -1)).transpose(1, 2).flatten(0, 1)  # (k B, U, A)
    log_p, _ = state_posteriors(by_target, skippable(tokens), slots.repeat_interleave(k), words.counts)
    return log_p


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


class Alignments(NamedTuple):
    """The alignments of a batch of targets, as a `Lattice`."""

    may_skip: Tensor  # (k B, A), those of `skippable`
    slots: Tensor  # (k B,), number of slots
    counts: Tensor  # (k B,), number of words

    def posteriors(
        self, rows: slice, chosen: Tensor, uniform: Tensor, transitions: Tensor | None, smoothing: float
    ) -> tuple[Tensor, Tensor, None]:
        """Return the loss (N,), smoothed at each slot, and the probability (N, U, A) of each state at each slot."""
        slots = self.slots[rows]
        log_p, states = state_posteriors(chosen, self.may_skip[rows], slots, self.counts[rows])
        is_slot = canvas(slots, chosen.shape[1])  # (N, U)
        return -(1 - smoothing) * log_p - smoothing * (uniform * is_slot).sum(1), states, None


@dataclass
class CtcGenerateOutput(SlotGenerateOutput):
    """Result of `generate(return_dict_in_generate=True)`: a target per source, scored by its path's log-probability.

    The `token_scores` (B, T) add up to it: that of a word includes the blanks before it, that of `</s>` the rest. With
    `num_beams` above 1 a source has n targets, scored by their log-probability, the sum over all alignments, plus
    `length_bonus` a token; then there are neither token scores nor a path.
    """


class VaswaniCtcForConditionalGeneration(SlotHead, GenerationMixin):
    """CTC, with `generate()` in one pass: the most likely token of each slot, collapsed, or a search (`num_beams`).

    Glancing shows tokens of the best alignment, which may be blanks.
    """

    config_class = VaswaniCtcConfig
    body_class = VaswaniCtcModel
    unmixed = "lm_head|table"
    family_settings = ("num_beams", "length_bonus", "num_return_sequences")

    def __init__(self, config: VaswaniCtcConfig) -> None:
        super().__init__(config)
        self.post_init()

    def needed_slots(self, words: Words) -> Tensor:
        """Return the number (k B,) of words, and of the blanks between equal neighbors."""
        is_word = canvas(words.counts, words.tokens.shape[1]).bool()  # (k B, T)
        is_repetition = (words.tokens[:, 1:] == words.tokens[:, :-1]) & is_word[:, 1:]
        return words.counts + is_repetition.sum(1)

    @torch.compiler.disable  # a graph cannot contain torch's ctc_loss
    def summed_losses(
        self, states: Tensor, logits: Tensor | None, mask: Tensor, words: Words, fits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the targets that fit, and the loss (k B,) of each target.

        Without `logits` (k B, U, V), those of `states` (k B, U, d_model) exist for one chunk at a time, to save memory.
        """
        words = self.known_words(words)
        if logits is None and self.has_plain_projection:
            tokens = state_tokens(words, self.blank)  # (k B, A)
            alignments = Alignments(skippable(tokens), mask.sum(1), words.counts)
            return summed_path_loss(states, self.lm_head.weight, None, fits, tokens, alignments, self.smoothing)
        losses = self.sentence_losses(self.lm_head(states) if logits is None else logits, mask, words)
        return (losses * fits).sum(), losses

    def sentence_losses(self, logits: Tensor, mask: Tensor, words: Words) -> Tensor:
        """Return -log p (k B,) of each target from logits (k B, U, V), label-smoothed in training mode."""
        slots, counts = torch.stack([mask.sum(1), words.counts]).cpu()  # one synchronization
        log_probs = logits.to(accumulation_dtype(logits.dtype)).log_softmax(-1)
        by_slot = log_probs.transpose(0, 1)  # (U, k B, V)
        losses = functional.ctc_loss(
            by_slot, words.tokens, slots, counts, self.blank, reduction="none", zero_infinity=True
        )  # (k B,)
        if self.smoothing == 0:
            return losses
        uniform = -(log_probs.mean(-1) * mask).sum(1)  # (k B,)
        return (1 - self.smoothing) * losses + self.smoothing * uniform

    def best_paths(self, states: Tensor, mask: Tensor, words: Words) -> tuple[Tensor, Tensor, Tensor]:
        """Return the most likely token of each slot, that of the best alignment, and the slots (k B, U)."""
        tokens = state_tokens(words, self.blank)  # (k B, A)
        chunks = [(predicted, scores) for _, predicted, scores in self.slot_logits(states, mask, tokens)]
        predicted, scores = map(torch.cat, zip(*chunks, strict=True))  # (k B, U), (k B, U, A)
        aligned = best_alignment(scores, tokens, mask.sum(1), words.counts)  # (k B, U)
        return predicted, aligned, mask.bool()

    def read_settings(self, generation_config: GenerationConfig | None, call: dict[str, Any]) -> NarSettings:
        """Return the settings of `generate()`, which may predict the blank."""
        settings = super().read_settings(generation_config, call)
        if settings.num_beams == 1 and "num_beams" in call and "length_bonus" not in call:
            settings.length_bonus = 0.0  # a saved one is for the saved search
        if settings.num_beams == 1 and settings.length_bonus != 0:
            refuse("length_bonus", "the most likely path has none", settings.length_bonus, "0, or num_beams above 1")
        if settings.num_return_sequences > settings.num_beams:
            limit = f"at most {settings.num_beams}, the num_beams"
            refuse("num_return_sequences", "more than the search finds", settings.num_return_sequences, limit)
        settings.suppress_tokens = [token for token in settings.suppress_tokens or () if token != self.blank]
        return settings

    def decode(
        self, states: Tensor, attention_mask: Tensor | None, settings: NarSettings
    ) -> Tensor | NarGenerateOutput:
        """Return the targets of the most likely paths, or with `num_beams` above 1 the most likely targets.

        Words of a path beyond a length limit are dropped; a search finds only targets within it.
        """
        source = self.read_source(states, attention_mask)
        limits = self.length_limits(source, settings)  # (B,)
        mask = self.slot_mask(source)  # (B, U)
        states = self.slot_states(source, mask)
        if settings.num_beams > 1:
            return self.search(states, mask, limits, settings)

        # The most likely path.
        is_slot = mask.bool()
        is_end = torch.zeros_like(is_slot)  # no slot has to be an end token
        path, log_probs = self.most_likely_words(
            states, is_slot, is_end, settings.suppress_tokens, settings.reads_scores
        )  # (B, U) each
        report_nan(log_probs.isnan().any(1), settings.nan_handler)
        path = path.masked_fill(~is_slot, self.blank)

        # Its target.
        tokens, lengths, token_of_slot = collapse(path, self.blank, self.end_ids[0], limits)
        sequences = pad(tokens, (1, 0), value=self.config.token_id("target_start_token_id"))
        if not settings.return_dict_in_generate:
            return sequences

        # A token's score adds up its slots and the blanks before it.
        token_scores = torch.zeros_like(tokens, dtype=log_probs.dtype).scatter_add(1, token_of_slot, log_probs)
        return CtcGenerateOutput(
            sequences=sequences,
            sequences_scores=log_probs.sum(1),
            token_scores=token_scores,
            lengths=lengths,
            history=sequences[None] if settings.return_history else None,
            path=path,
        )

    def search(self, states: Tensor, mask: Tensor, limits: Tensor, settings: NarSettings) -> Tensor | NarGenerateOutput:
        """Return the n best targets that `prefix_beam_search` finds in states (B, U, d_model), within `limits` (B,).

        They are ranked by log p of the loss, the sum over all alignments, plus `length_bonus` a token.
        """
        logits = self.lm_head(states)  # (B, U, V)
        log_probs = logits.to(accumulation_dtype(logits.dtype)).log_softmax(-1)
        slots = mask.sum(1)  # (B,)
        report_nan((log_probs[..., self.blank].isnan() & mask.bool()).any(1), settings.nan_handler)

        # k targets of each source; where fewer are found, empty ones of score -inf.
        k = settings.num_beams
        targets: list[tuple[int, ...]] = []
        is_missing: list[bool] = []
        for found in self.find_targets(log_probs, slots, limits, settings):
            missing = k - len(found)
            targets += [*found, *[()] * missing]
            is_missing += [False] * len(found) + [True] * missing
        counts = slots.new_tensor([len(target) for target in targets])  # (k B,)
        width = max(1, *map(len, targets))
        rows = [[*target, *[self.blank] * (width - len(target))] for target in targets]
        words = slots.new_tensor(rows)  # (k B, T)

        # Their scores. The search may have dropped some alignments, so log p is computed anew.
        log_p = target_log_probs(log_probs, slots, Words(words, counts, counts >= 0), self.blank)
        scores = log_p + settings.length_bonus * counts
        scores = scores.masked_fill(mask.new_tensor(is_missing, dtype=torch.bool), -torch.inf).view(-1, k)

        # The n best, followed by the end token and blanks.
        scores, order = scores.topk(settings.num_return_sequences, dim=1)  # (B, n)
        first_row = k * torch.arange(len(order), device=order.device)
        chosen = (order + first_row[:, None]).flatten()  # (n B,)
        lengths = counts[chosen] + 1
        tokens = pad(words[chosen], (0, 1), value=self.blank)
        tokens = tokens.scatter(1, lengths[:, None] - 1, self.end_ids[0])[:, : int(lengths.max())]
        sequences = pad(tokens, (1, 0), value=self.config.token_id("target_start_token_id"))
        if not settings.return_dict_in_generate:
            return sequences
        return CtcGenerateOutput(
            sequences=sequences,
            sequences_scores=scores.flatten(),
            lengths=lengths,
            history=sequences[None] if settings.return_history else None,
        )

    def find_targets(
        self, log_probs: Tensor, slots: Tensor, limits: Tensor, settings: NarSettings
    ) -> list[list[tuple[int, ...]]]:
        """Return at most k targets of each source, from the best words and the blank of each slot.

        Args:
            log_probs: (B, U, V).
            slots, limits: (B,), numbers of slots, and largest lengths counting `</s>`.
            settings: those of the search; k is its `num_beams`.
        """
        k = settings.num_beams
        forbidden = slots.new_tensor([self.blank, *(settings.suppress_tokens or [])])
        allowed = log_probs.index_fill(2, forbidden, -torch.inf)
        best = allowed.topk(min(max(BEST_TOKENS, k), allowed.shape[2]), dim=2)
        words = best.indices.tolist()
        probabilities = best.values.exp().tolist()
        blanks = log_probs[..., self.blank].exp().tolist()

        targets = []
        for row, (count, limit) in enumerate(zip(slots.tolist(), limits.tolist(), strict=True)):
            slots_of_row = list(zip(probabilities[row], words[row], blanks[row], strict=True))[:count]
            targets.append(prefix_beam_search(slots_of_row, k, settings.length_bonus, limit - 1))
        return targets
