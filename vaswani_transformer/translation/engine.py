"""Engines that find translations: the protocol, and `generate()` of Transformers.

B texts of a batch, S source, T target, n translations of a text, R hypotheses: n B.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from ..config import as_token_ids
from ..generation import CallSettings, default_limit
from ..search import length_penalty
from ..support.modes import eval_mode, is_non_autoregressive

DEFAULT_MAX_SOURCE_TOKENS = 1024  # of a text, if the model has positions without end
SCORING_TOKENS = 2048  # target tokens that are scored at once, each with a number for every vocabulary entry

ScoredTokens = tuple[list[int], float | None]

Constraint = Callable[[list[str], Tensor], LogitsProcessor]
"""A function of the texts of a batch, and of the new tokens that each target may have (B,), which makes the processor
that excludes tokens from the search."""


class DecodingEngine(Protocol):
    """An engine that finds translations; `Translator` takes any callable with these attributes."""

    num_translations: int
    """n, the translations of each text."""
    scores: bool
    """True if hypotheses have scores."""

    @property
    def search(self) -> dict[str, Any]:
        """The complete search, for records."""
        ...

    def __call__(self, sources: list[list[int]]) -> list[list[ScoredTokens]]:
        """Return, for each text of a batch of token lists, the new tokens and scores of its n best hypotheses."""
        ...


@torch.no_grad()
def log_probabilities(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    decoder_input_ids: Tensor | None = None,
) -> Tensor:
    """Return log P(Y | X) in nats of each target (R,), a sum over its tokens, `</s>` included.

    Args:
        model: any encoder-decoder of Transformers, in evaluation mode.
        input_ids, attention_mask: (R, S), the sources.
        labels: (R, T), the targets with their end tokens; -100 after them.
        decoder_input_ids: (R, T), what the decoder reads; None for the labels as the model shifts them.
    """
    rows, sums = max(1, SCORING_TOKENS // labels.shape[1]), []
    for batch in (slice(start, start + rows) for start in range(0, labels.shape[0], rows)):
        gold = labels[batch]
        read = {} if decoder_input_ids is None else {"decoder_input_ids": decoder_input_ids[batch]}
        logits = model(input_ids=input_ids[batch], attention_mask=attention_mask[batch], labels=gold, **read).logits
        logits = logits.float()  # (rows, T, V)
        scores = logits.gather(-1, gold.clamp(min=0).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)  # (rows, T)
        sums.append(scores.masked_fill(gold == -100, 0.0).sum(1))
    return torch.cat(sums)


def pad_rows(rows: list[list[int]], value: int, device: torch.device) -> Tensor:
    """Return rows of unequal lengths as one tensor, padded on the right with `value`."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], device=device)


