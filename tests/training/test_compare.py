"""The comparison of two sets of translations: sacreBLEU's paired bootstrap, and the sentences that differ most."""

import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from tests.commands import Run, error_line, run_main
from tests.training.runs import FinishedRun
from training import score
from training.compare import main

SOURCES = ["eins zwei", "drei vier", "fuenf sechs", "sieben acht"]
REFERENCES = ["one two three four", "two three four five", "three four five six", "four five six seven"]
GOOD = ["one two three four", "two three four six", "three four five six", "four five six seven"]
BAD = ["one two", "two three four six", "three five five six", "nothing at all"]


def write(path: Path, translations: Iterable[str], sources: list[str] = SOURCES) -> Path:
    texts = zip(sources, translations, REFERENCES[: len(sources)], strict=True)
    rows = [dict(zip(("source", "translation", "reference"), row, strict=True)) for row in texts]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: run_main(main, arguments, capsys)


def run_folder(folder: Path, translations: list[str], **recipe: Any) -> Path:
    """Write what the command reads of a finished run."""
    folder.mkdir()
    tree = {"data": {"kind": "json", "path": "pairs", "target": "de"}, "score": {"tokenize": "auto"}} | recipe
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    write(folder / "translations.jsonl", translations)
    return folder


def test_comparison_is_sacrebleus_paired_bootstrap(run: Run, tmp_path: Path) -> None:
    first, second = run_folder(tmp_path / "a", BAD, score={"tokenize": "none"}), write(tmp_path / "b.jsonl", GOOD)
    output, errors, status = run(first, second, "--output", tmp_path / "comparison.json")
    assert (errors, status) == ("", 0)

    metrics: dict[str, Any] = {"BLEU": BLEU(tokenize="none", force=True), "chrF": CHRF()}
    tested: Any = PairedTest([("A", BAD), ("B", GOOD)], metrics, [REFERENCES], test_type="bs")()
    signatures, expected = tested
    result = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    for title, name in (("BLEU", "BLEU"), ("chrF", "chrF2")):
        worse, better = cast(list[Any], expected[name])
        test = result["tests"][title]
        assert (test["A"]["score"], test["B"]["score"], test["p"]) == (worse.score, better.score, better.p_value)
        assert (test["A"]["mean"], test["A"]["interval"]) == (worse.mean, worse.ci)
        assert test["signature"] == str(signatures[name])
        assert f"{title} {signatures[name]}\n" in output
        assert f"{better.score - worse.score:+8.2f} {better.p_value:7.3f}\n" in output
    assert "tok:none" in result["tests"]["BLEU"]["signature"]
    assert result["length_ratio"] == {"A": 13 / 16, "B": 1.0}


