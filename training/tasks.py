"""Metrics of texts, and the tasks that use them: translation, dialogue and parsing."""

import math
import re
import tempfile
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NotRequired, TypedDict, cast

import datasets
import evaluate
import sacrebleu
from sacrebleu.metrics.bleu import BLEUScore
from sacrebleu.significance import PairedTest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.recipe import Recipe, bleu_tokenizer
from vaswani_transformer.parsing import BracketScores, delinearize, score_trees
from vaswani_transformer.parsing.constraint import tree_constraint
from vaswani_transformer.parsing.linear import place_count
from vaswani_transformer.support.command import UserError, one_line
from vaswani_transformer.translation.translator import Constraint


def nfc(texts: Iterable[str]) -> list[str]:
    """Return texts in the normal form NFC, in which tokenizers write; every metric reads texts in this form."""
    return [unicodedata.normalize("NFC", text) for text in texts]


class Score(TypedDict):
    """A score with what is needed to compute it again."""

    score: float
    signature: str
    brevity_penalty: NotRequired[float]  # of BLEU


class CorpusScore(evaluate.Metric):
    """A score of sacreBLEU over a corpus with one reference, by `compute(predictions, references, metric)`."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=str(self.__doc__),
            citation="Post 2018, A Call for Clarity in Reporting BLEU Scores, WMT.",
            inputs_description="predictions: translations; references: one reference for each.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> dict[str, float | str]:
        """Return a `Score`."""
        metric = kwargs["metric"]
        result = metric.corpus_score(nfc(predictions), [nfc(references)])
        score: dict[str, float | str] = {"score": result.score, "signature": str(metric.get_signature())}
        if isinstance(result, BLEUScore):
            score["brevity_penalty"] = result.bp
        return score


def compute(metric: sacrebleu.BLEU | sacrebleu.CHRF, predictions: list[str], references: list[str]) -> Score:
    with tempfile.TemporaryDirectory() as folder:  # for `evaluate`
        corpus_score = CorpusScore(keep_in_memory=True, cache_dir=folder)
        return cast(Score, corpus_score.compute(predictions=predictions, references=references, metric=metric))


def bleu_metric(tokenize: str, order: int = 4) -> sacrebleu.BLEU:
    """Return sacreBLEU's BLEU with a tokenizer."""
    try:
        return sacrebleu.BLEU(tokenize=tokenize, max_ngram_order=order, force=True)
    except (ImportError, RuntimeError) as error:  # a tokenizer's own package is missing
        raise UserError(f"score.tokenize: {tokenize} cannot be used; {one_line(error)}") from error


def p_value(baseline: Any, result: Any) -> float:
    """Return the p value of a system's result of sacreBLEU's `PairedTest` against that of its baseline.

    It is 1 for equal scores, for which sacreBLEU has the smallest possible p.
    """
    return 1.0 if result.score == baseline.score else float(result.p_value)


def paired_test(systems: Iterable[tuple[str, Iterable[str]]], metrics: dict[str, Any], references: list[str]) -> Any:
    """Return the signatures and results of sacreBLEU's paired bootstrap; the first system is the baseline."""
    named: list[tuple[str, Sequence[str]]] = [(name, nfc(texts)) for name, texts in systems]
    return PairedTest(named, metrics, [nfc(references)], test_type="bs")()


def bleu(predictions: list[str], references: list[str], tokenize: str = "13a", order: int = 4) -> Score:
    """Return corpus BLEU, with `order` 1 or 2 BLEU-1 or BLEU-2.

    With `tokenize="none"` the texts' own tokens count, which gives tokenized BLEU. The signature names a lower order.
    """
    score = compute(bleu_metric(tokenize, order), predictions, references)
    if order != 4:
        score["signature"] += f"|order:{order}"
    return score


def chrf(predictions: list[str], references: list[str]) -> Score:
    """Return chrF, the F-score of character n-grams (Popovic 2015). White space is ignored."""
    return compute(sacrebleu.CHRF(), predictions, references)


def tokenized_bleu(
    predictions: list[str], references: list[str], language: str | None, compounds: bool = False
) -> Score:
    """Return tokenized BLEU as before sacreBLEU (multi-bleu.perl).

    Args:
        language: language of the Moses tokenizer; None for tokenized texts.
        compounds: whether to split hyphenated compounds, "rich-text" to "rich ##AT##-##AT## text", as in
            tensor2tensor's get_ende_bleu.sh for the paper's En-De models.
    """
    made_by = "text:tokens"
    if language is not None:
        import sacremoses  # slow to import

        tokenizer = sacremoses.MosesTokenizer(lang=language)
        predictions = [tokenizer.tokenize(text, return_str=True) for text in nfc(predictions)]
        references = [tokenizer.tokenize(text, return_str=True) for text in nfc(references)]
        made_by = f"text:moses-{language}-sacremoses-{sacremoses.__version__}"
    if compounds:
        predictions = [split_compounds(text) for text in predictions]
        references = [split_compounds(text) for text in references]
        made_by += "|compounds:split"
    score = bleu(predictions, references, tokenize="none")
    score["signature"] += f"|{made_by}"
    return score


