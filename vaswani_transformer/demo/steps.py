"""The steps of a search for one target: beams and finished targets, or the target after each pass.

k beams, R different ones, V vocabulary, T tokens of a target so far.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from ..config import as_token_ids
from ..search import length_penalty
from ..support.modes import is_non_autoregressive
from ..translation.engine import TransformersEngine


@dataclass(frozen=True)
class Candidate:
    """A continuation that a search from left to right keeps.

    tokens: its new tokens.
    log_prob: log P(Y | X) in nats.
    length_penalty: lp(Y).
    is_finished: whether it has ended, by an end token or at its limit; else it is an open beam.
    """

    tokens: tuple[int, ...]
    log_prob: float
    length_penalty: float
    is_finished: bool

    @property
    def score(self) -> float:
        """What finished targets are ranked by: log P(Y | X) / lp(Y)."""
        return self.log_prob / self.length_penalty


class SearchRecorder(LogitsProcessor):
    """Records the search for one target from left to right, whose scores it does not change.

    Args:
        engine: whose settings the search has.
        limit: the new tokens that the target may have.
        constraint: a processor that excludes tokens from the search; it is called here, before the recording.

    Attributes:
        steps: the candidates after each step.
    """

    def __init__(self, engine: TransformersEngine, limit: int, constraint: LogitsProcessor | None) -> None:
        self.limit, self.constraint = limit, constraint
        self.num_beams = engine.resolve_setting("num_beams", 1)
        self.alpha = engine.resolve_setting("length_penalty", 1.0)
        self.length_penalty_type = engine.resolve_setting("length_penalty_type", "power")
        self.end_tokens = as_token_ids(engine.resolve_setting("eos_token_id"))
        self.steps: list[list[Candidate]] = []
        self.totals: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record a step over the beams `input_ids` (k, T + 1), and return their next-token scores (k, V)."""
        permitted = scores if self.constraint is None else self.constraint(input_ids, scores)
        log_probs = permitted  # of beam search; greedy search has logits
        if self.num_beams == 1:
            log_probs = scores.log_softmax(-1).masked_fill(permitted == -torch.inf, -torch.inf)
        beams = {tuple(tokens): row for row, tokens in enumerate(input_ids[:, 1:].tolist())}  # k equal ones at first
        # each continues a beam of the previous step
        before = log_probs.new_tensor([float(self.totals[beam[:-1]][beam[-1]]) if beam else 0.0 for beam in beams])
        totals = log_probs[list(beams.values())] + before[:, None]  # (R, V)
        self.totals = dict(zip(beams, totals, strict=True))
        self.steps.append(self.candidates(list(beams), totals))
        return permitted

    def candidates(self, beams: list[tuple[int, ...]], totals: Tensor) -> list[Candidate]:
        """Return what the search keeps of all continuations: the finished ones among the k best, and k open beams."""
        k, length = self.num_beams, len(beams[0]) + 1
        penalty = float(length_penalty(length, self.alpha, self.length_penalty_type))
        values, indices = totals.flatten().topk(min(max(2, 1 + len(self.end_tokens)) * k, totals.numel()))
        kept: list[Candidate] = []
        num_open = 0
        for rank, (log_prob, index) in enumerate(zip(values.tolist(), indices.tolist(), strict=True)):
            beam, token = divmod(index, totals.shape[1])
            is_finished = token in self.end_tokens or length >= self.limit
            if log_prob > -torch.inf and (rank < k if is_finished else num_open < k):
                kept.append(Candidate((*beams[beam], token), log_prob, penalty, is_finished))
                num_open += not is_finished
        return kept[:1] if k == 1 else kept  # greedy search ends with its only beam


class RecordingEngine(TransformersEngine):
    """`generate()` for one source, which keeps the steps of its search.

    Attributes:
        steps: of a search from left to right, the candidates after each step.
        history: (R, T), of a model that predicts all words at once, the target after each iteration or layer.
    """

    def __init__(self, model: PreTrainedModel, pad_token_id: int, **generate_kwargs: Any) -> None:
        super().__init__(model, pad_token_id, scores=is_non_autoregressive(model), **generate_kwargs)
        self.steps: list[list[Candidate]] = []
        self.history: list[list[int]] = []

    @property
    def finished(self) -> list[Candidate]:
        """The targets that ended, the best first."""
        ended = [candidate for step in self.steps for candidate in step if candidate.is_finished]
        return sorted(ended, key=lambda candidate: -candidate.score)

    def generate(self, tokens: Tensor, mask: Tensor, **more: Any) -> Any:
        if is_non_autoregressive(self.model):
            output = super().generate(tokens, mask, return_history=True, **more)
            self.history = output.history[:, 0, 1 : 1 + int(output.lengths[0])].tolist()
            return output
        (constraint,) = more.pop("logits_processor", [None])
        recorder = SearchRecorder(self, int(self.target_limits(mask)[0]), constraint)
        self.steps = recorder.steps
        return super().generate(tokens, mask, logits_processor=[recorder], **more)
