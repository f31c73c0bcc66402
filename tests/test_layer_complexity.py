"""The command that measures Table 1: rows for every layer, n and d, the operations that torch counts, and a figure."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks import layer_complexity as benchmark
from vaswani_transformer import draw_layer_complexity


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # the number of threads of the tests stays


@pytest.mark.slow
def test_command_writes_table_and_figure_of_every_layer(
    tmp_path: Path, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "table1"
    benchmark.main(["--lengths", "128", "16", "--widths", "32", "64", "--rounds", "2", f"--output={output}"])
    results = json.loads((output / "table1.json").read_text())
    rows = results["measurements"]
    assert {(row["layer"], row["n"], row["d"]) for row in rows} == {
        (layer, n, d) for layer in benchmark.LAYERS for n in (16, 128) for d in (32, 64)
    }
    assert all(row["seconds"] > 0 and len(row["rounds"]) == 2 for row in rows)
    page = (output / "table1.md").read_text()
    assert capsys.readouterr().out == page
    assert "| recurrent | O(n d^2) | O(n) | O(n) |" in page
    assert "| self-attention | O(n^2 d) | O(1) | O(1) |" in page
    assert page.count("| 128 |") == 2 * 3  # time, memory and operations of each width
    drawn = ElementTree.parse(output / "table1.svg").getroot()
    assert drawn.tag.endswith("svg")


def test_layer_beyond_the_memory_is_skipped_and_the_table_says_so(tmp_path: Path, one_thread: None) -> None:
    output = tmp_path / "table1"
    benchmark.main(["--lengths", "512", "--widths", "64", "--rounds=1", "--memory=0.002", f"--output={output}"])
    rows = {row["layer"]: row for row in json.loads((output / "table1.json").read_text())["measurements"]}
    assert {layer for layer, row in rows.items() if "seconds" not in row} == {"self-attention"}
    page = (output / "table1.md").read_text()
    assert "| 512 | skipped | " in page
    assert "self-attention, n = 512: needs about 0.0029 GiB, --memory is 0.002." in page


def test_folder_that_exists_is_left_as_it_is(
    tmp_path: Path, one_thread: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table1.json").write_text("{}")
    monkeypatch.setattr(benchmark, "measure", lambda *_: pytest.fail("measured before the check"))
    with pytest.raises(SystemExit) as error:
        benchmark.main([f"--output={tmp_path}"])
    assert error.value.code == 2
    assert (tmp_path / "table1.json").read_text() == "{}"
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_interrupted_command_keeps_what_it_measured(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"n": 16, "d": 64, "seconds": 0.1, "operations": 5}
    measured = [{"layer": layer, **row} for layer in benchmark.LAYERS]
    monkeypatch.setattr(benchmark, "measure", Mock(side_effect=[measured, KeyboardInterrupt]))
    benchmark.main([f"--output={tmp_path / 'table1'}"])
    assert len(json.loads((tmp_path / "table1" / "table1.json").read_text())["measurements"]) == len(benchmark.LAYERS)


@pytest.mark.parametrize("layer", ["self-attention", "convolutional"])
def test_operations_are_those_that_torch_counts(layer: str) -> None:
    """torch counts neither the products of a fused LSTM nor those of fused attention on a CPU."""
    options = benchmark.parse_arguments(["--kernel=5"])
    with FlopCounterMode(display=False) as counter:
        benchmark.make_layer(layer, 64, options)(torch.randn(1, 24, 64))
    assert counter.get_total_flops() == benchmark.operations(layer, 24, 64, options)


def test_restricted_layer_needs_linear_operations_and_a_short_text_all_of_them() -> None:
    options = benchmark.parse_arguments(["--reach=4"])
    cost = [benchmark.operations("restricted", n, 64, options) for n in (9, 18, 36)]
    assert cost[1] == 2 * cost[0]
    assert cost[2] == 4 * cost[0]
    assert cost[0] == benchmark.operations("self-attention", 9, 64, options)


def test_gru_has_three_of_four_gates() -> None:
    costs = [
        benchmark.operations("recurrent", 8, 64, benchmark.parse_arguments([f"--cell={cell}"]))
        for cell in ("lstm", "gru")
    ]
    assert 3 * costs[0] == 4 * costs[1]


def test_growth_is_the_exponent_of_n() -> None:
    rows = [{"n": n, "seconds": 3e-6 * n**2} for n in (16, 64, 256)] + [{"n": 1024}]
    assert benchmark.growth(rows, "seconds") == "n^2.00"


def test_peak_memory_is_that_of_the_largest_moment() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells a process its peak")

    def hold_40_mib() -> None:
        torch.ones(10 * 2**20)

    assert benchmark.peak_mib(hold_40_mib) == pytest.approx(40, abs=4)


@pytest.mark.parametrize("widths", [["33"], ["200"]])
def test_width_without_whole_heads_is_an_error(widths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(["--widths", *widths])
    assert "--widths: no whole heads" in capsys.readouterr().err


def test_figure_shows_the_measurements() -> None:
    rows = [
        {"layer": layer, "n": n, "d": d, "seconds": factor * n, "peak_mib": None, "operations": n * d}
        for layer, factor in (("one", 0.5), ("two", 2.0))
        for n in (16, 64)
        for d in (8, 32)
    ]
    figure = draw_layer_complexity(rows)
    assert [axes.get_title() for axes in figure.axes[:3]] == [
        "seconds, d = 8",
        "peak memory (MiB), d = 8",
        "operations, d = 8",
    ]
    lines = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in figure.axes[0].lines}
    assert lines == {"one": [[16, 8], [64, 32]], "two": [[16, 32], [64, 128]]}
    with pytest.raises(ValueError, match="measurements: nothing to draw"):
        draw_layer_complexity([])
