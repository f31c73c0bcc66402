"""Dialogue: a prompt in, a reply out. One prompt has many replies, so one reference says less than for translation."""

from typing import Any

from training.tasks.metrics import bleu
from training.tasks.task import Metric, Task
from training.tasks.text_statistics import text_statistics


class DialogueTask(Task):
    """Replies to prompts, scored by BLEU-1 and BLEU-2 and described by their variety."""

    hub_name = "text-generation"
    verb = "answer"
    roles = ("prompt", "reply", "reference")
    metrics = (Metric("bleu_1", "BLEU-1", "bleu_1_signature"), Metric("bleu_2", "BLEU-2", "bleu_2_signature"))
    best_metric = metrics[1]

    def __init__(self, tokenize: str) -> None:
        self.tokenize = tokenize

    @property
    def title(self) -> str:
        return "Dialogue"

    @property
    def card_words(self) -> dict[str, str]:
        return {
            "purpose": "answer prompts with replies",
            "languages": "those of the data's prompts and replies",
            "use": "`vaswani-translate` of vaswani-transformer answers a file of prompts, a line each.",
            "limits": "It answers a single prompt and knows nothing of the turns before it.",
            "errors": "It may answer anything with the same few phrases, contradict itself or invent facts.",
            "measure": "BLEU-1 and BLEU-2 compare words with one reply of the many that would do.",
        }

    def evaluate(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        score = bleu(predictions, references, self.tokenize, 2)
        return {"bleu_2": score["bleu"], "bleu_2_signature": score["signature"]}

    def test(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        score = bleu(predictions, references, self.tokenize, 1)
        scores = {"bleu_1": score["bleu"], "bleu_1_signature": score["signature"]}
        return scores | self.evaluate(predictions, references) | self.statistics(predictions, references)

    def statistics(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        return text_statistics(predictions, references)

    def all_scores(self, predictions: list[str], references: list[str]) -> dict[str, dict[str, Any]]:
        """Return BLEU-1 and BLEU-2, each as `score` and `signature`."""
        result = {f"bleu_{order}": bleu(predictions, references, self.tokenize, order) for order in (1, 2)}
        return {name: {"score": score["bleu"], "signature": score["signature"]} for name, score in result.items()}
