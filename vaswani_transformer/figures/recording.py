"""Recording of the search for one target, which a page draws: the candidates of each step, or the target of each pass.

k beams, R distinct beams, V vocabulary, P tokens of the prompt, T target tokens so far.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..search import length_penalty
from ..settings import CallSettings, as_token_ids
from ..support.loading import eval_mode, is_non_autoregressive
from ..tokenizer import source_encoder
from .tokens import Target, display_tokens, token_labels


@dataclass(frozen=True)
class Candidate:
    """Target of an autoregressive search after one of its steps."""

    tokens: Target  # new tokens
    log_prob: float  # log P(Y | X) in nats
    length_penalty: float  # lp(Y)
    is_finished: bool = False  # ended with an end token or at its limit
    is_kept: bool = True  # False: the best candidate that the step drops

    @property
    def score(self) -> float:
        """Score of finished targets: log P(Y | X) / lp(Y)."""
        return self.log_prob / self.length_penalty


Steps = Sequence[Sequence[Candidate]]
"""Candidates after each step, best first."""


class Recording(NamedTuple):
    """Recorded search: the best target, and the data that web/search-view.js draws."""

    target: str
    data: dict[str, Any]


def best_finished(steps: Steps) -> list[Candidate]:
    """Return the finished targets of a search, best first."""
    candidates = itertools.chain(*steps)
    finished = [candidate for candidate in candidates if candidate.is_finished and candidate.is_kept]
    return sorted(finished, key=lambda candidate: -candidate.score)


class SearchRecorder(LogitsProcessor):
    """Logits processor that records the candidates after each step of an autoregressive search for one target.

    `settings` are those of the call, including the mask of its source.
    """

    def __init__(self, settings: CallSettings) -> None:
        self.limit = int(settings.target_limits()[0])
        self.num_beams = settings.values.get("num_beams", 1)
        self.alpha = settings.values.get("length_penalty", 1.0)
        self.length_penalty_type = settings.values.get("length_penalty_type", "power")
        self.end_tokens = as_token_ids(settings.values.get("eos_token_id"))
        self.prompt: Target = ()  # tokens that the target begins with, known from the first step
        self.steps: list[list[Candidate]] = []
        self.totals: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record a step over the beams `input_ids` (k, P + T), and return their next-token scores (k, V)."""
        self.prompt = self.prompt or tuple(input_ids[0].tolist())
        log_probs = scores.log_softmax(-1) if self.num_beams == 1 else scores  # greedy search passes logits

        # Equal beams, such as all of the first step, count once.
        beams = {tuple(tokens): row for row, tokens in enumerate(input_ids[:, len(self.prompt) :].tolist())}
        # log P of a beam is that of the candidate of the previous step that it was.
        before = [float(self.totals[beam[:-1]][beam[-1]]) if beam else 0.0 for beam in beams]
        totals = log_probs[list(beams.values())] + log_probs.new_tensor(before)[:, None]  # (R, V)
        self.totals = dict(zip(beams, totals, strict=True))
        self.steps.append(self.candidates(list(beams), totals))
        return scores

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


def beams_data(tokenizer: PreTrainedTokenizerBase, prompt: Target, steps: Steps) -> list[list[dict[str, Any]]]:
    """Return the candidates of each step as dictionaries; `parent` is the index of the one that it continues, or -1."""
    beginnings = [prompt[:end] for end in range(1, len(prompt) + 1)]
    continuations = [prompt + candidate.tokens for step in steps for candidate in step]
    labels = token_labels(tokenizer, beginnings + continuations)
    before: list[Target] = []
    data = []
    for step in steps:
        data.append([
            {
                "word": labels[prompt + candidate.tokens],
                "text": tokenizer.decode([*prompt, *candidate.tokens], skip_special_tokens=True),
                "parent": before.index(candidate.tokens[:-1]) if before else -1,
                "logProb": candidate.log_prob,
                "penalty": candidate.length_penalty,
                "isFinished": candidate.is_finished,
                "isKept": candidate.is_kept,
            }
            for candidate in step
        ])  # fmt: skip
        before = [candidate.tokens for candidate in step]
    return data


def passes_data(tokenizer: PreTrainedTokenizerBase, history: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return the target after each pass as a dictionary."""
    return [
        {
            "words": display_tokens(tokenizer, tokens),
            "tokens": list(tokens),
            "text": tokenizer.decode(list(tokens), skip_special_tokens=True),
        }
        for tokens in history
    ]


def name_of_pass(model: PreTrainedModel, passes: int) -> str:
    """Return the word for a pass of a non-autoregressive model."""
    if "num_iterations" in getattr(model, "family_settings", ()):
        return "iteration"
    return "layer" if passes > 1 else "pass"


def recorded_beams(model: Any, inputs: dict[str, Any]) -> SearchRecorder:
    """Return the recorder of an autoregressive search after its last step; `inputs` are arguments of `generate()`."""
    inputs = {**inputs, "do_sample": False}
    recorder = SearchRecorder(CallSettings(inputs.get("generation_config"), model, inputs))
    model.generate(**inputs, logits_processor=[recorder])
    return recorder


def record_passes(model: Any, tokenizer: PreTrainedTokenizerBase, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the target after each pass of a non-autoregressive model."""
    output = model.generate(**inputs, return_history=True, return_dict_in_generate=True)
    history = output.history[:, 0, 1 : 1 + int(output.lengths[0])].tolist()
    return passes_data(tokenizer, history)


@torch.no_grad()
def record_search(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, **generate_kwargs: Any
) -> Recording:
    """Translate a source and record the search: beams, or the target after each iteration, layer or pass.

    `generate_kwargs` override the model's settings. The search is recorded even if those say `do_sample`.
    """
    encoded = source_encoder(tokenizer)(source, return_tensors="pt")
    inputs = {name: tensor.to(model.device) for name, tensor in encoded.items()} | generate_kwargs
    with eval_mode(model):
        if is_non_autoregressive(model):
            passes = record_passes(model, tokenizer, inputs)
            name = name_of_pass(model, len(passes))
            return Recording(passes[-1]["text"], {"source": source, "name": name, "passes": passes})
        recorder = recorded_beams(model, inputs)
    prompt, steps = recorder.prompt, recorder.steps
    tokens = [*prompt, *best_finished(steps)[0].tokens]
    start = " ".join(display_tokens(tokenizer, prompt))
    data = {"source": source, "start": start, "steps": beams_data(tokenizer, prompt, steps)}
    return Recording(cast(str, tokenizer.decode(tokens, skip_special_tokens=True)), data)
