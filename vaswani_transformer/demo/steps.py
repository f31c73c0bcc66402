"""Recording of a search for one target: beams and finished targets, or the target after each pass.

k beams, R distinct beams, V vocabulary, T target tokens so far.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..figures.search import Candidate
from ..search import length_penalty
from ..settings import CallSettings, as_token_ids
from ..support.modes import is_non_autoregressive
from ..translation.translator import Translator


class SearchRecorder(LogitsProcessor):
    """Logits processor that records the candidates after each step of an autoregressive search for one target.

    `settings` are those of the call, including the mask of its source; a `constraint` is applied before recording.
    """

    def __init__(self, settings: CallSettings, constraint: LogitsProcessor | None) -> None:
        self.constraint = constraint
        self.limit = int(settings.target_limits()[0])
        self.num_beams = settings.values.get("num_beams", 1)
        self.alpha = settings.values.get("length_penalty", 1.0)
        self.length_penalty_type = settings.values.get("length_penalty_type", "power")
        self.end_tokens = as_token_ids(settings.values.get("eos_token_id"))
        self.steps: list[list[Candidate]] = []
        self.totals: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record a step over the beams `input_ids` (k, T + 1), and return their next-token scores (k, V)."""
        permitted = scores if self.constraint is None else self.constraint(input_ids, scores)
        log_probs = permitted
        if self.num_beams == 1:  # greedy search passes logits
            log_probs = scores.log_softmax(-1).masked_fill(permitted == -torch.inf, -torch.inf)

        # Equal beams, such as all of the first step, count once.
        beams = {tuple(tokens): row for row, tokens in enumerate(input_ids[:, 1:].tolist())}
        # log P of a beam is that of the candidate of the previous step that it was.
        before = [float(self.totals[beam[:-1]][beam[-1]]) if beam else 0.0 for beam in beams]
        totals = log_probs[list(beams.values())] + log_probs.new_tensor(before)[:, None]  # (R, V)
        self.totals = dict(zip(beams, totals, strict=True))
        self.steps.append(self.candidates(list(beams), totals))
        return permitted

    def candidates(self, beams: list[tuple[int, ...]], totals: Tensor) -> list[Candidate]:
        """Return k open beams, the finished continuations among the k best, and the best dropped one; best first."""
        k = self.num_beams
        length = len(beams[0]) + 1
        penalty = float(length_penalty(length, self.alpha, self.length_penalty_type))

        # Each beam can end in each end token, so the best k (1 + E) contain k open ones.
        num_examined = min(max(2, 1 + len(self.end_tokens)) * k, totals.numel())
        values, indices = totals.flatten().topk(num_examined)
        candidates: list[Candidate] = []
        num_open = 0
        num_dropped = 0
        for rank, (log_prob, index) in enumerate(zip(values.tolist(), indices.tolist(), strict=True)):
            beam, token = divmod(index, totals.shape[1])
            is_finished = token in self.end_tokens or length >= self.limit
            is_kept = rank < k if is_finished or k == 1 else num_open < k  # greedy search ends with its only beam
            if log_prob > -torch.inf and (is_kept or not num_dropped):
                candidates.append(Candidate((*beams[beam], token), log_prob, penalty, is_finished, is_kept))
                num_open += is_kept and not is_finished
                num_dropped += not is_kept
        return candidates


class RecordingTranslator(Translator):
    """Translator of one text that records its search."""

    steps: list[list[Candidate]]  # candidates after each step of an autoregressive search
    history: list[list[int]]  # (R, T), target after each iteration or layer of a non-autoregressive model

    def generate(self, **inputs: Any) -> Any:
        """Return the output of `generate()`, and record the search."""
        self.steps = []
        self.history = []
        if is_non_autoregressive(self.model):
            inputs.update(return_history=True, return_dict_in_generate=True)
            output = super().generate(**inputs)
            self.history = output.history[:, 0, 1 : 1 + int(output.lengths[0])].tolist()
            return output
        (constraint,) = inputs.get("logits_processor", [None])
        recorder = SearchRecorder(CallSettings(inputs.get("generation_config"), self.model, inputs), constraint)
        self.steps = recorder.steps
        inputs["logits_processor"] = [recorder]
        return super().generate(**inputs)
