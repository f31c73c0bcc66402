"""The table of the comparison and its tests, from the kept files alone: `python -m bench.family_table FOLDER`.

FOLDER contains what `bench.family` keeps: of each run `NAME.json`, its results, and `NAME.csv.gz`, the counts of each
test sentence, and `decoding.json`, the measurement of speed and memory. A run of a further seed ends in `-SEED`. There
are no texts.

A row is a search of a model. Its BLEU is the mean over the seeds, with the standard deviation. The interval is that of
a bootstrap over sentences and seeds: each sample draws as many sentences as the test set has, the same for all rows,
and of each model as many seeds as it was trained with, the same for all its searches. Drawing from S seeds loses
1 / S of their variance, so the difference of a sample's seeds to the mean of all is scaled by sqrt(S / (S - 1)). With
one seed a row has no variance of seeds: its interval is that of this one model. `q1` to `q4` are BLEU for the quarters
of the sentences with the shortest to the longest sources.

The comparisons of `COMPARISONS` have the 95% interval of the difference in BLEU and a p value by the same samples, as
in sacreBLEU: the share of them whose difference is as far from its mean as the difference is from 0. Holm's correction
of p covers all comparisons that the folder has the rows for; the intervals are not corrected.

B samples, S seeds, N sentences, C counts of a sentence.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.measuring import Row, make_parser, report, report_more
from bench.sentence_counts import (
    BLEU_COUNTS,
    CHRF_COUNTS,
    Counts,
    bleu_of,
    chrf_of,
    column,
    columns,
    read_counts,
)
from vaswani_transformer.support.command import UserError, exit_on_user_error
from vaswani_transformer.support.files import read_json

COUNTS = ".csv.gz"
OURS = "iterative-vae-revealed"
COMPARISONS = (  # model and search each; those that the page makes
    ("ctc, beam 8", "teacher, beam 4"),
    ("ctc, best path", "teacher, beam 4"),
    ("ctc, beam 8", "student, beam 1"),
    ("ctc, beam 8", "ctc, best path"),
    ("ctc, beam 8", "glat, 5 lengths"),
    ("ctc, beam 8", "cmlm, 5 lengths; 10 iterations"),
    ("teacher, beam 1", "ctc, beam 8"),
    ("ctc-glat, best path", "ctc, best path"),
    ("ctc-glat, beam 8", "ctc, beam 8"),
    ("student, beam 1", "teacher, beam 4"),
    ("student, beam 1", "ctc, beam 8; reranked"),
    ("autoregressive-raw, beam 4", "student, beam 1"),
    ("dag, lookahead", "ctc-raw, beam 8"),
    ("dag, lookahead", "autoregressive-raw, beam 4"),
    (f"{OURS}, 1 length", "glat-by-layer, 1 length"),
    (f"{OURS}, 1 length", "glat, 1 length"),
    (f"{OURS}, 1 length", "nat, 1 length"),
    (f"{OURS}, 5 lengths", "glat-by-layer, 5 lengths"),
    (f"{OURS}, 5 lengths", "glat, 5 lengths"),
    (f"{OURS}, 5 lengths", "nat, 5 lengths"),
    (f"{OURS}, 5 lengths", "cmlm, 5 lengths; 10 iterations"),
    (f"{OURS}, 5 lengths", "ctc, beam 8"),
)
SPEED = (
    *("ms a sentence, median", "speed-up over teacher, beam 4", "sentences a second, batch 32"),
    *("MiB of weights", "MiB more, batch 32"),
)
NAMES = {
    "student": "the student",
    "teacher": "the teacher",
    "autoregressive-raw": "autoregressive, no teacher",
    "nat": "NAT*",
    "glat": "GLAT",
    "glat-by-layer": "GLAT by layer",
    "cmlm": "CMLM",
    "iterative-vae-revealed": "IterativeVAE",
    "iterative-vae-discrete": "IterativeVAE, discrete latents",
    "ctc": "CTC",
    "ctc-glat": "CTC with glancing",
    "ctc-raw": "CTC with glancing, no teacher",
    "dag": "DAG",
    "flowseq": "FlowSeq",
}
"""The names of the models of `bench.family` in tables and pictures."""
SEED = 2017  # of the samples


@dataclass
class Search:
    """A search of a model.

    Attributes:
        model: the model's name, without a seed.
        counts: (S, N, C), of each seed, in the order of the seeds.
        steps: steps of training; None without results.
        samples: (B,), the mean BLEU of the drawn seeds in each bootstrap sample.
    """

    model: str
    counts: Counts
    steps: int | None
    samples: NDArray[np.float64]

    @property
    def scores(self) -> list[float]:
        """BLEU of each seed."""
        return [bleu_of(total).score for total in columns(self.counts, BLEU_COUNTS).sum(1)]


def model_of(run: str) -> str:
    """Return the name of a run's model, without the seed of a further run."""
    model, _, seed = run.rpartition("-")
    return model if model and seed.isdecimal() else run


