"""The kept counts give sacreBLEU's scores, and the table's tests are those of a bootstrap over sentences and seeds."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import family_table
from bench.measuring import spell
from bench.sentence_counts import (
    BLEU_COUNTS,
    CHRF_COUNTS,
    COLUMNS,
    Counts,
    bleu_of,
    chrf_of,
    column,
    columns,
    read_counts,
    translation_counts,
    write_counts,
)
from tests import ROOT
from tests.commands import error_line, run_main, user_error
from training.tasks import TrigramModel, bleu, chrf, text_statistics

REFERENCES = [
    "a man in a blue shirt is standing on a ladder cleaning a window .",
    "two dogs play in the deep snow .",
    "the old woman reads",
    "a child runs over the bridge , and its mother calls it back .",
    "three men stand at the bar",
    "an empty street in the morning light .",
    "people watch",
    "a dog jumps over a fence in the park near the river .",
]
SOURCES = [" ".join("word" for _ in reference.split()[number % 3 :]) for number, reference in enumerate(REFERENCES)]
GOOD = [reference.replace("a ", "the ", 1) for reference in REFERENCES]
BAD = [" ".join(word for word in reference.split() for _ in range(1 + (word == "in"))[:2]) for reference in REFERENCES]
WORSE = [" ".join(reference.split()[: 1 + len(reference.split()) // 2]) for reference in REFERENCES]


def counts_of(texts: list[str], model: TrigramModel | None = None) -> Counts:
    return translation_counts(texts, REFERENCES, SOURCES, "13a", model)


@pytest.mark.parametrize("texts", [REFERENCES, GOOD, BAD, WORSE, [""] * 8, ["über café naïve ."] * 8])
def test_summed_counts_give_the_scores_of_the_corpus(texts: list[str]) -> None:
    counts = counts_of(texts, model := TrigramModel(REFERENCES))
    expected = bleu(texts, REFERENCES)
    score = bleu_of(columns(counts, BLEU_COUNTS).sum(0))
    assert (score.score, score.bp) == pytest.approx((expected["score"], expected["brevity_penalty"]))
    assert chrf_of(columns(counts, CHRF_COUNTS).sum(0)) == pytest.approx(chrf(texts, REFERENCES)["score"])
    words = column(counts, "spaced_words")
    repeats = column(counts, "repeats").sum() / max(1, words.sum())
    assert repeats == pytest.approx(text_statistics(texts, REFERENCES)["repeats"])
    assert column(counts, "lm_nll").sum() / (words + 1).sum() == pytest.approx(model.mean_nll(texts))
    assert column(counts, "source_words").tolist() == [len(source.split()) for source in SOURCES]


def test_file_has_the_counts_and_the_same_bytes_for_the_same_counts(tmp_path: Path) -> None:
    searches = {"1 length": counts_of(GOOD), "5 lengths; 10 iterations": counts_of(BAD, TrigramModel(REFERENCES))}
    for name in ("one", "other"):
        write_counts(tmp_path / name, searches)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    read = read_counts(tmp_path / "one")
    assert list(read) == list(searches)
    for name, counts in searches.items():
        np.testing.assert_allclose(read[name], counts, rtol=1e-9)
    (tmp_path / "one").write_bytes((tmp_path / "one").read_bytes()[:-20])
    with user_error("one: cannot be read .*bench.decode_family --counts"):
        read_counts(tmp_path / "one")


def keep(folder: Path, run: str, seed: int, searches: dict[str, list[str]]) -> None:
    write_counts(folder / f"{run}.csv.gz", {search: counts_of(texts) for search, texts in searches.items()})
    (folder / f"{run}.json").write_text(json.dumps({"steps": 10, "recipe": {"seed": seed}}))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    keep(tmp_path, "teacher", 2017, {"beam 1": GOOD, "beam 4": REFERENCES})
    for run, seed, texts in (("ctc", 2017, BAD), ("ctc-2018", 2018, GOOD), ("ctc-2019", 2019, WORSE)):
        keep(tmp_path, run, seed, {"best path": texts, "beam 8": texts})
    speed = {"ms a sentence, median": 6.25, "sentences a second, batch 32": 500.0}
    rows = [{"model": "ctc, beam 8", **speed}]
    (tmp_path / "decoding.json").write_text(json.dumps({"rows": rows}))
    return tmp_path


def test_row_has_the_mean_and_deviation_of_the_seeds_and_a_comparison_its_interval(kept: Path) -> None:
    searches = family_table.bootstrap(family_table.read_searches(kept), 500)
    assert list(searches) == ["ctc, best path", "ctc, beam 8", "teacher, beam 1", "teacher, beam 4"]
    scores = [bleu(texts, REFERENCES)["score"] for texts in (BAD, GOOD, WORSE)]
    assert searches["ctc, beam 8"].scores == pytest.approx(scores)
    rows = {row["model"]: row for row in family_table.table_rows(searches, family_table.measurement(kept))}
    row = rows["CTC, beam 8"]
    assert (row["seeds"], row["BLEU"], row["deviation"]) == (
        3,
        f"{np.mean(scores):.2f}",
        f"{np.std(scores, ddof=1):.2f}",
    )
    assert row["ms a sentence, median"] == 6.25
    assert rows["CTC, best path"]["ms a sentence, median"] is None
    assert (rows["the teacher, beam 4"]["BLEU"], rows["the teacher, beam 4"]["95% interval"]) == (
        "100.00",
        "100.00 to 100.00",
    )
    low, high = map(float, row["95% interval"].split(" to "))
    assert low < np.mean(scores) < high

    comparisons = {row["comparison"]: row for row in family_table.comparison_rows(searches)}
    assert list(comparisons) == [
        "CTC, beam 8 - the teacher, beam 4",
        "CTC, best path - the teacher, beam 4",
        "CTC, beam 8 - CTC, best path",
        "the teacher, beam 1 - CTC, beam 8",
    ]
    worse = comparisons["CTC, beam 8 - the teacher, beam 4"]
    same = comparisons["CTC, beam 8 - CTC, best path"]
    assert float(worse["BLEU"]) == pytest.approx(np.mean(scores) - 100, abs=0.01)
    assert (same["BLEU"], same["95% interval"], same["p"]) == ("+0.00", "0.00 to 0.00", "1.0000")
    corrected = family_table.holm([float(row["p"]) for row in comparisons.values()])
    assert [float(row["p, Holm"]) for row in comparisons.values()] == pytest.approx(corrected, abs=3e-4)


def test_quarters_are_those_of_the_source_lengths() -> None:
    """BLEU of a quarter is that of its sentences, the shortest sources first."""
    order = sorted(range(8), key=lambda index: len(SOURCES[index].split()))
    shortest = order[:2]
    expected = bleu([BAD[index] for index in shortest], [REFERENCES[index] for index in shortest])["score"]
    assert family_table.lengths_quarters(counts_of(BAD)[None])[0] == pytest.approx(expected)


def test_samples_have_the_variance_of_the_mean_of_the_seeds() -> None:
    """Every sentence is the same, so only the seeds differ: s^2 / S, with S - 1 in the denominator of s^2."""
    texts = [[word] * 6 for word in ("the cat is black", "the cat is very black", "a cat is black")]
    references = ["the cat is black now"] * 6
    counts = np.stack([translation_counts(of_seed, references, references, "13a", None) for of_seed in texts])
    search = family_table.bootstrap({"ctc, best path": ("ctc", counts, None)}, 4000)["ctc, best path"]
    assert search.samples.var() == pytest.approx(np.var(search.scores, ddof=1) / 3, rel=0.1)


def test_more_seeds_that_differ_widen_the_interval(tmp_path: Path) -> None:
    keep(tmp_path, "nat", 1, {"1 length": GOOD})
    keep(tmp_path, "ctc", 1, {"best path": GOOD})
    keep(tmp_path, "ctc-2", 2, {"best path": WORSE})
    searches = family_table.bootstrap(family_table.read_searches(tmp_path), 300)
    assert searches["ctc, best path"].samples.std() > 2 * searches["nat, 1 length"].samples.std()


def test_holm_multiplies_the_smallest_by_their_number_and_never_falls() -> None:
    assert family_table.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert family_table.holm([0.9, 0.8]) == [1.0, 1.0]
    assert family_table.holm([]) == []


def test_p_value_is_large_for_noise_and_small_for_a_difference_beyond_it() -> None:
    noise = np.random.default_rng(0).normal(size=1000)
    assert family_table.p_value(noise + 0.1, 0.1) > 0.5
    assert family_table.p_value(noise + 8, 8.0) == 1 / 1001
    assert family_table.p_value(noise * 0, 0.0) == 1.0


def test_runs_with_different_test_sets_and_an_empty_folder_are_errors(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = counts_of(GOOD)
    counts[0, COLUMNS.index("source_words")] += 1
    write_counts(kept / "nat.csv.gz", {"1 length": counts})
    assert "its runs have different test sets" in error_line(run_main(family_table.main, [kept], capsys))
    (tmp_path / "empty").mkdir()
    assert "has no counts" in error_line(run_main(family_table.main, [tmp_path / "empty"], capsys))


def rows_on(page: Path) -> Iterator[dict[str, str]]:
    """Yield the cells of each row of the tables of a page, by their headings."""
    headings: list[str] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = line.strip("| ").split(" | ") if line.startswith("|") else []
        if cells and headings and not set(line) <= set("|- "):
            yield dict(zip(headings, cells, strict=False))
        headings = (headings or cells) if cells else []


def test_pages_of_the_kept_comparison_have_what_its_files_give() -> None:
    """Every row is on a page; of its cells the intervals and p values depend on the bootstrap's samples."""
    folder = ROOT / "training" / "recipes" / "results" / "multi30k-sixty-minutes"
    searches = family_table.bootstrap(family_table.read_searches(folder), samples=2)
    pages = (ROOT / "docs" / "non-autoregressive.md", folder / "README.md")
    shown = [
        {heading: cell for heading, cell in row.items() if heading not in ("95% interval", "p", "p, Holm")}
        for page in pages
        for row in rows_on(page)
    ]
    rows = {row["model"]: row for row in family_table.table_rows(searches, family_table.measurement(folder))}
    models = {cells["model"]: cells for cells in shown if "model" in cells}
    assert rows.keys() <= models.keys()
    for name, row in rows.items():
        assert {"BLEU", "BP", "chrF", "repeats", "LM"} <= models[name].keys()
        assert models[name] == {heading: spell(row[heading]) for heading in models[name]}
    for cells in shown:
        if search := cells.pop("search", None):  # further columns of a row
            assert cells == {heading: spell(rows[search][heading]) for heading in cells}
    differences = [
        {name: row[name] for name in ("comparison", "BLEU")} for row in family_table.comparison_rows(searches)
    ]
    assert [cells for cells in shown if "comparison" in cells] == differences
    for path in folder.glob("*.json"):
        kept = json.loads(path.read_text("utf-8"))
        if path.name != "decoding.json":
            assert "examples" not in kept["test"]  # no text of a data set
            assert not kept["commit"]["dirty"]
