"""The benchmark of the data runs on few pairs, and its file holds what it measured."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import text_pace
from tests.benchmarks.data_pace import main
from tests.helpers import PAIRS, model_of_pairs


@pytest.mark.slow
def test_benchmark_writes_every_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of_pairs()[1].save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "texts.txt").write_text("\n".join(20 * list(PAIRS)), encoding="utf-8")
    given = [f"--tokenizer={tmp_path / 'tokenizer'}", f"--texts={tmp_path / 'texts.txt'}"]
    results = main(["--tiny", *given, f"--output={tmp_path / 'pace.json'}"])
    assert json.loads((tmp_path / "pace.json").read_text()) == results
    assert results["order"]["steps"] > 1
    printed = capsys.readouterr().out
    parts = ["order", "batches", "cmlm step, ms", "tokenizing", "streams", "texts"]
    assert [part for part in results if part != "pairs"] == parts
    assert all(name in printed for part in parts for name in [part, *results[part]])


@pytest.mark.slow
def test_jobs_report_their_memory_on_the_way(tmp_path: Path) -> None:
    results = text_pace.main(["--tiny", f"--output={tmp_path / 'texts.json'}"])
    assert json.loads((tmp_path / "texts.json").read_text()) == results
    for name in ("translate", "distill"):
        assert [report["lines"] for report in results[name]] == [0, 500, 1000, 2500, 5000]
        assert all(0 < report["now_MiB"] <= report["peak_MiB"] for report in results[name])
