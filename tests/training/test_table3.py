"""Table 3 at any size: its rows keep the paper's proportions, its runs resume, and its orderings are counted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import error_line, run_main, user_error
from tests.training.runs import assert_same_checkpoints, equal, last_of_each, rewind, train_in, weights
from training import table3
from training.recipe.fields import DataRecipe, Recipe, TrainingRecipe
from training.report.table3 import PAPER_FIGURES, PaperFigures, orderings, to_markdown
from training.table3 import main, make_run, parse_arguments, unfinished_runs
from vaswani_transformer import VaswaniTransformerConfig
from vaswani_transformer.config import PAPER_SETTINGS
from vaswani_transformer.support.errors import OutputError

SMALL = ["--model.num_heads=8", "--model.encoder_layers=3", "--model.decoder_layers=3", "--training.steps=4"]
GRAMMAR = DataRecipe(kind="grammar", target="es")


def given(arguments: list[str], folder: Path, *more: str) -> list[str]:
    return last_of_each(*arguments, *SMALL, f"--output_dir={folder}", *more)


def run_table(arguments: list[str], folder: Path, *more: str) -> dict[str, Any]:
    main(given(arguments, folder, *more))
    return json.loads((folder / "table3.json").read_text())


def config_of(model: dict[str, int], row: str, folder: Path) -> VaswaniTransformerConfig:
    recipe = make_run(Recipe(data=GRAMMAR, model=model), folder, row, 1).recipe
    return recipe.model_config(vocab_size=37000)


def test_rows_are_those_of_table_3() -> None:
    assert PAPER_FIGURES.keys() == PAPER_SETTINGS.keys() - {"big-en-fr", "parsing", "parsing-semi-supervised"}


@pytest.mark.parametrize("row", PAPER_FIGURES)
def test_rows_at_the_papers_size_are_the_papers(row: str, tmp_path: Path) -> None:
    assert config_of({}, row, tmp_path).to_dict() == VaswaniTransformerConfig.from_paper(row).to_dict()


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        ("A-h1", "num_heads", 1),
        ("A-h32", "num_heads", 32),
        ("B-dk16", "head_dim", 4),
        ("B-dk16", "value_head_dim", 16),
        ("C-n2", "decoder_layers", 1),
        ("C-n8", "encoder_layers", 4),
        ("C-dmodel256", "head_dim", 8),
        ("C-dmodel1024", "d_model", 256),
        ("C-dff1024", "d_ff", 256),
        ("D-dropout0.2", "dropout", 0.2),
        ("E", "position_embedding", "learned"),
        ("big", "num_heads", 16),
    ],
)
def test_sizes_keep_the_papers_ratio_to_the_base(row: str, field: str, value: float | str, tmp_path: Path) -> None:
    base = {"d_model": 128, "d_ff": 512, "encoder_layers": 3, "decoder_layers": 3}
    assert getattr(config_of(base, row, tmp_path), field) == value


def test_runs_of_all_rows_have_the_same_steps_and_data_and_no_mean_of_checkpoints(tmp_path: Path) -> None:
    training = TrainingRecipe(steps=50, average_last=1, patience=3, evaluation_steps=10)
    recipes = [make_run(Recipe(data=GRAMMAR, training=training), tmp_path, row, 7).recipe for row in PAPER_FIGURES]
    assert len({recipe.training for recipe in recipes}) == len({recipe.data for recipe in recipes}) == 1
    training = recipes[0].training
    assert (training.steps, training.evaluation_steps, training.evaluation_beams) == (50, 50, 4)
    assert (training.average_last, training.patience, training.checkpoint_steps) == (None, None, 10)
    assert {recipe.seed for recipe in recipes} == {7}


@pytest.mark.parametrize(
    ("model", "rows", "message"),
    [
        ({"num_heads": 4}, ["A-h1"], "row A-h1: num_heads .* got 0.5, .* multiple of 8"),
        ({"encoder_layers": 4, "decoder_layers": 4}, ["C-n2"], "row C-n2: encoder_layers .* multiple of 3"),
        ({"d_model": 72}, ["B-dk16"], "row B-dk16: d_k .* got 2.25, .* multiple of 4"),
        (
            {"d_model": 88},
            ["A-h32"],
            r"row A-h32: .*d_model \(88\) must be divisible by num_heads \(32\) .*; give a base of another size",
        ),
        ({"kind": "nat", "num_heads": 4}, ["A-h1"], "model.kind: Table 3 varies the paper's model; got nat"),
        ({"d_k": 64}, ["base"], "model.d_k: the rows of Table 3 set it; got 64"),
        ({"dropout": 0.2}, ["base", "D-dropout0.2"], "row D-dropout0.2: its model is that of base"),
    ],
)
def test_row_without_a_model_at_this_size_is_an_error_of_one_line(
    model: dict[str, Any], rows: list[str], message: str, tmp_path: Path
) -> None:
    recipe = Recipe(data=GRAMMAR, model=model)
    with user_error(message):
        unfinished_runs(recipe, tmp_path, rows, [1])


def metrics_of(figures: dict[str, PaperFigures]) -> dict[str, dict[str, dict[str, float | None]]]:
    return {
        row: {name: {"mean": getattr(figure, name), "std": None} for name in ("perplexity", "bleu")}
        for row, figure in figures.items()
    }


def test_paper_is_ordered_as_itself() -> None:
    comparison = orderings(metrics_of(PAPER_FIGURES))
    assert list(comparison) == ["A", "B", "C", "D", "E", "big"]
    assert all(counts["differ"] == [] for metrics in comparison.values() for counts in metrics.values())
    assert comparison["A"]["bleu"]["pairs"] == 9  # of 10: base and 16 heads are equal
    assert "perplexity" not in comparison["E"]


def test_exchanged_rows_are_named_the_better_of_the_paper_first() -> None:
    figures = {row: PAPER_FIGURES[row] for row in ("base", "A-h1", "A-h4")}
    figures["base"], figures["A-h1"] = figures["A-h1"], figures["base"]
    counts = orderings(metrics_of(figures))["A"]["bleu"]
    assert (counts["pairs"], counts["as_in_the_paper"]) == (3, 0)
    assert counts["differ"] == [["base", "A-h1"], ["base", "A-h4"], ["A-h4", "A-h1"]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--rows=base,A-h2"], "'A-h2', expected some of base, A-h1"),
        (["--rows=base,base"], "base is given twice"),
        (["--seeds=1,1"], "expected different numbers"),
        (["--seeds=one"], "expected different numbers"),
        (["--training.steps=0"], "training.steps: 0 is not positive"),
        (["--no-such"], "--no-such: no such option; there are --rows"),
        (["--rows=base,E", "--model.max_position_embeddings=8"], "row E: model.max_position_embeddings: split"),
    ],
)
def test_wrong_argument_is_one_line_before_any_training(
    wrong: list[str], message: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_line(run_main(main, given(arguments, tmp_path / "table", *wrong), capsys))
    assert not list((tmp_path / "table").rglob("*.*"))


def test_home_is_expanded_in_the_folder_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_arguments(["recipe.yaml", "--output_dir=~/table"])[0].output_dir == tmp_path / "table"


def test_full_disk_ends_the_table_and_begins_no_other_row(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def full(recipe: Recipe) -> None:
        begun.append(recipe.name)
        raise OutputError("checkpoint-2: cannot be written: No space left on device; make room.")

    monkeypatch.setattr(table3, "train", full)
    _, errors, status = run_main(main, given(arguments, tmp_path / "table", "--rows=base,A-h1"), capsys)
    assert (begun, status) == (["own-base"], 2)
    assert errors.endswith("checkpoint-2: cannot be written: No space left on device; make room.\n")


@pytest.mark.slow
def test_table_resumes_run_by_run(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, rows = tmp_path / "table", "--rows=base,A-h1"
    first = run_table(arguments, folder, rows, "--seeds=1,2", "--training.checkpoint_steps=2")
    assert list(first["rows"]) == ["base", "A-h1"]
    for summary in first["rows"].values():
        values = torch.tensor([run["perplexity"] for run in summary["runs"].values()], dtype=torch.float64)
        assert summary["perplexity"]["mean"] == pytest.approx(values.mean().item())
        assert summary["perplexity"]["std"] == pytest.approx(values.std().item())
        assert [run["steps"] for run in summary["runs"].values()] == [4, 4]
    assert capsys.readouterr().out.strip() == to_markdown(first).strip()
    assert (folder / "table3.md").read_text() == to_markdown(first)

    uninterrupted = tmp_path / "uninterrupted"
    (folder / "base" / "seed-1").rename(uninterrupted)
    finished = (folder / "base" / "seed-2" / "model.safetensors").stat().st_mtime_ns
    run_table(arguments, folder, rows, "--seeds=1,2", "--training.checkpoint_steps=2")
    assert_same_checkpoints(uninterrupted, folder / "base" / "seed-1")
    rewind(folder / "base" / "seed-1", 2)
    again = run_table(arguments, folder, rows, "--seeds=1", "--training.checkpoint_steps=2", "--training.log_steps=3")
    assert_same_checkpoints(uninterrupted, folder / "base" / "seed-1")
    assert (folder / "base" / "seed-2" / "model.safetensors").stat().st_mtime_ns == finished
    assert again["rows"]["A-h1"] == first["rows"]["A-h1"]  # the other seed stays in the table

    _, errors, status = run_main(main, given(arguments, folder, "--rows=C-n2", "--training.steps=5"), capsys)
    assert status == 2
    assert re.search("holds a run of another recipe, training.*; give the same command", errors)
    assert not (folder / "C-n2").exists()


@pytest.mark.slow
def test_run_of_the_table_is_a_run_of_the_training_command(arguments: list[str], tmp_path: Path) -> None:
    """The row's recipe in its folder, trained by itself, has the same weights."""
    run_table(arguments, tmp_path / "table", "--rows=C-dff1024", "--seeds=3", "--model.dropout=0.1")
    folder = tmp_path / "table" / "C-dff1024" / "seed-3"
    train_in([str(folder / "recipe.yaml")], tmp_path / "alone")
    assert equal(weights(folder), weights(tmp_path / "alone"))


@pytest.mark.slow
def test_run_that_diverges_is_named_and_the_next_one_begins(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = given(arguments, tmp_path / "t", "--rows=base,A-h1", "--training.learning_rate_scale=1e30")
    output, _, status = run_main(main, wild, capsys)
    assert status == 2
    table = json.loads((tmp_path / "t" / "table3.json").read_text())
    assert list(table["errors"]) == ["base, seed 2017", "A-h1, seed 2017"]
    assert "- Failed: base, seed 2017: " in output
