"""CTC, which predicts all words in one pass without predicting a length (Libovický and Helcl 2018, Gu and Kong 2021).

B batch, S source, T target, k target rows per source row, U slots, V vocabulary, N sentences of a chunk, A = 2 T + 1
states of an alignment (a blank, then each word followed by a blank).

The decoder is the paper's without the causal mask. It has `upsampling` slots per source token and predicts a word or
the blank, `<pad>`, at each. Such a path collapses to a target: equal neighbors become one token, then the blanks are
removed, so a blank must separate a word from its repetition. The probability of a target is the sum over the paths that
collapse to it (Graves et al. 2006). `</s>` is in no path, because the end of the path is the end of the target.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad
from transformers.generation import GenerationConfig, GenerationMixin

from .config import positive_int
from .loss import FusedLinearCrossEntropy, accumulation_dtype, chunk_size, reduce_loss
from .model import EncoderDecoder
from .nar import NarConfig, NarGenerateOutput, NarHead, NarLMOutput
from .nar_decoder import (
    EncodedSource,
    NarDecoder,
    Target,
    TargetInputs,
    argmax,
    canvas,
    check_right_padded,
    choose_positions,
    input_mask,
    soft_copy,
)
from .prefix_search import BEST_TOKENS, prefix_beam_search
from .search import report_nan
from .settings import NarSettings, refuse
from .stacks import check_rows


@strict
class VaswaniCtcConfig(NarConfig):
    """Hyperparameters of CTC; `label_smoothing` applies to each slot.

    Args:
        upsampling: number of slots per source token. They must suffice for the words of a target and a blank between
            equal neighbors.
    """

    model_type = "vaswani_ctc"
    keys_to_ignore_at_inference = [*NarConfig.keys_to_ignore_at_inference, "sentence_losses"]

    upsampling: int = positive_int(default=2)


class VaswaniCtcModel(EncoderDecoder):
    """Encoder and non-autoregressive decoder with a shared embedding matrix, without predictions."""

    config_class = VaswaniCtcConfig
    decoder_class = NarDecoder


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


@dataclass
class CtcLMOutput(NarLMOutput):
    """Output of CTC; the field below is None without labels."""

    sentence_losses: Tensor | None = None  # (k B,), loss of each target; infinite if it does not fit


@dataclass
class CtcGenerateOutput(NarGenerateOutput):
    """Result of `generate(return_dict_in_generate=True)`: a target per source, scored by its path's log-probability.

    The `token_scores` (B, T) add up to it: that of a word includes the blanks before it, that of `</s>` the rest. With
    `num_beams` above 1 a source has n targets, scored by their log-probability, the sum over all alignments, plus
    `length_bonus` a word; then there are neither token scores nor a path.
    """

    path: Tensor | None = None  # (B, U), token of each slot; blank at padding


class FusedLinearCtc(FusedLinearCrossEntropy):
    """Summed CTC loss of `hidden @ weight.T`, chunk by chunk of sentences.

    With logits z, eps = `smoothing` and the probability g_a of each state at a slot, the loss has the gradient
    softmax(z) - (1 - eps) sum_a g_a onehot(token_a) - eps / V at each slot. As in `FusedLinearCrossEntropy`, the
    forward pass computes the gradients too, so that each logit is computed once.
    """

    @staticmethod
    def forward(  # ty: ignore[incompatible-method-override] - of different arguments
        hidden: Tensor,
        weight: Tensor,
        is_counted: Tensor,
        tokens: Tensor,
        counts: Tensor,
        slots: Tensor,
        smoothing: float,
        needs_grad: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the summed loss, the loss (k B,) of each target, and the sum's gradients in `hidden` and `weight`.

        All are in at least float32, and only the sum is differentiable.

        Args:
            hidden: (k B, U, d_model).
            weight: (V, d_model).
            is_counted: (k B,), whether the sum includes a target.
            tokens: (k B, A), those of `state_tokens`.
            counts, slots: (k B,), numbers of words and of slots.
            smoothing: eps_ls.
            needs_grad: whether to compute each of the two gradients.
        """
        wide = accumulation_dtype(hidden.dtype)
        projection = weight.to(hidden.dtype)  # (V, d_model)
        mean_weight = weight.mean(0, dtype=wide)  # (d_model,)
        grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad[1] else None
        is_slot = canvas(slots, hidden.shape[1]).bool()  # (k B, U)
        may_skip = skippable(tokens)
        losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        size = max(1, chunk_size(hidden.device) // hidden.shape[1])
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            states = hidden[rows].flatten(0, 1)  # (N U, d_model)

            # The logits: those of the alignments' states, and their normalization.
            logits = (states @ projection.T).to(wide)  # (N U, V)
            choices = tokens[rows, None].expand(-1, hidden.shape[1], -1)  # (N, U, A)
            chosen = logits.view(*choices.shape[:2], -1).gather(2, choices)  # (N, U, A)
            largest = logits.amax(1, keepdim=True)
            probs = logits.sub_(largest).exp_()  # in place
            total = probs.sum(1, keepdim=True)
            logsumexp = (total.log() + largest).view(choices.shape[:2])  # (N, U)

            # The loss.
            log_p, posteriors = state_posteriors(
                chosen - logsumexp[..., None], may_skip[rows], slots[rows], counts[rows]
            )  # (N,), (N, U, A)
            mean = (states.to(wide) @ mean_weight).view_as(logsumexp)
            uniform = ((logsumexp - mean) * is_slot[rows]).sum(1)
            losses[rows] = smoothing * uniform - (1 - smoothing) * log_p

            # Its gradient, where it counts.
            counted = is_slot[rows] & is_counted[rows, None]  # (N, U)
            factors = counted.view(-1, 1).to(wide)
            posteriors = posteriors.masked_fill(~counted[..., None], 0) * (smoothing - 1)
            gradient = probs.mul_(factors / total).scatter_add_(1, choices.flatten(0, 1), posteriors.flatten(0, 1))
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                grad_states = gradient @ projection - (smoothing * factors * mean_weight).to(hidden.dtype)
                grad_hidden[rows] = grad_states.view_as(hidden[rows])
            if grad_weight is not None:
                grad_weight += gradient.T @ states
                grad_weight -= smoothing / len(weight) * (states * factors).sum(0, dtype=wide)
        return (losses.masked_fill(~is_counted, 0)).sum(), losses, grad_hidden, grad_weight


def summed_ctc_loss(
    hidden: Tensor, weight: Tensor, mask: Tensor, words: Words, fits: Tensor, blank: int, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the CTC loss of the words that fit, summed in nats, and without gradient the loss (k B,) of each target.

    The logits are hidden W^T, of which there is never a (k B, U, V) tensor.

    Args:
        hidden: (k B, U, d_model), the decoder's output.
        weight: (V, d_model), the output projection.
        mask: (k B, U), nonzero at slots.
        words, fits: the targets, and which of them (k B,) fit into their slots.
        blank: id of the blank.
        smoothing: eps_ls, of each slot.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    tokens = state_tokens(words, blank)  # (k B, A)
    with torch.autocast(device_type, enabled=False):
        needs_grad = hidden.requires_grad, weight.requires_grad
        summed, losses, *_ = FusedLinearCtc.apply(
            hidden, weight, fits, tokens, words.counts, mask.sum(1), smoothing, needs_grad
        )
    return summed, losses


@dataclass
class CtcTarget(Target):
    """A target of CTC, whose loss sums over the paths that collapse to its words."""

    words: Words | None = field(default=None, kw_only=True)

    def predictions(self, head: Any, states: Tensor, skip_logits: bool | None) -> dict[str, Tensor | None]:
        predictions: dict[str, Tensor | None] = {**self.outputs}
        skips_logits = head.training if skip_logits is None else skip_logits
        if self.words is None or not skips_logits:
            predictions["logits"] = head.lm_head(states)  # (k B, U, V)
        if self.labels is None or self.words is None:
            return predictions
        fits = self.words.needed_slots <= self.mask.sum(1)  # (k B,)
        logits = predictions.get("logits")
        summed, losses = head.summed_losses(states, logits, self.mask, self.words, fits)  # (), (k B,)
        counted = self.labels.masked_fill(~fits[:, None].to(self.labels.device), -100)
        loss = reduce_loss(summed, counted, self.num_items)
        predictions.update(loss=loss, token_loss=loss, sentence_losses=losses.masked_fill(~fits, torch.inf))
        return predictions


class VaswaniCtcForConditionalGeneration(NarHead, GenerationMixin):
    """CTC, with `generate()` in one pass: the most likely token of each slot, collapsed, or a search (`num_beams`).

    `logits` (k B, U, V) are those of the slots, whose number depends on the source alone; `decoder_attention_mask` is
    read only as the mask of `decoder_inputs_embeds`. In evaluation mode the `loss` is the negative log-likelihood of
    the targets per token, counting `</s>`. Targets that do not fit into their slots have no loss.

    `forward` also takes `glancing_draws` (k B, U), uniform on [0, 1), that determine the slots shown by glancing.

    Attributes:
        glancing_ratio: rho, as in NAT; glancing shows tokens of the best alignment at some slots.
    """

    config_class = VaswaniCtcConfig
    body_class = VaswaniCtcModel
    output_class = CtcLMOutput
    has_likelihood = True
    further_arguments = ("glancing_draws",)
    unmixed = "lm_head|table"
    family_settings = ("num_beams", "length_bonus", "num_return_sequences")
    glancing_ratio: float = 0.0

    def __init__(self, config: VaswaniCtcConfig) -> None:
        super().__init__(config)
        self.blank = config.token_id("pad_token_id")
        self.end_ids = config.end_token_ids
        if not self.end_ids or self.blank in self.end_ids:
            raise ValueError(
                f"eos_token_id: CTC needs an end token that is not <pad>, its blank; got {config.eos_token_id}, and "
                f"{self.blank} as pad_token_id. Set a different one."
            )
        self.post_init()

    def slot_mask(self, source: EncodedSource) -> Tensor:
        """Return the mask (B, U) of the slots."""
        counts = self.config.upsampling * source.lengths  # (B,)
        width = self.config.upsampling * source.memory.shape[1]
        if self.config.position_embedding == "learned":
            width = min(width, self.config.max_position_embeddings)
        return canvas(counts, width)

    def make_target(self, source: EncodedSource, inputs: TargetInputs) -> "CtcTarget":
        """Return the slots of each target with its words, and the soft copy, of which glancing replaces some slots."""
        # The slots of each target, and its words.
        inputs_embeds = inputs.inputs_embeds
        mask = None
        if inputs_embeds is not None:
            mask = input_mask(source, inputs.attention_mask, inputs_embeds)  # (k B, U)
        if mask is None:
            mask = self.slot_mask(source)  # (B, U)
        labels = inputs.labels
        words = None
        if labels is not None:
            check_right_padded(labels)
            check_rows(len(labels), len(source.memory))
            mask = mask.repeat_interleave(len(labels) // len(mask), dim=0)  # (k B, U)
            words = words_of(labels.to(source.memory.device), self.end_ids, self.blank)
        target = CtcTarget(mask, labels, inputs.num_items, words=words)

        # The decoder's input.
        if inputs_embeds is None:
            inputs_embeds = soft_copy(source.memory, source.is_real, mask)  # (k B, U, d_model)
            if words is not None and self.training and self.glancing_ratio > 0:
                draws = inputs.further["glancing_draws"]
                is_shown, aligned, target.outputs["accuracy"] = self.glance(source, inputs_embeds, mask, words, draws)
                shown = self.model.decoder.embed_tokens(aligned).to(inputs_embeds.dtype)  # (k B, U, d_model)
                inputs_embeds = torch.where(is_shown.unsqueeze(-1), shown, inputs_embeds)
        target.decoder_inputs["inputs_embeds"] = inputs_embeds
        return target

    def in_chunks(self, mask: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the rows of `tensors` (k B, ...) in chunks of sentences with logits that fit into memory at once."""
        size = max(1, chunk_size(mask.device) // mask.shape[1])
        return zip(*(tensor.split(size) for tensor in tensors), strict=True)

    @torch.compiler.disable  # a graph cannot contain torch's ctc_loss
    def summed_losses(
        self, states: Tensor, logits: Tensor | None, mask: Tensor, words: Words, fits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the targets that fit, and the loss (k B,) of each target.

        Without `logits` (k B, U, V), those of `states` (k B, U, d_model) exist for one chunk at a time, to save memory.
        """
        ids = torch.arange(self.config.vocab_size, device=mask.device)
        tokens = ids.index_select(0, words.tokens.flatten()).view_as(words.tokens)  # raises for an id out of range
        words = Words(tokens, words.counts, words.needed_slots)
        if logits is None and self.has_plain_projection:
            return summed_ctc_loss(states, self.lm_head.weight, mask, words, fits, self.blank, self.smoothing)
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

    @torch.no_grad()
    def glance(
        self, source: EncodedSource, inputs_embeds: Tensor, mask: Tensor, words: Words, draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slots (k B, U) to show, the token (k B, U) of each slot, and the accuracy of the first pass.

        The tokens are those of the best alignment, which may be blanks. Where the first pass differs from them at c
        slots, floor(rho c) of all slots are shown.
        """
        # The first pass: its most likely tokens, and the scores of the tokens of an alignment's states.
        states = self.model.decoder.run(source, mask, inputs_embeds=inputs_embeds)[0]  # (k B, U, d_model)
        tokens = state_tokens(words, self.blank)  # (k B, A)
        predicted_chunks = []
        score_chunks = []
        for states_of_chunk, tokens_of_chunk in self.in_chunks(mask, states, tokens):
            logits = self.lm_head(states_of_chunk)  # (N, U, V)
            predicted_chunks.append(argmax(logits.flatten(0, 1)).view(logits.shape[:2]))
            choices = tokens_of_chunk[:, None].expand(-1, logits.shape[1], -1)  # (N, U, A)
            score_chunks.append(logits.gather(2, choices).to(accumulation_dtype(logits.dtype)))
        predicted = torch.cat(predicted_chunks)  # (k B, U)
        scores = torch.cat(score_chunks)  # (k B, U, A)

        # Where it differs from the best alignment.
        slots = mask.sum(1)  # (k B,)
        aligned = best_alignment(scores, tokens, slots, words.counts)  # (k B, U)
        is_slot = mask.bool()
        fits = words.needed_slots <= slots
        mistakes = ((predicted != aligned) & is_slot).sum(1) * fits  # (k B,), c
        accuracy = 1 - mistakes.sum() / (slots * fits).sum().clamp(min=1)

        # The tokens to show.
        if draws is not None:
            draws = draws[:, : mask.shape[1]]  # learned positions may limit the slots
        counts = (self.glancing_ratio * mistakes).floor().long()
        return choose_positions(is_slot, counts, draws), aligned, accuracy

    def read_settings(self, generation_config: GenerationConfig | None, call: dict[str, Any]) -> NarSettings:
        """Return the settings of `generate()`, which may predict the blank."""
        settings = super().read_settings(generation_config, call)
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
        # The most likely path.
        source = self.read_source(states, attention_mask)
        mask = self.slot_mask(source)  # (B, U)
        states = self.model.decoder.run(source, mask, inputs_embeds=soft_copy(states, source.is_real, mask))[0]
        if settings.num_beams > 1:
            return self.search(states, mask, self.length_limits(source, settings), settings)
        is_slot = mask.bool()
        is_end = torch.zeros_like(is_slot)  # no slot has to be an end token
        path, log_probs = self.most_likely_words(
            states, is_slot, is_end, settings.suppress_tokens, settings.reads_scores
        )  # (B, U) each
        report_nan(log_probs.isnan().any(1), settings.nan_handler)
        path = path.masked_fill(~is_slot, self.blank)

        # Its target.
        limits = self.length_limits(source, settings)  # (B,)
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

        They are ranked by log p of the loss, the sum over all alignments, plus `length_bonus` a word.
        """
        logits = self.lm_head(states)  # (B, U, V)
        log_probs = logits.to(accumulation_dtype(logits.dtype)).log_softmax(-1)
        slots = mask.sum(1)  # (B,)
        report_nan((log_probs[..., self.blank].isnan() & mask.bool()).any(1), settings.nan_handler)

        # The best words of each slot, and k targets of each source; if fewer are found, empty ones of score -inf.
        k = settings.num_beams
        forbidden = slots.new_tensor([self.blank, *(settings.suppress_tokens or [])])
        best = log_probs.index_fill(2, forbidden, -torch.inf).topk(min(max(BEST_TOKENS, k), logits.shape[2]), dim=2)
        columns = (best.values.exp().tolist(), best.indices.tolist(), log_probs[..., self.blank].exp().tolist())
        targets: list[tuple[int, ...]] = []
        is_found: list[bool] = []
        for *columns_of_row, count, limit in zip(*columns, slots.tolist(), limits.tolist(), strict=True):
            slots_of_row = list(zip(*columns_of_row, strict=True))[:count]
            found = prefix_beam_search(slots_of_row, k, settings.length_bonus, limit - 1)
            targets += [*found, *[()] * (k - len(found))]
            is_found += [place < len(found) for place in range(k)]

        # Their exact log-probabilities; the search may have dropped some alignments.
        counts = slots.new_tensor([len(target) for target in targets])  # (k B,)
        width = max(map(len, targets))
        words = slots.new_tensor([[*target, *[self.blank] * (width - len(target))] for target in targets])  # (k B, T)
        tokens = state_tokens(Words(words, counts, counts), self.blank)  # (k B, A)
        choices = tokens.unflatten(0, (-1, k)).flatten(1)[:, None].expand(-1, log_probs.shape[1], -1)  # (B, U, k A)
        chosen = log_probs.gather(2, choices).unflatten(2, (k, -1)).transpose(1, 2).flatten(0, 1)  # (k B, U, A)
        log_p, _ = state_posteriors(chosen, skippable(tokens), slots.repeat_interleave(k), counts)
        scores = log_p + settings.length_bonus * counts
        scores = scores.masked_fill(~mask.new_tensor(is_found, dtype=torch.bool), -torch.inf).view(-1, k)

        # The n best, followed by the end token and blanks.
        scores, order = scores.topk(settings.num_return_sequences, dim=1)  # (B, n)
        rows = (order + k * torch.arange(len(order), device=order.device)[:, None]).flatten()  # (n B,)
        lengths = counts[rows] + 1
        sequences = pad(words[rows], (0, 1), value=self.blank).scatter(1, lengths[:, None] - 1, self.end_ids[0])
        sequences = pad(sequences[:, : int(lengths.max())], (1, 0), value=self.config.token_id("target_start_token_id"))
        if not settings.return_dict_in_generate:
            return sequences
        history = sequences[None] if settings.return_history else None
        return CtcGenerateOutput(
            sequences=sequences, sequences_scores=scores.flatten(), lengths=lengths, history=history
        )