class TransformersEngine:
    """`model.generate()`, on the model's own device and in evaluation mode.

    Args:
        model: any encoder-decoder of Transformers that generates.
        pad_token_id: the token that pads the sources of a batch; the attention mask hides it.
        scores: whether to return scores, by one more pass over each hypothesis; a model that predicts all tokens at
            once has scores of its search.
        **generate_kwargs: arguments of `generate()`, which override the model's generation config. A target of a model
            of this package that neither limits has at most 50 tokens more than its source.
    """

    def __init__(self, model: PreTrainedModel, pad_token_id: int, scores: bool = False, **generate_kwargs: Any) -> None:
        self.model, self.pad_token_id, self.scores = model, pad_token_id, scores
        self.generate_kwargs = generate_kwargs | default_limit(model, **generate_kwargs)
        self.search = self.call_settings().search()
        self.num_translations = self.resolve_setting("num_return_sequences", 1)

    def call_settings(self, **more: Any) -> CallSettings:
        """Return the settings of a call of `generate()` with more of its arguments."""
        given = self.generate_kwargs | more
        return CallSettings(given.pop("generation_config", None), self.model, given)

    def resolve_setting(self, name: str, default: Any = None) -> Any:
        """Return a setting as `generate()` resolves it: the call's, or else the model's."""
        return self.call_settings().resolve(name, default)

    @torch.no_grad()
    def __call__(
        self, sources: list[list[int]], constrain: Callable[[Tensor], LogitsProcessor] | None = None
    ) -> list[list[ScoredTokens]]:
        """Return the hypotheses of a batch, by a search under the constraint of its texts if there is one."""
        tokens = pad_rows(sources, self.pad_token_id, self.model.device)  # (B, S)
        mask = pad_rows([[1] * len(source) for source in sources], 0, self.model.device)  # (B, S)
        with eval_mode(self.model):
            settings: dict[str, Any] = {}
            if constrain is not None:
                given = self.generate_kwargs.get("logits_processor") or ()
                settings["logits_processor"] = [*given, constrain(self.target_limits(mask))]
            output = self.generate(tokens, mask, **settings)
            sequences = output if isinstance(output, Tensor) else output.sequences  # (R, T + 1)
            targets = sequences[:, 1:]  # (R, T), without the start
            lengths = self.lengths(targets)
            scores: list[float | None] = [None] * len(targets)
            if self.scores and is_non_autoregressive(self.model):
                scores = output.sequences_scores.tolist()
            elif self.scores:
                scores = self.score(tokens, mask, sequences, lengths).tolist()
        ids = [row[:length] for row, length in zip(targets.tolist(), lengths.tolist(), strict=True)]
        hypotheses, count = list(zip(ids, scores, strict=True)), len(ids) // len(sources)
        return [hypotheses[start : start + count] for start in range(0, len(hypotheses), count)]

    def target_limits(self, mask: Tensor) -> Tensor:
        """Return how many new tokens each target may have (B,), for sources with this mask (B, S)."""
        return self.call_settings(attention_mask=mask).target_limits()

    def generate(self, tokens: Tensor, mask: Tensor, **more: Any) -> Any:
        """Return what `generate()` returns for sources (B, S), their mask (B, S) and more of its arguments."""
        settings = self.generate_kwargs | more
        if self.scores and is_non_autoregressive(self.model):
            settings = settings | {"return_dict_in_generate": True}
        return cast(Any, self.model).generate(input_ids=tokens, attention_mask=mask, **settings)

    def lengths(self, targets: Tensor) -> Tensor:
        """Return the tokens of each target (R, T) up to its end token or, without one, up to its padding (R,)."""
        positions = torch.arange(1, targets.shape[1] + 1, device=targets.device)
        ends = torch.tensor(as_token_ids(self.resolve_setting("eos_token_id")), dtype=torch.long, device=targets.device)
        is_end = torch.isin(targets, ends)
        to_padding = (positions * targets.ne(self.resolve_setting("pad_token_id", self.pad_token_id))).amax(1)
        return torch.where(is_end.any(1), is_end.long().argmax(1) + 1, to_padding)

    def score(self, tokens: Tensor, mask: Tensor, sequences: Tensor, lengths: Tensor) -> Tensor:
        """Return log P(Y | X) / lp(Y) of each target (R,), which `sequences` (R, T + 1) hold after the start token."""
        targets, count = sequences[:, 1:], len(sequences) // len(tokens)
        is_padding = torch.arange(targets.shape[1], device=targets.device) >= lengths[:, None]
        sources = (rows.repeat_interleave(count, dim=0) for rows in (tokens, mask))
        sums = log_probabilities(self.model, *sources, targets.masked_fill(is_padding, -100), sequences[:, :-1])
        alpha = float(self.resolve_setting("length_penalty", 1.0))  # torch raises no integer to a negative one
        return sums / length_penalty(lengths.clamp(min=1), alpha, self.resolve_setting("length_penalty_type", "power"))

    def max_positions(self) -> int | None:
        """Return the tokens that no text may exceed, those of a table of positions; None without a table."""
        is_endless = getattr(self.model.config, "position_embedding", None) == "sinusoidal"
        return None if is_endless else getattr(self.model.config, "max_position_embeddings", None)

    def max_source_tokens(self, without_table: int = DEFAULT_MAX_SOURCE_TOKENS) -> int:
        """Return the tokens that a text may have by default: those of a table of positions, or `without_table`."""
        return self.max_positions() or without_table
