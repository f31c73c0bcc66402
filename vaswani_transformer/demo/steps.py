"""Recording of a search for one target: beams and finished targets, or the target after each pass.

k beams, R distinct beams, V vocabulary, T target tokens so far.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..config import as_token_ids
from ..figures.search import Candidate
from ..generation import CallSettings
from ..search import length_penalty
from ..support.modes import is_non_autoregressive
from ..translation.translator import Translator


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
        """Return k open beams, the finished continuations among the k best, and the best of the others; best first."""
        k, length = self.num_beams, len(beams[0]) + 1
        penalty = float(length_penalty(length, self.alpha, self.length_penalty_type))
        values, indices = totals.flatten().topk(min(max(2, 1 + len(self.end_tokens)) * k, totals.numel()))
        found: list[Candidate] = []
        num_open = num_dropped = 0
        for rank, (log_prob, index) in enumerate(zip(values.tolist(), indices.tolist(), strict=True)):
            beam, token = divmod(index, totals.shape[1])
            is_finished = token in self.end_tokens or length >= self.limit
            is_kept = rank < k if is_finished or k == 1 else num_open < k  # greedy search ends with its only beam
            if log_prob > -torch.inf and (is_kept or not num_dropped):
                found.append(Candidate((*beams[beam], token), log_prob, penalty, is_finished, is_kept))
                num_open += is_kept and not is_finished
                num_dropped += not is_kept
        return found


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
