"""What CTC and DAG share: slots instead of a predicted length, a loss that sums over paths, and glancing.

B batch, S source, T target, k target rows per source row, U slots, V vocabulary, A tokens of a path's states, N
sentences of a chunk.

The decoder has `upsampling` slots per source token, and the words of a target are predicted at slots along a path. The
probability of a target is the sum over all of its paths. `</s>` is in no path, because the end of a path is the end of
the target.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

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
from .stacks import check_rows


@strict
class SlotConfig(NarConfig):
    """Hyperparameters of models with slots, in addition to those of `NarConfig`.

    Args:
        upsampling: number of slots per source token.
    """

    keys_to_ignore_at_inference = [*NarConfig.keys_to_ignore_at_inference, "sentence_losses"]

    upsampling: int = positive_int(default=2)


class SlotModel(EncoderDecoder):
    """Encoder and non-autoregressive decoder with a shared embedding matrix, without predictions."""

    config_class = SlotConfig
    decoder_class = NarDecoder


NO_TARGET = torch.iinfo(torch.long).max  # slots that a row without labels needs, so that it has no loss


class Words(NamedTuple):
    """The words of targets, without `</s>`."""

    tokens: Tensor  # (k B, T), blanks after the words
    counts: Tensor  # (k B,), number of words
    has_target: Tensor  # (k B,), False for rows without labels


def words_of(labels: Tensor, end_ids: list[int], blank: int) -> Words:
    """Return the words of `labels` (k B, T), -100 at padding: all tokens but the end token."""
    lengths = labels.ne(-100).sum(1, keepdim=True)  # (k B, 1)
    last = labels.gather(1, (lengths - 1).clamp(min=0))
    is_end = torch.stack([last == end for end in end_ids]).any(0)  # (k B, 1)
    counts = (lengths - is_end.long()).squeeze(1)  # (k B,)
    is_word = canvas(counts, labels.shape[1]).bool()  # (k B, T)
    return Words(labels.masked_fill(~is_word, blank), counts, lengths.squeeze(1) > 0)


class Lattice(Protocol):
    """The paths of a batch of targets. Implementations are named tuples of tensors (k B, ...)."""

    def posteriors(
        self, rows: slice, chosen: Tensor, uniform: Tensor, transitions: Tensor | None, smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the loss (N,) of targets, and the probabilities of what their paths use.

        Those are the probability (N, U, A) of each token at each slot, and, with `transitions`, that (N, U, U) of each
        transition. They are the negative derivatives of the loss, and meaningless for targets that have no path.

        Args:
            rows: the N rows of the targets.
            chosen: (N, U, A), log-probabilities of the tokens of the paths' states.
            uniform: (N, U), mean log-probability of all tokens.
            transitions: (N, U, U), log-probabilities; None for a family without them.
            smoothing: eps_ls.
        """


