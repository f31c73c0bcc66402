"""The length beam: how models that predict a length decode targets of several lengths and choose among them.

B batch, S source, T target, k target rows per source row, C length classes, l lengths of a length beam, n targets
returned per source, V vocabulary, R iterations or refining layers. For lengths, n and m are the numbers of source and
target tokens, both including `</s>`.
"""

from dataclasses import replace
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.generation import GenerationConfig

from .config import loss_weight
from .nar import NarConfig, NarGenerateOutput, NarHead, NarTargets
from .nar_decoder import EncodedSource, MeasuredSource, canvas
from .search import report_nan
from .settings import NarSettings, refuse


@strict
class LengthConfig(NarConfig):
    """Hyperparameters of every model that predicts a length, in addition to those of `NarConfig`.

    Args:
        length_loss_weight: weight of the length's cross-entropy relative to that of a token.
    """

    length_loss_weight: float | int = loss_weight(default=1.0)


class LengthHead(NarHead):
    """Base class of heads that predict a length, and then the words of a target of that length."""

    family_settings: tuple[str, ...] = ("length_beam_size", "length_penalty", "length_weight", "num_return_sequences")

    def read_source(self, states: Tensor, attention_mask: Tensor | None) -> MeasuredSource:
        """Return the encoded source with its length prediction."""
        raise NotImplementedError

    def decode_targets(self, source: MeasuredSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,)."""
        raise NotImplementedError

    @property
    def longest_target(self) -> int | None:
        """The largest target length that the learned positions allow; None with other positions."""
        config = self.config
        return config.max_position_embeddings if config.position_embedding == "learned" else None

    def is_allowed(self, source: MeasuredSource, limits: Tensor | None = None) -> Tensor:
        """Return whether each length class (B, C) is a length from 1 to `limits` (B,)."""
        classes = torch.arange(source.length_logits.shape[1], device=source.memory.device)
        lengths = source.first_length[:, None] + classes  # (B, C)
        is_allowed = lengths >= 1
        if limits is not None:
            is_allowed = is_allowed & (lengths <= limits[:, None])
        return is_allowed

    def best_lengths(self, source: MeasuredSource, count: int) -> Tensor:
        """Return the `count` most likely target lengths (B, l) of each source, best first.

        Impossible ones are the nearest possible one: 1, or the number of learned positions.
        """
        longest = self.longest_target
        limits = None if longest is None else torch.full_like(source.first_length, longest)  # (B,)
        logits = source.length_logits.masked_fill(~self.is_allowed(source, limits), float("-inf"))
        classes = logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
        return (source.first_length[:, None] + classes).clamp(min=1, max=longest)

    def read_settings(self, generation_config: GenerationConfig | None, call: dict[str, Any]) -> NarSettings:
        """Return the settings of every model, after checking the number of lengths, samples and returned targets."""
        settings = super().read_settings(generation_config, call)
        largest = {"length_beam_size": (self.num_length_classes, "the model's length classes")}
        if settings.latent_temperature == 0:
            largest["num_latent_samples"] = (1, "since at latent_temperature 0 all samples are the same")
        candidates = settings.length_beam_size * settings.num_latent_samples
        largest["num_return_sequences"] = (candidates, "length_beam_size times num_latent_samples")
        for name, (limit, reason) in largest.items():
            value = getattr(settings, name)
            if value > limit:
                refuse(name, "out of range", value, f"at most {limit}, {reason}")
        return settings

    def decode(
        self, states: Tensor, attention_mask: Tensor | None, settings: NarSettings
    ) -> Tensor | NarGenerateOutput:
        """Predict targets of the most likely lengths, and return the best of them."""
        source = self.read_source(states, attention_mask)
        lengths, is_candidate = self.choose_lengths(source, settings)  # (B, l) each
        targets = self.decode_targets(source, lengths.flatten(), settings)
        return self.choose_targets(source, targets, lengths, is_candidate, settings)

    def length_limits(self, source: EncodedSource, settings: NarSettings) -> Tensor:
        """Return the largest target length (B,) of each source by the settings and the positions."""
        limits = super().length_limits(source, settings)
        return limits if self.longest_target is None else limits.clamp(max=self.longest_target)

    def choose_lengths(self, source: MeasuredSource, settings: NarSettings) -> tuple[Tensor, Tensor]:
        """Return the target lengths (B, l) to decode for each sample, and whether each is a candidate (B, l).

        They are the most likely lengths within the limits, or the limit if no class is. A source with fewer of them
        than others has repetitions, which are not candidates.

        Raises:
            ValueError: a source has fewer candidates than targets to return.
        """
        # The most likely lengths within the limits.
        limits = self.length_limits(source, settings)  # (B,)
        is_allowed = self.is_allowed(source, limits)  # (B, C)
        logits = source.length_logits.masked_fill(~is_allowed, float("-inf"))
        lengths = self.best_lengths(replace(source, length_logits=logits), settings.length_beam_size)  # (B, l)
        lengths = torch.minimum(lengths, limits[:, None])

        # Some sources have fewer possible lengths than others; reading their number synchronizes.
        samples = settings.num_latent_samples
        counts = is_allowed.sum(1).clamp(1, lengths.shape[1])  # (B,)
        if settings.num_return_sequences > 1:
            fewest = int(counts.min()) * samples
            if settings.num_return_sequences > fewest:
                expected = f"at most {fewest}, the candidates of the source with the fewest possible lengths"
                refuse("num_return_sequences", "out of range", settings.num_return_sequences, expected)
        is_candidate = torch.arange(lengths.shape[1], device=lengths.device) < counts[:, None]  # (B, l)
        return lengths.repeat_interleave(samples, dim=1), is_candidate.repeat_interleave(samples, dim=1)

    def read_words(
        self, states: Tensor, lengths: Tensor, is_predicted: Tensor, suppress_tokens: list[int] | None, has_scores: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `most_likely_words` (l B, T), with the end token last at each of `lengths` (l B,)."""
        is_last = torch.arange(is_predicted.shape[1], device=lengths.device) == lengths[:, None] - 1  # (l B, T)
        return self.most_likely_words(states, is_predicted, is_last, suppress_tokens, has_scores)

    def target_scores(
        self, source: MeasuredSource, targets: NarTargets, lengths: Tensor, settings: NarSettings
    ) -> Tensor:
        """Return the scores (B, l) by which `NarSettings` ranks the targets of `lengths` (B, l)."""
        scores = targets.log_likelihoods  # (l B,)
        if scores is None:
            scores = targets.log_probs.sum(1)
        classes = source.length_classes(lengths.flatten()).view_as(lengths)
        log_lengths = source.length_logits.to(scores.dtype).log_softmax(-1).gather(1, classes)  # (B, l)
        scores = scores.view_as(lengths) + settings.length_weight * log_lengths
        return scores / lengths.to(scores.dtype) ** settings.length_penalty

    def choose_targets(
        self,
        source: MeasuredSource,
        targets: NarTargets,
        lengths: Tensor,
        is_candidate: Tensor,
        settings: NarSettings,
    ) -> Tensor | NarGenerateOutput:
        """Return the n best of the targets of `lengths` (B, l) for each source, where `is_candidate` (B, l)."""
        # The scores of all candidates.
        scores = self.target_scores(source, targets, lengths, settings)  # (B, l)
        report_nan(scores.isnan().any(1), settings.nan_handler)
        scores = scores.masked_fill(~is_candidate, float("-inf"))

        # The n best, as rows of l B.
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores = scores[:, : settings.num_return_sequences]  # (B, n)
        order = order[:, : settings.num_return_sequences]
        first_rows = torch.arange(len(lengths), device=order.device)[:, None] * lengths.shape[1]  # (B, 1)
        rows = (first_rows + order).flatten()  # (n B,)
        lengths = lengths.flatten()[rows]  # (n B,)
        is_real = canvas(lengths).bool()  # (n B, T)

        # Their tokens, and on request what led to them.
        start = self.config.token_id("target_start_token_id")
        pad = self.config.token_id("pad_token_id")

        def sequences(tokens: Tensor) -> Tensor:
            kept = tokens[rows, : is_real.shape[1]].masked_fill(~is_real, pad)  # (n B, T)
            return nn.functional.pad(kept, (1, 0), value=start)  # (n B, T + 1)

        if not settings.return_dict_in_generate:
            return sequences(targets.tokens)
        history = None
        committed = None
        if settings.return_history:
            history = torch.stack([sequences(tokens) for tokens in targets.history])
            if targets.committed is not None:
                committed = torch.stack([is_final[rows, : is_real.shape[1]] for is_final in targets.committed])
        return NarGenerateOutput(
            sequences=sequences(targets.tokens),
            sequences_scores=scores.flatten(),
            token_scores=targets.log_probs[rows, : is_real.shape[1]],
            lengths=lengths,
            history=history,
            committed=committed,
        )