def shown_name(search: str) -> str:
    """Return the name of a model and its search for readers."""
    model, _, rest = search.partition(", ")
    return f"{NAMES.get(model, model)}, {rest}"


def read_searches(folder: Path) -> dict[str, tuple[str, Counts, int | None]]:
    """Return the model, the counts (S, N, C) and the steps of each search, by the names of both.

    Raises:
        UserError: there are no counts, or the runs have different test sets.
    """
    runs: dict[str, list[tuple[int, dict[str, Counts], int | None]]] = {}
    for path in sorted(folder.glob(f"*{COUNTS}")):
        run = path.name.removesuffix(COUNTS)
        results = folder / f"{run}.json"
        tree = read_json(results, "restore it.") if results.exists() else {}
        seed = tree.get("recipe", {}).get("seed", 0)
        runs.setdefault(model_of(run), []).append((seed, read_counts(path), tree.get("steps")))
    if not runs:
        raise UserError(f"{folder}: has no counts; expected *{COUNTS}, which bench.family keeps. Choose its folder.")

    searches = {}
    for model, of_seeds in runs.items():
        of_seeds.sort(key=lambda run: run[0])
        for search in of_seeds[0][1]:
            counts = [counts[search] for _, counts, _ in of_seeds]
            searches[f"{model}, {search}"] = model, np.stack(check_same_test_set(folder, counts)), of_seeds[0][2]
    check_same_test_set(folder, [counts[0] for _, counts, _ in searches.values()])
    return searches


def check_same_test_set(folder: Path, counts: list[Counts]) -> list[Counts]:
    """Return counts of the same sentences, whose sources and references have the same numbers of words."""
    first = counts[0]
    for other in counts[1:]:
        names = ("source_words", "reference_words")
        if first.shape != other.shape or any((column(first, name) != column(other, name)).any() for name in names):
            raise UserError(f"{folder}: its runs have different test sets; got other lengths. Measure them together.")
    return counts


def bootstrap(searches: dict[str, tuple[str, Counts, int | None]], samples: int) -> dict[str, Search]:
    """Return the searches with their bootstrap samples."""
    random = np.random.default_rng(SEED)
    sentences = next(iter(searches.values()))[1].shape[1]
    draws = random.multinomial(sentences, np.full(sentences, 1 / sentences), samples)  # (B, N), times of each sentence
    seeds_of_model: dict[str, NDArray[np.integer]] = {}
    drawn = {}
    for name, (model, counts, steps) in searches.items():
        seeds = len(counts)
        if model not in seeds_of_model:  # the same for all searches of a model
            seeds_of_model[model] = random.integers(seeds, size=(samples, seeds))  # (B, S)
        totals = draws @ columns(counts, BLEU_COUNTS)  # (S, B, counts of BLEU)
        bleu = np.array([[bleu_of(total).score for total in of_seed] for of_seed in totals])  # (S, B)
        means = np.take_along_axis(bleu.T, seeds_of_model[model], axis=1).mean(1)  # (B,)
        of_all = bleu.mean(0)
        scale = np.sqrt(seeds / (seeds - 1)) if seeds > 1 else 1.0
        drawn[name] = Search(model, counts, steps, of_all + scale * (means - of_all))
    return drawn


def interval(samples: NDArray[np.float64]) -> str:
    """Return the 95% interval of bootstrap samples."""
    low, high = np.quantile(samples, (0.025, 0.975))
    return f"{low:.2f} to {high:.2f}"


def p_value(samples: NDArray[np.float64], difference: float) -> float:
    """Return the two-sided p value of a difference from bootstrap samples (B,) of it."""
    extreme = np.abs(samples - samples.mean()) >= abs(difference)
    return float((extreme.sum() + 1) / (len(samples) + 1)) if difference else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values with Holm's correction (1979), in the same order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * p_values[index]))
        corrected[index] = largest
    return corrected


