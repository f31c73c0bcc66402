"""Noisy parallel decoding (Gu et al. 2018): a teacher chooses among the translations that a model's search finds.

B texts in a batch, n candidates per text.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..support.command import UserError
from .targets import TargetScorer
from .translator import (
    WIDTH_OPTIONS,
    NanError,
    Pair,
    TooLong,
    TooLongError,
    Translation,
    Translator,
    width_setting,
)


def teacher_scores(
    teacher: TargetScorer, sources: Sequence[str], candidates: Sequence[Sequence[str]], first: int = 0
) -> list[list[float]]:
    """Return a teacher's mean log-probability of a token of each candidate (B, n), in nats, from one parallel pass.

    Candidates are read as texts, so the teacher may have a different vocabulary. One without a word, or one that is too
    long for the teacher's learned positions, has -inf.

    Args:
        teacher: scorer of the teacher's own likelihood.
        sources: the B texts.
        candidates: (B, n), their translations.
        first: index of the first text, which errors name.
    """
    count = len(candidates[0])
    pairs = []
    for source, texts in zip(sources, candidates, strict=True):
        pairs += [Pair(source, text) for text in teacher.without_long(texts)]
    try:
        scored = teacher.score_window(pairs)
    except TooLongError as error:
        raise TooLongError(first + error.index // count, error.tokens, error.limit) from error
    except NanError as error:
        raise NanError(first + error.index // count) from error
    means = [
        score.log_probability / len(score.tokens) if pair.target.strip() else -math.inf
        for pair, score in zip(pairs, scored, strict=True)
    ]
    return [means[start : start + count] for start in range(0, len(means), count)]


class Reranker(Translator):
    """Translator that returns the candidates of its search in the order of a teacher; arguments as in `rerank`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        teacher: TargetScorer,
        *,
        num_return_sequences: int = 1,
        **settings: Any,
    ) -> None:
        candidates = Translator(model, tokenizer, **settings).most_hypotheses
        if not max(1, num_return_sequences - 1) < candidates < math.inf:
            name = width_setting(model)
            fix = "Use a different model" if name is None else f"Set {name} ({WIDTH_OPTIONS[name]})"
            found = "any number of samples" if math.isinf(candidates) else f"{candidates}"
            raise UserError(
                f"rerank: the teacher needs several translations of a text to choose among; the search finds {found}, "
                f"expected at least {max(2, num_return_sequences)}. {fix}."
            )
        super().__init__(model, tokenizer, num_return_sequences=candidates, **settings)
        self.teacher = teacher
        self.count = num_return_sequences

    def translate_window(
        self,
        texts_or_pairs: Sequence[str | Pair],
        first: int,
        skip: int = 0,
        progress: Callable[[int], object] | None = None,
    ) -> list[Translation]:
        """Return the translations of the texts after the first `skip`, of each the teacher's best candidates."""
        translations = super().translate_window(texts_or_pairs, first, skip, progress)
        sources = [translation.source for translation in translations]
        candidates = [[hypothesis.text for hypothesis in translation.hypotheses] for translation in translations]
        scores = teacher_scores(self.teacher, sources, candidates, first + skip)
        return list(map(self.choose, translations, scores))

    def choose(self, translation: Translation, scores: list[float]) -> Translation:
        """Return a translation with the best of its hypotheses by the teacher's scores, which become theirs."""
        if not translation.source.strip():  # its translation is empty
            scores = [0.0] * len(scores)
        ranked = sorted(zip(scores, translation.hypotheses, strict=True), key=lambda scored: -scored[0])
        best = [replace(hypothesis, score=score) for score, hypothesis in ranked[: self.count]]
        return replace(translation, hypotheses=best)


def rerank(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    teacher: PreTrainedModel,
    teacher_tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    batch_tokens: int = 2048,
    window: int = 2048,
    max_source_tokens: int | None = None,
    too_long: TooLong = "truncate",
    progress: Callable[[int], object] | None = None,
    num_return_sequences: int = 1,
    **generate_kwargs: Any,
) -> Iterator[Translation]:
    """Yield the translations of many texts that a teacher likes best among those that the model's search finds.

    The candidates are the targets of all lengths and latents that a non-autoregressive model tries, or of all beams.
    The teacher reads them as texts, all of a batch in one parallel pass, and ranks them by its mean log-probability of
    a token, which is the `score` of each hypothesis (Gu et al. 2018: noisy parallel decoding).

    Args:
        model: any encoder-decoder of Transformers that generates.
        tokenizer: its tokenizer, with a padding token.
        teacher: any model that `score_targets` supports, with whatever vocabulary.
        teacher_tokenizer: its tokenizer.
        texts: the texts to translate.
        batch_tokens, window, max_source_tokens, too_long: as in `translate`, for both models.
        progress: called with the number of newly translated texts.
        num_return_sequences: number of translations of each text, the teacher's best first.
        **generate_kwargs: arguments of the model's `generate()`, such as `length_beam_size=5` or `num_beams=8`.

    Raises:
        TypeError, ValueError, TooLongError: as in `translate` and `score_targets`; also ValueError if the search finds
            fewer translations than the teacher is to return, or only one.
    """
    if isinstance(texts, str):
        raise TypeError(f"texts is the str {texts!r}; pass a list of texts, for example [text].")
    limits: Any = {"batch_tokens": batch_tokens, "max_source_tokens": max_source_tokens, "too_long": too_long}
    scorer = TargetScorer(teacher, teacher_tokenizer, **limits)
    reranker = Reranker(
        model,
        tokenizer,
        scorer,
        num_return_sequences=num_return_sequences,
        window=window,
        **limits,
        **generate_kwargs,
    )
    return reranker(texts, progress=progress)
