"""BLEU as one of `evaluate`'s metrics, computed by sacreBLEU and never downloaded."""

from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import BLEU


class SacreBleu(evaluate.Metric):
    """Corpus BLEU of detokenised translations, with the signature without which it cannot be compared.

    `compute(predictions=[...], references=[...], tokenize="13a")` returns `bleu`, `signature`, `brevity_penalty`. With
    `tokenize="none"` the texts' own tokens count, and the figure compares with tokenised BLEU alone.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Corpus BLEU by sacreBLEU.",
            citation="Post 2018, A Call for Clarity in Reporting BLEU Scores, WMT.",
            inputs_description="predictions: translations; references: one reference for each.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> dict[str, float | str]:
        metric = BLEU(tokenize=kwargs.get("tokenize", "13a"), force=True)
        score = metric.corpus_score(list(predictions), [list(references)])
        return {
            "bleu": score.score,
            "signature": str(metric.get_signature()),
            "brevity_penalty": score.bp,
        }


def bleu(predictions: list[str], references: list[str], tokenize: str = "13a") -> dict[str, Any]:
    """`SacreBleu` of lists of texts, holding them in memory."""
    metric = SacreBleu(keep_in_memory=True)
    return metric.compute(predictions=predictions, references=references, tokenize=tokenize) or {}