def split_compounds(text: str) -> str:
    """Split hyphens within words into separate tokens."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", text)


def text_statistics(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Return statistics that docs/results.md defines; 0 for a share of nothing.

    Unlike in Li et al. 2016, distinct-n is relative to the number of n-grams.
    """
    words, bigrams = words_and_bigrams(predictions)
    reference_words, reference_bigrams = words_and_bigrams(references)
    repeats = sum(left == right for left, right in bigrams)
    reference_repeats = sum(left == right for left, right in reference_bigrams)
    return {
        "distinct_1": len(set(words)) / max(1, len(words)),
        "distinct_2": len(set(bigrams)) / max(1, len(bigrams)),
        "repeats": repeats / max(1, len(words)),
        "reference_repeats": reference_repeats / max(1, len(reference_words)),
        "length_ratio": len(words) / max(1, len(reference_words)),
    }


def words_and_bigrams(texts: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return all words of texts, and all pairs of neighboring words of one text."""
    words: list[str] = []
    bigrams: list[tuple[str, str]] = []
    for text in nfc(texts):
        words += text.split()
        bigrams += pairwise(text.split())
    return words, bigrams


# A language model

BEGIN = "<s>"
END = "</s>"
UNKNOWN = "<unk>"
Gram = tuple[str, ...]


class TrigramModel:
    """Trigram language model with interpolated Kneser-Ney smoothing (Kneser and Ney 1995).

    Trigrams use occurrence counts; bigrams and unigrams use the number of distinct preceding words. Unigrams fall back
    to 1 / |V|, where V contains the words of the texts, `</s>` and `<unk>`. The discount of an order is
    n1 / (n1 + 2 n2), where n1 and n2 n-grams have the counts 1 and 2 (Ney et al. 1994); 0.5 if either is 0.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        # A shorter gram is counted once for each word before it.
        trigrams: Counter[Gram] = Counter()
        for text in nfc(texts):
            words = [BEGIN, BEGIN, *text.split(), END]
            trigrams.update(zip(words, words[1:], words[2:], strict=False))
        bigrams = Counter(gram[1:] for gram in trigrams)
        unigrams = Counter(gram[1:] for gram in bigrams)
        self.orders = (unigrams, bigrams, trigrams)

        # What follows a context: the number of words, and of distinct words.
        self.totals: Counter[Gram] = Counter()
        self.followers: Counter[Gram] = Counter()
        self.discounts: list[float] = []
        for counts in self.orders:
            for gram, count in counts.items():
                self.totals[gram[:-1]] += count
                self.followers[gram[:-1]] += 1
            once = sum(count == 1 for count in counts.values())
            twice = sum(count == 2 for count in counts.values())
            self.discounts.append(once / (once + 2 * twice) if once and twice else 0.5)
        self.words = {word for (word,) in unigrams}
        self.fallback = 1 / len(self.words | {UNKNOWN})  # </s> is among the words

    def probability(self, first: str, second: str, word: str) -> float:
        """Return P(word | first second); unknown words must be passed as `<unk>`."""
        # Each order refines the probability of the next lower one.
        grams: tuple[Gram, ...] = ((word,), (second, word), (first, second, word))
        probability = self.fallback
        for counts, discount, gram in zip(self.orders, self.discounts, grams, strict=True):
            context = gram[:-1]
            if context in self.totals:
                kept = max(counts[gram] - discount, 0.0)
                probability = (kept + discount * self.followers[context] * probability) / self.totals[context]
        return probability

    def mean_nll(self, texts: Iterable[str]) -> float:
        """Return the mean negative log-likelihood in nats per word, including `</s>`."""
        total = 0.0
        count = 0
        for text in nfc(texts):
            known = (word if word in self.words else UNKNOWN for word in text.split())
            words = [BEGIN, BEGIN, *known, END]
            for gram in zip(words, words[1:], words[2:], strict=False):
                total -= math.log(self.probability(*gram))
                count += 1
        return total / max(count, 1)


class WordScores(TypedDict):
    """Mean negative log-likelihoods in nats per word."""

    score: float  # of the predictions
    reference: float
    definition: str


def lm_scores(training_targets: list[str], predictions: list[str], references: list[str]) -> WordScores:
    """Return the scores of predictions and references under a model of the training targets."""
    model = TrigramModel(training_targets)
    return {
        "score": model.mean_nll(predictions),
        "reference": model.mean_nll(references),
        "definition": "mean nll of a word in nats, </s> counted, under an interpolated Kneser-Ney trigram of "
        f"{len(training_targets):,} training targets",
    }


# Tasks

SPLIT_AT_SPACES = ("13a", "intl", "none")  # sacreBLEU tokenizers for languages that Moses tokenizes too


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