def test_sentences_that_differ_most_come_first_and_equal_ones_are_left_out(run: Run, tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", BAD), write(tmp_path / "b.jsonl", GOOD)
    output = run(first, second)[0]
    lines = [int(line.split(":")[0].removeprefix("line ")) for line in output.splitlines() if line.startswith("line ")]
    assert lines[0] == 4
    assert sorted(lines) == [1, 3, 4]
    assert "B is better in 3, worse in 0 and equal in 1.\n" in output
    assert f"  {'source':<10} sieben acht\n  {'reference':<10} four five six seven\n" in output
    assert f"  {'A':<10} nothing at all\n  {'B':<10} four five six seven\n" in output
    assert run(first, second, "--sentences=1")[0].count("\nline ") == 1


def test_equal_translations_do_not_differ(run: Run, tmp_path: Path) -> None:
    """sacreBLEU's own p would be 0.001."""
    path = write(tmp_path / "a.jsonl", GOOD)
    output = run(path, path)[0]
    assert [line.split()[-1] for line in output.splitlines() if line.startswith(("BLEU  ", "chrF  "))] == ["1.000"] * 2


def test_comparison_does_not_depend_on_the_normal_form(run: Run, tmp_path: Path) -> None:
    names = ("source", "translation", "reference")
    for form in ("NFC", "NFD"):
        rows = [dict.fromkeys(names, unicodedata.normalize(form, text)) for text in ("schöne größere Häuser", "à é")]
        (tmp_path / form).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    output, errors, status = run(tmp_path / "NFC", tmp_path / "NFD")
    assert (errors, status) == ("", 0)
    assert "worse in 0 and equal in 2.\n" in output
    assert output.count("+0.00   1.000\n") == 2


def test_runs_with_different_tokenizers_of_bleu_need_the_option(run: Run, tmp_path: Path) -> None:
    first = run_folder(tmp_path / "a", GOOD, score={"tokenize": "none"})
    second = run_folder(tmp_path / "b", BAD)
    assert error_line(run(first, second)) == (
        "score.tokenize: differs between the runs; got 13a and none. Set --tokenize.\n"
    )
    assert "tok:char" in run(first, second, "--tokenize=char")[0]


def test_runs_of_a_family_that_is_not_registered_are_compared(run: Run, tmp_path: Path) -> None:
    first = run_folder(tmp_path / "a", GOOD, model={"kind": "mirror"}, score={"tokenize": "none"})
    output, errors, status = run(first, write(tmp_path / "b.jsonl", BAD))
    assert (errors, status) == ("", 0)
    assert "tok:none" in output


def test_what_cannot_be_compared_is_an_error_of_one_line(run: Run, tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", GOOD)
    shorter = write(tmp_path / "shorter.jsonl", GOOD[:3], SOURCES[:3])
    other = write(tmp_path / "other.jsonl", GOOD, ["eins zwei", "neun", *SOURCES[2:]])
    scores = tmp_path / "scores.json"
    scores.write_text('{\n  "bleu": 20\n}', encoding="utf-8")
    (tmp_path / "empty.jsonl").touch()
    half = write(tmp_path / "half.jsonl", [*GOOD[:3], "\ud800"])
    nested = tmp_path / "nested.jsonl"
    nested.write_text("[" * 100_000, encoding="utf-8")
    parser = run_folder(tmp_path / "parser", GOOD, data={"kind": "trees", "path": "trees"})
    (tmp_path / "unfinished").mkdir()

    for path, message in (
        (shorter, "has a different test set; got 3 sentences, expected the 4 of"),
        (other, "has different sources; got 'neun' in line 2, expected 'drei vier'"),
        (half, "line 4: is not a translation"),
        (nested, "line 1: is not a translation; got '[["),
        (scores, "line 1: is not a translation; got '{', expected a JSON object with the texts source, translation"),
        (tmp_path / "empty.jsonl", "contains no translations. Make the file with training"),
        (parser, "is the run of a parser"),
        (tmp_path / "unfinished", "has no translations.jsonl"),
        (tmp_path / "missing.jsonl", "No such file or directory"),
    ):
        line = error_line(run(good, path))
        assert line.startswith(str(path))
        assert message in line
    assert "choose a new file" in error_line(run(good, good, "--output", good))


@pytest.mark.slow
def test_finished_run_is_compared_with_its_translations_by_a_different_search(
    run: Run, finished_run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of docs/own-data.md; the search of the run itself finds the run's translations."""
    folder, recipe = finished_run.folder, finished_run.arguments[0]
    for name, search in (("same", []), ("wide", ["--decoding.num_beams=8"])):
        path = tmp_path / f"{name}.jsonl"
        _, errors, status = run_main(score.main, [folder, recipe, f"--translations={path}", *search], capsys)
        assert (errors, status) == ("", 0)
        assert "BLEU" in run(folder, path)[0]
    rows = [path.read_text(encoding="utf-8") for path in (folder / "translations.jsonl", tmp_path / "same.jsonl")]
    texts = [[json.loads(line)["translation"] for line in text.splitlines()] for text in rows]
    assert texts[0] == texts[1]
