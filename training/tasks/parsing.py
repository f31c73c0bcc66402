"""Constituency parsing (6.3): a sentence in, its linear tree out, scored by labeled brackets as by EVALB."""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.tasks.task import Metric, Task
from vaswani_transformer.parsing import BracketScores, ParsedSentence, delinearize, score_trees
from vaswani_transformer.parsing.constraint import tree_constraint
from vaswani_transformer.parsing.linear import linear_tokens, place_count
from vaswani_transformer.translation.engine import Constraint

PARSING_STATISTICS = {"repaired": "percent of the sentences whose output was malformed and was repaired"}


class ParsingTask(Task):
    """Parsing of one language into linear trees."""

    hub_name = "token-classification"  # the Hub has no name for parsing
    best_metric = Metric("f1", "F1")
    metrics = (
        best_metric,
        Metric("precision", "precision"),
        Metric("recall", "recall"),
        Metric("exact_match", "exact match"),
        Metric("tagging_accuracy", "tagging accuracy"),
    )
    verb = "parse"
    command = "vaswani-parse"
    roles = ("source", "parse", "reference")
    shares_vocabulary = False

    def __init__(self, language: str) -> None:
        self.language, self.languages = language, (language,)
        self.title = f"Constituency parsing {language}"

    @property
    def card_words(self) -> dict[str, str]:
        return {
            "purpose": f"parse `{self.language}` into constituency trees",
            "languages": f"`{self.language}`",
            "use": "The output is a linear tree. `vaswani-parse` and `parse` of vaswani-transformer put it over the "
            "sentence's words, as a tree in brackets.",
            "limits": "It parses single sentences, best with the words of its treebank.",
            "errors": "It may attach a phrase to the wrong place or give it a wrong label.",
            "measure": "F1 compares brackets with one tree a sentence, and some sentences have several good ones.",
        }

    def single_tokens(self, targets: Iterable[str]) -> set[str]:
        """Return every opening label, closing label and tag of the targets."""
        return linear_tokens(targets)

    def constraint(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Constraint | None:
        """Return what leaves a search only well-formed trees."""
        return tree_constraint(model, tokenizer)

    def display(self, source: str, text: str) -> str:
        """Return the tree in brackets."""
        return str(delinearize(text, source.split(" ")).tree)

    def measure(
        self, predictions: list[str], references: list[str], metrics: Iterable[Metric]
    ) -> dict[str, dict[str, Any]]:
        scores, _ = score_linear(predictions, references)
        return {each.key: {"score": getattr(scores, each.key), "signature": signature(scores)} for each in metrics}

    def statistics(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return the share of predictions that were malformed, in percent, as `repaired`."""
        return {"repaired": score_linear(predictions, references)[1]}

    def all_scores(self, predictions: list[str], references: list[str]) -> dict[str, dict[str, Any]]:
        """Return the metrics, and as `evalb_f1` what EVALB prints.

        That leaves out the sentences in which the trees disagree about punctuation.
        """
        evalb, _ = score_linear(predictions, references, own_punctuation=True)
        evalb_f1 = {"score": evalb.f1, "signature": signature(evalb, own_punctuation=True)}
        return super().all_scores(predictions, references) | {"evalb_f1": evalb_f1}


def numbered_tree(text: str, count: int) -> ParsedSentence:
    """Return the tree of a linear tree over `count` words, whose numbers are enough for scores."""
    return delinearize(text, [str(number) for number in range(count)])


def score_linear(
    predictions: list[str], references: list[str], own_punctuation: bool = False
) -> tuple[BracketScores, float]:
    """Return the scores of linear trees, and in percent the share of predictions that were repaired."""
    counts = [place_count(text) for text in references]
    gold = [numbered_tree(text, count).tree for text, count in zip(references, counts, strict=True)]
    trees = [numbered_tree(text, count) for text, count in zip(predictions, counts, strict=True)]
    scores = score_trees(gold, [sentence.tree for sentence in trees], own_punctuation)
    return scores, 100 * sum(sentence.is_repaired for sentence in trees) / max(1, len(trees))


def signature(scores: BracketScores, own_punctuation: bool = False) -> str:
    parts = ["evalb:COLLINS.prm", f"punctuation:{'own' if own_punctuation else 'gold'}-tags"]
    parts += [f"sentences:{scores.sentences}", f"skipped:{scores.skipped}", f"errors:{scores.errors}"]
    return "|".join(parts)
