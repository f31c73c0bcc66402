"""Counts of each sentence of a test set, from which every score can be computed again without the texts.

The n-grams and characters are counted by sacreBLEU, whose scores of the summed counts are those of the corpus. A file
is a gzipped table with a row for each search and sentence.

N sentences, C columns.
"""

import csv
import gzip
import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics import BLEU, CHRF

from training.tasks import TrigramModel, bleu_metric, nfc
from vaswani_transformer.support.command import UserError

ORDERS = range(1, 5)
BLEU_COUNTS = (
    "words",
    "reference_words",
    *(f"matches_{order}" for order in ORDERS),
    *(f"ngrams_{order}" for order in ORDERS),
)
CHRF_COUNTS = tuple(
    f"{name}_{order}" for order in range(1, 7) for name in ("characters", "reference_characters", "matched_characters")
)
FURTHER = ("source_words", "repeats", "spaced_words", "lm_nll", "nll", "length_nll", "tokens")
COLUMNS = (*BLEU_COUNTS, *CHRF_COUNTS, *FURTHER)
"""Columns of a file after `search`.

words, reference_words, matches_n, ngrams_n: those of sacreBLEU's tokenizer, n = 1 to 4.
characters_n, reference_characters_n, matched_characters_n: of chrF, n = 1 to 6.
source_words: words of the source, at spaces.
repeats, spaced_words: words of the translation that equal the word before, and all of its words, at spaces.
lm_nll: negative log-likelihood of these words and `</s>` under a language model, in nats; nan without one.
nll, length_nll, tokens: of the reference under the model itself, all of it and its length alone, and its number of
    tokens; nan if the model has none.
"""
Counts = NDArray[np.float64]


def translation_counts(
    texts: Sequence[str], references: Sequence[str], sources: Sequence[str], tokenize: str, model: TrigramModel | None
) -> Counts:
    """Return the counts (N, C) of translations; the last three columns are nan."""
    hypotheses = nfc(texts)
    metrics: tuple[Any, Any] = (bleu_metric(tokenize), CHRF())
    of_bleu, of_chrf = (metric._extract_corpus_statistics(hypotheses, [nfc(references)]) for metric in metrics)
    rows = []
    for text, source, *counts in zip(hypotheses, sources, of_bleu, of_chrf, strict=True):
        words = text.split()
        repeats = sum(left == right for left, right in pairwise(words))
        nll = np.nan if model is None else model.mean_nll([text]) * (len(words) + 1)
        further = (len(source.split()), repeats, len(words), nll, np.nan, np.nan, np.nan)
        rows.append([*counts[0], *counts[1], *further])
    return np.array(rows, dtype=np.float64)


def column(counts: Counts, name: str) -> Counts:
    """Return the column (..., N) of counts (..., N, C)."""
    return counts[..., COLUMNS.index(name)]


def columns(counts: Counts, names: Sequence[str]) -> Counts:
    """Return neighboring columns (..., N, len(names)) of counts (..., N, C)."""
    first = COLUMNS.index(names[0])
    return counts[..., first : first + len(names)]


def bleu_of(summed: Sequence[float]) -> Any:
    """Return sacreBLEU's score of the summed `BLEU_COUNTS`; `score` and `bp` are its fields."""
    metric: Any = BLEU(force=True)
    return metric._compute_score_from_stats([int(count) for count in summed])


def chrf_of(summed: Sequence[float]) -> float:
    """Return sacreBLEU's chrF of the summed `CHRF_COUNTS`."""
    metric: Any = CHRF()
    return metric._compute_score_from_stats([int(count) for count in summed]).score


def write_counts(path: Path, searches: dict[str, Counts]) -> None:
    """Write the counts (N, C) of each search of a run; the same counts give the same bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("search", *COLUMNS))
    for search, counts in searches.items():
        for row in counts.tolist():
            writer.writerow([search, *("" if value != value else f"{value:.10g}" for value in row)])
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def read_counts(path: Path) -> dict[str, Counts]:
    """Return the counts (N, C) of each search of a run.

    Raises:
        UserError: the file is damaged, or its columns are different ones.
    """
    rows: dict[str, list[list[float]]] = {}
    try:
        heading, *lines = csv.reader(io.StringIO(gzip.decompress(path.read_bytes()).decode()))
        for search, *values in lines:
            rows.setdefault(search, []).append([float(value or "nan") for value in values])
    except (OSError, EOFError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); expected a file of bench.decode_family --counts."
        ) from error
    if heading != ["search", *COLUMNS]:
        raise UserError(
            f"{path}: has different columns; got {len(heading)}, expected {len(COLUMNS) + 1}. Measure again."
        )
    return {search: np.array(values) for search, values in rows.items()}