class FusedLinearPaths(FusedLinearCrossEntropy):
    """Summed loss over the paths of targets through the logits `hidden @ weight.T`, chunk by chunk of sentences.

    With logits z, eps = `smoothing` and the probability g_a that a slot has the token a of a path, the loss has the
    gradient g softmax(z) - (1 - eps) sum_a g_a onehot(a) - eps g / V at each slot, where g = sum_a g_a. As in
    `FusedLinearCrossEntropy`, the forward pass computes the gradients too, so that each logit is computed once.
    """

    @staticmethod
    def forward(  # ty: ignore[incompatible-method-override] - of different arguments
        hidden: Tensor,
        weight: Tensor,
        transitions: Tensor | None,
        is_counted: Tensor,
        tokens: Tensor,
        lattice: Lattice,
        smoothing: float,
        needs_grad: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the summed loss, the loss (k B,) of each target, and the sum's gradients in the first arguments.

        All are in at least float32, and only the sum is differentiable.

        Args:
            hidden: (k B, U, d_model).
            weight: (V, d_model).
            transitions: (k B, U, U), log-probabilities, or None.
            is_counted: (k B,), whether the sum includes a target.
            tokens: (k B, A), the tokens of the paths' states.
            lattice: the paths.
            smoothing: eps_ls.
            needs_grad: whether to compute each of the three gradients.
        """
        wide = accumulation_dtype(hidden.dtype)
        projection = weight.to(hidden.dtype)  # (V, d_model)
        mean_weight = weight.mean(0, dtype=wide)  # (d_model,)
        grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad[1] else None
        grad_transitions = None
        if transitions is not None and needs_grad[2]:
            grad_transitions = torch.empty_like(transitions)
        losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        size = max(1, chunk_size(hidden.device) // hidden.shape[1])
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            states = hidden[rows].flatten(0, 1)  # (N U, d_model)

            # The logits: those of the paths' tokens, and their normalization.
            logits = (states @ projection.T).to(wide)  # (N U, V)
            choices = tokens[rows, None].expand(-1, hidden.shape[1], -1)  # (N, U, A)
            chosen = logits.view(*choices.shape[:2], -1).gather(2, choices)  # (N, U, A)
            largest = logits.amax(1, keepdim=True)
            probs = logits.sub_(largest).exp_()  # in place
            total = probs.sum(1, keepdim=True)
            logsumexp = (total.log() + largest).view(choices.shape[:2])  # (N, U)

            # The loss.
            mean = (states.to(wide) @ mean_weight).view_as(logsumexp)
            losses[rows], used, moved = lattice.posteriors(
                rows,
                chosen - logsumexp[..., None],
                mean - logsumexp,
                None if transitions is None else transitions[rows],
                smoothing,
            )

            # Its gradient, where it counts.
            is_counted_row = is_counted[rows, None, None]  # (N, 1, 1)
            used = used.masked_fill(~is_counted_row, 0)  # (N, U, A)
            factors = used.sum(2).view(-1, 1)  # (N U, 1)
            gradient = probs.mul_(factors / total).scatter_add_(
                1, choices.flatten(0, 1), (smoothing - 1) * used.flatten(0, 1)
            )
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                grad_states = gradient @ projection - (smoothing * factors * mean_weight).to(hidden.dtype)
                grad_hidden[rows] = grad_states.view_as(hidden[rows])
            if grad_weight is not None:
                grad_weight += gradient.T @ states
                grad_weight -= smoothing / len(weight) * (states * factors).sum(0, dtype=wide)
            if grad_transitions is not None and moved is not None:
                grad_transitions[rows] = -moved.masked_fill(~is_counted_row, 0)
        summed = losses.masked_fill(~is_counted, 0).sum()
        return summed, losses, grad_hidden, grad_weight, grad_transitions


def summed_path_loss(
    hidden: Tensor,
    weight: Tensor,
    transitions: Tensor | None,
    fits: Tensor,
    tokens: Tensor,
    lattice: Lattice,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the loss of the targets that fit, summed in nats, and without gradient the loss (k B,) of each target.

    The logits are hidden W^T, of which there is never a (k B, U, V) tensor.

    Args:
        hidden: (k B, U, d_model), the decoder's output.
        weight: (V, d_model), the output projection.
        transitions: (k B, U, U), log-probabilities of the transitions; None for a family without them.
        fits: (k B,), which targets fit into their slots.
        tokens: (k B, A), the tokens of the paths' states.
        lattice: the paths.
        smoothing: eps_ls.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    with torch.autocast(device_type, enabled=False):
        arguments = (hidden, weight, transitions)
        needs_grad = tuple(argument is not None and argument.requires_grad for argument in arguments)
        summed, losses, *_ = FusedLinearPaths.apply(
            hidden, weight, transitions, fits, tokens, lattice, smoothing, needs_grad
        )
    return summed, losses


@dataclass
class SlotLMOutput(NarLMOutput):
    """Output of a model with slots; the field below is None without labels."""

    sentence_losses: Tensor | None = None  # (k B,), loss of each target; infinite if it does not fit


@dataclass
class SlotGenerateOutput(NarGenerateOutput):
    """Result of `generate(return_dict_in_generate=True)`: a target per source, scored by its path's log-probability.

    The `token_scores` (B, T) add up to it: that of a word includes what is before it on the path, that of `</s>` the
    rest.
    """

    path: Tensor | None = None  # (B, U), token of each slot; `<pad>` at slots without one


@dataclass
class SlotTarget(Target):
    """A target whose loss sums over the paths that its words can take through the slots."""

    words: Words | None = field(default=None, kw_only=True)

    def predictions(self, head: Any, states: Tensor, skip_logits: bool | None) -> dict[str, Tensor | None]:
        predictions: dict[str, Tensor | None] = {**self.outputs}
        skips_logits = head.training if skip_logits is None else skip_logits
        if self.words is None or not skips_logits:
            predictions["logits"] = head.lm_head(states)  # (k B, U, V)
        if self.labels is None or self.words is None:
            return predictions
        fits = head.fits(self.words, self.mask)  # (k B,)
        logits = predictions.get("logits")
        summed, losses = head.summed_losses(states, logits, self.mask, self.words, fits)  # (), (k B,)
        counted = self.labels.masked_fill(~fits[:, None].to(self.labels.device), -100)
        loss = reduce_loss(summed, counted, self.num_items)
        predictions.update(loss=loss, token_loss=loss, sentence_losses=losses.masked_fill(~fits, torch.inf))
        return predictions


class SlotHead(NarHead):
    """Base class of heads with slots, whose number depends on the source alone.

    `logits` (k B, U, V) are those of the slots; `decoder_attention_mask` is read only as the mask of
    `decoder_inputs_embeds`. In evaluation mode the `loss` is the negative log-likelihood of the targets per token,
    counting `</s>`. Targets that do not fit into their slots have no loss.

    `forward` also takes `glancing_draws` (k B, U), uniform on [0, 1), that determine the slots shown by glancing.

    Attributes:
        glancing_ratio: rho, as in NAT; glancing shows tokens of the best path at some slots.
    """

    output_class = SlotLMOutput
    has_likelihood = True
    further_arguments = ("glancing_draws",)
    glancing_ratio: float = 0.0

    def __init__(self, config: SlotConfig) -> None:
        super().__init__(config)
        self.blank = config.token_id("pad_token_id")
        self.end_ids = config.end_token_ids
        if not self.end_ids or self.blank in self.end_ids:
            raise ValueError(
                "eos_token_id: slots need an end token that is not <pad>, the token of an empty slot; got "
                f"{config.eos_token_id}, and {self.blank} as pad_token_id. Set a different one."
            )

    def needed_slots(self, words: Words) -> Tensor:
        """Return the number (k B,) of slots without which the words have no path."""
        raise NotImplementedError

    def summed_losses(
        self, states: Tensor, logits: Tensor | None, mask: Tensor, words: Words, fits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the targets that fit, and the loss (k B,) of each target.

        Without `logits` (k B, U, V), those of `states` (k B, U, d_model) exist for one chunk at a time, to save memory.
        """
        raise NotImplementedError

    def best_paths(self, states: Tensor, mask: Tensor, words: Words) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each slot (k B, U) the most likely token, that of the best path of the words, and if it has one.

        `states` (k B, U, d_model) are the decoder's.
        """
        raise NotImplementedError

    def fits(self, words: Words, mask: Tensor) -> Tensor:
        """Return which targets (k B,) fit into their slots of `mask` (k B, U)."""
        needed = self.needed_slots(words).masked_fill(~words.has_target, NO_TARGET)
        return needed <= mask.sum(1)

    def slot_mask(self, source: EncodedSource) -> Tensor:
        """Return the mask (B, U) of the slots."""
        counts = self.config.upsampling * source.lengths  # (B,)
        width = self.config.upsampling * source.memory.shape[1]
        if self.config.position_embedding == "learned":
            width = min(width, self.config.max_position_embeddings)
        return canvas(counts, width)

    def slot_states(self, source: EncodedSource, mask: Tensor) -> Tensor:
        """Return the decoder's states (B, U, d_model) of the slots of `mask` (B, U)."""
        inputs_embeds = soft_copy(source.memory, source.is_real, mask)
        return self.model.decoder.run(source, mask, inputs_embeds=inputs_embeds)[0]

    def make_target(self, source: EncodedSource, inputs: TargetInputs) -> SlotTarget:
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
        target = SlotTarget(mask, labels, inputs.num_items, words=words)

        # The decoder's input.
        if inputs_embeds is None:
            inputs_embeds = soft_copy(source.memory, source.is_real, mask)  # (k B, U, d_model)
            if words is not None and self.training and self.glancing_ratio > 0:
                draws = inputs.further["glancing_draws"]
                is_shown, tokens, target.outputs["accuracy"] = self.glance(source, inputs_embeds, mask, words, draws)
                shown = self.model.decoder.embed_tokens(tokens).to(inputs_embeds.dtype)  # (k B, U, d_model)
                inputs_embeds = torch.where(is_shown.unsqueeze(-1), shown, inputs_embeds)
        target.decoder_inputs["inputs_embeds"] = inputs_embeds
        return target

    @torch.no_grad()
    def glance(
        self, source: EncodedSource, inputs_embeds: Tensor, mask: Tensor, words: Words, draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slots (k B, U) to show, the token (k B, U) of each slot, and the accuracy of the first pass.

        The tokens are those of the best path. Where the first pass differs from them at c slots, floor(rho c) of the
        slots with a token are shown.
        """
        states = self.model.decoder.run(source, mask, inputs_embeds=inputs_embeds)[0]  # (k B, U, d_model)
        predicted, tokens, has_token = self.best_paths(states, mask, words)  # (k B, U) each
        has_token = has_token & self.fits(words, mask)[:, None]
        mistakes = ((predicted != tokens) & has_token).sum(1)  # (k B,), c
        accuracy = 1 - mistakes.sum() / has_token.sum().clamp(min=1)
        if draws is not None:
            draws = draws[:, : mask.shape[1]]  # learned positions may limit the slots
        counts = (self.glancing_ratio * mistakes).floor().long()
        return choose_positions(has_token, counts, draws), tokens, accuracy

    def known_words(self, words: Words) -> Words:
        """Return the words, of which every id is in the vocabulary.

        Raises:
            IndexError: one is not; a gather on a CPU might read other memory.
        """
        ids = torch.arange(self.config.vocab_size, device=words.tokens.device)
        tokens = ids.index_select(0, words.tokens.flatten()).view_as(words.tokens)
        return Words(tokens, words.counts, words.has_target)

    def slot_logits(self, states: Tensor, mask: Tensor, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the logits (N, U, V) of chunks of sentences, the most likely tokens (N, U), and the logits of `tokens`.

        Args:
            states: (k B, U, d_model).
            mask: (k B, U).
            tokens: (k B, A), the tokens whose logits (N, U, A) are yielded for each slot of a row.
        """
        size = max(1, chunk_size(mask.device) // mask.shape[1])
        for states_of_chunk, tokens_of_chunk in zip(states.split(size), tokens.split(size), strict=True):
            logits = self.lm_head(states_of_chunk)  # (N, U, V)
            logits = logits.to(accumulation_dtype(logits.dtype))
            predicted = argmax(logits.flatten(0, 1)).view(logits.shape[:2])
            choices = tokens_of_chunk[:, None].expand(-1, logits.shape[1], -1)  # (N, U, A)
            yield logits, predicted, logits.gather(2, choices)
