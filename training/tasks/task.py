"""The interface of a task, which training, scoring and model cards use instead of a metric's name."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vaswani_transformer.translation.engine import Constraint


@dataclass(frozen=True)
class Metric:
    """A score of a set of predictions.

    key: its key in results.json; in the log it has the prefix `eval_`.
    title: its name in text.
    signature_key: the key in results.json of the signature by which it can be compared; metrics may share one.
    greater_is_better: whether higher is better.
    """

    key: str
    title: str
    signature_key: str = "signature"
    greater_is_better: bool = True


class Task(ABC):
    """A task that a model trains for.

    Attributes:
        hub_name: the Hub's name of the task.
        best_metric: the metric that chooses the best checkpoint.
        metrics: every metric of the test set, in the order of the card.
        more_metrics: those of the test set that only results.json has.
        verb: what a model of the task does to a text.
        command: the command that does it.
        roles: what readers call a source, what the model makes of it, and a reference.
        shares_vocabulary: whether the vocabulary is learned from targets too.
        title: the task and its data in a few words.
        languages: the codes of the languages that the texts are in, as far as the recipe names them.
    """

    hub_name: ClassVar[str]
    best_metric: ClassVar[Metric]
    metrics: ClassVar[tuple[Metric, ...]]
    more_metrics: ClassVar[tuple[Metric, ...]] = ()
    verb: ClassVar[str]
    command: ClassVar[str] = "vaswani-translate"
    roles: ClassVar[tuple[str, str, str]] = ("source", "translation", "reference")
    shares_vocabulary: ClassVar[bool] = True
    title: str
    languages: tuple[str, ...] = ()

    def single_tokens(self, targets: Iterable[str]) -> set[str]:
        """Return the texts in the targets that must each be one token of the vocabulary."""
        return set()

    def constraint(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Constraint | None:
        """Return what excludes malformed targets from a model's search; None if nothing does."""
        return None

    def display(self, source: str, text: str) -> str:
        """Return a hypothesis or a reference of a source as readers see it."""
        return text

    @property
    @abstractmethod
    def card_words(self) -> dict[str, str]:
        """The task's words in a model card, by their names in its template."""

    @abstractmethod
    def measure(
        self, predictions: list[str], references: list[str], metrics: Iterable[Metric]
    ) -> dict[str, dict[str, Any]]:
        """Return the `score` and the `signature` of each metric by its key."""

    def statistics(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return numbers that describe the predictions and rank nothing, by their keys."""
        return {}

    def evaluate(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        """Return `best_metric` and its signature, by their keys."""
        return self.results(predictions, references, [self.best_metric])

    def test(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        """Return each of `metrics` and `more_metrics` with its signature, and `statistics`, by their keys."""
        scores = self.results(predictions, references, [*self.metrics, *self.more_metrics])
        return scores | self.statistics(predictions, references)

    def results(self, predictions: list[str], references: list[str], metrics: list[Metric]) -> dict[str, Any]:
        """Return metrics and their signatures by their keys in results.json."""
        scores = self.measure(predictions, references, metrics)
        values = {metric.key: scores[metric.key]["score"] for metric in metrics}
        return values | {metric.signature_key: scores[metric.key]["signature"] for metric in metrics}

    def all_scores(self, predictions: list[str], references: list[str]) -> dict[str, dict[str, Any]]:
        """Return every score in use for the task, by name, each as `score` and `signature`."""
        return self.measure(predictions, references, self.metrics)
