"""BLEU and chrF by sacreBLEU as local metrics of `evaluate`, and the tokenized BLEU of the literature."""

import re
import tempfile
from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF


def texts_info(description: str, citation: str) -> evaluate.MetricInfo:
    """Return the description that `evaluate` needs of a metric with one reference a hypothesis."""
    return evaluate.MetricInfo(
        description=description,
        citation=citation,
        inputs_description="predictions: translations; references: one reference for each.",
        features=datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")}),
    )


class SacreBleu(evaluate.Metric):
    """Corpus BLEU of detokenized translations, with the signature that comparisons need.

    `compute(predictions=[...], references=[...], tokenize="13a")` returns `bleu`, `signature`, `brevity_penalty`. With
    `tokenize="none"` the texts' own tokens count; such a score compares only with tokenized BLEU. `order=1` is BLEU-1,
    of single tokens, and `order=2` BLEU-2; the signature names an order below 4.
    """

    def _info(self) -> evaluate.MetricInfo:
        return texts_info("Corpus BLEU by sacreBLEU.", "Post 2018, A Call for Clarity in Reporting BLEU Scores, WMT.")

    def _compute(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> dict[str, float | str]:
        order = kwargs.get("order", 4)
        metric = BLEU(tokenize=kwargs.get("tokenize", "13a"), max_ngram_order=order, force=True)
        score = metric.corpus_score(list(predictions), [list(references)])
        return {
            "bleu": score.score,
            "signature": str(metric.get_signature()) + ("" if order == 4 else f"|order:{order}"),
            "brevity_penalty": score.bp,
        }


class ChrF(evaluate.Metric):
    """Corpus chrF, the F-score of character n-grams, with its signature.

    `compute(predictions=[...], references=[...])` returns `chrf` and `signature`. It ignores white space, so that
    tokenized texts compare with others as far as their tokens do.
    """

    def _info(self) -> evaluate.MetricInfo:
        return texts_info("Corpus chrF by sacreBLEU.", "Popovic 2015, chrF: character n-gram F-score, WMT.")

    def _compute(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> dict[str, float | str]:
        metric = CHRF()
        score = metric.corpus_score(list(predictions), [list(references)])
        return {"chrf": score.score, "signature": str(metric.get_signature())}


def compute(metric: type[evaluate.Metric], **inputs: Any) -> dict[str, Any]:
    """Return a metric of lists of texts, kept in memory.

    `evaluate` makes a folder even then; a temporary one, because a home folder may be read-only.
    """
    with tempfile.TemporaryDirectory() as folder:
        return metric(keep_in_memory=True, cache_dir=folder).compute(**inputs) or {}


def bleu(predictions: list[str], references: list[str], tokenize: str = "13a", order: int = 4) -> dict[str, Any]:
    return compute(SacreBleu, predictions=predictions, references=references, tokenize=tokenize, order=order)


def chrf(predictions: list[str], references: list[str]) -> dict[str, Any]:
    return compute(ChrF, predictions=predictions, references=references)


def tokenized_bleu(
    predictions: list[str], references: list[str], language: str | None, compounds: bool = False
) -> dict[str, Any]:
    """Return tokenized BLEU as before sacreBLEU (multi-bleu.perl): `bleu` and `signature`.

    Args:
        language: the language of the Moses tokenizer for both sides; None for texts that are tokenized.
        compounds: whether the parts of compounds that a hyphen joins are tokens too, "rich-text" being
            "rich ##AT##-##AT## text", as tensor2tensor scored the paper's En-De models (get_ende_bleu.sh there).
    """
    made_by = "text:tokens"
    if language is not None:
        import sacremoses  # here, because it takes a quarter of a second

        tokenizer = sacremoses.MosesTokenizer(lang=language)
        predictions, references = (
            [tokenizer.tokenize(text, return_str=True) for text in texts] for texts in (predictions, references)
        )
        made_by = f"text:moses-{language}-sacremoses-{sacremoses.__version__}"
    if compounds:
        predictions, references = ([split_compounds(text) for text in texts] for texts in (predictions, references))
        made_by += "|compounds:split"
    score = bleu(predictions, references, tokenize="none")
    return score | {"signature": f"{score['signature']}|{made_by}"}


def split_compounds(text: str) -> str:
    """Return a text with hyphens within words as separate tokens."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", text)
