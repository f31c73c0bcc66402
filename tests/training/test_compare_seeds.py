"""The summary of several seeds: groups of runs by recipe, with the spread of each metric."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.command_parsers import commands_of
from tests.commands import Run, error_line, run_main
from tests.training.invented_results import results_of
from training.compare import main
from training.recipe import FileData, TokenizerRecipe

KEPT = ROOT / "training" / "recipes" / "results"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: run_main(main, arguments, capsys)


def write_run(
    folder: Path, seed: int, bleu: float | None, sha256: str = "0" * 64, split: str = "test", **recipe: Any
) -> Path:
    """Write what the command reads of a finished run."""
    folder.mkdir()
    results = results_of(test=bleu, seed=seed, **recipe)
    results["data"][split]["sha256"] = sha256
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def test_seeds_of_two_recipes_are_two_groups_with_their_spread_and_difference(run: Run, tmp_path: Path) -> None:
    scores = {"a": [20.0, 21.0, 25.0], "b": [23.0, 24.0]}
    paths = [
        write_run(tmp_path / f"{name}-{seed}", seed, bleu, model={"dropout": 0.1 if name == "a" else 0.2})
        for name, values in scores.items()
        for seed, bleu in enumerate(values)
    ]
    output, errors, status = run(*paths, "--output", tmp_path / "summary.json")
    assert (errors, status) == ("", 0)

    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    metric = summary["metrics"]["BLEU"]
    assert metric["A"] == {"mean": 22.0, "sd": statistics.stdev(scores["a"]), "lowest": 20.0, "highest": 25.0}
    assert metric["B"]["mean"] == 23.5
    assert metric["difference"] == 1.5
    assert metric["standard_error"] == pytest.approx((7 / 3 + 0.5 / 2) ** 0.5)
    assert summary["differing_fields"] == {"model.dropout": {"A": 0.1, "B": 0.2}}
    assert [list(group["runs"]) for group in summary["groups"].values()] == [
        [str(path) for path in paths[:3]],
        [str(path) for path in paths[3:]],
    ]
    assert f"    {paths[1]}, seed 1\n" in output
    assert "model.dropout: A 0.1, B 0.2\n" in output
    rows = [line.split() for line in output.splitlines() if line.startswith("BLEU ")]
    assert rows[:2] == [
        ["BLEU", "A", "3", "22.00", "2.65", "20.00", "25.00"],
        ["BLEU", "B", "2", "23.50", "0.71", "23.00", "24.00"],
    ]
    assert " ".join(rows[2]) == "BLEU B - A +1.50 (standard error 1.61)"


def test_folder_of_the_data_does_not_separate_runs_but_distillation_does(run: Run, tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "a", 1, 20.0, data=FileData(path="here", distilled="pairs")),
        write_run(tmp_path / "b", 2, 21.0, data=FileData(path="there", distilled="pairs")),
        write_run(tmp_path / "c", 1, 22.0, data=FileData(path="there")),
    ]
    output = run(*paths)[0]
    assert "data.distilled: A pairs, B not set\n" in output
    assert "BLEU               B         1    22.00             22.00    22.00\n" in output
    assert "BLEU               B - A          +1.50\n" in output


@pytest.mark.parametrize("split", ["train", "validation"])
def test_runs_on_other_pairs_are_two_groups_unless_the_seed_holds_them_out(
    run: Run, tmp_path: Path, split: str
) -> None:
    for validation in ("validation.jsonl", 9):
        data = FileData(path="here", validation=validation)
        names = [f"{validation}-{seed}" for seed in range(3)]
        paths = [
            write_run(tmp_path / name, seed, 20.0, "1" * 64 if seed else "0" * 64, split, data=data)
            for seed, name in enumerate(names)
        ]
        output = run(*paths)[0]
        is_split = validation != 9
        assert (f"data.{split}.sha256: A {'0' * 64}, B {'1' * 64}\n" in output) == is_split
        assert ("BLEU               B         2" in output) == is_split


def test_settings_that_learn_a_vocabulary_do_not_count_where_one_is_loaded(run: Run, tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "a", 1, 20.0, tokenizer=TokenizerRecipe(path="words")),
        write_run(tmp_path / "b", 2, 21.0, tokenizer=TokenizerRecipe(path="words", vocab_size=9000)),
        write_run(tmp_path / "c", 1, 22.0, tokenizer=TokenizerRecipe(vocab_size=8000)),
    ]
    output = run(*paths)[0]
    assert "tokenizer.path: A words, B not set\ntokenizer.vocab_size: A not set, B 8000\n" in output
    assert "37000" not in output


def test_runs_without_a_test_set_are_summarized_by_validation(run: Run, tmp_path: Path) -> None:
    output = run(*(write_run(tmp_path / str(seed), seed, None) for seed in range(3)))[0]
    assert "16 pairs of validation\n" in output
    assert "BLEU               A         3    30.12     0.00    30.12    30.12\n" in output


@pytest.mark.parametrize("files", ["multi30k-family/*.json", "dialogue-family/*.json", "multi30k-tiny*.json"])
def test_kept_results_of_every_family_are_groups(run: Run, files: str) -> None:
    paths = sorted(KEPT.glob(files))
    output, errors, status = run(*paths)
    assert (errors, status) == ("", 0)
    assert "BLEU" in output


def test_command_of_the_page_compares_two_groups(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [words[3:] for words in commands_of(ROOT / "docs" / "own-data.md") if "training.compare" in words]
    (paths,) = [runs for runs in commands if len(runs) > 2]
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for path in paths:
        write_run(Path(path), paths.index(path), 20.0, model={"d_model": 192 if "large" in path else 128})
    output, errors, status = run(*paths)
    assert (errors, status) == ("", 0)
    assert "model.d_model: A 128, B 192\n" in output


def test_runs_that_have_no_summary_are_an_error_of_one_line(run: Run, tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, seed, 20.0) for seed, name in enumerate("ab"))
    same_seed = write_run(tmp_path / "c", 1, 21.0)
    other_set = write_run(tmp_path / "d", 2, 21.0, sha256="1" * 64)
    (tmp_path / "unfinished").mkdir()
    for path, message in (
        (same_seed, f"c: has the recipe and the seed of {second}; got seed 1 twice."),
        (
            other_set,
            f"d: was scored on different pairs than {first}. Use one test set for all runs; for one that",
        ),
        (tmp_path / "unfinished", "results.json"),
    ):
        assert message in error_line(run(first, second, path))
    assert error_line(run(first)) == "RUN: got 1, expected at least two.\n"
    assert "--tokenize: is an option for two runs" in error_line(run(first, second, first, "--tokenize=13a"))
