"""Translation, scored by BLEU and chrF."""

from typing import Any

from training.tasks.metrics import bleu, chrf, tokenized_bleu
from training.tasks.task import Metric, Task
from training.tasks.text_statistics import text_statistics

SPLIT_AT_SPACES = ("13a", "intl", "none")  # sacreBLEU tokenizers for languages that Moses tokenizes too


class TranslationTask(Task):
    """Translation from one language into another."""

    hub_name = "translation"
    verb = "translate"
    best_metric = Metric("bleu", "BLEU", "signature")
    metrics = (best_metric, Metric("chrf", "chrF", "chrf_signature"))

    def __init__(self, source: str, target: str, tokenize: str) -> None:
        self.source, self.target, self.tokenize = source, target, tokenize

    @property
    def title(self) -> str:
        return f"Translation {self.source}-{self.target}"

    @property
    def languages(self) -> list[str]:
        return [self.source, self.target]

    def evaluate(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        score = bleu(predictions, references, self.tokenize)
        return {"bleu": score["bleu"], "signature": score["signature"]}

    def test(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        scores = self.evaluate(predictions, references)
        score = chrf(predictions, references)
        scores |= {"chrf": score["chrf"], "chrf_signature": score["signature"]}
        for order in (1, 2):
            score = bleu(predictions, references, self.tokenize, order)
            scores |= {f"bleu_{order}": score["bleu"], f"bleu_{order}_signature": score["signature"]}
        return scores | self.statistics(predictions, references)

    def statistics(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        return text_statistics(predictions, references)

    def all_scores(self, predictions: list[str], references: list[str]) -> dict[str, dict[str, Any]]:
        """Return every score in use for the texts, by name, each as `score` and `signature`.

        sacrebleu: of the texts, tokenized by sacreBLEU; left out for texts that are tokenized.
        chrf: of the texts.
        bleu_1, bleu_2: BLEU of single tokens, and of tokens and bigrams, tokenized by the recipe's tokenizer.
        tokenized_bleu: of the texts' own tokens, or of Moses' tokens of both sides.
        compound_split_bleu: the same with the parts of compounds as tokens, for German; the paper's En-De metric.
        """
        is_tokenized = self.tokenize == "none"
        scores: dict[str, dict[str, Any]] = {}
        if not is_tokenized:
            scores["sacrebleu"] = bleu(predictions, references, self.tokenize)
        scores["chrf"] = chrf(predictions, references)
        for order in (1, 2):
            scores[f"bleu_{order}"] = bleu(predictions, references, self.tokenize, order)
        if self.tokenize in SPLIT_AT_SPACES:
            language = None if is_tokenized else self.target
            scores["tokenized_bleu"] = tokenized_bleu(predictions, references, language)
            if self.target == "de":
                scores["compound_split_bleu"] = tokenized_bleu(predictions, references, language, compounds=True)
        return {
            name: {"score": score["chrf" if name == "chrf" else "bleu"], "signature": score["signature"]}
            for name, score in scores.items()
        }
