"""The interface of a task: what training, scoring and model cards ask for instead of a metric by name."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Metric:
    """A score of a set of predictions; higher is better.

    key: its key in results.json; in the log it has the prefix `eval_`.
    title: its name in text.
    signature_key: the key in results.json of the signature by which it can be compared.
    """

    key: str
    title: str
    signature_key: str


class Task(ABC):
    """A task that a model trains for.

    Attributes:
        hub_name: the Hub's name of the task.
        best_metric: the metric that chooses the best checkpoint.
        metrics: every metric of the test set, in the order of the card.
        title: the task and its data in a few words.
    """

    hub_name: ClassVar[str]
    best_metric: ClassVar[Metric]
    metrics: ClassVar[tuple[Metric, ...]]

    @property
    @abstractmethod
    def title(self) -> str:
        """The task and its data in a few words."""

    @abstractmethod
    def evaluate(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        """Return `best_metric` and its signature, by their keys."""

    @abstractmethod
    def test(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        """Return each of `metrics` and its signature, and `statistics`, by their keys."""

    def statistics(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return numbers that describe the predictions and rank nothing, by their keys."""
        return {}

    @abstractmethod
    def all_scores(self, predictions: list[str], references: list[str]) -> dict[str, dict[str, Any]]:
        """Return every score in use for the task, by name, each as `score` and `signature`."""