def mean_over_seeds(counts: Counts, numerator: str, denominator: Counts) -> float:
    """Return the mean over seeds of a column's sum over that of `denominator` (S, N)."""
    return float((column(counts, numerator).sum(1) / denominator.sum(1)).mean())


def lengths_quarters(counts: Counts) -> list[float]:
    """Return the mean BLEU over seeds of each quarter of the sentences, from the shortest to the longest sources."""
    order = np.argsort(column(counts[0], "source_words"), kind="stable")
    means = []
    for quarter in np.array_split(order, 4):
        totals = columns(counts[:, quarter], BLEU_COUNTS).sum(1)
        means.append(statistics.mean(bleu_of(total).score for total in totals))
    return means


def quality(search: Search) -> Row:
    """Return the scores of a search, as means over its seeds."""
    counts = search.counts
    scores = search.scores
    totals = columns(counts, BLEU_COUNTS).sum(1)
    row: Row = {"seeds": len(counts), "steps": search.steps, "BLEU": f"{statistics.mean(scores):.2f}"}
    row["deviation"] = f"{statistics.stdev(scores):.2f}" if len(scores) > 1 else None
    row["95% interval"] = interval(search.samples)
    row["BP"] = f"{statistics.mean(bleu_of(total).bp for total in totals):.3f}"
    row["chrF"] = f"{statistics.mean(chrf_of(total) for total in columns(counts, CHRF_COUNTS).sum(1)):.2f}"
    spaced_words = column(counts, "spaced_words")
    row["repeats"] = f"{mean_over_seeds(counts, 'repeats', spaced_words):.2%}"
    lm = mean_over_seeds(counts, "lm_nll", spaced_words + 1)  # with </s>
    row["LM"] = None if np.isnan(lm) else f"{lm:.2f}"
    length_loss = mean_over_seeds(counts, "length_nll", column(counts, "tokens"))
    row["length loss"] = None if np.isnan(length_loss) else f"{length_loss:.3f}"
    for number, score in enumerate(lengths_quarters(counts), start=1):
        row[f"q{number}"] = f"{score:.2f}"
    return row


def table_rows(searches: dict[str, Search], measured: dict[str, Row]) -> list[Row]:
    """Return the row of each search; `measured` are the rows of the measurement by name."""
    rows = []
    for name, search in searches.items():
        speed = {key: measured.get(name, {}).get(key) for key in SPEED}
        rows.append({"model": shown_name(name), **quality(search), **speed})
    return rows


def comparison_rows(searches: dict[str, Search]) -> list[Row]:
    """Return the difference in BLEU of each pair of `COMPARISONS` that is there, with its interval and p values."""
    pairs = [pair for pair in COMPARISONS if set(pair) <= searches.keys()]
    rows: list[Row] = []
    p_values = []
    for first, second in pairs:
        difference = statistics.mean(searches[first].scores) - statistics.mean(searches[second].scores)
        samples = searches[first].samples - searches[second].samples
        p_values.append(p_value(samples, difference))
        rows.append({"comparison": f"{shown_name(first)} - {shown_name(second)}", "BLEU": f"{difference:+.2f}"})
        rows[-1]["95% interval"] = interval(samples)
    for row, p, corrected in zip(rows, p_values, holm(p_values), strict=True):
        row["p"] = f"{p:.4f}"
        row["p, Holm"] = f"{corrected:.4f}"
    return rows


def measurement(folder: Path) -> dict[str, Row]:
    """Return the rows of the folder's measurement by name; none without a file."""
    path = folder / "decoding.json"
    rows: list[dict[str, Any]] = read_json(path, "measure again.")["rows"] if path.exists() else []
    return {row["model"]: row for row in rows}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("family_table", __doc__, {"samples": 20})
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the kept files")
    parser.add_argument("--samples", type=int, default=10_000, metavar="B", help="bootstrap samples (10000)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    with exit_on_user_error(OSError):
        searches = bootstrap(read_searches(options.folder), options.samples)
        report(table_rows(searches, measurement(options.folder)), options)
        report_more("comparisons", comparison_rows(searches), options)


if __name__ == "__main__":
    main()
