"""Recording of a search for one target: beams and finished targets, or the target after each pass.

k beams, R distinct beams, V vocabulary, T target tokens so far.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..config import as_token_ids
from ..generation import CallSettings
from ..search import length_penalty
from ..support.modes import is_non_autoregressive
from ..translation.translator import Translator


@dataclass(frozen=True)
class Candidate:
    """Open beam or finished target of an autoregressive search."""

    tokens: tuple[int, ...]  # new tokens
    log_prob: float  # log P(Y | X) in nats
    length_penalty: float  # lp(Y)
    is_finished: bool  # ended with an end token or at its limit

    @property
    def score(self) -> float:
        """Score of finished targets: log P(Y | X) / lp(Y)."""
        return self.log_prob / self.length_penalty


class SearchRecorder(LogitsProcessor):
    """Logits processor that records the candidates of each of the `steps` of an autoregressive search for one target.

    `settings` are those of the call, including the mask of its source; a `constraint` is applied before recording.
    """

    def __init__(self, settings: CallSettings, constraint: LogitsProcessor | None) -> None:
        self.limit, self.constraint = int(settings.target_limits()[0]), constraint
        self.num_beams, self.alpha = settings.values.get("num_beams", 1), settings.values.get("length_penalty", 1.0)
        self.length_penalty_type = settings.values.get("length_penalty_type", "power")
        self.end_tokens = as_token_ids(settings.values.get("eos_token_id"))
        self.steps: list[list[Candidate]] = []
        self.totals: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record a step over the beams `input_ids` (k, T + 1), and return their next-token scores (k, V)."""
        permitted = scores if self.constraint is None else self.constraint(input_ids, scores)
        log_probs = permitted  # in beam search; greedy search has logits
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
        """Return the finished continuations among the k best, and k open beams."""
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


class RecordingTranslator(Translator):
    """Translator of one text that records its search."""

    steps: list[list[Candidate]]  # candidates after each step of an autoregressive search
    history: list[list[int]]  # (R, T), target after each iteration or layer of a non-autoregressive model

    def generate(self, **inputs: Any) -> Any:
        """Return the output of `generate()`, and record the search."""
        self.steps, self.history = [], []
        if is_non_autoregressive(self.model):
            output = super().generate(**inputs | {"return_history": True, "return_dict_in_generate": True})
            self.history = output.history[:, 0, 1 : 1 + int(output.lengths[0])].tolist()
            return output
        (constraint,) = inputs.get("logits_processor", [None])
        recorder = SearchRecorder(CallSettings(inputs.get("generation_config"), self.model, inputs), constraint)
        self.steps = recorder.steps
        return super().generate(**inputs | {"logits_processor": [recorder]})
