"""BLEU and chrF as local metrics of `evaluate`, text statistics, and a trigram language model."""

import math
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NotRequired, TypedDict, cast

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.bleu import BLEUScore
from sacrebleu.significance import PairedTest

from vaswani_transformer.support.command import UserError, one_line


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


def compute(metric: BLEU | CHRF, predictions: list[str], references: list[str]) -> Score:
    with tempfile.TemporaryDirectory() as folder:  # for `evaluate`
        corpus_score = CorpusScore(keep_in_memory=True, cache_dir=folder)
        return cast(Score, corpus_score.compute(predictions=predictions, references=references, metric=metric))


def bleu_metric(tokenize: str, order: int = 4) -> BLEU:
    """Return sacreBLEU's BLEU with a tokenizer."""
    try:
        return BLEU(tokenize=tokenize, max_ngram_order=order, force=True)
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
    return compute(CHRF(), predictions, references)


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
    return {
        "distinct_1": len(set(words)) / max(1, len(words)),
        "distinct_2": len(set(bigrams)) / max(1, len(bigrams)),
        "repeats": sum(left == right for left, right in bigrams) / max(1, len(words)),
        "reference_repeats": sum(left == right for left, right in reference_bigrams) / max(1, len(reference_words)),
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
