"""Tasks with their metrics: translation, dialogue and parsing."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.fields import Recipe
from training.metrics import Score, bleu, chrf, text_statistics, tokenized_bleu
from vaswani_transformer.parsing import BracketScores, delinearize, score_trees
from vaswani_transformer.parsing.constraint import tree_constraint
from vaswani_transformer.parsing.linear import place_count
from vaswani_transformer.translation.translator import Constraint

# Tokenizers for languages without spaces between words.
UNSPACED = {
    **dict.fromkeys(("zh", "zho", "cmn", "yue"), "zh"),
    **dict.fromkeys(("ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod"), "char"),
}
SPLIT_AT_SPACES = ("13a", "intl", "none")  # sacreBLEU tokenizers for languages that Moses tokenizes too


def bleu_tokenizer(name: str, language: str | None) -> str:
    """Return sacreBLEU's tokenizer that `score.tokenize` names; auto is that of the target language's code."""
    return UNSPACED.get(language or "", "13a") if name == "auto" else name


@dataclass(frozen=True)
class Metric:
    """Metric of a set of predictions.

    key: key in results.json; in the log it has the prefix `eval_`.
    title: name in text.
    signature_key: key of the signature; metrics may share one.
    greater_is_better: whether higher is better.
    """

    key: str
    title: str
    signature_key: str = "signature"
    greater_is_better: bool = True


BLEU = Metric("bleu", "BLEU")
BLEU_1 = Metric("bleu_1", "BLEU-1", "bleu_1_signature")
BLEU_2 = Metric("bleu_2", "BLEU-2", "bleu_2_signature")
CHRF = Metric("chrf", "chrF", "chrf_signature")
F1 = Metric("f1", "F1")
ENERGY = Metric("energy", "energy", greater_is_better=False)
ORDERS = {BLEU: 4, BLEU_1: 1, BLEU_2: 2}


class Task(ABC):
    """Base class of tasks.

    Attributes:
        hub_name: name of the task on the Hub.
        metrics: metrics on the test set, in the order of the model card.
        more_metrics: further metrics on the test set, only in results.json.
        best_metric: metric of evaluations.
        selection: metric that selects the best checkpoint: that of evaluations, or a teacher's energy.
        verb, command: verb for applying the model, and the command for it.
        roles: words for source, output and reference.
    """

    hub_name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    more_metrics: ClassVar[tuple[Metric, ...]] = ()
    best_metric: ClassVar[Metric]
    verb: ClassVar[str]
    command: ClassVar[str] = "vaswani-translate"
    roles: ClassVar[tuple[str, str, str]] = ("source", "translation", "reference")

    def __init__(self, recipe: Recipe) -> None:
        self.tokenize = bleu_tokenizer(recipe.score.tokenize, recipe.data.languages[1])
        self.language = recipe.data.languages[1] or "en"  # Moses has English rules for an unknown language
        self.selection = ENERGY if recipe.training.selects_by_energy else self.best_metric

    @abstractmethod
    def measure(self, predictions: list[str], references: list[str], metric: Metric) -> Score:
        """Return the score of a metric."""

    def statistics(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return descriptive statistics of the predictions by key."""
        return text_statistics(predictions, references)

    def scores(self, predictions: list[str], references: list[str], *metrics: Metric) -> dict[str, float | str]:
        """Return metrics and signatures by their keys in results.json."""
        scores: dict[str, float | str] = {}
        for metric in metrics:
            measured = self.measure(predictions, references, metric)
            scores[metric.key] = measured["score"]
            scores[metric.signature_key] = measured["signature"]
        return scores

    def all_scores(self, predictions: list[str], references: list[str]) -> dict[str, Score]:
        """Return every common score of the task, by name."""
        return {metric.key: self.measure(predictions, references, metric) for metric in self.metrics}

    def constraint(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Constraint | None:
        """Return the constraint to well-formed targets, or None."""
        return None

    def display(self, source: str, text: str) -> str:
        """Return a hypothesis or reference for display."""
        return text


class TranslationTask(Task):
    """Translation, scored by BLEU and chrF."""

    hub_name = "translation"
    metrics = (BLEU, CHRF)
    more_metrics = (BLEU_1, BLEU_2)
    best_metric = BLEU
    verb = "translate"

    def measure(self, predictions: list[str], references: list[str], metric: Metric) -> Score:
        if metric == CHRF:
            return chrf(predictions, references)
        return bleu(predictions, references, self.tokenize, ORDERS[metric])

    def all_scores(self, predictions: list[str], references: list[str]) -> dict[str, Score]:
        """Return the scores that docs/results.md defines, by name."""
        is_tokenized = self.tokenize == "none"
        scores: dict[str, Score] = {}
        if not is_tokenized:
            scores["sacrebleu"] = self.measure(predictions, references, BLEU)
        for metric in (CHRF, BLEU_1, BLEU_2):
            scores[metric.key] = self.measure(predictions, references, metric)

        # Scores of papers that did not use sacreBLEU.
        language = None if is_tokenized else self.language
        if self.tokenize in SPLIT_AT_SPACES:
            scores["tokenized_bleu"] = tokenized_bleu(predictions, references, language)
        if self.tokenize in SPLIT_AT_SPACES and self.language == "de":
            scores["compound_split_bleu"] = tokenized_bleu(predictions, references, language, compounds=True)
        return scores


class DialogueTask(TranslationTask):
    """Replies to prompts."""

    hub_name = "text-generation"
    metrics = (BLEU_1, BLEU_2)
    more_metrics = ()
    best_metric = BLEU_2
    verb = "answer"
    roles = ("prompt", "reply", "reference")

    def all_scores(self, predictions: list[str], references: list[str]) -> dict[str, Score]:
        return Task.all_scores(self, predictions, references)


class ParsingTask(Task):
    """Constituency parsing (6.3) with linear trees, scored by labeled brackets as in EVALB."""

    hub_name = "token-classification"  # the nearest of the Hub's names
    best_metric = F1
    metrics = (
        F1,
        Metric("precision", "precision"),
        Metric("recall", "recall"),
        Metric("exact_match", "exact match"),
        Metric("tagging_accuracy", "tagging accuracy"),
    )
    verb = "parse"
    command = "vaswani-parse"
    roles = ("source", "parse", "reference")

    def measure(self, predictions: list[str], references: list[str], metric: Metric) -> Score:
        scores, _ = score_linear(predictions, references)
        return {"score": getattr(scores, metric.key), "signature": bracket_signature(scores)}

    def statistics(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return the percentage of the sentences whose output was malformed and was repaired."""
        return {"repaired": score_linear(predictions, references)[1]}

    def all_scores(self, predictions: list[str], references: list[str]) -> dict[str, Score]:
        """Return the metrics, and as `evalb_f1` the F1 of EVALB, which skips trees that disagree about punctuation."""
        evalb, _ = score_linear(predictions, references, own_punctuation=True)
        scores = super().all_scores(predictions, references)
        scores["evalb_f1"] = {"score": evalb.f1, "signature": bracket_signature(evalb, "own")}
        return scores

    def constraint(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Constraint | None:
        """Return the constraint to well-formed trees."""
        return tree_constraint(model, tokenizer)

    def display(self, source: str, text: str) -> str:
        """Return the tree in brackets."""
        return str(delinearize(text, source.split(" ")).tree)


def score_linear(
    predictions: list[str], references: list[str], own_punctuation: bool = False
) -> tuple[BracketScores, float]:
    """Return the scores of linear trees, and the percentage of repaired predictions."""
    # A linear tree has places instead of words, and scores do not depend on the words, so numbers stand for them.
    words = [list(map(str, range(place_count(text)))) for text in references]
    gold = [delinearize(text, row).tree for text, row in zip(references, words, strict=True)]
    trees = [delinearize(text, row) for text, row in zip(predictions, words, strict=True)]
    scores = score_trees(gold, [sentence.tree for sentence in trees], own_punctuation)
    return scores, 100 * sum(sentence.is_repaired for sentence in trees) / max(1, len(trees))


def bracket_signature(scores: BracketScores, punctuation: str = "gold") -> str:
    counts = f"sentences:{scores.sentences}|skipped:{scores.skipped}|errors:{scores.errors}"
    return f"evalb:COLLINS.prm|punctuation:{punctuation}-tags|{counts}"


def task_class(data_kind: str, task: str) -> type[Task]:
    """Return the class of a recipe's task."""
    if data_kind == "trees":
        return ParsingTask
    return DialogueTask if task == "dialogue" else TranslationTask


def make_task(recipe: Recipe) -> Task:
    return task_class(recipe.data.kind, recipe.task)(recipe)
