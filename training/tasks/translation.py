"""Translation, scored by BLEU and chrF, and what all tasks share whose outputs are texts."""

import re
from collections.abc import Iterable
from typing import Any

from training.tasks.metrics import bleu, chrf, tokenized_bleu
from training.tasks.task import Metric, Task
from training.tasks.text_statistics import text_statistics

# For languages without spaces between words, which "13a" does not split.
UNSPACED = {"zh": "zh", "zho": "zh", "cmn": "zh", "yue": "zh"} | dict.fromkeys(
    ("ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod"), "char"
)
SPLIT_AT_SPACES = ("13a", "intl", "none")  # sacreBLEU tokenizers for languages that Moses tokenizes too
BLEU, CHRF = Metric("bleu", "BLEU"), Metric("chrf", "chrF", "chrf_signature")
BLEU_1, BLEU_2 = (Metric(f"bleu_{order}", f"BLEU-{order}", f"bleu_{order}_signature") for order in (1, 2))
ORDERS = {BLEU: 4, BLEU_1: 1, BLEU_2: 2}


def choose_tokenizer(tokenize: str, language: str) -> str:
    """Return sacreBLEU's tokenizer, "auto" being the one for a language code such as "ja" or "zh-CN"."""
    return UNSPACED.get(re.split("[-_]", language.lower())[0], "13a") if tokenize == "auto" else tokenize


class TextTask(Task):
    """A task whose outputs are texts, which sacreBLEU's tokenizer `tokenize` splits."""

    tokenize: str

    def measure(
        self, predictions: list[str], references: list[str], metrics: Iterable[Metric]
    ) -> dict[str, dict[str, Any]]:
        scores = {}
        for metric in metrics:
            if metric == CHRF:
                value, score = "chrf", chrf(predictions, references)
            else:
                value, score = "bleu", bleu(predictions, references, self.tokenize, ORDERS[metric])
            scores[metric.key] = {"score": score[value], "signature": score["signature"]}
        return scores

    def statistics(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        return text_statistics(predictions, references)


class TranslationTask(TextTask):
    """Translation from one language into another."""

    hub_name = "translation"
    verb = "translate"
    best_metric = BLEU
    metrics = (BLEU, CHRF)
    more_metrics = (BLEU_1, BLEU_2)

    def __init__(self, source: str, target: str, tokenize: str) -> None:
        self.source, self.target, self.tokenize = source, target, tokenize
        self.title, self.languages = f"Translation {source}-{target}", (source, target)

    @property
    def card_words(self) -> dict[str, str]:
        return {
            "purpose": f"translate `{self.source}` into `{self.target}`",
            "languages": f"from `{self.source}` to `{self.target}`",
            "use": '`pipeline("vaswani-translation", model=repository, trust_remote_code=True)` takes lists of texts.',
            "limits": "It translates single sentences in one direction.",
            "errors": "It may drop, repeat or invent words in fluent sentences.",
            "measure": "BLEU compares words with one reference and does not measure meaning.",
        }

    def all_scores(self, predictions: list[str], references: list[str]) -> dict[str, dict[str, Any]]:
        """Return every score in use for the texts, by name, each as `score` and `signature`.

        sacrebleu: of the texts, tokenized by sacreBLEU; left out for texts that are tokenized.
        chrf: of the texts.
        bleu_1, bleu_2: BLEU of single tokens, and of tokens and bigrams, tokenized by the recipe's tokenizer.
        tokenized_bleu: of the texts' own tokens, or of Moses' tokens of both sides.
        compound_split_bleu: the same with the parts of compounds as tokens, for German; the paper's En-De metric.
        """
        scores = self.measure(predictions, references, [CHRF, BLEU_1, BLEU_2])
        if not (is_tokenized := self.tokenize == "none"):
            scores = {"sacrebleu": self.measure(predictions, references, [BLEU])["bleu"]} | scores
        if self.tokenize not in SPLIT_AT_SPACES:
            return scores
        names = {"tokenized_bleu": False} | ({"compound_split_bleu": True} if self.target == "de" else {})
        for name, compounds in names.items():
            score = tokenized_bleu(predictions, references, None if is_tokenized else self.target, compounds)
            scores[name] = {"score": score["bleu"], "signature": score["signature"]}
        return scores
