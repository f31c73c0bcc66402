"""BLEU and chrF by sacreBLEU, and the tokenized BLEU of the literature; each as `score` and `signature`."""

import re
from typing import Any

from sacrebleu.metrics import BLEU, CHRF


def bleu(predictions: list[str], references: list[str], tokenize: str = "13a", order: int = 4) -> dict[str, Any]:
    """Return corpus BLEU of detokenized translations (Post 2018), with the signature that comparisons need.

    With `tokenize="none"` the texts' own tokens count; such a score compares only with tokenized BLEU. `order=1` is
    BLEU-1, of single tokens, and `order=2` BLEU-2; the signature names an order below 4.
    """
    metric = BLEU(tokenize=tokenize, max_ngram_order=order, force=True)
    score = metric.corpus_score(predictions, [references]).score
    return {"score": score, "signature": str(metric.get_signature()) + ("" if order == 4 else f"|order:{order}")}


def chrf(predictions: list[str], references: list[str]) -> dict[str, Any]:
    """Return corpus chrF, the F-score of character n-grams (Popovic 2015).

    It ignores white space, so that tokenized texts compare with others as far as their tokens do.
    """
    metric = CHRF()
    score = metric.corpus_score(predictions, [references]).score
    return {"score": score, "signature": str(metric.get_signature())}


def tokenized_bleu(
    predictions: list[str], references: list[str], language: str | None, compounds: bool = False
) -> dict[str, Any]:
    """Return tokenized BLEU as before sacreBLEU (multi-bleu.perl).

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
